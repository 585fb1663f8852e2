#!/usr/bin/env bash
# Builds and pushes the image.
#
#   tools/image/image.sh build IMAGE    with docker, podman or buildah; where none runs, an archive of what cargo builds on this machine
#   tools/image/image.sh push IMAGE     to the registry that IMAGE names; log in beforehand
#
# BUILD_IMAGE and BASE_IMAGE replace the images that the Dockerfile begins with, for a registry of one's own.
set -euo pipefail
cd "$(dirname "$0")/../.."
ARCHIVE="${CARGO_TARGET_DIR:-target}/image/kvcachepool.tar"

say() { printf '[image] %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The first builder that works: a docker without its daemon does not.
builder() {
    local tool
    for tool in docker podman buildah; do
        if command -v "$tool" >/dev/null && "$tool" info >/dev/null 2>&1; then echo "$tool"; return; fi
    done
}

build() {
    local image="$1" tool arguments=() name
    tool="$(builder)"
    if [ -z "$tool" ]; then archive "$image"; return; fi
    for name in BUILD_IMAGE BASE_IMAGE; do
        if [ -n "${!name:-}" ]; then arguments+=(--build-arg "$name=${!name}"); fi
    done
    arguments+=(--build-arg "VERSION=$(git describe --always --dirty 2>/dev/null || echo dev)" -t "$image")
    DOCKER_BUILDKIT=1 "$tool" build "${arguments[@]}" .
    say "built $image with $tool"
}

# No registry and no daemon is needed; the libraries are this machine's.
archive() {
    mkdir -p "$(dirname "$ARCHIVE")"
    # As in the Dockerfile.
    if [ "$(uname -m)" = aarch64 ]; then export JEMALLOC_SYS_WITH_LG_PAGE=16; fi
    CARGO_PROFILE_RELEASE_STRIP=debuginfo cargo build --release --bins
    python3 tools/image/archive.py "$1" "${CARGO_TARGET_DIR:-target}/release" "$ARCHIVE"
    say "no docker, podman or buildah runs here: $1 is in $ARCHIVE (docker load, podman load, ctr images import)"
}

push() {
    local image="$1" tool
    tool="$(builder)"
    if [ -n "$tool" ]; then "$tool" push "$image"; return; fi
    command -v skopeo >/dev/null || die "pushing needs docker, podman, buildah or skopeo (apt-get install skopeo)"
    [ -e "$ARCHIVE" ] || die "$ARCHIVE is missing: make image IMAGE=$image"
    skopeo copy "docker-archive:$ARCHIVE" "docker://$image"
}

[ -n "${2:-}" ] || die "which image? make $1 IMAGE=registry.example/kvcachepool:0.1.0"
case "$1" in
    build) build "$2" ;;
    push) push "$2" ;;
    *) die "build or push" ;;
esac
