// An arithmetic coder as torchac has it, for one stream: an interval of 32 bits that is narrowed to a level's part of it, and the stream of
// the bits that are known then. Reference: src/codec/cachegen/{interval,encoder,decoder}.rs, which code many streams in step.
#pragma once

#include "words.cuh"

// Bytes of the place of a stream. A level narrows the interval, of more than 2^30, to no less than a 65,536th of it but for what rounding
// takes: 256 of them are 4,096 bits, the end takes two more, and a place is whole words.
static const u32 STREAM_BYTES = 516;

// Both ends belong to it.
struct Interval {
    u32 low = 0;
    u32 high = 0xffffffffu;

    // How far from its begin so many 65,536ths of it are.
    __device__ u32 part(u32 place) const {
        return static_cast<u32>((static_cast<u64>(high - low) + 1) * place >> 16);
    }

    __device__ void narrow(u32 from, u32 to) {
        const u32 begin = low + part(from);
        high = low + part(to) - 1;
        low = begin;
    }

    // Leading bits on which its ends agree; at most 31, whatever the table was.
    __device__ u32 agreed() const { return __clz(static_cast<int>(low ^ high)) % 32; }

    // Bits behind the first, where it is just around the middle: the ends' first bits differ then.
    __device__ u32 around() const { return __clz(static_cast<int>(~((low & ~high) << 1))) % 32; }

    // Drops leading bits; behind the last, an interval begins with zeros and ends with ones.
    __device__ void drop(u32 bits) {
        low <<= bits;
        high = high << bits | ~(0xffffffffu << bits);
    }

    // Drops those around the middle and keeps the first.
    __device__ void drop_around(u32 bits) {
        drop(bits);
        low &= 0x7fffffffu;
        high |= 0x80000000u;
    }
};

// Writes a stream, the highest bit of a byte first, and never beyond its place.
struct Writer {
    u32* place;
    u32 words = 0;
    // The last `count` bits of it are still to be written; fewer than 32 between calls.
    u64 held = 0;
    u32 count = 0;
    // Bits that will be the opposite of the next one that is known.
    u32 pending = 0;

    __device__ explicit Writer(u32* place) : place(place) {}

    // Bits that are known now: behind the first of them go those that were pending.
    __device__ void put_known(u32 bits, u32 known) {
        if (known == 0) return;
        if (known + pending <= 32) {
            // Whether the first bit is 0 or 1, this puts its opposite behind it: 0 + 0111 = 0111, 0001 + 0111 = 1000.
            const u64 opposite = (((1ull << pending) - 1) << known) >> 1;
            put(bits + opposite, known + pending);
            pending = 0;
            return;
        }
        const u32 others = known - 1;
        const u32 first = bits >> others;
        put(first, 1);
        while (pending > 0) {
            const u32 some = pending < 32 ? pending : 32;
            put(first ? 0 : (1ull << some) - 1, some);
            pending -= some;
        }
        put(bits - (first << others), others);
    }

    // The bit of the quarter that is in the interval as a whole, and its opposite: whatever follows, the value stays in the interval. Returns
    // how many bytes the stream has; the last one is filled with zeros.
    __device__ u32 finish(u32 low) {
        pending += 1;
        put_known(low >= 0x40000000u, 1);
        const u32 full = 4 * words;
        const u32 rest = (count + 7) / 8;
        put(0, 32 - count);
        return full + rest < STREAM_BYTES ? full + rest : STREAM_BYTES;
    }

    // The lowest bits of a number without higher ones, at most 32.
    __device__ void put(u64 bits, u32 some) {
        held = held << some | bits;
        count += some;
        if (count >= 32) {
            count -= 32;
            if (words < STREAM_BYTES / 4) {
                place[words] = swapped(static_cast<u32>(held >> count));
                words += 1;
            }
        }
    }
};

// Reads a stream. Behind its end are zeros.
struct Reader {
    const u8* at;
    const u8* end;
    u64 held = 0;
    u32 count = 0;

    __device__ Reader(const u8* at, const u8* end) : at(at), end(end) {}

    // The next bits, at most 32.
    __device__ u32 take(u32 bits) {
        while (count < bits) {
            held = held << 8 | (at < end ? *at : 0);
            at += at < end;
            count += 8;
        }
        count -= bits;
        return static_cast<u32>(held >> count & ((1ull << bits) - 1));
    }
};
