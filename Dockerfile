# syntax=docker/dockerfile:1
# One image for operator, sidecar and kubectl plugin: three programs and the libraries that they load, run by a user without rights,
# on a root file system that may be read-only. `make image` builds it.
ARG BUILD_IMAGE=rust:1.95-bookworm
ARG BASE_IMAGE=scratch

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY . .
ENV CARGO_TARGET_DIR=/target CARGO_PROFILE_RELEASE_STRIP=debuginfo
# Kernels for aarch64 have pages of 4 or of 64 KiB: an allocator built for the larger ones works with both.
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/target \
    if [ "$(uname -m)" = aarch64 ]; then export JEMALLOC_SYS_WITH_LG_PAGE=16; fi && \
    cargo build --release --locked --bins && tools/image/rootfs.sh /target/release /rootfs

FROM ${BASE_IMAGE}
ARG VERSION=dev
LABEL org.opencontainers.image.title="kvcachepool" \
      org.opencontainers.image.description="Kubernetes operator and node-local KV cache sidecar for vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=build /rootfs/ /
ENV PATH=/usr/local/bin
# A number: a kubelet checks runAsNonRoot without knowing names.
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/kvcachepool-operator"]
