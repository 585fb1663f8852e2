// The straight line between the numbers of a group and their codes, and the codes of FP8. References: src/codec/scale.rs, src/codec/fp8.rs;
// every operation is rounded as there.
#pragma once

#include "words.cuh"

// Added to a number of less than 2^22 it rounds that to a whole number, which then stands in the lowest bits.
static const float ROUND = 12582912.0f;

struct Scale {
    float lift;
    float drop;
    float base;
    float up_by;
    float down_by;

    // Of finite numbers, `low` not above `high`; codes go from 0 to `top`. Very narrow groups are lifted by 2^64 and very wide ones halved, so
    // that no factor overflows or becomes subnormal.
    __device__ Scale(float low, float high, float top) {
        const float width = high - low;
        const float largest = fmaxf(fabsf(low), fabsf(high));
        if (width < 0x1p-60f && largest < 1.0f) {
            lift = 0x1p64f;
        } else if (__float_as_uint(width) == 0x7f800000u) {
            lift = 0.5f;
        } else {
            lift = 1.0f;
        }
        drop = 1.0f / lift;
        base = low * lift;
        const float lifted = high * lift - base;
        up_by = lifted > 0.0f ? top / lifted : 1.0f;
        down_by = lifted / top;
    }

    __device__ float up(float value) const { return (value * lift - base) * up_by; }
    __device__ float down(float code) const { return (code * down_by + base) * drop; }
};

// The value, or the end that it is beyond; NaN stays NaN.
static __device__ float within(float value, float least, float greatest) {
    if (value > greatest) return greatest;
    return value < least ? least : value;
}

// The code of FP8 (e4m3fn) nearest to a value, ties to even; beyond the largest that one.
static __device__ u8 fp8_of_f32(float value) {
    const u32 largest = 0x43e00000u;  // 448
    const u32 normal = 0x3c800000u;   // 2^-6, the least normal number
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 bounded = magnitude < largest ? magnitude : largest;
    // Beside 2^20 times its power of two, f32 has the steps that FP8 has at the number: the addition rounds, its lowest bits count steps.
    const u32 power = (bounded & 0x7f800000u) > normal ? bounded & 0x7f800000u : normal;
    const u32 beside = power + (20u << 23);
    const u32 steps = __float_as_uint(__uint_as_float(beside) + __uint_as_float(bounded)) - beside;
    const u32 finite = steps + ((power >> 20) - (normal >> 20));
    const u32 code = magnitude > 0x7f800000u ? 0x7fu : finite;
    return static_cast<u8>(code | ((bits >> 24) & 0x80u));
}

static __device__ float f32_of_fp8(u8 code) {
    const u32 sign = (code & 0x80u) << 24;
    const u32 magnitude = code & 0x7fu;
    // With the least normal exponent added and its one taken away, the mantissa is what is left.
    const u32 subnormal = __float_as_uint(__uint_as_float((magnitude << 20) + (121u << 23)) - 0x1p-6f);
    u32 bits = (magnitude << 20) + (120u << 23);
    if (magnitude == 0x7f) {
        bits = 0x7fc00000u;
    } else if (magnitude < 8) {
        bits = subnormal;
    }
    return __uint_as_float(bits | sign);
}
