// The element types of KV states and their conversion to and from f32, rounded to nearest, ties to even: one instruction each.
// A program that runs these kernels on a host brings conversions of its own and defines KV_ON_HOST.
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
    static __device__ float value(u16 bits) { return f32_of_bf16(bits); }
    static __device__ u16 nearest(float value) { return bf16_of_f32(value); }
};

struct F16 {
    typedef u16 Bits;
    static __device__ float value(u16 bits) { return f32_of_f16(bits); }
    static __device__ u16 nearest(float value) { return f16_of_f32(value); }
};

struct F32 {
    typedef float Bits;
    static __device__ float value(float bits) { return bits; }
    static __device__ float nearest(float value) { return value; }
};
