# Sourced by setup.sh: what a real Kubernetes on this machine needs (tests/cluster), all in $CACHE/cluster/bin. Another version than
# the pinned one has a folder of its own, $CACHE/cluster/bin-VERSION, with links to everything else.
#
# Kubernetes, helm and CoreDNS are built from Go modules, pinned with their checksums in tools/cluster. containerd, etcd
# and promtool, which tests alerts, are Debian's, unpacked and not installed: an installed package would start a service.

GO_VERSION=1.26.8

setup_cluster() {
    mkdir -p "$CACHE/cluster/bin"
    cluster_packages
    cluster_once debian "$TOOLS/setup/cluster.sh" -- cluster_debian
    cluster_once pause "$TOOLS/cluster/pause.c" -- \
        quietly cluster-pause.log "compiling the pause program" cc -static -Os -o "$CACHE/cluster/bin/pause" "$TOOLS/cluster/pause.c"
    cluster_once kubernetes "$TOOLS"/cluster/kubernetes/go.* -- cluster_kubernetes
    cluster_once addons "$TOOLS"/cluster/addons/go.* "$TOOLS/cluster/addons/coredns/main.go" -- cluster_addons
    if [ -n "${1:-}" ]; then cluster_another_kubernetes "$1"; fi
}

# Runs a step when the files that it follows from have changed since it last went well.
cluster_once() { # cluster_once NAME FILE... -- COMMAND...
    local name="$1" files=() marker
    shift
    while [ "$1" != -- ]; do files+=("$1"); shift; done
    shift
    marker="$CACHE/ready/cluster-$name-$(cat "${files[@]}" | sha256sum | cut -c1-16)"
    if [ -f "$marker" ]; then return; fi
    "$@"
    rm -f "$CACHE/ready/cluster-$name-"*
    touch "$marker"
}

cluster_packages() {
    local missing=()
    PATH="$PATH:/usr/sbin:/sbin"
    command -v runc >/dev/null || missing+=(runc)
    command -v iptables >/dev/null || missing+=(iptables)
    command -v nft >/dev/null || missing+=(nftables)
    command -v ip >/dev/null || missing+=(iproute2)
    command -v sysctl >/dev/null || missing+=(procps)
    command -v openssl >/dev/null || missing+=(openssl)
    [ -x /usr/lib/cni/ptp ] || missing+=(containernetworking-plugins)
    # The shell of test images; the package of that name is linked statically.
    [ -x /bin/busybox ] && ! ldd /bin/busybox >/dev/null 2>&1 || missing+=(busybox-static)
    # The server's program lies in redis-tools; the package redis-server adds the service.
    command -v redis-cli >/dev/null || missing+=(redis-tools)
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || die "install what these Debian packages bring, then run again: ${missing[*]}"
    quietly cluster-apt.log "installing packages: ${missing[*]}" as_root env DEBIAN_FRONTEND=noninteractive \
        sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' sh "${missing[@]}"
}

cluster_debian() {
    command -v apt-get >/dev/null ||
        die "copy containerd (1.6 or newer), containerd-shim-runc-v2, ctr, etcd (3.4 or newer) and promtool into $CACHE/cluster/bin and touch $marker"
    quietly cluster-debian.log "fetching containerd, etcd and promtool" unpack_debian containerd etcd-server prometheus
}

unpack_debian() { # unpack_debian PACKAGE...
    local scratch archive
    scratch="$(mktemp -d "$CACHE/cluster/debian-XXXXXX")"
    (
        cd "$scratch"
        apt-get download "$@" || { as_root apt-get update && apt-get download "$@"; }
        for archive in *.deb; do dpkg -x "$archive" files; done
        install -m 755 files/usr/bin/{containerd,containerd-shim-runc-v2,ctr,etcd,promtool} "$CACHE/cluster/bin/"
    )
    rm -rf "$scratch"
}

cluster_kubernetes() {
    local version
    version="$(sed -n 's/^.*k8s.io\/kubernetes v\([0-9.]*\).*/\1/p' "$TOOLS/cluster/kubernetes/go.mod" | head -n 1)"
    build_kubernetes "$version" "$TOOLS/cluster/kubernetes" "$CACHE/cluster/bin"
}

# The checksums of its modules are those of the public log.
cluster_another_kubernetes() { # cluster_another_kubernetes VERSION
    local version="$1" folder="$CACHE/cluster/bin-$1" module="$CACHE/cluster/module-$1"
    [[ "$version" =~ ^1\.[0-9]+\.[0-9]+$ ]] || die "not a version of Kubernetes, such as 1.33.13: $version"
    if [ ! -f "$folder/.complete" ]; then
        mkdir -p "$folder" "$module"
        quietly "cluster-module-$version.log" "fetching the sources of Kubernetes $version" retried kubernetes_module "$version" "$module"
        build_kubernetes "$version" "$module" "$folder"
        touch "$folder/.complete"
    fi
    find "$CACHE/cluster/bin" -type f | while read -r program; do
        [ -f "$folder/${program##*/}" ] || ln -s "$program" "$folder/"
    done
}

