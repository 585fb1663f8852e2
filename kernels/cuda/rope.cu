// RoPE re-positioning: keys of all states turned by the same positions, in place. Reference: src/pages/rope.rs, bit for bit where no NaN
// is: products are rounded before they are added there, so this file is compiled without fused multiply-add.

#include "numbers.cuh"

// Threads of one `y` share a key. `states` and `key_offset` are aligned to the element; `cos` and `sin` have `pairs` numbers each.
template <typename Number, bool NEOX>
static __device__ void turn(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs, const float* cos,
                            const float* sin) {
    typedef typename Number::Bits Bits;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.y;
    for (u64 state = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y; state < state_count; state += step) {
        Bits* key = reinterpret_cast<Bits*>(states + state * state_bytes + key_offset);
        for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
            Bits* first = NEOX ? key + i : key + 2 * i;
            Bits* second = NEOX ? first + pairs : first + 1;
            const float x = Number::value(*first);
            const float y = Number::value(*second);
            *first = Number::nearest(x * cos[i] - y * sin[i]);
            *second = Number::nearest(y * cos[i] + x * sin[i]);
        }
    }
}

extern "C" __global__ void kv_turn_neox_bf16(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                             const float* cos, const float* sin) {
    turn<Bf16, true>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}

extern "C" __global__ void kv_turn_neox_f16(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                            const float* cos, const float* sin) {
    turn<F16, true>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}

extern "C" __global__ void kv_turn_neox_f32(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                            const float* cos, const float* sin) {
    turn<F32, true>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}

extern "C" __global__ void kv_turn_gptj_bf16(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                             const float* cos, const float* sin) {
    turn<Bf16, false>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}

extern "C" __global__ void kv_turn_gptj_f16(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                            const float* cos, const float* sin) {
    turn<F16, false>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}

extern "C" __global__ void kv_turn_gptj_f32(u8* states, u64 state_count, u64 state_bytes, u64 key_offset, u32 pairs,
                                            const float* cos, const float* sin) {
    turn<F32, false>(states, state_count, state_bytes, key_offset, pairs, cos, sin);
}
