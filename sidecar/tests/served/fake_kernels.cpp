// The other half of the made-up driver (fake_driver.c): modules of PTX, of which only version and entries are read, and launches. A kernel
// that is launched is run on the host from its CUDA source, thread by thread, with the arguments as they lie in memory by the types of the
// source: who passes others gets other results, or dies. FAKE_PTX: the newest version of PTX that it knows.
#include "../../../kernels/tests/emulated/device.h"
#include "../../../kernels/tests/emulated/numbers.h"

#include "../../../kernels/cuda/cachegen.cu"
#include "../../../kernels/cuda/digest.cu"
#include "../../../kernels/cuda/layout.cu"
#include "../../../kernels/cuda/pages.cu"
#include "../../../kernels/cuda/quant.cu"
#include "../../../kernels/cuda/rope.cu"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

typedef void (*Run)(void** arguments);

template <typename... Types, size_t... At>
static void called(void (*kernel)(Types...), void** arguments, std::index_sequence<At...>) {
    kernel(*static_cast<Types*>(arguments[At])...);
}

template <auto kernel, typename... Types>
static void run_of(void (*)(Types...), void** arguments) {
    called(kernel, arguments, std::index_sequence_for<Types...>());
}

template <auto kernel>
static void run(void** arguments) {
    run_of<kernel>(kernel, arguments);
}

#define KERNEL(name) {#name, run<name>}
static const std::map<std::string, Run> KERNELS = {
    KERNEL(kv_gather),          KERNEL(kv_scatter),         KERNEL(kv_to_canonical),    KERNEL(kv_to_verbatim),
    KERNEL(kv_turn_neox_bf16),  KERNEL(kv_turn_neox_f16),   KERNEL(kv_turn_neox_f32),   KERNEL(kv_turn_gptj_bf16),
    KERNEL(kv_turn_gptj_f16),   KERNEL(kv_turn_gptj_f32),   KERNEL(kv_pack_fp8_bf16),   KERNEL(kv_pack_fp8_f16),
    KERNEL(kv_unpack_fp8_bf16), KERNEL(kv_unpack_fp8_f16),  KERNEL(kv_pack_int8_bf16),  KERNEL(kv_pack_int8_f16),
    KERNEL(kv_unpack_int8_bf16), KERNEL(kv_unpack_int8_f16), KERNEL(kv_pack_int4_bf16), KERNEL(kv_pack_int4_f16),
    KERNEL(kv_unpack_int4_bf16), KERNEL(kv_unpack_int4_f16), KERNEL(kv_digest),
    KERNEL(kv_cachegen_quantise_bf16), KERNEL(kv_cachegen_quantise_f16), KERNEL(kv_cachegen_quantise_f32),
    KERNEL(kv_cachegen_restore_bf16), KERNEL(kv_cachegen_restore_f16), KERNEL(kv_cachegen_restore_f32),
    KERNEL(kv_cachegen_count),  KERNEL(kv_cachegen_encode), KERNEL(kv_cachegen_decode),
};

extern "C" {
int cuModuleLoadDataEx(void** module, const char* ptx, unsigned options, int*, void**) {
    const char* newest = getenv("FAKE_PTX");
    const char* version = std::strstr(ptx, ".version ");
    if (!version || options) return 218;
    if (newest && std::atof(newest) < std::atof(version + 9)) return 222;
    return *module = strdup(ptx), 0;
}
int cuModuleUnload(void* module) { return std::free(module), 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
    const auto known = KERNELS.find(name);
    const std::string entry = std::string(".entry ") + name + "(";
    if (known == KERNELS.end() || !std::strstr(static_cast<char*>(module), entry.c_str())) return 500;
    return *function = const_cast<void*>(static_cast<const void*>(&known->second)), 0;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
    static std::mutex one_at_a_time;
    const bool shape = grid_x && grid_y && grid_z == 1 && block_z == 1 && block_x * block_y && block_x * block_y <= 1024;
    if (!shape || shared || !stream || extra || block_x * block_y % 32) return 1;
    const std::lock_guard<std::mutex> held(one_at_a_time);
    launch(Dim3{grid_x, grid_y}, Dim3{block_x, block_y}, [&] { (*static_cast<Run*>(function))(arguments); });
    return 0;
}
int cuCtxSynchronize() { return 0; }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) {
    return stream ? (std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0) : 400;
}
}
