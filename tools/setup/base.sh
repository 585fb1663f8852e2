# Sourced by setup.sh: apt packages and the Rust toolchain.

rust_version() { sed -n 's/^channel = "\(.*\)"/\1/p' "$TOOLS/../rust-toolchain.toml"; }

# Packages are asked for by what they bring, so that a tool from elsewhere counts too.
setup_packages() {
    local missing=() python
    command -v cc >/dev/null || missing+=(build-essential)
    command -v make >/dev/null || missing+=(make)
    command -v git >/dev/null || missing+=(git)
    command -v curl >/dev/null || missing+=(curl ca-certificates)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    # vLLM on CPU loads it for its OpenMP threads, and compiles with g++ where it runs non-eager.
    ldconfig -p 2>/dev/null | grep -q libnuma.so.1 || missing+=(libnuma1)
    python="$(find_python || true)"
    if [ -z "$python" ] || ! "$python" -c 'import ensurepip' 2>/dev/null; then missing+=(python3 python3-venv); fi
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || die "install these with your package manager, then run again: ${missing[*]}"
    quietly apt.log "installing packages: ${missing[*]}" as_root env DEBIAN_FRONTEND=noninteractive \
        sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' sh "${missing[@]}"
}

setup_rust() {
    local wanted
    wanted="$(rust_version)"
    if ! command -v cargo >/dev/null && [ -x "$HOME/.cargo/bin/cargo" ]; then PATH="$HOME/.cargo/bin:$PATH"; fi
    if command -v rustup >/dev/null; then
        rustup toolchain list | grep -q "^$wanted-" ||
            quietly rust.log "installing Rust $wanted" retried rustup toolchain install "$wanted" --profile minimal -c clippy -c rustfmt
        return
    fi
    if command -v cargo >/dev/null; then
        # A Rust that did not come by rustup: used as it is, if new enough.
        [ "$(printf '%s\n' "$wanted" "$(rustc --version | cut -d' ' -f2)" | sort -V | head -n 1)" = "$wanted" ] && return
        say "$(rustc --version) is older than $wanted"
    fi
    quietly rust.log "installing Rust $wanted" retried sh -c \
        'curl --proto "=https" -sSf https://sh.rustup.rs | sh -s -- -y --no-modify-path --profile minimal --default-toolchain "$1" -c clippy -c rustfmt' sh "$wanted"
}

setup_base() {
    setup_packages
    setup_rust
}
