// Layout change: a section from the order of its rank's KV cache to the head-major canonical one, and back.
// Reference: src/pages/order.rs, whose loops these are: heads, layers, blocks, kernel blocks, tokens, then a run of bytes that are
// neighbours in both orders. The loops' strides are those of the rank-verbatim side, in bytes; canonical runs lie one behind another.

#include "words.cuh"

// A row of the table of loops, outermost first.
struct Loop {
    u64 extent;
    u64 stride;
};

static const u32 LOOPS = 5;

// Threads of one `y` share a run; with 32 of them, a run of 512 bytes (a state of 128 elements for key and value) is one load each.
template <bool TO_CANONICAL>
static __device__ void change(u8* verbatim, u8* canonical, const Loop* loops, u64 run_bytes) {
    u64 runs = 1;
    for (u32 i = 0; i < LOOPS; ++i) {
        runs *= loops[i].extent;
    }
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.y;
    for (u64 run = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y; run < runs; run += step) {
        u64 rest = run;
        u64 at = 0;
        for (u32 i = LOOPS; i-- > 0;) {
            at += rest % loops[i].extent * loops[i].stride;
            rest /= loops[i].extent;
        }
        u8* there = canonical + run * run_bytes;
        u8* here = verbatim + at;
        copy_run(TO_CANONICAL ? there : here, TO_CANONICAL ? here : there, run_bytes, threadIdx.x, blockDim.x);
    }
}

extern "C" __global__ void kv_to_canonical(u8* verbatim, u8* canonical, const Loop* loops, u64 run_bytes) {
    change<true>(verbatim, canonical, loops, run_bytes);
}

extern "C" __global__ void kv_to_verbatim(u8* verbatim, u8* canonical, const Loop* loops, u64 run_bytes) {
    change<false>(verbatim, canonical, loops, run_bytes);
}
