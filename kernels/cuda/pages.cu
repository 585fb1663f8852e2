// Gather and scatter: blocks of a KV cache to the bytes of a section, and back, for every layout of the table.
// Reference: src/pages/transfer.rs. What it refuses, the host refuses before a launch; only block ids, which may have been written by
// another kernel, are looked at here.

#include "words.cuh"

// A row of the table of planes: block `b` of the plane lies at device address `address + b * block_stride`, and its `bytes` bytes begin at
// byte `at` of a block's bytes in the section.
struct Plane {
    u64 address;
    u64 block_stride;
    u64 bytes;
    u64 at;
};

// Pieces in section order, `gridDim.x` of them at a time; `gridDim.y` thread blocks share a piece. A piece of a block that the cache has
// not is left out and counted in `refused`.
template <bool GATHER>
static __device__ void transfer(const Plane* planes, u32 plane_count, const u32* blocks, u32 block_count,
                                u32 cache_blocks, u8* section, u64 block_bytes, u32* refused) {
    const u64 first = static_cast<u64>(blockIdx.y) * blockDim.x + threadIdx.x;
    const u64 step = static_cast<u64>(gridDim.y) * blockDim.x;
    const u64 pieces = static_cast<u64>(plane_count) * block_count;
    for (u64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const u64 row = piece / plane_count;
        const Plane plane = planes[piece % plane_count];
        const u32 block = blocks[row];
        if (block >= cache_blocks) {
            if (first == 0) {
                atomicAdd(refused, 1u);
            }
            continue;
        }
        u8* page = reinterpret_cast<u8*>(plane.address + block * plane.block_stride);
        u8* bytes = section + row * block_bytes + plane.at;
        copy_run(GATHER ? bytes : page, GATHER ? page : bytes, plane.bytes, first, step);
    }
}

extern "C" __global__ void kv_gather(const Plane* planes, u32 plane_count, const u32* blocks, u32 block_count,
                                     u32 cache_blocks, u8* section, u64 block_bytes, u32* refused) {
    transfer<true>(planes, plane_count, blocks, block_count, cache_blocks, section, block_bytes, refused);
}

extern "C" __global__ void kv_scatter(const Plane* planes, u32 plane_count, const u32* blocks, u32 block_count,
                                      u32 cache_blocks, u8* section, u64 block_bytes, u32* refused) {
    transfer<false>(planes, plane_count, blocks, block_count, cache_blocks, section, block_bytes, refused);
}
