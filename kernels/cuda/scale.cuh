// The straight line between the numbers of a group and their codes. Reference: src/codec/scale.rs; every operation is rounded as there.
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
