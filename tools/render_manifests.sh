#!/usr/bin/env bash
# Copies crds/ into the chart and renders manifests/install.yaml from it, for those who do not use helm.
# With --check nothing is written; it fails where something differs. With --print CHART that chart's manifest goes to stdout.
set -euo pipefail
cd "$(dirname "$0")/.."
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
HELM="${HELM:-$CACHE/cluster/bin/helm}"
NAMESPACE=kvcachepool-system
[ -x "$HELM" ] || { echo "no helm at $HELM: tools/setup.sh cluster builds it, or say HELM=/path/to/helm" >&2; exit 1; }

render() { # render CHART
    cat <<EOF
# Rendered from charts/kvcachepool with its default values: tools/render_manifests.sh
# kubectl apply --server-side -f install.yaml
apiVersion: v1
kind: Namespace
metadata:
  name: $NAMESPACE
  labels:
    pod-security.kubernetes.io/enforce: restricted
EOF
    # Labels that tell helm's own objects do not belong on these.
    "$HELM" template kvcachepool "$1" --namespace "$NAMESPACE" --kube-version 1.33.0 --skip-tests --set crds.keep=false |
        sed -e '/^ *helm\.sh\/chart:/d' -e '/^ *app\.kubernetes\.io\/managed-by: Helm$/d' -e '/^# Source: /d'
}

if [ "${1:-}" = --print ]; then
    render "$2"
    exit
fi

copies=charts/kvcachepool/files/crds
if [ "${1:-}" != --check ]; then
    rm -rf "$copies"
    mkdir -p "$copies"
    cp crds/*.yaml "$copies/"
elif ! diff -r crds "$copies"; then
    echo "$copies differs from crds/: run tools/render_manifests.sh" >&2
    exit 1
fi

rendered="$(mktemp)"
trap 'rm -f "$rendered"' EXIT
render charts/kvcachepool >"$rendered"
if [ "${1:-}" != --check ]; then
    cp "$rendered" manifests/install.yaml
elif ! diff -u manifests/install.yaml "$rendered"; then
    echo "manifests/install.yaml differs from the chart: run tools/render_manifests.sh" >&2
    exit 1
fi
