#!/usr/bin/env bash
# Packs what a GPU host without network and toolchain needs to test and to measure: programs with their PTX, the connector, tests,
# benchmarks and run.sh.
#
#   tools/gpu_bundle/pack.sh PROGRAMS ARCHIVE [WHEELS]
#
# PROGRAMS: cargo's folder of a profile, e.g. target/release. WHEELS: a folder of wheels of msgspec, which the tests of windows need and a
# host with torch alone lacks; without it those tests are skipped there by name.
set -euo pipefail

ROOT="$(cd "$(dirname "$0")/../.." && pwd)"
PROGRAMS="$1" ARCHIVE="$2" WHEELS="${3:-}"
MOST_MIB=60

die() { printf '[gpu-bundle] %s\n' "$*" >&2; exit 1; }

stage="$(mktemp -d)"
trap 'rm -rf "$stage"' EXIT
tree="$stage/kvcachepool-gpu"
mkdir -p "$tree/bin" "$tree/tests" "$tree/sidecar/connector" "$(dirname "$ARCHIVE")"

for program in kvcachepool-sidecar examples/gpu_check examples/gpu_bench; do
    [[ -x "$PROGRAMS/$program" ]] || die "$PROGRAMS/$program is missing: make gpu-bundle builds it"
    strip -o "$tree/bin/$(basename "$program")" "$PROGRAMS/$program"
done
cd "$ROOT"
# Of what git knows, so that nothing else that lies about comes along.
git ls-files -z -- sidecar/connector/kvcachepool tests/gpu tests/servers tests/bench/__init__.py tests/bench/gpu.py \
    tests/bench/copies.py tests/bench/mps.py tests/bench/results.py | xargs -0 cp --parents -t "$tree"
cp tools/gpu_bundle/run.sh "$tree/run.sh"
git describe --always --dirty --abbrev=40 >"$tree/commit"
objdump -T "$tree"/bin/* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1 | cut -d_ -f2 >"$tree/glibc"
for wheel in ${WHEELS:+"$WHEELS"/*.whl}; do
    # msgspec-VERSION-cp312-cp312-PLATFORM.whl
    python="$(basename "$wheel" | cut -d- -f3)"
    python3 -m zipfile -e "$wheel" "$tree/python/$python"
done
tar -C "$stage" --owner=0 --group=0 --sort=name -czf "$ARCHIVE" kvcachepool-gpu
bytes="$(stat -c %s "$ARCHIVE")"
(( bytes <= MOST_MIB << 20 )) || die "$ARCHIVE has $bytes bytes, more than $MOST_MIB MiB"
printf '[gpu-bundle] %s: %d KiB, for glibc %s or newer and Python 3.10 or newer with torch\n' \
    "$ARCHIVE" $((bytes >> 10)) "$(cat "$tree/glibc")"
