// A GPU as far as the kernels see one, on a host: the threads of a warp are fibers that run in turns, warps run one after another.
#pragma once
#define KV_ON_HOST
#define __global__
#define __device__

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

struct Dim3 {
    unsigned x = 1, y = 1, z = 1;
};
static Dim3 gridDim, blockDim, blockIdx, threadIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

static unsigned atomicAdd(unsigned* at, unsigned value) {
    const unsigned before = *at;
    *at += value;
    return before;
}

static unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
    const unsigned long long before = *at;
    *at = std::min(before, value);
    return before;
}

// Zeros before the highest one.
static int __clz(int bits) {
    return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits));
}

// One warp of 32 fibers.
struct Warp {
    static constexpr unsigned LANES = 32;
    struct Fiber {
        ucontext_t context;
        std::vector<char> stack = std::vector<char>(64 << 10);
        Dim3 thread;
        bool done = false;
        unsigned round = 0;
    };
    std::vector<Fiber> fibers = std::vector<Fiber>(LANES);
    ucontext_t scheduler;
    unsigned lane = 0;
    std::function<void()> body;
};
static Warp warp;

// Values of the two latest collectives: a lane is at most one ahead of another.
static unsigned long long given[2][Warp::LANES];

// Waits until all lanes of the warp have given a value.
static const unsigned long long* all_given(unsigned long long value) {
    Warp::Fiber& fiber = warp.fibers[warp.lane];
    fiber.round ^= 1;
    const unsigned long long* values = given[fiber.round];
    given[fiber.round][warp.lane] = value;
    swapcontext(&fiber.context, &warp.scheduler);
    return values;
}

// Of the `int`s that were given.
static bool less(unsigned long long one, unsigned long long other) {
    return static_cast<int>(one) < static_cast<int>(other);
}

static int __reduce_max_sync(unsigned, int value) {
    const unsigned long long* values = all_given(value);
    return static_cast<int>(*std::max_element(values, values + Warp::LANES, less));
}

static void enter() {
    warp.body();
    warp.fibers[warp.lane].done = true;
}

// Runs all fibers of a warp to their end, each up to where it waits for the others.
static void run_warp(unsigned first) {
    for (unsigned lane = 0; lane < Warp::LANES; ++lane) {
        Warp::Fiber& fiber = warp.fibers[lane];
        const unsigned number = first + lane;
        fiber.thread.x = number % blockDim.x;
        fiber.thread.y = number / blockDim.x;
        fiber.done = false;
        fiber.round = 0;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = &warp.scheduler;
        makecontext(&fiber.context, enter, 0);
    }
    for (bool more = true; more;) {
        more = false;
        for (warp.lane = 0; warp.lane < Warp::LANES; ++warp.lane) {
            Warp::Fiber& fiber = warp.fibers[warp.lane];
            if (fiber.done) continue;
            threadIdx = fiber.thread;
            swapcontext(&warp.scheduler, &fiber.context);
            more = more || !fiber.done;
        }
    }
}

static void launch(Dim3 grid, Dim3 block, std::function<void()> body) {
    gridDim = grid;
    blockDim = block;
    warp.body = std::move(body);
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y) {
        for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
            for (unsigned first = 0; first < block.x * block.y; first += Warp::LANES) run_warp(first);
        }
    }
}
