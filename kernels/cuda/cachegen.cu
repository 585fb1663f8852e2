// CacheGen: what packs a section and what unpacks it, but for the container, which the host puts together and takes apart. Reference and
// container: src/codec/cachegen; every part is the reference's, bit for bit.
//
// A section is planes, which are halves of layers, of tokens, of channels. Packing: numbers to levels and each row's largest magnitude; levels
// to counts and, from these, tables; levels to streams. Unpacking: streams to levels, levels to numbers. Streams are coded one bit after the
// other: a thread takes a stream, and neighbours take neighbouring channels, whose levels and tables lie side by side.

#include "coder.cuh"
#include "numbers.cuh"
#include "scale.cuh"

// Levels that a table has room for.
static const u32 LEVELS = 32;
// Tokens of a stream.
static const u32 STREAM_TOKENS = 256;
// Levels that are read before the first is coded: memory answers late.
static const u32 AHEAD = 8;

// A warp takes a row, so a thread block has exactly 32 threads in `x`. `steps` has those of each plane to either side of zero. A row that has
// a number which is not finite, or a largest magnitude that no row has, is left out, and the first of them is the least in `refused`.
template <typename Number, bool PACK>
static __device__ void levels_of_rows(typename Number::Bits* raw, u64 row_count, u32 tokens, u32 channels, const u8* steps,
                                      typename Number::Bits* rows, u8* levels, u64* refused) {
    const u64 step = static_cast<u64>(gridDim.x) * blockDim.y;
    for (u64 row = static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y; row < row_count; row += step) {
        typename Number::Bits* numbers = raw + row * channels;
        u8* mine = levels + row * channels;
        typename Number::Bits bound = rows[row];
        if (PACK) {
            int largest = 0;
            for (u32 i = threadIdx.x; i < channels; i += 32) {
                const int magnitude = magnitude_of(numbers[i]);
                largest = magnitude > largest ? magnitude : largest;
            }
            bound = static_cast<typename Number::Bits>(__reduce_max_sync(ALL_LANES, largest));
        }
        if (bound >= static_cast<u32>(Number::INFINITE)) {
            if (threadIdx.x == 0) atomicMin(refused, row);
            continue;
        }
        const float middle = static_cast<float>(steps[row / tokens]);
        const float largest = Number::value(bound);
        const Scale scale(0.0f, largest, middle);
        if (PACK && threadIdx.x == 0) rows[row] = bound;
        for (u32 i = threadIdx.x; i < channels; i += 32) {
            if (PACK) {
                mine[i] = static_cast<u8>(__float_as_uint(scale.up(Number::value(numbers[i])) + middle + ROUND));
            } else {
                const float value = scale.down(static_cast<float>(mine[i]) - middle);
                numbers[i] = Number::nearest(within(value, -largest, largest));
            }
        }
    }
}

