// Integer types by their width, threads of a warp, and copies of runs of bytes by several threads.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

static const u32 ALL_LANES = 0xffffffffu;

// The same bytes, the last one first.
static __device__ u32 swapped(u32 word) {
    return word << 24 | (word & 0xff00u) << 8 | (word >> 8 & 0xff00u) | word >> 24;
}

// Copies this thread's words of a run: number `first` and every `step`th after it. Four loads are under way before the first store: memory
// answers late, and the compiler does not reorder them where it cannot tell source and target apart.
template <typename Word>
static __device__ void copy_words(u8* to, const u8* from, u64 bytes, u64 first, u64 step) {
    Word* target = reinterpret_cast<Word*>(to);
    const Word* source = reinterpret_cast<const Word*>(from);
    const u64 words = bytes / sizeof(Word);
    u64 i = first;
    for (; i + 3 * step < words; i += 4 * step) {
        const Word a = source[i];
        const Word b = source[i + step];
        const Word c = source[i + 2 * step];
        const Word d = source[i + 3 * step];
        target[i] = a;
        target[i + step] = b;
        target[i + 2 * step] = c;
        target[i + 3 * step] = d;
    }
    for (; i < words; i += step) {
        target[i] = source[i];
    }
}

// The same with the widest words that addresses and length allow.
static __device__ void copy_run(u8* to, const u8* from, u64 bytes, u64 first, u64 step) {
    const u64 all = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from) | bytes;
    if (all % 16 == 0) {
        copy_words<uint4>(to, from, bytes, first, step);
    } else if (all % 8 == 0) {
        copy_words<u64>(to, from, bytes, first, step);
    } else if (all % 4 == 0) {
        copy_words<u32>(to, from, bytes, first, step);
    } else {
        copy_words<u8>(to, from, bytes, first, step);
    }
}
