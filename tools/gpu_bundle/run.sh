#!/bin/sh
# Tests or measures on this machine's GPU: needs Python 3.10 or newer with torch, and NVIDIA's driver; no network, no toolchain.
#
#   run.sh test  [PART-OF-A-NAME...]    one line a check; what cannot run is skipped by name
#   run.sh bench                        speeds beside what bounds them, into gpu.json beside this file
#
# PYTHON names another Python than python3. Nothing outside of this folder and of temporary ones is written.
set -eu

here="$(cd "$(dirname "$0")" && pwd)"
python="${PYTHON:-python3}"
what="${1:-test}"
[ $# -eq 0 ] || shift

say() { printf '[run] %s\n' "$*"; }
die() { say "$*" >&2; exit 2; }

needed="$(cat "$here/glibc")"
found="$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" || found=""
oldest="$(printf '%s\n%s\n' "$needed" "${found:-0}" | sort -V | head -n 1)"
[ "$oldest" = "$needed" ] || die "the programs need glibc $needed or newer, and this machine has ${found:-another C library}"
command -v "$python" >/dev/null || die "there is no $python: PYTHON=... names one"
tag="$("$python" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die "$python is older than 3.10"

export KVCACHEPOOL_SIDECAR="$here/bin/kvcachepool-sidecar" KVCACHEPOOL_EXAMPLES="$here/bin"
export PYTHONPATH="$here/tests" PYTHONDONTWRITEBYTECODE=1
# Behind what the Python has itself.
[ ! -d "$here/python/$tag" ] || export KVCACHEPOOL_WHEELS="$here/python/$tag"
say "commit $(cat "$here/commit"), $python ($tag), glibc $found"
case "$what" in
    test) exec "$python" -m gpu "$@" ;;
    bench) exec "$python" -m bench.gpu --out "$here/gpu.json" "$@" ;;
    *) die "there is nothing called $what: test or bench" ;;
esac
