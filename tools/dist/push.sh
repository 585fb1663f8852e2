#!/usr/bin/env bash
# Pushes the chart of a folder made by dist.sh: push.sh FOLDER oci://REGISTRY/charts [--dry-run] [OPTION OF HELM...]. Log in with `helm
# registry login` beforehand. Writes the reference with the digest into FOLDER/chart.reference, which sign.sh reads.
set -euo pipefail
CACHE="${KVCACHEPOOL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kvcachepool}"
HELM="${HELM:-$CACHE/cluster/bin/helm}"
folder="$1" to="$2" dry=""
shift 2
if [ "${1:-}" = --dry-run ]; then
    dry=yes
    shift
fi
case "$to" in oci://*) ;; *) echo "expected oci://REGISTRY/charts, found $to" >&2; exit 2 ;; esac
chart="$(echo "$folder"/kvcachepool-*.tgz)"
[ -e "$chart" ] || { echo "no chart in $folder: run make dist" >&2; exit 1; }
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)
if [ -n "$dry" ]; then
    echo "$HELM push $chart $to $*"
    exit
fi
pushed="$("$HELM" push "$chart" "$to" "$@" 2>&1)" || { echo "$pushed" >&2; exit 1; }
echo "$pushed"
digest="$(sed -n 's/^Digest: *//p' <<<"$pushed")"
[ -n "$digest" ] || { echo "helm printed no digest" >&2; exit 1; }
echo "${to#oci://}/kvcachepool@$digest" >"$folder/chart.reference"
