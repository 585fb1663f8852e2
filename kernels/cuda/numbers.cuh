// The element types of KV states: bits, values rounded to nearest with ties to even, and magnitudes as whole numbers.
// Reference: src/codec/number.rs. A program that runs these kernels on a host brings conversions of its own and defines KV_ON_HOST.
#pragma once

#include "words.cuh"

#ifndef KV_ON_HOST
static __device__ float f32_of_f16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

static __device__ u16 f16_of_f32(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

static __device__ float f32_of_bf16(u16 bits) {
    return __uint_as_float(static_cast<u32>(bits) << 16);
}

static __device__ u16 bf16_of_f32(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

struct Bf16 {
    typedef u16 Bits;
    // Where infinity and, behind it, NaN stand in the order of magnitudes.
    static const int INFINITE = 0x7f80;
    static __device__ float value(u16 bits) { return f32_of_bf16(bits); }
    static __device__ u16 nearest(float value) { return bf16_of_f32(value); }
};

struct F16 {
    typedef u16 Bits;
    static const int INFINITE = 0x7c00;
    static __device__ float value(u16 bits) { return f32_of_f16(bits); }
    static __device__ u16 nearest(float value) { return f16_of_f32(value); }
};

struct F32 {
    typedef u32 Bits;
    static const int INFINITE = 0x7f800000;
    static __device__ float value(u32 bits) { return __uint_as_float(bits); }
    static __device__ u32 nearest(float value) { return __float_as_uint(value); }
};

static __device__ int magnitude_of(u16 bits) {
    return bits & 0x7fff;
}

static __device__ int magnitude_of(u32 bits) {
    return static_cast<int>(bits & 0x7fffffffu);
}
