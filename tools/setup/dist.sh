# Sourced by setup.sh: what `make dist` needs beyond the rest. The compilers for another architecture are Debian's.

CARGO_CYCLONEDX=0.5.9

setup_dist() {
    local bin="$CACHE/tools/bin" other
    [[ "$("$bin/cargo-cyclonedx" cyclonedx --version 2>/dev/null)" = *" $CARGO_CYCLONEDX" ]] ||
        CARGO_TARGET_DIR="$CACHE/target-tools" quietly cargo-cyclonedx.log "building cargo-cyclonedx" \
            retried cargo install --locked --root "$CACHE/tools" "cargo-cyclonedx@$CARGO_CYCLONEDX"
    case "$(uname -m)" in
        x86_64) other=aarch64 ;;
        aarch64) other=x86_64 ;;
        *) return ;;
    esac
    # Both are optional: dist.sh says which architecture is left out without them.
    if ! command -v "$other-linux-gnu-g++" >/dev/null && command -v apt-get >/dev/null; then
        quietly dist-apt.log "installing Debian's compiler for $other" as_root env DEBIAN_FRONTEND=noninteractive \
            sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' sh \
            "g++-${other/_/-}-linux-gnu" "libc6-dev-$([ "$other" = aarch64 ] && echo arm64 || echo amd64)-cross"
    fi
    if command -v rustup >/dev/null && ! rustup target list --installed | grep "^$other-unknown-linux-gnu$" >/dev/null; then
        quietly dist-target.log "installing Rust's libraries for $other" retried rustup target add "$other-unknown-linux-gnu"
    fi
}
