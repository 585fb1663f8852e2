# Sourced by setup.sh: servers that tests of the tiers start, all in $CACHE/tools/bin. Redis is Debian's own package (base.sh).

# A real S3 server over a folder, from its Go module with the checksums of Go's public log.
VERSITYGW=1.8.0
# Valkey as Debian built it for bookworm, where it is a backport; it runs on later ones beside any libc.
VALKEY=8.0.1
VALKEY_DEB="http://deb.debian.org/debian/pool/main/v/valkey/valkey-tools_8.0.1+dfsg1-1~bpo12+1_amd64.deb"
VALKEY_SHA256=d2c2ea67642fa9571a07138b80ae52ebe566311c952aef25a39c1d5050697853
# redis_exporter as Debian built it for bookworm.
REDIS_EXPORTER=1.45.0
REDIS_EXPORTER_DEB="http://deb.debian.org/debian/pool/main/p/prometheus-redis-exporter/prometheus-redis-exporter_1.45.0-2+b4_amd64.deb"
REDIS_EXPORTER_SHA256=4b310368285e805ae533a2be5d37fb2d170d8fa6227497572fcaf2c82dd69c74

setup_servers() {
    mkdir -p "$CACHE/tools/bin"
    server_once "versitygw-$VERSITYGW" versitygw server_versitygw
    server_once "redis_exporter-$REDIS_EXPORTER" redis_exporter server_redis_exporter
    server_once "valkey-$VALKEY" valkey-cli server_valkey
    server_once "stores-$(cat "$TOOLS/requirements/stores.txt" "$TOOLS/setup/servers.sh" | sha256sum | cut -c1-16)" mooncake_master server_stores
}

server_once() { # server_once MARKER PROGRAM COMMAND
    local marker="$CACHE/ready/$1"
    if [ -f "$marker" ] && [ -x "$CACHE/tools/bin/$2" ]; then return; fi
    "$3"
    rm -f "$CACHE/ready/${1%-*}-"*
    touch "$marker"
}

server_versitygw() {
    local go
    go="$(ready_go)"
    quietly versitygw.log "building the S3 server versitygw $VERSITYGW (1 to 2 minutes on 2 cores)" \
        retried env CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local GOBIN="$CACHE/tools/bin" \
        nice "$go" install -trimpath -ldflags "-s -w" "github.com/versity/versitygw/cmd/versitygw@v$VERSITYGW"
}

# Mooncake and the client of InfiniStore, for the Python of vLLM, in a folder that only their tests put on PYTHONPATH.
server_stores() {
    local python="$CACHE/venvs/vllm-$(newest_vllm)/bin/python" missing=()
    if ! [ -x "$python" ]; then python="$(compgen -G "$CACHE/venvs/vllm-*/bin/python" | head -n 1)" || python="$(find_python)"; fi
    ldconfig -p 2>/dev/null | grep libibverbs.so.1 >/dev/null || missing+=(libibverbs1)
    ldconfig -p 2>/dev/null | grep libcurl.so.4 >/dev/null || missing+=(libcurl4)
    if [ ${#missing[@]} != 0 ]; then
        command -v apt-get >/dev/null || die "install these with your package manager, then run again: ${missing[*]}"
        quietly apt.log "installing packages: ${missing[*]}" as_root env DEBIAN_FRONTEND=noninteractive \
            sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' sh "${missing[@]}"
    fi
    rm -rf "$CACHE/tools/stores"
    quietly stores.log "installing Mooncake and InfiniStore's client (60 MB)" retried "$python" -m pip install \
        --disable-pip-version-check --no-input --no-deps --no-compile --upgrade --target "$CACHE/tools/stores" \
        -r "$TOOLS/requirements/stores.txt"
    ln -sf "$CACHE/tools/stores/mooncake/mooncake_master" "$CACHE/tools/bin/mooncake_master"
    chmod +x "$CACHE/tools/stores/mooncake/mooncake_master"
}

server_valkey() {
    command -v dpkg >/dev/null || die "copy valkey-server and valkey-cli (8.0 or newer) into $CACHE/tools/bin and touch $CACHE/ready/valkey-$VALKEY"
    quietly valkey.log "fetching Valkey $VALKEY" \
        retried unpack "$VALKEY_DEB" "$VALKEY_SHA256" valkey-check-rdb=valkey-server valkey-cli=valkey-cli
}

server_redis_exporter() {
    command -v dpkg >/dev/null || die "copy redis_exporter into $CACHE/tools/bin and touch $CACHE/ready/redis_exporter-$REDIS_EXPORTER"
    quietly redis_exporter.log "fetching redis_exporter $REDIS_EXPORTER" \
        retried unpack "$REDIS_EXPORTER_DEB" "$REDIS_EXPORTER_SHA256" prometheus-redis-exporter=redis_exporter
}

unpack() { # unpack URL SHA256 PROGRAM=NAME...: programs of a package of Debian
    local url="$1" sha256="$2" scratch program status=0
    shift 2
    scratch="$(mktemp -d "$CACHE/tools/unpack-XXXXXX")"
    curl -sSf -o "$scratch/package.deb" "$url" &&
        echo "$sha256  $scratch/package.deb" | sha256sum -c --quiet - &&
        dpkg -x "$scratch/package.deb" "$scratch/files" || status=1
    for program; do
        [ $status != 0 ] || install -m 755 "$scratch/files/usr/bin/${program%=*}" "$CACHE/tools/bin/${program#*=}" || status=1
    done
    rm -rf "$scratch"
    return $status
}
