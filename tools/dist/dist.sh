#!/usr/bin/env bash
# Everything of a release in one folder: dist.sh FOLDER [ARCH=FOLDER-OF-PROGRAMS...]. Programs of other architectures are built. Variables:
#
#   IMAGE    registry and name of the pushed image      DIGEST   its digest, sha256:...
#   URL      where the files will be published          RUNBOOK  where the page Alerts is published (optional)
#   RELEASE  tag, such as v0.1.0: version and changelog must agree, and no architecture may be missing (optional)
#   PYTHON   with pip and setuptools
set -euo pipefail
cd "$(dirname "$0")/../.."
out="$1"
shift
: "${IMAGE:?registry and name of the image: make dist IMAGE=registry.example/kvcachepool DIGEST=sha256:...}"
: "${DIGEST:?the digest that the registry has for $IMAGE: make push prints it}"
URL="${URL:-https://example.invalid/kvcachepool/releases/download/${RELEASE:-dev}}"
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
say() { printf '[dist] %s\n' "$*" >&2; }

arguments=()
for arch in amd64 arm64; do
    folder=""
    for given in "$@"; do
        if [ "${given%%=*}" = "$arch" ]; then folder="${given#*=}"; fi
    done
    if [ -z "$folder" ]; then
        folder="$(tools/dist/programs.sh "$arch")" || {
            code=$?
            [ "$code" = 3 ] && [ -z "${RELEASE:-}" ] || exit "$code"
            say "left out: programs for $arch"
            continue
        }
    fi
    tools/dist/sbom.sh "$arch" "$scratch/sbom"
    arguments+=(--programs "$arch=$folder")
done
tools/wheel.sh "${PYTHON:-python3}" "$scratch/wheel" >/dev/null
if [ -n "${RELEASE:-}" ]; then arguments+=(--release "$RELEASE"); fi
if [ -n "${RUNBOOK:-}" ]; then arguments+=(--runbook "$RUNBOOK"); fi
python3 tools/dist/bundle.py --out "$out" --image "$IMAGE" --digest "$DIGEST" --url "$URL" \
    --wheel "$scratch"/wheel/*.whl --sbom "$scratch/sbom" "${arguments[@]}"
say "in $out:"
ls "$out"
