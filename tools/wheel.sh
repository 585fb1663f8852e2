#!/usr/bin/env bash
# Builds the Python package: wheel.sh PYTHON FOLDER. Builds in a copy, because setuptools writes into its sources.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$1"
mkdir -p "$2"
source="$(mktemp -d)"
trap 'rm -rf "$source"' EXIT
cp -r sidecar/connector/. "$source"
rm -f "$2"/kvcachepool-*.whl
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --no-index --wheel-dir "$2" "$source"
ls "$2"/kvcachepool-*.whl