extern "C" __global__ void kv_cachegen_quantise_bf16(u16* raw, u64 row_count, u32 tokens, u32 channels,
                                                     const u8* steps, u16* rows, u8* levels, u64* refused) {
    levels_of_rows<Bf16, true>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

extern "C" __global__ void kv_cachegen_quantise_f16(u16* raw, u64 row_count, u32 tokens, u32 channels,
                                                    const u8* steps, u16* rows, u8* levels, u64* refused) {
    levels_of_rows<F16, true>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

extern "C" __global__ void kv_cachegen_quantise_f32(u32* raw, u64 row_count, u32 tokens, u32 channels,
                                                    const u8* steps, u32* rows, u8* levels, u64* refused) {
    levels_of_rows<F32, true>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

extern "C" __global__ void kv_cachegen_restore_bf16(u16* raw, u64 row_count, u32 tokens, u32 channels,
                                                    const u8* steps, u16* rows, u8* levels, u64* refused) {
    levels_of_rows<Bf16, false>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

extern "C" __global__ void kv_cachegen_restore_f16(u16* raw, u64 row_count, u32 tokens, u32 channels,
                                                   const u8* steps, u16* rows, u8* levels, u64* refused) {
    levels_of_rows<F16, false>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

extern "C" __global__ void kv_cachegen_restore_f32(u32* raw, u64 row_count, u32 tokens, u32 channels,
                                                   const u8* steps, u32* rows, u8* levels, u64* refused) {
    levels_of_rows<F32, false>(raw, row_count, tokens, channels, steps, rows, levels, refused);
}

// This thread's number, and how many there are: any shape of a block.
static __device__ u64 this_thread() {
    return (static_cast<u64>(blockIdx.x) * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}

static __device__ u64 all_threads() {
    return static_cast<u64>(gridDim.x) * blockDim.y * blockDim.x;
}

// Up to eight levels of a channel, the first in the lowest byte. All loads are under way before the first is waited for.
static __device__ u64 some_levels(const u8* levels, u32 channels, u32 count) {
    u64 found = 0;
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
        const u64 level = i < count ? levels[static_cast<u64>(i) * channels] : 0;
        found |= level % LEVELS << (8 * i);
    }
    return found;
}

// A thread takes a channel of a plane. `counts` are [planes][channels][32], as the host writes them down; `tables`, cumulative frequencies in
// 65,536ths, are [planes][33][channels], because neighbouring threads look for the same level.
extern "C" __global__ void kv_cachegen_count(const u8* levels, u32 planes, u32 tokens, u32 channels, u32* counts, u16* tables) {
    const u64 all = tokens == 0 ? 0 : static_cast<u64>(planes) * channels;
    for (u64 at = this_thread(); at < all; at += all_threads()) {
        const u64 plane = at / channels;
        const u32 channel = static_cast<u32>(at % channels);
        const u8* mine = levels + plane * tokens * channels + channel;
        u32* count = counts + at * LEVELS;
        for (u32 level = 0; level < LEVELS; ++level) count[level] = 0;
        // A byte of a word for each level, as long as none can overflow: words stay in registers, because nothing picks one by a number.
        const u32 most = 248;
        for (u32 first = 0, here; first < tokens; first += here) {
            here = tokens - first < most ? tokens - first : most;
            u32 fours[LEVELS / 4] = {};
            for (u32 token = 0; token < here; token += AHEAD) {
                const u32 some = here - token < AHEAD ? here - token : AHEAD;
                u64 ahead = some_levels(mine + static_cast<u64>(first + token) * channels, channels, some);
                for (u32 i = 0; i < some; ++i, ahead >>= 8) {
                    const u32 level = static_cast<u32>(ahead) & 0xff;
                    const u32 one = 1u << (8 * (level % 4));
#pragma unroll
                    for (u32 n = 0; n < LEVELS / 4; ++n) fours[n] += level / 4 == n ? one : 0;
                }
            }
#pragma unroll
            for (u32 level = 0; level < LEVELS; ++level) count[level] += fours[level / 4] >> (8 * (level % 4)) & 0xff;
        }
        u16* table = tables + plane * (LEVELS + 1) * channels + channel;
        u32 sum = 0;
#pragma unroll 1
        for (u32 level = 0; level <= LEVELS; ++level) {
            table[level * channels] = static_cast<u16>(65503ull * sum / tokens + level);
            sum += level < LEVELS ? count[level] : 0;
        }
    }
}

// A stream: [planes][groups of tokens][channels] of them.
struct Stream {
    u64 plane;
    u32 channel;
    u32 tokens;
    // Where its levels begin.
    u64 level;

    __device__ Stream(u64 at, u32 all_tokens, u32 channels) {
        const u64 group_count = (all_tokens - 1) / STREAM_TOKENS + 1;
        const u64 group = at / channels;
        const u32 first = static_cast<u32>(group % group_count) * STREAM_TOKENS;
        plane = group / group_count;
        channel = static_cast<u32>(at % channels);
        tokens = all_tokens - first < STREAM_TOKENS ? all_tokens - first : STREAM_TOKENS;
        level = (plane * all_tokens + first) * channels + channel;
    }

    static __device__ u64 count(u32 planes, u32 all_tokens, u32 channels) {
        return all_tokens == 0 ? 0 : ((all_tokens - 1) / STREAM_TOKENS + 1ull) * planes * channels;
    }

    __device__ const u16* table(const u16* tables, u32 channels) const {
        return tables + plane * (LEVELS + 1) * channels + channel;
    }
};

// Each stream gets a place of 516 bytes in `streams`, which is aligned to 4, and the number of its bytes.
extern "C" __global__ void kv_cachegen_encode(const u8* levels, u32 planes, u32 tokens, u32 channels,
                                              const u16* tables, u8* streams, u32* lengths) {
    const u64 all = Stream::count(planes, tokens, channels);
    for (u64 at = this_thread(); at < all; at += all_threads()) {
        const Stream stream(at, tokens, channels);
        const u16* table = stream.table(tables, channels);
        const u8* mine = levels + stream.level;
        Interval interval;
        Writer writer(reinterpret_cast<u32*>(streams + at * STREAM_BYTES));
        for (u32 token = 0; token < stream.tokens; token += AHEAD) {
            const u32 some = stream.tokens - token < AHEAD ? stream.tokens - token : AHEAD;
            u64 ahead = some_levels(mine + static_cast<u64>(token) * channels, channels, some);
            for (u32 i = 0; i < some; ++i, ahead >>= 8) {
                const u32 level = static_cast<u32>(ahead) & 0xff;
                interval.narrow(table[level * channels], table[(level + 1) * channels]);
                const u32 known = interval.agreed();
                writer.put_known((interval.low >> 1) >> (31 - known), known);
                interval.drop(known);
                const u32 around = interval.around();
                interval.drop_around(around);
                writer.pending += around;
            }
        }
        lengths[at] = writer.finish(interval.low);
    }
}

// Streams begin at `offsets` in `packed`; what is said to lie outside of it is not there. Whatever they hold, all levels are written, and none
// is above twice its plane's `steps`.
extern "C" __global__ void kv_cachegen_decode(const u8* packed, u64 packed_bytes, const u64* offsets, const u32* lengths, u32 planes, u32 tokens,
                                              u32 channels, const u8* steps, const u16* tables, u8* levels) {
    const u64 all = Stream::count(planes, tokens, channels);
    for (u64 at = this_thread(); at < all; at += all_threads()) {
        const Stream stream(at, tokens, channels);
        const u16* table = stream.table(tables, channels);
        const u32 highest = steps[stream.plane] < LEVELS / 2 ? 2 * steps[stream.plane] : LEVELS - 1;
        const u64 begin = offsets[at] < packed_bytes ? offsets[at] : packed_bytes;
        const u64 bytes = lengths[at] < packed_bytes - begin ? lengths[at] : packed_bytes - begin;
        Reader reader(packed + begin, packed + begin + bytes);
        Interval interval;
        // What of the stream stands beside the ends of the interval: in between, if the stream is sound.
        u32 value = reader.take(32);
        u8* mine = levels + stream.level;
        for (u32 token = 0; token < stream.tokens; ++token) {
            // The last level whose part does not begin above the value.
            const u32 above = value - interval.low;
            u32 level = 0;
            for (u32 more = LEVELS / 2; more > 0; more /= 2) {
                const bool further = level + more <= highest && interval.part(table[(level + more) * channels]) <= above;
                level += further ? more : 0;
            }
            mine[static_cast<u64>(token) * channels] = static_cast<u8>(level);
            interval.narrow(table[level * channels], table[(level + 1) * channels]);
            const u32 known = interval.agreed();
            interval.drop(known);
            value = value << known | reader.take(known);
            const u32 around = interval.around();
            interval.drop_around(around);
            value = value << around | reader.take(around);
            // Each bit of those around the middle is turned when it becomes the first; all but the last of them are dropped.
            value ^= around > 0 ? 0x80000000u : 0;
        }
    }
}
