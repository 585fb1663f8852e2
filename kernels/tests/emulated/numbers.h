// Conversions of element types by shifting bits, for hosts: rounded to nearest, ties to even, as the device's instructions do.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

static float __uint_as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

static uint32_t __float_as_uint(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

static float f32_of_bf16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

static uint16_t bf16_of_f32(float value) {
    if (std::isnan(value)) return 0x7fff;
    const uint32_t bits = __float_as_uint(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float f32_of_f16(uint16_t bits) {
    const int exponent = bits >> 10 & 31;
    const float mantissa = static_cast<float>(bits & 1023);
    float magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0f + mantissa, exponent - 25);
    if (exponent == 31) magnitude = mantissa == 0.0f ? INFINITY : NAN;
    return bits >> 15 ? -magnitude : magnitude;
}

static uint16_t f16_of_f32(float value) {
    if (std::isnan(value)) return 0x7fff;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float magnitude = std::fabs(value);
    if (magnitude == 0.0f) return sign;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    // Halves are whole multiples of a power of two that depends on the exponent; below 2^-14 it stays 2^-24.
    int exponent;
    std::frexp(magnitude, &exponent);
    const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
    const uint32_t multiple = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
    // With a leading bit, the multiple counts on in the exponent's place; a carry does too.
    return static_cast<uint16_t>(sign | (multiple + (static_cast<uint32_t>(unit + 24) << 10)));
}
