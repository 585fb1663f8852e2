#!/usr/bin/env bash
# Runs every fuzz target of the protocol for some seconds: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/../sidecar/protocol"
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
export CARGO_TARGET_DIR="$CACHE/target-fuzz"
export PATH="$CACHE/tools/bin:$PATH"
toolchain="$(rustup toolchain list | sed -n 's/^\(nightly[^ ]*\).*/\1/p' | head -n 1)"
[ -n "$toolchain" ] || { echo "fuzzing needs a nightly Rust installed by rustup" >&2; exit 1; }
for target in $(cargo "+$toolchain" fuzz list); do
    echo "fuzz $target for $1 s"
    log="$CACHE/logs/fuzz-$target.log"
    cargo "+$toolchain" fuzz run "$target" -- -max_total_time="$1" -max_len=65536 -rss_limit_mb=2048 >"$log" 2>&1 ||
        { tail -n 40 "$log" >&2; exit 1; }
    grep '^Done ' "$log" || true
done
