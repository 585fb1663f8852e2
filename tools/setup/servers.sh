# Sourced by setup.sh: servers that tests of the tiers start, all in $CACHE/tools/bin. Redis is Debian's own package (base.sh).

# A real S3 server over a folder, from its Go module with the checksums of Go's public log.
VERSITYGW=1.8.0
# The exporter of managed servers, in the same way.
REDIS_EXPORTER=1.84.0
# Valkey as Debian built it for bookworm, where it is a backport; it runs on later ones beside any libc.
VALKEY=8.0.1
VALKEY_DEB="http://deb.debian.org/debian/pool/main/v/valkey/valkey-tools_8.0.1+dfsg1-1~bpo12+1_amd64.deb"
VALKEY_SHA256=d2c2ea67642fa9571a07138b80ae52ebe566311c952aef25a39c1d5050697853

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
    quietly versitygw.log "building the S3 server versitygw $VERSITYGW (1 to 2 minutes on 2 cores)" \
        retried install_go "github.com/versity/versitygw/cmd/versitygw@v$VERSITYGW"
}

server_redis_exporter() {
    quietly redis_exporter.log "building redis_exporter $REDIS_EXPORTER" \
        retried install_go "github.com/oliver006/redis_exporter@v$REDIS_EXPORTER"
}

install_go() { # install_go PACKAGE@VERSION
    local go
    go="$(ready_go)"
    CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local GOBIN="$CACHE/tools/bin" nice "$go" install -trimpath -ldflags "-s -w" "$1"
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
    quietly valkey.log "fetching Valkey $VALKEY" retried unpack_valkey
}

unpack_valkey() {
    local scratch
    scratch="$(mktemp -d "$CACHE/tools/valkey-XXXXXX")"
    curl -sSf -o "$scratch/valkey.deb" "$VALKEY_DEB" &&
        echo "$VALKEY_SHA256  $scratch/valkey.deb" | sha256sum -c --quiet - &&
        dpkg -x "$scratch/valkey.deb" "$scratch/files" &&
        install -m 755 "$scratch/files/usr/bin/valkey-check-rdb" "$CACHE/tools/bin/valkey-server" &&
        install -m 755 "$scratch/files/usr/bin/valkey-cli" "$CACHE/tools/bin/valkey-cli"
    local status=$?
    rm -rf "$scratch"
    return $status
}
