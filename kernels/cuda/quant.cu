// Quantising by groups: numbers of 16 bits to FP8, INT8 and INT4 codes with the ends of each group beside them, and back.
// Reference and stored format: src/codec/grouped.rs and src/codec/{fp8,int8,int4}.rs; the header is the host's. Bytes are the reference's
// but for the sign of NaN.
//
// A warp takes a group, so a thread block has exactly 32 threads in `x`. `ends` and `codes` are those of all groups. A group that cannot be
// packed, or that has ends which no group has, is left out and counted in `refused`: the host then gives the whole section up.

#include "numbers.cuh"
#include "scale.cuh"

// One code per byte; stored is the largest magnitude.
template <typename Number, typename Code>
struct Whole {
    static const u32 ENDS = 1;

    static __device__ u64 bytes(u64 numbers) { return numbers; }

    // False: no group has such an end.
    static __device__ bool line(const u16* ends, float& low, float& high) {
        const int largest = order_of(ends[0]);
        high = Number::value(ends[0]);
        low = -high;
        return largest >= 0 && largest < Number::INFINITE;
    }

    static __device__ void ends(const u16* numbers, u32 count, u16* ends) {
        int largest = 0;
        for (u32 i = threadIdx.x; i < count; i += 32) {
            const int magnitude = magnitude_of(numbers[i]);
            const bool counts = Code::KEEPS_SPECIAL ? magnitude < Number::INFINITE : true;
            largest = counts && magnitude > largest ? magnitude : largest;
        }
        ends[0] = at_order(__reduce_max_sync(ALL_LANES, largest));
    }

    static __device__ void pack(float, float high, const u16* numbers, u32 count, u8* codes) {
        const Scale scale(0.0f, high, Code::TOP);
        for (u32 i = threadIdx.x; i < count; i += 32) {
            codes[i] = Code::code(scale.up(Number::value(numbers[i])));
        }
    }

    static __device__ void unpack(float low, float high, u16* numbers, u32 count, const u8* codes) {
        const Scale scale(0.0f, high, Code::TOP);
        for (u32 i = threadIdx.x; i < count; i += 32) {
            numbers[i] = Number::nearest(within(scale.down(Code::value(codes[i])), low, high));
        }
    }
};

struct Fp8Code {
    static const bool KEEPS_SPECIAL = true;
    static constexpr float TOP = 448.0f;
    static __device__ u8 code(float scaled) { return fp8_of_f32(scaled); }
    static __device__ float value(u8 code) { return f32_of_fp8(code); }
};

struct Int8Code {
    static const bool KEEPS_SPECIAL = false;
    static constexpr float TOP = 127.0f;
    static __device__ u8 code(float scaled) { return static_cast<u8>(__float_as_uint(scaled + ROUND)); }
    static __device__ float value(u8 code) { return static_cast<float>(static_cast<signed char>(code)); }
};

// Two codes per byte, the first half of a group in the low halves; stored are the least and the greatest number.
template <typename Number>
struct Int4 {
    static const u32 ENDS = 2;
    static constexpr float TOP = 15.0f;

    static __device__ u64 bytes(u64 numbers) { return (numbers + 1) / 2; }

    static __device__ bool line(const u16* ends, float& low, float& high) {
        low = Number::value(ends[0]);
        high = Number::value(ends[1]);
        const bool finite = magnitude_of(ends[0]) < Number::INFINITE && magnitude_of(ends[1]) < Number::INFINITE;
        return finite && order_of(ends[0]) <= order_of(ends[1]);
    }

    static __device__ void ends(const u16* numbers, u32 count, u16* ends) {
        int least = order_of(numbers[0]);
        int greatest = least;
        for (u32 i = threadIdx.x; i < count; i += 32) {
            const int order = order_of(numbers[i]);
            least = order < least ? order : least;
            greatest = order > greatest ? order : greatest;
        }
        ends[0] = at_order(__reduce_min_sync(ALL_LANES, least));
        ends[1] = at_order(__reduce_max_sync(ALL_LANES, greatest));
    }

    static __device__ u32 code(const Scale& scale, u16 number) {
        return __float_as_uint(scale.up(Number::value(number)) + ROUND) & 15;
    }

    static __device__ u16 number(const Scale& scale, float low, float high, u32 code) {
        return Number::nearest(within(scale.down(static_cast<float>(code)), low, high));
    }

    static __device__ void pack(float low, float high, const u16* numbers, u32 count, u8* codes) {
        const Scale scale(low, high, TOP);
        const u32 half = (count + 1) / 2;
        for (u32 i = threadIdx.x; i < half; i += 32) {
            const u32 second = i + half < count ? code(scale, numbers[i + half]) : 0;
            codes[i] = static_cast<u8>(code(scale, numbers[i]) | second << 4);
        }
    }

    static __device__ void unpack(float low, float high, u16* numbers, u32 count, const u8* codes) {
        const Scale scale(low, high, TOP);
        const u32 half = (count + 1) / 2;
        for (u32 i = threadIdx.x; i < half; i += 32) {
            numbers[i] = number(scale, low, high, codes[i] & 15);
            if (i + half < count) {
                numbers[i + half] = number(scale, low, high, codes[i] >> 4);
            }
        }
    }
};

template <typename Quantiser, bool PACK>
static __device__ void quantise(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    const u64 groups = (numbers + group - 1) / group;
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.y;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y; at < groups; at += step) {
        const u64 left = numbers - at * group;
        const u32 count = left < group ? static_cast<u32>(left) : group;
        u16* mine = raw + at * group;
        u16* stored = ends + at * Quantiser::ENDS;
        u8* packed = codes + at * Quantiser::bytes(group);
        u16 both[2];
        if (PACK) {
            Quantiser::ends(mine, count, both);
        } else {
            for (u32 i = 0; i < Quantiser::ENDS; ++i) both[i] = stored[i];
        }
        float low;
        float high;
        if (!Quantiser::line(both, low, high)) {
            if (threadIdx.x == 0) atomicAdd(refused, 1u);
        } else if (PACK) {
            if (threadIdx.x == 0) {
                for (u32 i = 0; i < Quantiser::ENDS; ++i) stored[i] = both[i];
            }
            Quantiser::pack(low, high, mine, count, packed);
        } else {
            Quantiser::unpack(low, high, mine, count, packed);
        }
    }
}

extern "C" __global__ void kv_pack_fp8_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<Bf16, Fp8Code>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_pack_fp8_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<F16, Fp8Code>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_fp8_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<Bf16, Fp8Code>, false>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_fp8_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<F16, Fp8Code>, false>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_pack_int8_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<Bf16, Int8Code>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_pack_int8_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<F16, Int8Code>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_int8_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<Bf16, Int8Code>, false>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_int8_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Whole<F16, Int8Code>, false>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_pack_int4_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Int4<Bf16>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_pack_int4_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Int4<F16>, true>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_int4_bf16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Int4<Bf16>, false>(raw, numbers, group, ends, codes, refused);
}

extern "C" __global__ void kv_unpack_int4_f16(u16* raw, u64 numbers, u32 group, u16* ends, u8* codes, u32* refused) {
    quantise<Int4<F16>, false>(raw, numbers, group, ends, codes, refused);
}
