// XXH3 of 128 bits with seed 0 and the default secret, after "xxHash fast digest algorithm" by Y. Collet (doc/xxhash_spec.md of xxHash, version
// 0.2.0): its constants, its steps on words, and the whole of it for up to 240 bytes. Words are little-endian, as the device's own are.
#pragma once

#include "words.cuh"

static const u64 PRIME32_1 = 0x9e3779b1ull;
static const u64 PRIME32_2 = 0x85ebca77ull;
static const u64 PRIME32_3 = 0xc2b2ae3dull;
static const u64 PRIME64_1 = 0x9e3779b185ebca87ull;
static const u64 PRIME64_2 = 0xc2b2ae3d27d4eb4full;
static const u64 PRIME64_3 = 0x165667b19e3779f9ull;
static const u64 PRIME64_4 = 0x85ebca77c2b2ae63ull;
static const u64 PRIME64_5 = 0x27d4eb2f165667c5ull;
static const u64 PRIME_MX1 = 0x165667919e3779f9ull;
static const u64 PRIME_MX2 = 0x9fb21c651e98df25ull;

static __constant__ const u64 SECRET[24] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

struct Digest {
    u64 low;
    u64 high;
};

// 8 bytes of the secret, from byte `at` on.
static __device__ u64 secret_at(u32 at) {
    const u32 bits = at % 8 * 8;
    const u64 low = SECRET[at / 8] >> bits;
    return bits == 0 ? low : low | SECRET[at / 8 + 1] << (64 - bits);
}

// A word of so many bytes at any address.
template <typename Word>
static __device__ Word word_at(const u8* at) {
    Word word = 0;
    for (u32 i = 0; i < sizeof(Word); ++i) {
        word |= static_cast<Word>(at[i]) << (8 * i);
    }
    return word;
}

static __device__ u64 swapped(u64 word) {
    return static_cast<u64>(swapped(static_cast<u32>(word))) << 32 | swapped(static_cast<u32>(word >> 32));
}

// Both halves of a product in one.
static __device__ u64 folded(u64 x, u64 y) {
    return (x * y) ^ __umul64hi(x, y);
}

static __device__ u64 avalanche(u64 x) {
    x = (x ^ x >> 37) * PRIME_MX1;
    return x ^ x >> 32;
}

// The one of XXH64, which the shortest inputs end with.
static __device__ u64 avalanche64(u64 x) {
    x = (x ^ x >> 33) * PRIME64_2;
    x = (x ^ x >> 29) * PRIME64_3;
    return x ^ x >> 32;
}

static __device__ Digest digest_of_0() {
    return {avalanche64(secret_at(64) ^ secret_at(72)), avalanche64(secret_at(80) ^ secret_at(88))};
}

static __device__ Digest digest_of_1_to_3(const u8* from, u32 bytes) {
    const u32 all = from[bytes - 1] | bytes << 8 | static_cast<u32>(from[0]) << 16 | static_cast<u32>(from[bytes / 2]) << 24;
    const u32 turned = swapped(all) << 13 | swapped(all) >> 19;
    const u64 low = secret_at(0);
    const u64 high = secret_at(8);
    return {avalanche64(static_cast<u32>(low ^ low >> 32) ^ all), avalanche64(static_cast<u32>(high ^ high >> 32) ^ turned)};
}

static __device__ Digest digest_of_4_to_8(const u8* from, u32 bytes) {
    const u64 both = word_at<u32>(from) | static_cast<u64>(word_at<u32>(from + bytes - 4)) << 32;
    const u64 value = secret_at(16) ^ secret_at(24) ^ both;
    const u64 factor = PRIME64_1 + 4 * bytes;
    u64 low = value * factor;
    const u64 high = __umul64hi(value, factor) + (low << 1);
    low ^= high >> 3;
    low = (low ^ low >> 35) * PRIME_MX2;
    return {low ^ low >> 28, avalanche(high)};
}

static __device__ Digest digest_of_9_to_16(const u8* from, u32 bytes) {
    const u64 first = word_at<u64>(from);
    const u64 last = word_at<u64>(from + bytes - 8);
    const u64 one = secret_at(32) ^ secret_at(40) ^ first ^ last;
    const u64 other = secret_at(48) ^ secret_at(56) ^ last;
    const u64 high = __umul64hi(one, PRIME64_1) + other + static_cast<u32>(other) * (PRIME32_2 - 1);
    const u64 low = (one * PRIME64_1 + (static_cast<u64>(bytes - 1) << 54)) ^ swapped(high);
    return {avalanche(low * PRIME64_2), avalanche(__umul64hi(low, PRIME64_2) + high * PRIME64_2)};
}

// Two pieces of 16 bytes into both halves.
static __device__ void mix(Digest& sums, const u8* one, const u8* other, u32 secret) {
    const u64 a = word_at<u64>(one);
    const u64 b = word_at<u64>(one + 8);
    const u64 c = word_at<u64>(other);
    const u64 d = word_at<u64>(other + 8);
    sums.low = (sums.low + folded(a ^ secret_at(secret), b ^ secret_at(secret + 8))) ^ (c + d);
    sums.high = (sums.high + folded(c ^ secret_at(secret + 16), d ^ secret_at(secret + 24))) ^ (a + b);
}

static __device__ Digest digest_of_17_to_240(const u8* from, u32 bytes) {
    Digest sums = {bytes * PRIME64_1, 0};
    if (bytes <= 128) {
        // From both ends towards the middle, the middle first.
        for (u32 i = (bytes - 1) / 32 + 1; i-- > 0;) {
            mix(sums, from + 16 * i, from + bytes - 16 * i - 16, 32 * i);
        }
    } else {
        for (u32 i = 0; i < bytes / 32; ++i) {
            mix(sums, from + 32 * i, from + 32 * i + 16, i < 4 ? 32 * i : 32 * (i - 4) + 3);
            if (i == 3) {
                sums = {avalanche(sums.low), avalanche(sums.high)};
            }
        }
        mix(sums, from + bytes - 16, from + bytes - 32, 103);
    }
    const u64 high = sums.low * PRIME64_1 + sums.high * PRIME64_4 + bytes * PRIME64_2;
    return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

static __device__ Digest digest_of_up_to_240(const u8* from, u32 bytes) {
    if (bytes > 16) return digest_of_17_to_240(from, bytes);
    if (bytes > 8) return digest_of_9_to_16(from, bytes);
    if (bytes > 3) return digest_of_4_to_8(from, bytes);
    return bytes > 0 ? digest_of_1_to_3(from, bytes) : digest_of_0();
}
