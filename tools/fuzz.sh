#!/usr/bin/env bash
# Runs every fuzz target for some seconds, from the committed seeds: tools/fuzz.sh SECONDS
set -euo pipefail
cd "$(dirname "$0")/.."
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
export CARGO_TARGET_DIR="$CACHE/target-fuzz"
export PATH="$CACHE/tools/bin:$PATH"
toolchain="$(rustup toolchain list | sed -n 's/^\(nightly[^ ]*\).*/\1/p' | head -n 1)"
[ -n "$toolchain" ] || { echo "fuzzing needs a nightly Rust installed by rustup" >&2; exit 1; }
mkdir -p "$CACHE/logs"
for folder in sidecar/protocol/fuzz sidecar/tiers/fuzz kernels/fuzz operator/fuzz; do
    for target in $(cargo "+$toolchain" fuzz list --fuzz-dir "$folder"); do
        # What a run finds is kept between runs.
        corpus="$CACHE/fuzz/$target"
        mkdir -p "$corpus"
        log="$CACHE/logs/fuzz-$target.log"
        cargo "+$toolchain" fuzz run --fuzz-dir "$folder" "$target" "$corpus" "$folder/seeds/$target" -- \
            -max_total_time="$1" -max_len=65536 -rss_limit_mb=2048 >"$log" 2>&1 || { tail -n 40 "$log" >&2; exit 1; }
        echo "fuzz $target: $(grep '^Done ' "$log")"
    done
done
