# Sourced by setup.sh: tools of `make check` only.

CARGO_DENY=0.20.2
CARGO_FUZZ=0.13.2
FUZZ_NIGHTLY=nightly-2026-05-20

setup_check() {
    local bin="$CACHE/tools/bin"
    export CARGO_TARGET_DIR="$CACHE/target-tools"
    [ "$("$bin/cargo-deny" --version 2>/dev/null)" = "cargo-deny $CARGO_DENY" ] ||
        quietly cargo-deny.log "building cargo-deny" retried cargo install --locked --root "$CACHE/tools" "cargo-deny@$CARGO_DENY"
    [ -x "$bin/cargo-fuzz" ] ||
        quietly cargo-fuzz.log "building cargo-fuzz" retried cargo install --locked --root "$CACHE/tools" "cargo-fuzz@$CARGO_FUZZ"
    # PTX is compared with what its sources give, and assembled.
    "$TOOLS/ptx.sh" ready ||
        quietly nvcc.log "installing nvcc from PyPI (514 MB)" retried "$TOOLS/ptx.sh" setup
    # Sanitizers need a nightly compiler; any one that is there will do.
    if command -v rustup >/dev/null && ! rustup toolchain list | grep '^nightly' >/dev/null; then
        quietly nightly.log "installing a nightly Rust for fuzzing" retried rustup toolchain install "$FUZZ_NIGHTLY" --profile minimal
    fi
}
