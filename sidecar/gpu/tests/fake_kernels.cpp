// The other half of the made-up driver (fake_driver.c): modules of PTX, of which only version and entries are read, and launches. A kernel
// that is launched is run on the host from its CUDA source, thread by thread, with the arguments as they lie in memory by the types of the
// source: who passes others gets other results, or dies. FAKE_PTX: the newest version of PTX that it knows. FAKE_LAUNCHES: from so many
// launches on, counted from when fake_launches was asked last, they fail. FAKE_REST: what is launched does nothing. A kernel runs no sooner than somebody waits for its stream, or
// asks the stream for more than kernels; fake_under says how often memory or a module was given back under one that had not run.
#include "../../../kernels/tests/emulated/device.h"
#include "../../../kernels/tests/emulated/numbers.h"

#include "../../../kernels/cuda/cachegen.cu"
#include "../../../kernels/cuda/layout.cu"
#include "../../../kernels/cuda/pages.cu"
#include "../../../kernels/cuda/rope.cu"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

// A kernel with its arguments, which are read when it is launched.
typedef std::function<void()> Call;
typedef Call (*Bind)(void** arguments);

template <typename... Types, size_t... At>
static Call bound(void (*kernel)(Types...), void** arguments, std::index_sequence<At...>) {
    const std::tuple<Types...> given(*static_cast<Types*>(arguments[At])...);
    return [=] { std::apply(kernel, given); };
}

template <auto kernel, typename... Types>
static Call bind_of(void (*)(Types...), void** arguments) {
    return bound(kernel, arguments, std::index_sequence_for<Types...>());
}

template <auto kernel>
static Call bind(void** arguments) {
    return bind_of<kernel>(kernel, arguments);
}

#define KERNEL(name) {#name, bind<name>}
static const std::map<std::string, Bind> KERNELS = {
    KERNEL(kv_gather),          KERNEL(kv_scatter),         KERNEL(kv_to_canonical),    KERNEL(kv_to_verbatim),
    KERNEL(kv_turn_neox_bf16),  KERNEL(kv_turn_neox_f16),   KERNEL(kv_turn_neox_f32),   KERNEL(kv_turn_gptj_bf16),
    KERNEL(kv_turn_gptj_f16),   KERNEL(kv_turn_gptj_f32),
    KERNEL(kv_cachegen_quantise_bf16), KERNEL(kv_cachegen_quantise_f16), KERNEL(kv_cachegen_quantise_f32),
    KERNEL(kv_cachegen_restore_bf16), KERNEL(kv_cachegen_restore_f16), KERNEL(kv_cachegen_restore_f32),
    KERNEL(kv_cachegen_count),  KERNEL(kv_cachegen_encode), KERNEL(kv_cachegen_decode),
};

struct Launch {
    Dim3 grid, block;
    Call call;
};
static std::mutex one_at_a_time;
static std::vector<Launch> queued;
static int launches, modules, under;

extern "C" {
int fake_captured();
int cuDeviceGet(int* device, int ordinal);
int cuDeviceGetAttribute(int* value, int attribute, int device);
int fake_right(void* stream);
int fake_launches() {
    const int counted = launches;
    return launches = 0, counted;
}
int fake_modules() { return modules; }
int fake_under() { return under; }
// Called before anything else that a stream is asked for, and before memory is given back.
void fake_settle(int given_back) {
    const std::lock_guard<std::mutex> held(one_at_a_time);
    under += given_back && !queued.empty();
    for (const Launch& one : queued) launch(one.grid, one.block, one.call);
    queued.clear();
}
int cuModuleLoadDataEx(void** module, const char* ptx, unsigned options, int*, void**) {
    if (fake_captured()) return 900;
    const char* newest = getenv("FAKE_PTX");
    const char* version = std::strstr(ptx, ".version ");
    if (!version || options) return 218;
    // As drivers answer to PTX for a newer device. All devices here are alike.
    const char* target = std::strstr(ptx, ".target sm_");
    int device, major, minor;
    if (cuDeviceGet(&device, 0) || cuDeviceGetAttribute(&major, 75, device) || cuDeviceGetAttribute(&minor, 76, device)) return 999;
    if (target && 10 * major + minor < std::atoi(target + 11)) return 218;
    if (newest && std::atof(newest) < std::atof(version + 9)) return 222;
    return ++modules, *module = strdup(ptx), 0;
}
int cuModuleUnload(void* module) {
    if (fake_captured()) return 900;
    fake_settle(1);
    return --modules, std::free(module), 0;
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    const auto known = KERNELS.find(name);
    const std::string entry = std::string(".entry ") + name + "(";
    if (known == KERNELS.end() || !std::strstr(static_cast<char*>(module), entry.c_str())) return 500;
    return *function = const_cast<void*>(static_cast<const void*>(&known->second)), 0;
}
int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                   unsigned block_z, unsigned shared, void* stream, void** arguments, void** extra) {
    const bool shape = grid_x && grid_y && grid_z == 1 && block_z == 1 && block_x && block_y && block_x * block_y <= 1024;
    if (!shape || grid_y > 65535 || shared || extra || block_x * block_y % 32) return 1;
    if (!fake_right(stream)) return 400;
    const std::lock_guard<std::mutex> held(one_at_a_time);
    const char* most = getenv("FAKE_LAUNCHES");
    if (most && launches >= std::atoi(most)) return 701;
    ++launches;
    if (getenv("FAKE_REST")) return 0;
    queued.push_back({Dim3{grid_x, grid_y}, Dim3{block_x, block_y}, (*static_cast<Bind*>(function))(arguments)});
    return 0;
}
int cuCtxSynchronize() { return fake_settle(0), 0; }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void* stream) {
    fake_settle(0);
    return stream ? (std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes), 0) : 400;
}
}
