// Runs one kernel on a host: host KERNEL GRID_X GRID_Y BLOCK_X BLOCK_Y, arguments on standard input, buffers on standard output.
//
// An argument is three u64 {kind, a, b} in the host's byte order. Kind 0: a number `a`. Kind 1: a buffer of `a` bytes at an address that is
// `b` beyond a multiple of 64, its bytes behind. Guards around each buffer must be whole in the end.
#include "device.h"
#include "numbers.h"

#include "../../cuda/cachegen.cu"
#include "../../cuda/layout.cu"
#include "../../cuda/pages.cu"
#include "../../cuda/rope.cu"

#include <map>
#include <string>

static const size_t GUARD = 256;
static const u8 GUARD_BYTE = 0xa5;

static void fail(const char* what) {
    std::fprintf(stderr, "%s\n", what);
    std::exit(1);
}

struct Buffer {
    std::vector<u8> memory;
    size_t start = 0;
    size_t bytes = 0;

    Buffer(size_t bytes, size_t beyond) : memory(bytes + beyond + 2 * GUARD + 64, GUARD_BYTE), bytes(bytes) {
        const size_t base = reinterpret_cast<size_t>(memory.data()) + GUARD;
        start = GUARD + (64 - base % 64) % 64 + beyond;
        if (std::fread(memory.data() + start, 1, bytes, stdin) != bytes) fail("standard input ends in a buffer");
    }
    u8* data() { return memory.data() + start; }
    void check() const {
        for (size_t i = 0; i < memory.size(); ++i) {
            const bool inside = i >= start && i < start + bytes;
            if (!inside && memory[i] != GUARD_BYTE) fail("a kernel wrote outside of its buffers");
        }
    }
};

static std::vector<Buffer> buffers;
static std::vector<u64> numbers;

static void read_arguments() {
    u64 head[3];
    buffers.reserve(16);
    while (std::fread(head, sizeof head, 1, stdin) == 1) {
        if (head[0] == 1) {
            buffers.emplace_back(head[1], head[2]);
        } else {
            numbers.push_back(head[1]);
        }
    }
}

template <typename T>
static T* in(size_t buffer) {
    return reinterpret_cast<T*>(buffers.at(buffer).data());
}

static u32 small(size_t number) { return static_cast<u32>(numbers.at(number)); }

// Planes in the first buffer come with offsets into the last one.
static void relocate(u64 by) {
    for (u64 i = 0; i < numbers.at(0); ++i) in<Plane>(0)[i].address += by;
}

int main(int count, char** words) {
    if (count != 6) fail("usage: host KERNEL GRID_X GRID_Y BLOCK_X BLOCK_Y");
    read_arguments();
    const std::string kernel = words[1];
    auto number = [&](int i) { return static_cast<unsigned>(std::atoi(words[i])); };
    const Dim3 grid{number(2), number(3)}, block{number(4), number(5)};
    const std::map<std::string, decltype(&kv_gather)> transfers = {{"kv_gather", kv_gather}, {"kv_scatter", kv_scatter}};
    const std::map<std::string, decltype(&kv_to_canonical)> changes = {{"kv_to_canonical", kv_to_canonical},
                                                                      {"kv_to_verbatim", kv_to_verbatim}};
    const std::map<std::string, decltype(&kv_turn_neox_f32)> turns = {
        {"kv_turn_neox_bf16", kv_turn_neox_bf16}, {"kv_turn_neox_f16", kv_turn_neox_f16},
        {"kv_turn_neox_f32", kv_turn_neox_f32},   {"kv_turn_gptj_bf16", kv_turn_gptj_bf16},
        {"kv_turn_gptj_f16", kv_turn_gptj_f16},   {"kv_turn_gptj_f32", kv_turn_gptj_f32}};
    const std::map<std::string, decltype(&kv_cachegen_restore_f16)> halves_of_rows = {
        {"kv_cachegen_quantise_bf16", kv_cachegen_quantise_bf16}, {"kv_cachegen_quantise_f16", kv_cachegen_quantise_f16},
        {"kv_cachegen_restore_bf16", kv_cachegen_restore_bf16},   {"kv_cachegen_restore_f16", kv_cachegen_restore_f16}};
    const std::map<std::string, decltype(&kv_cachegen_restore_f32)> singles_of_rows = {
        {"kv_cachegen_quantise_f32", kv_cachegen_quantise_f32}, {"kv_cachegen_restore_f32", kv_cachegen_restore_f32}};
    const std::map<std::string, decltype(&kv_cachegen_count)> counts = {{"kv_cachegen_count", kv_cachegen_count}};
    const std::map<std::string, decltype(&kv_cachegen_encode)> encoders = {{"kv_cachegen_encode", kv_cachegen_encode}};
    const std::map<std::string, decltype(&kv_cachegen_decode)> decoders = {{"kv_cachegen_decode", kv_cachegen_decode}};
    if (transfers.count(kernel)) {
        const u64 cache = reinterpret_cast<u64>(in<u8>(4));
        relocate(cache);
        launch(grid, block, [&] {
            transfers.at(kernel)(in<Plane>(0), small(0), in<u32>(1), small(1), small(2), in<u8>(2), numbers.at(3), in<u32>(3));
        });
        relocate(0 - cache);
    } else if (changes.count(kernel)) {
        launch(grid, block, [&] { changes.at(kernel)(in<u8>(0), in<u8>(1), in<Loop>(2), numbers.at(0)); });
    } else if (turns.count(kernel)) {
        launch(grid, block, [&] {
            turns.at(kernel)(in<u8>(0), numbers.at(0), numbers.at(1), numbers.at(2), small(3), in<float>(1), in<float>(2));
        });
    } else if (halves_of_rows.count(kernel)) {
        launch(grid, block, [&] {
            halves_of_rows.at(kernel)(in<u16>(0), numbers.at(0), small(1), small(2), in<u8>(1), in<u16>(2), in<u8>(3), in<u64>(4));
        });
    } else if (singles_of_rows.count(kernel)) {
        launch(grid, block, [&] {
            singles_of_rows.at(kernel)(in<u32>(0), numbers.at(0), small(1), small(2), in<u8>(1), in<u32>(2), in<u8>(3), in<u64>(4));
        });
    } else if (counts.count(kernel)) {
        launch(grid, block, [&] { counts.at(kernel)(in<u8>(0), small(0), small(1), small(2), in<u32>(1), in<u16>(2)); });
    } else if (encoders.count(kernel)) {
        launch(grid, block, [&] { encoders.at(kernel)(in<u8>(0), small(0), small(1), small(2), in<u16>(1), in<u8>(2), in<u32>(3)); });
    } else if (decoders.count(kernel)) {
        launch(grid, block, [&] {
            decoders.at(kernel)(in<u8>(0), numbers.at(0), in<u64>(1), in<u32>(2), small(1), small(2), small(3), in<u8>(3),
                                in<u16>(4), in<u8>(5));
        });
    } else {
        fail("no such kernel");
    }
    for (Buffer& buffer : buffers) {
        buffer.check();
        std::fwrite(buffer.data(), 1, buffer.bytes, stdout);
    }
    return 0;
}
