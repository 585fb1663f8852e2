# Sourced by setup.sh: servers that tests of the tiers start, all in $CACHE/tools/bin.

# A real S3 server over a folder, from its Go module with the checksums of Go's public log.
VERSITYGW=1.8.0

setup_servers() {
    local program="$CACHE/tools/bin/versitygw" marker="$CACHE/ready/versitygw-$VERSITYGW" go
    if [ -f "$marker" ] && [ -x "$program" ]; then return; fi
    mkdir -p "$CACHE/tools/bin"
    go="$(find_go)" || go=""
    if [ -z "$go" ]; then
        install_go
        go="$CACHE/tools/go-$GO_VERSION/bin/go"
    fi
    quietly versitygw.log "building the S3 server versitygw $VERSITYGW (1 to 2 minutes on 2 cores)" \
        retried env CGO_ENABLED=0 GOFLAGS=-buildvcs=false GOTOOLCHAIN=local GOBIN="$CACHE/tools/bin" \
        nice "$go" install -trimpath -ldflags "-s -w" "github.com/versity/versitygw/cmd/versitygw@v$VERSITYGW"
    rm -f "$CACHE/ready/versitygw-"*
    touch "$marker"
}
