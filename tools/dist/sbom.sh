#!/usr/bin/env bash
# SBOMs (CycloneDX) of the programs: sbom.sh ARCH FOLDER. cargo-cyclonedx writes beside the manifests, so it runs in a copy.
set -euo pipefail
cd "$(dirname "$0")/../.."
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
export PATH="$PATH:$CACHE/tools/bin"
case "$1" in
    amd64) triple=x86_64-unknown-linux-gnu ;;
    arm64) triple=aarch64-unknown-linux-gnu ;;
    *) echo "no target for $1: amd64 or arm64" >&2; exit 2 ;;
esac
command -v cargo-cyclonedx >/dev/null || { echo "no cargo-cyclonedx: run tools/setup.sh dist" >&2; exit 1; }
version="$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
git ls-files -z | tar --null -T - -c | tar -x -C "$copy"
cargo-cyclonedx cyclonedx --quiet --manifest-path "$copy/Cargo.toml" --describe binaries --format json --spec-version 1.5 --target "$triple"
mkdir -p "$2"
find "$copy" -name '*_bin.cdx.json' | while read -r file; do
    # References to crates of the workspace contain their path.
    sed "s|file://$copy|file:///kvcachepool|g" "$file" >"$2/$(basename "$file" _bin.cdx.json)_${version}_linux_$1.cdx.json"
done
