# Sourced by setup.sh: apt packages and the Rust toolchain.

rust_version() { sed -n 's/^channel = "\(.*\)"/\1/p' "$TOOLS/../rust-toolchain.toml"; }

# Packages are asked for by what they bring, so that a tool from elsewhere counts too.
setup_packages() {
    local missing=() python
    # Tests run the GPU's kernels on the host: CUDA sources are C++ to g++.
    command -v cc >/dev/null && command -v g++ >/dev/null || missing+=(build-essential)
    command -v make >/dev/null || missing+=(make)
    command -v git >/dev/null || missing+=(git)
    command -v curl >/dev/null || missing+=(curl ca-certificates)
    command -v pkg-config >/dev/null || missing+=(pkg-config)
    # Tests of the Redis tier start servers of their own.
    command -v redis-server >/dev/null && command -v redis-cli >/dev/null || missing+=(redis-server)
    # vLLM on CPU loads it for its OpenMP threads, and compiles with g++ where it runs non-eager.
    ldconfig -p 2>/dev/null | grep libnuma.so.1 >/dev/null || missing+=(libnuma1)
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
        rustup toolchain list | grep "^$wanted-" >/dev/null ||
            quietly rust.log "installing Rust $wanted" retried rustup toolchain install "$wanted" --profile minimal -c clippy -c rustfmt
        return
    fi
    if command -v cargo >/dev/null; then
        # A Rust that did not come by rustup: used as it is, if new enough.
        [ "$(printf '%s\n' "$wanted" "$(rustc --version | cut -d' ' -f2)" | sort -V | head -n 1)" = "$wanted" ] && return
        say "$(rustc --version) is older than $wanted"
    fi
    quietly rust.log "installing Rust $wanted" retried install_rustup "$wanted"
}

# rustup's own installer, of one version and with its checksum, instead of a script from the network that may change.
RUSTUP_VERSION=1.28.2
install_rustup() { # install_rustup TOOLCHAIN
    local triple sum
    case "$(uname -m)" in
        x86_64) triple=x86_64-unknown-linux-gnu sum=20a06e644b0d9bd2fbdbfd52d42540bdde820ea7df86e92e533c073da0cdd43c ;;
        aarch64) triple=aarch64-unknown-linux-gnu sum=e3853c5a252fca15252d07cb23a1bdd9377a8c6f3efa01531109281ae47f841c ;;
        *) echo "no pinned rustup for $(uname -m): install Rust $1 yourself" >&2; return 1 ;;
    esac
    mkdir -p "$CACHE/tools" &&
        curl --proto "=https" -sSf -o "$CACHE/tools/rustup-init" "https://static.rust-lang.org/rustup/archive/$RUSTUP_VERSION/$triple/rustup-init" &&
        echo "$sum  $CACHE/tools/rustup-init" | sha256sum -c --quiet - &&
        chmod +x "$CACHE/tools/rustup-init" &&
        "$CACHE/tools/rustup-init" -y --no-modify-path --profile minimal --default-toolchain "$1" -c clippy -c rustfmt
}

setup_base() {
    setup_packages
    setup_rust
}
