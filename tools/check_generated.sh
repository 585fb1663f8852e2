#!/usr/bin/env bash
# Files that stand twice must be equal, and every file that names a version must name the same.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0
same() {
    cmp -s "$1" "$2" || { echo "$2 differs from $1: copy it again" >&2; failed=1; }
}
same sidecar/protocol/layouts.json sidecar/connector/kvcachepool/layouts.json
same kernels/ptx/manifest.json sidecar/connector/kvcachepool/kernels.json
same kernels/ptx/pages.ptx sidecar/connector/kvcachepool/pages.ptx
grep -q "^_PTX_SHA256 = \"$(sha256sum kernels/ptx/pages.ptx | cut -d' ' -f1)\"$" sidecar/connector/kvcachepool/page_kernels.py ||
    { echo "sidecar/connector/kvcachepool/page_kernels.py has another hash than pages.ptx: see whether they go together" >&2; failed=1; }
crate="$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)"
package="$(sed -n 's/^version = "\(.*\)"/\1/p' sidecar/connector/pyproject.toml)"
[ "$crate" = "$package" ] || { echo "Cargo.toml says version $crate, sidecar/connector/pyproject.toml $package" >&2; failed=1; }
for field in version appVersion; do
    chart="$(sed -n "s/^$field: //p" charts/kvcachepool/Chart.yaml)"
    [ "$crate" = "$chart" ] || { echo "Cargo.toml says version $crate, $field of charts/kvcachepool/Chart.yaml $chart" >&2; failed=1; }
done
cargo run -q --locked -p kvcachepool-operator --example generate -- --check || failed=1
python3 tools/identity_page.py --check || failed=1
python3 tools/compatibility.py --check || failed=1
"${PYTHON:-python3}" tools/chart_values.py --check || failed=1
tools/ptx.sh check || failed=1
tools/render_manifests.sh --check || failed=1
cargo metadata --locked --format-version 1 >/dev/null || { echo "Cargo.lock is not up to date" >&2; failed=1; }
exit $failed
