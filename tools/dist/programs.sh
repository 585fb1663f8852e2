#!/usr/bin/env bash
# Builds the released programs: programs.sh ARCH, with ARCH amd64 or arm64, prints their folder. Another architecture than that of this
# machine is cross-compiled with Debian's compiler. Ends with code 3 where that is missing: tools/setup.sh dist installs it.
set -euo pipefail
cd "$(dirname "$0")/../.."
case "$1" in
    amd64) machine=x86_64 ;;
    # Kernels for aarch64 have pages of 4 or of 64 KiB: an allocator built for the larger ones works with both.
    arm64) machine=aarch64; export JEMALLOC_SYS_WITH_LG_PAGE=16 ;;
    *) echo "no target for $1: amd64 or arm64" >&2; exit 2 ;;
esac
triple="$machine-unknown-linux-gnu"
if [ "$(uname -m)" != "$machine" ]; then
    prefix="$machine-linux-gnu"
    command -v "$prefix-g++" >/dev/null && [ -d "$(rustc --print sysroot)/lib/rustlib/$triple" ] ||
        { echo "no $prefix-g++, or no Rust target $triple: run tools/setup.sh dist" >&2; exit 3; }
    variable="${triple//-/_}"
    export "CC_$variable=$prefix-gcc" "CXX_$variable=$prefix-g++" "AR_$variable=$prefix-ar" "CARGO_TARGET_${variable^^}_LINKER=$prefix-gcc"
fi
CARGO_PROFILE_RELEASE_STRIP=debuginfo cargo build --release --locked --bins --target "$triple" >&2
echo "${CARGO_TARGET_DIR:-target}/$triple/release"