# A module that only requires this Kubernetes, with the versions of the libraries that its repository has in folders.
kubernetes_module() { # kubernetes_module VERSION FOLDER
    local version="$1" folder="$2" go its
    # A build that was interrupted has left a part of it.
    rm -f "$folder/go.sum"
    go="$(ready_go)"
    its="$(env -C "$folder" GOTOOLCHAIN=local "$go" mod download -json "k8s.io/kubernetes@v$version" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')" &&
        {
            printf 'module kubernetes\n\n%s\n\nrequire k8s.io/kubernetes v%s\n\n' "$(grep '^go ' "$its")" "$version"
            sed -n "s#^.*\(k8s.io/[a-z-]*\) => ./staging/.*#replace \1 => \1 v0.${version#1.}#p" "$its"
        } >"$folder/go.mod"
}

build_kubernetes() { # build_kubernetes VERSION MODULE FOLDER
    local version="$1" module="$2" folder="$3" ldflags name programs=()
    ldflags="-X k8s.io/component-base/version.gitVersion=v$version"
    ldflags+=" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=$(cut -d. -f2 <<<"$version")"
    for name in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
        programs+=("k8s.io/kubernetes/cmd/$name")
    done
    cluster_build cluster-kubernetes.log "building Kubernetes $version (6 to 12 minutes on 2 cores)" "$module" "$folder" "$ldflags" "${programs[@]}"
}

cluster_addons() {
    cluster_build cluster-addons.log "building helm and CoreDNS (3 to 5 minutes on 2 cores)" "$TOOLS/cluster/addons" "$CACHE/cluster/bin" "" \
        helm.sh/helm/v4/cmd/helm ./coredns
}

cluster_build() { # cluster_build LOG WHAT MODULE FOLDER LDFLAGS PACKAGE...
    local log="$1" what="$2" module="$3" folder="$4" ldflags="$5" go sums=readonly
    shift 5
    go="$(ready_go)"
    [ -f "$module/go.sum" ] || sums=mod
    quietly "$log" "$what" retried env -C "$module" CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local \
        nice "$go" build -mod="$sums" -trimpath -ldflags "-s -w $ldflags" -o "$folder/" "$@"
}

# A Go that is new enough for the modules; it is installed if there is none.
ready_go() {
    find_go && return
    install_go
    printf '%s\n' "$CACHE/tools/go-$GO_VERSION/bin/go"
}

# A Go that is new enough for the modules.
find_go() {
    local candidate wanted
    wanted="$(sed -n 's/^go //p' "$TOOLS/cluster/kubernetes/go.mod")"
    for candidate in "$CACHE/tools/go-$GO_VERSION/bin/go" "$(command -v go || true)" /usr/local/go/bin/go; do
        if [ -x "$candidate" ] && newer_go "$candidate" "$wanted"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

newer_go() { # newer_go GO VERSION
    local found
    found="$(GOTOOLCHAIN=local "$1" version | sed 's/^go version go\([0-9.]*\).*/\1/')"
    [ "$(printf '%s\n' "$2" "$found" | sort -V | head -n 1)" = "$2" ]
}

# Any Go, also the old one of Debian 12, fetches a new one: releases are modules too, with their checksums in the same public log.
install_go() {
    if ! command -v go >/dev/null; then
        command -v apt-get >/dev/null || die "needs Go $GO_VERSION or newer to build Kubernetes: install it, then run again"
        quietly cluster-go-apt.log "installing Debian's Go" as_root env DEBIAN_FRONTEND=noninteractive \
            sh -c 'apt-get update && apt-get install -y --no-install-recommends golang-go ca-certificates'
    fi
    quietly cluster-go.log "fetching Go $GO_VERSION with $(GOTOOLCHAIN=local go version)" retried fetch_go
}

fetch_go() {
    local architecture modules="$CACHE/tools/go-modules" folder
    architecture="$(go env GOARCH)"
    folder="$modules/golang.org/toolchain@v0.0.1-go$GO_VERSION.linux-$architecture"
    (cd "$CACHE/tools" && GOMODCACHE="$modules" GOFLAGS="" GOTOOLCHAIN=local go mod download "golang.org/toolchain@v0.0.1-go$GO_VERSION.linux-$architecture") &&
        # A module's files are neither writable nor executable.
        chmod -R u+wx "$modules" &&
        rm -rf "$CACHE/tools/go-$GO_VERSION" &&
        mv "$folder" "$CACHE/tools/go-$GO_VERSION" &&
        rm -rf "$modules"
}
