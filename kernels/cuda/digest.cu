// Digests of sections: XXH3 of 128 bits, seed 0, of many sections in one launch. Reference: `object::digest` of sidecar/protocol, byte for byte
// for every length.
//
// XXH3 reads blocks of 1 KiB. What a block adds to the eight sums does not depend on the sums; only the scramble behind each block does. So
// a warp takes a section, four of its threads a block, and the eight blocks that it has read are then scrambled in one after the other. That
// chain is sequential: a section is read no faster than a warp can, and the device is busy only with many sections.

#include "xxh3.cuh"

// A row of the list of sections.
struct Section {
    u64 address;
    u64 bytes;
};

static const u32 BLOCK_BYTES = 1024;
static const u32 STRIPE_BYTES = 64;
static const u32 STRIPES = BLOCK_BYTES / STRIPE_BYTES;
// Blocks that a warp reads at a time.
static const u32 BLOCKS = 8;
// Where the secret of the scramble begins, that of the last stripe, and those of both halves.
static const u32 SCRAMBLE_SECRET = 128;
static const u32 LAST_SECRET = 121;
static const u32 LOW_SECRET = 11;
static const u32 HIGH_SECRET = 117;

// Two neighbours of the eight sums, or the words of a stripe that go into them.
struct Pair {
    u64 even;
    u64 odd;
};

static __device__ Pair secret_pair(u32 at) {
    return {secret_at(at), secret_at(at + 8)};
}

// Byte by byte where an address is not aligned to 16: right, and slow.
template <bool ALIGNED>
static __device__ Pair pair_at(const u8* at) {
    if (ALIGNED) {
        const ulonglong2 both = *reinterpret_cast<const ulonglong2*>(at);
        return {both.x, both.y};
    }
    return {word_at<u64>(at), word_at<u64>(at + 8)};
}

static __device__ u64 product_of_halves(u64 word) {
    return static_cast<u64>(static_cast<u32>(word)) * (word >> 32);
}

static __device__ void add(Pair& sums, Pair words, u64 even_secret, u64 odd_secret) {
    sums.even += words.odd + product_of_halves(words.even ^ even_secret);
    sums.odd += words.even + product_of_halves(words.odd ^ odd_secret);
}

static __device__ u64 scrambled(u64 sum, u64 secret) {
    return (sum ^ sum >> 47 ^ secret) * PRIME32_1;
}

// The sums that a section of more than 240 bytes begins with.
static __device__ Pair begin(u32 pair) {
    switch (pair) {
        case 0: return {PRIME32_3, PRIME64_1};
        case 1: return {PRIME64_2, PRIME64_3};
        case 2: return {PRIME64_4, PRIME32_2};
        default: return {PRIME64_5, PRIME32_1};
    }
}

// The same digest in all threads of a warp. Thread `lane` has pair `lane % 4` of the sums, and of eight blocks it reads number `lane / 4`.
template <bool ALIGNED>
static __device__ Digest digest_of_blocks(const u8* section, u64 bytes, u32 lane) {
    const u32 pair = lane % 4;
    const u32 at = 16 * pair;
    // Stripe `n` takes the secret's words from `n` on.
    u64 secrets[STRIPES + 1];
#pragma unroll
    for (u32 n = 0; n <= STRIPES; ++n) {
        secrets[n] = SECRET[2 * pair + n];
    }
    const Pair scramble = secret_pair(SCRAMBLE_SECRET + at);
    Pair sums = begin(pair);
    // The last block is not scrambled, also where it is whole.
    const u64 blocks = (bytes - 1) / BLOCK_BYTES;
    for (u64 first = 0; first < blocks; first += BLOCKS) {
        const u32 count = blocks - first < BLOCKS ? static_cast<u32>(blocks - first) : BLOCKS;
        Pair added = {0, 0};
        if (lane / 4 < count) {
            const u8* block = section + (first + lane / 4) * BLOCK_BYTES + at;
            // All loads are under way before the first product: memory answers late.
            Pair words[STRIPES];
#pragma unroll
            for (u32 n = 0; n < STRIPES; ++n) {
                words[n] = pair_at<ALIGNED>(block + n * STRIPE_BYTES);
            }
#pragma unroll
            for (u32 n = 0; n < STRIPES; ++n) {
                add(added, words[n], secrets[n], secrets[n + 1]);
            }
        }
        for (u32 i = 0; i < count; ++i) {
            sums.even = scrambled(sums.even + __shfl_sync(ALL_LANES, added.even, 4 * i + pair), scramble.even);
            sums.odd = scrambled(sums.odd + __shfl_sync(ALL_LANES, added.odd, 4 * i + pair), scramble.odd);
        }
    }
    const u8* rest = section + blocks * BLOCK_BYTES;
    const u32 stripes = static_cast<u32>(bytes - blocks * BLOCK_BYTES - 1) / STRIPE_BYTES;
    for (u32 n = 0; n < stripes; ++n) {
        const Pair secret = secret_pair(8 * n + at);
        add(sums, pair_at<ALIGNED>(rest + n * STRIPE_BYTES + at), secret.even, secret.odd);
    }
    const Pair last = secret_pair(LAST_SECRET + at);
    add(sums, pair_at<false>(section + bytes - STRIPE_BYTES + at), last.even, last.odd);

    Digest merged = {folded(sums.even ^ secret_at(LOW_SECRET + at), sums.odd ^ secret_at(LOW_SECRET + at + 8)),
                     folded(sums.even ^ secret_at(HIGH_SECRET + at), sums.odd ^ secret_at(HIGH_SECRET + at + 8))};
    for (u32 i = 1; i < 4; i *= 2) {
        merged.low += __shfl_sync(ALL_LANES, merged.low, lane ^ i);
        merged.high += __shfl_sync(ALL_LANES, merged.high, lane ^ i);
    }
    return {avalanche(bytes * PRIME64_1 + merged.low), avalanche(~(bytes * PRIME64_2) + merged.high)};
}

// A warp takes a section, so a thread block has exactly 32 threads in `x`. `digests` has 16 bytes for each section, aligned to 8.
extern "C" __global__ void kv_digest(const Section* sections, u64 section_count, u64* digests) {
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.y;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y; at < section_count; at += step) {
        const u8* section = reinterpret_cast<const u8*>(sections[at].address);
        const u64 bytes = sections[at].bytes;
        Digest digest;
        if (bytes <= 240) {
            digest = digest_of_up_to_240(section, static_cast<u32>(bytes));
        } else if (sections[at].address % 16 == 0) {
            digest = digest_of_blocks<true>(section, bytes, threadIdx.x);
        } else {
            digest = digest_of_blocks<false>(section, bytes, threadIdx.x);
        }
        if (threadIdx.x == 0) {
            digests[2 * at] = digest.low;
            digests[2 * at + 1] = digest.high;
        }
    }
}
