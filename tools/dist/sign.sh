#!/usr/bin/env bash
# Signs a release with cosign: sign.sh FOLDER IMAGE@DIGEST [--dry-run]. Signs SHA256SUMS, the image and a pushed chart, and attests provenance
# and SBOMs. Without a key cosign asks the environment's identity provider (in a workflow: its own); COSIGN_KEY names a key instead.
set -euo pipefail
folder="$1" image="$2" dry="${3:-}"
case "$image" in *@sha256:*) ;; *) echo "expected IMAGE@sha256:..., found $image" >&2; exit 2 ;; esac
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)
key=()
if [ -n "${COSIGN_KEY:-}" ]; then key=(--key "$COSIGN_KEY"); fi
run() {
    if [ "$dry" = --dry-run ]; then echo "cosign $*"; else cosign "$@"; fi
}
run sign-blob --yes "${key[@]}" --bundle "$folder/SHA256SUMS.sigstore.json" "$folder/SHA256SUMS"
run attest-blob --yes "${key[@]}" --type slsaprovenance1 --predicate "$folder/provenance.json" \
    --bundle "$folder/SHA256SUMS.provenance.sigstore.json" "$folder/SHA256SUMS"
run sign --yes "${key[@]}" --recursive "$image"
run attest --yes "${key[@]}" --type slsaprovenance1 --predicate "$folder/provenance.json" "$image"
for sbom in "$folder"/kvcachepool-operator_*.cdx.json "$folder"/kvcachepool-sidecar_*.cdx.json; do
    run attest --yes "${key[@]}" --type cyclonedx --predicate "$sbom" "$image"
done
if [ -e "$folder/chart.reference" ]; then run sign --yes "${key[@]}" "$(cat "$folder/chart.reference")"; fi
