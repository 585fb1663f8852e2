#!/usr/bin/env bash
# PTX of the GPU kernels, built from kernels/cuda and committed, so that no build needs CUDA.
#
#   tools/ptx.sh setup   installs nvcc and ptxas from PyPI (514 MB) outside the checkout
#   tools/ptx.sh ready   are they there, in the version of the manifest?
#   tools/ptx.sh build   writes kernels/ptx/*.ptx and the hashes in kernels/ptx/manifest.json, and the connector's copies
#   tools/ptx.sh check   does the PTX belong to the sources? With nvcc by compiling again, and ptxas assembles it for sm_80 and sm_90;
#                        without nvcc by hashes alone
set -euo pipefail
cd "$(dirname "$0")/.."
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
VENV="$CACHE/venvs/nvcc"
MANIFEST=kernels/ptx/manifest.json

# A value that stands alone on a line of the manifest, lists without their brackets and quotes.
value() { sed -n "s/^ *\"$1\": \[\{0,1\}\(.*[^],]\)\]\{0,1\},\{0,1\}$/\1/p" "$MANIFEST" | tr -d '",'; }
modules() { sed -n 's/^      "name": "\(.*\)",$/\1/p' "$MANIFEST"; }
sources() { sed -n 's/^        "\(.*\.cuh\{0,1\}\)": .*/\1/p' "$MANIFEST" | sort -u; }
sha() { sha256sum "$1" | cut -d' ' -f1; }

toolkit() {
    local found
    found="$(echo "$VENV"/lib/python3*/site-packages/nvidia/cu13)"
    [ -x "$found/bin/nvcc" ] && [[ "$("$found/bin/nvcc" --version)" == *"V$(value compiler)"* ]] && echo "$found"
}

# Drivers load PTX of versions that they know only, and nvcc writes its own: the version is lowered to one that drivers of CUDA 12 know.
# ptxas refuses what that version has not.
compile() { # compile TOOLKIT MODULE OUTPUT
    local flags
    read -ra flags <<<"$(value flags)"
    (cd kernels/cuda && "$1/bin/nvcc" -ptx "${flags[@]}" "$2.cu" -o "$3.new")
    sed "s/^\.version .*/.version $(value ptx_version)/" "$3.new" >"$3"
    rm "$3.new"
}

manifest() { # the manifest with the hashes of what is there
    local edits=() name
    for name in $(sources); do edits+=(-e "s/^\( *\"$name\": \"\)[0-9a-f]*\"/\1$(sha "kernels/cuda/$name")\"/"); done
    for name in $(modules); do
        edits+=(-e "/^      \"name\": \"$name\",/{n;s/\(\"ptx_sha256\": \"\)[0-9a-f]*\"/\1$(sha "kernels/ptx/$name.ptx")\"/}")
    done
    sed "${edits[@]}" "$MANIFEST"
}

build() {
    local cuda name
    cuda="$(toolkit)" || { echo "no nvcc $(value compiler) in $VENV: run tools/ptx.sh setup" >&2; exit 1; }
    for name in $(modules); do compile "$cuda" "$name" "$PWD/kernels/ptx/$name.ptx"; done
    manifest >"$MANIFEST.new"
    mv "$MANIFEST.new" "$MANIFEST"
    cp "$MANIFEST" sidecar/connector/kvcachepool/kernels.json
    cp kernels/ptx/pages.ptx sidecar/connector/kvcachepool/pages.ptx
}

check() {
    local cuda name arch failed=0
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    manifest | cmp -s - "$MANIFEST" || { echo "$MANIFEST has other hashes than the files: run tools/ptx.sh build" >&2; exit 1; }
    cuda="$(toolkit)" || { echo "skipped: compiling kernels again and assembling them: no nvcc $(value compiler) in $VENV; hashes agree"; exit 0; }
    for name in $(modules); do
        compile "$cuda" "$name" "$scratch/$name.ptx"
        cmp -s "$scratch/$name.ptx" "kernels/ptx/$name.ptx" ||
            { echo "kernels/ptx/$name.ptx is not what nvcc makes of its source: run tools/ptx.sh build" >&2; failed=1; }
        for arch in sm_80 sm_90; do
            "$cuda/bin/ptxas" -arch="$arch" "kernels/ptx/$name.ptx" -o "$scratch/$name.cubin" ||
                { echo "kernels/ptx/$name.ptx does not assemble for $arch" >&2; failed=1; }
        done
    done
    exit $failed
}

case "${1:-}" in
    setup)
        [ -x "$VENV/bin/pip" ] || python3 -m venv "$VENV"
        "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps -r tools/requirements/nvcc.txt
        ;;
    ready) toolkit >/dev/null ;;
    build) build ;;
    check) check ;;
    *) sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
