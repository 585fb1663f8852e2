// A driver with made-up devices, built as libcuda.so.1 and libnvidia-ml.so.1: what the doctor asks, by the interfaces of cuda.h and
// nvml.h, and memory that a window can be in: memfds. FAKE_INIT is the result of cuInit; "hang" never returns. FAKE_NO_FD: memory cannot
// be passed by descriptor. FAKE_FULL: there is none left. FAKE_CAPTURE: some thread captures a graph in the global mode.
// FAKE_FREE, FAKE_FREE_WITHIN: MiB of memory that are free, as they are told without a context and within one. FAKE_NO_CONTEXT: none is made.
// FAKE_FREED: a file that is made when memory is freed that was passed by handle. FAKE_STAYS: what was passed cannot be unmapped.
// FAKE_CONTEXTS: a file that says how many contexts there are. FAKE_LOST, from the first event on: what events and streams answer.
// FAKE_MAP_FAILS: what a process gets that maps memory which another one passed to it. FAKE_TALKS: such a process prints.
// FAKE_NO_BATCH: a driver from before CUDA 12.8. FAKE_BATCH_FAILS: which copy of a batch fails, from 0.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { DEVICES = 3, COMPUTE_MODE = 20, MAJOR = 75, MINOR = 76 };
static const char *const NAMES[DEVICES] = {"Fake H100", "Fake H100 MIG 1g.10gb", "Fake H200"};
static const int MODES[DEVICES] = {0, 0, 3};

int cuInit(unsigned flags) {
  const char *said = getenv("FAKE_INIT");
  if (flags != 0) return 1;
  if (said && strcmp(said, "hang") == 0) pause();
  return said ? atoi(said) : 0;
}
int cuDriverGetVersion(int *version) { return *version = 12040, 0; }
int cuDeviceGetCount(int *count) { return *count = DEVICES, 0; }
// Handles that are not their ordinals: who mixes them up is refused.
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal + 40, 0; }
static int at(int device) { return device - 40; }
int cuDeviceGetName(char *name, int bytes, int device) {
  if (at(device) < 0 || at(device) >= DEVICES) return 101;
  return snprintf(name, bytes, "%s", NAMES[at(device)]), 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, 0x11, 16);
  return uuid[15] = at(device), 0;
}
int cuDeviceGetPCIBusId(char *bus, int bytes, int device) { return snprintf(bytes > 0 ? bus : NULL, bytes, "FA4E:0%d:00.0", at(device)), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = (size_t)(at(device) + 1) << 36, 0; }
// FAKE_CAPABILITY: the compute capability, major.minor.
static int capability(int part) {
  const char *said = getenv("FAKE_CAPABILITY");
  int parts[2] = {9, 1};
  return said && sscanf(said, "%d.%d", &parts[0], &parts[1]) != 2 ? 0 : parts[part];
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case COMPUTE_MODE: return *value = MODES[at(device)], 0;
    case MAJOR: return *value = capability(0), 0;
    case MINOR: return *value = capability(1), 0;
    default: return 1;
  }
}

// What a capture forbids to every thread that did not say that its calls are none of it (relaxed, 2): the call fails, the capture ends.
static __thread int capture_mode;
static int captures_ended;
int fake_captures_ended(void) { return captures_ended; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  if (*mode < 0 || *mode > 2) return 1;
  return capture_mode = *mode, *mode = before, 0;
}
static int captured(void) { return getenv("FAKE_CAPTURE") && capture_mode != 2 && ++captures_ended; }
int fake_captured(void) { return captured(); }
#define BESIDE_CAPTURES if (captured()) return 900

// One context at a time, as calls that need one ask for it. FAKE_CURRENT: one that somebody else in the process made.
static __thread void *made;
#define current (made || getenv("FAKE_CURRENT"))
static char contexts[DEVICES];
// FAKE_CONTEXTS: a file that gets a + for a context that is retained and a - for one that is released.
static void note(const char *sign) {
  const char *log = getenv("FAKE_CONTEXTS");
  int fd = log ? open(log, O_CREAT | O_WRONLY | O_APPEND, 0600) : -1;
  if (fd >= 0 && write(fd, sign, 1) + close(fd) < 1) abort();
}
// FAKE_HOLD, FAKE_SLOW: a file; as long as it is there no event comes, or no context, and another, `.asked`, says that one was asked for.
static int held(const char *name) {
  const char *file = getenv(name);
  char asked[4096];
  if (!file || access(file, F_OK)) return 0;
  snprintf(asked, sizeof asked, "%s.asked", file);
  return close(open(asked, O_CREAT | O_WRONLY, 0600)), 1;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  while (held("FAKE_SLOW")) usleep(1000);
  if (getenv("FAKE_NO_CONTEXT")) return 999;
  return note("+"), *context = &contexts[at(device)], 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return note("-"), at(device) < 0; }
static uint64_t free_bytes(const char *name) {
  const char *said = getenv(name);
  return said ? strtoull(said, NULL, 10) << 20 : 1ull << 33;
}
int cuMemGetInfo_v2(size_t *left, size_t *total) {
  return *left = free_bytes("FAKE_FREE_WITHIN"), *total = 1ull << 36, current ? 0 : 201;
}
int cuCtxSetCurrent(void *context) { return made = context, 0; }
int cuCtxGetDevice(int *device) { return *device = 40 + (made ? (char *)made - contexts : 0), current ? 0 : 201; }
int cuCtxGetCurrent(void **context) { return *context = made ? made : getenv("FAKE_CURRENT") ? contexts : NULL, 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
static char streams[2];
static int streams_made;
int fake_streams(void) { return streams_made; }
int fake_right(void *stream) { return stream == streams && current; }
// Kernels that were launched run: fake_kernels.cpp, where it is there.
__attribute__((weak)) void fake_settle(int given_back);
static void settle(int given_back) { if (fake_settle) fake_settle(given_back); }
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
  BESIDE_CAPTURES;
  if (!current || flags != 1 || priority != 0) return 201;
  return streams_made++, *stream = streams, 0;
}
// What events and streams answer instead of the truth: FAKE_LOST, or what was told last; below 0 events alone.
static int told, lost;
void fake_fail(int result) { told = result; }
static int failure(int of_an_event) {
  const char *said = lost ? getenv("FAKE_LOST") : NULL;
  int result = told || !said ? told : atoi(said);
  return result < 0 ? (of_an_event ? -result : 0) : result;
}
// A stream whose earlier work is stuck: who waits for it is ended by 702 here, and never on a GPU.
static int stuck;
void fake_stuck(int now) { stuck = now; }
int cuStreamSynchronize(void *stream) {
  BESIDE_CAPTURES;
  if (failure(0)) return failure(0);
  if (stuck) return 702;
  settle(0);
  return stream == streams && current ? 0 : 400;
}
int cuStreamQuery(void *stream) {
  if (failure(0)) return failure(0);
  if (stuck) return 600;
  settle(0);
  return stream == streams && current ? 0 : 400;
}
int cuStreamDestroy_v2(void *stream) { return streams_made--, stream == streams ? 0 : 400; }
// An event is not ready the first two times that it is asked.
static int events;
int fake_events(void) { return events; }
int cuEventCreate(void **event, unsigned flags) { return events++, lost = 1, *event = calloc(1, sizeof(int)), flags == 2 ? 0 : 1; }
int cuEventRecord(void *event, void *stream) { return settle(0), event && stream == streams ? 0 : 400; }
int cuEventQuery(void *event) {
  BESIDE_CAPTURES;
  if (failure(1)) return failure(1);
  if (held("FAKE_HOLD")) return 600;
  return ++*(int *)event > 2 ? 0 : 600;
}
int cuEventDestroy_v2(void *event) { return events--, free(event), 0; }
static int copy(void *to, const void *from, size_t bytes) { return current ? (memcpy(to, from, bytes), 0) : 201; }
// fake_stages: from now on, bytes from pageable memory that are told to be taken lie in buffers of the driver, and no stream brings them on.
static int stages;
void fake_stages(int now) { stages = now; }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  BESIDE_CAPTURES;
  return stages ? 0 : copy((void *)to, from, bytes);
}
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { BESIDE_CAPTURES; return copy(to, (void *)from, bytes); }
// A range of host memory that was registered in part, or by parts, is refused.
static struct { char *start; size_t bytes; } locked[64];
static int partly_locked(const char *host, size_t bytes) {
  for (int i = 0; i < 64; i++) {
    if (!locked[i].start) continue;
    char *start = locked[i].start, *end = start + locked[i].bytes;
    if (host < end && host + bytes > start && (host < start || host + bytes > end)) return 1;
  }
  return 0;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  BESIDE_CAPTURES;
  if (partly_locked(from, bytes)) return 1;
  settle(0);
  return stream == streams ? copy((void *)to, from, bytes) : 400;
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  BESIDE_CAPTURES;
  if (partly_locked(to, bytes)) return 1;
  settle(0);
  return stream == streams ? copy(to, (void *)from, bytes) : 400;
}
int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
  BESIDE_CAPTURES;
  for (int i = 0; i < 64 && start && bytes && flags == 1 && current; i++) {
    if (!locked[i].start) return locked[i].bytes = bytes, locked[i].start = start, 0;
  }
  return 1;
}
// The memory was freed: whatever has its addresses later is not locked.
int fake_freed(void *start) {
  for (int i = 0; i < 64 && start; i++) {
    if (locked[i].start == start) return locked[i].start = NULL, 0;
  }
  return 1;
}
int cuMemHostUnregister(void *start) { BESIDE_CAPTURES; return fake_freed(start); }
struct location { int kind, id; };
// What CUDA 12.8 came with, by the signature that 13.0 changed: asked for as of 13.0 it would be another function, which is not made up here.
struct attributes { int order; struct location from, to; unsigned flags; };
static int batches;
int fake_batches(void) {
  int counted = batches;
  return batches = 0, counted;
}
static int sane(const struct attributes *one) {
  int located = one->from.kind >= 0 && one->from.kind <= 4 && one->to.kind >= 0 && one->to.kind <= 4;
  return one->order >= 1 && one->order <= 3 && one->flags <= 1 && located;
}
int cuMemcpyBatchAsync(uint64_t *to, uint64_t *from, size_t *sizes, size_t count, struct attributes *kinds, size_t *firsts, size_t kinds_count,
                       size_t *failed, void *stream) {
  BESIDE_CAPTURES;
  const char *fails = getenv("FAKE_BATCH_FAILS");
  *failed = SIZE_MAX;
  if (stream != streams || !current) return stream == streams ? 201 : 400;
  if (!count || !kinds_count || firsts[0]) return 1;
  for (size_t i = 0; i < kinds_count; i++) {
    if (!sane(&kinds[i]) || firsts[i] >= count || (i && firsts[i] <= firsts[i - 1])) return 1;
  }
  settle(0);
  batches++;
  for (size_t i = 0; i < count; i++) {
    int parts = partly_locked((char *)to[i], sizes[i]) || partly_locked((char *)from[i], sizes[i]);
    if (!sizes[i] || parts || (fails && strtoull(fails, NULL, 10) == i)) return *failed = i, 1;
    memcpy((void *)to[i], (void *)from[i], sizes[i]);
  }
  return 0;
}
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
  int known = strcmp(name, "cuMemcpyBatchAsync") == 0 && !getenv("FAKE_NO_BATCH");
  int given = known && version >= 12080 && version < 13000 && !flags;
  if (found) *found = given ? 0 : known ? 2 : 1;
  return *function = given ? (void *)cuMemcpyBatchAsync : NULL, given ? 0 : 500;
}
struct prop { int kind, handles; struct location location; void *win32; unsigned char flags[8]; };
int cuMemGetAllocationGranularity(size_t *unit, const struct prop *prop, int option) {
  return *unit = 2 << 20, prop->location.kind == 1 && option == 0 ? 0 : 1;
}
int cuMemCreate(uint64_t *allocation, size_t bytes, const struct prop *prop, unsigned long long flags) {
  BESIDE_CAPTURES;
  if (getenv("FAKE_FULL")) return 2;
  if (getenv("FAKE_NO_FD")) return 801;
  if (prop->kind != 1 || prop->handles != 1 || prop->location.id < 40 || flags) return 1;
  int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
  return *allocation = fd, ftruncate(fd, bytes);
}
int cuMemRelease(uint64_t allocation) { BESIDE_CAPTURES; return close((int)allocation); }
int cuMemExportToShareableHandle(int *fd, uint64_t allocation, int kind, unsigned long long flags) {
  return *fd = dup((int)allocation), kind == 1 && !flags && *fd >= 0 ? 0 : 1;
}
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t align, uint64_t wish, unsigned long long flags) {
  BESIDE_CAPTURES;
  if (align || wish || flags) return 1;
  void *start = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return *address = (uint64_t)start, start == MAP_FAILED ? 2 : 0;
}
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t allocation, unsigned long long flags) {
  BESIDE_CAPTURES;
  if (flags) return 1;
  return mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)allocation, offset) == MAP_FAILED;
}
struct access { struct location location; int flags; };
static int imported;
int cuMemSetAccess(uint64_t address, size_t bytes, const struct access *access, size_t count) {
  BESIDE_CAPTURES;
  const char *fails = getenv("FAKE_MAP_FAILS");
  if (imported && fails) return atoi(fails);
  if (count != 1 || access->flags != 3 || access->location.kind != 1) return 1;
  return mprotect((void *)address, bytes, PROT_READ | PROT_WRITE) != 0;
}
int cuMemUnmap(uint64_t address, size_t bytes) { BESIDE_CAPTURES; return mprotect((void *)address, bytes, PROT_NONE) != 0; }
int cuMemAddressFree(uint64_t address, size_t bytes) { BESIDE_CAPTURES; return munmap((void *)address, bytes) != 0; }
// Memory of an allocation: a page that says what it is, and behind it a memfd, which a handle names to other processes.
enum { PAGE = 4096 };
struct memfd { uint64_t bytes; int fd; };
static struct memfd *of(uint64_t address) { return (struct memfd *)(address - PAGE); }
static uint64_t mapped(int fd, uint64_t bytes) {
  char *start = mmap(NULL, PAGE + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (start == MAP_FAILED) return 0;
  if (mmap(start + PAGE, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) return munmap(start, PAGE + bytes), 0;
  *(struct memfd *)start = (struct memfd){bytes, fd};
  return (uint64_t)(start + PAGE);
}
static int unmapped(uint64_t address) { return munmap(of(address), PAGE + of(address)->bytes) != 0; }
static int allocations;
int fake_allocations(void) { return allocations; }
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  BESIDE_CAPTURES;
  if (!current || getenv("FAKE_FULL")) return 2;
  int fd = memfd_create("fake-device-memory", MFD_CLOEXEC);
  *address = fd >= 0 && ftruncate(fd, bytes + !bytes) == 0 ? mapped(fd, bytes + !bytes) : 0;
  return *address ? (allocations++, 0) : (close(fd), 2);
}
int cuMemFree_v2(uint64_t address) {
  BESIDE_CAPTURES;
  const char *log = getenv("FAKE_FREED");
  if (log) close(open(log, O_CREAT | O_WRONLY, 0600));
  settle(1);
  return allocations--, close(of(address)->fd) + unmapped(address);
}
// A handle says whose memory it is, where that process has it, and by its inode that it is this one still.
struct handle { int pid, fd; uint64_t bytes, inode; unsigned char rest[39], mark; };
enum { MARK = 7 };
int cuIpcGetMemHandle(struct handle *handle, uint64_t address) {
  struct stat file;
  if (!address || fstat(of(address)->fd, &file)) return 1;
  return *handle = (struct handle){getpid(), of(address)->fd, of(address)->bytes, file.st_ino, {0}, MARK}, 0;
}

// FAKE_APART: a process that is given memory by descriptor maps other memory.
// What a process does that is given memory: the descriptor comes as a pointer.
int cuMemImportFromShareableHandle(uint64_t *allocation, void *fd, int kind) {
  BESIDE_CAPTURES;
  int own = getenv("FAKE_APART") ? memfd_create("fake-device-memory", MFD_CLOEXEC) : dup((int)(intptr_t)fd);
  if (getenv("FAKE_APART") && ftruncate(own, 64 << 20)) return 2;
  if (getenv("FAKE_TALKS")) dprintf(1, "mapped\n"), dprintf(2, "mapped\n");
  return imported = 1, *allocation = own, kind == 1 && own >= 0 ? 0 : 1;
}
// Memory of this process is refused as on a GPU, and so is that of a process that is dead or has freed it.
int cuIpcOpenMemHandle_v2(uint64_t *address, struct handle handle, unsigned flags) {
  BESIDE_CAPTURES;
  char path[64];
  struct stat file;
  if (handle.mark != MARK || flags != 1) return 1;
  if (handle.pid == getpid()) return 201;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 205;
  *address = fstat(fd, &file) == 0 && file.st_ino == handle.inode ? mapped(fd, handle.bytes) : 0;
  return close(fd), *address ? 0 : 205;
}
int cuIpcCloseMemHandle(uint64_t address) { BESIDE_CAPTURES; return getenv("FAKE_STAYS") ? 999 : unmapped(address); }

// FAKE_FOREIGN: the ordinal of the device on which memory lies, as a pointer's attribute 9 says; else that of the first.
int cuPointerGetAttribute(void *data, int attribute, uint64_t address) {
  const char *said = getenv("FAKE_FOREIGN");
  return attribute == 9 && address && current ? (*(int *)data = said ? atoi(said) : 0, 0) : 1;
}

struct memory { unsigned long long total, free, used; };
// FAKE_NVML: the result of nvmlInit.
int nvmlInit_v2(void) {
  const char *said = getenv("FAKE_NVML");
  return said ? atoi(said) : 0;
}
int nvmlSystemGetDriverVersion(char *version, unsigned bytes) { return snprintf(version, bytes, "550.1.2"), 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-11111111-1111-1111-1111-111111111100") != 0) return 6;
  return *device = (void *)uuid, 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  (void)device;
  unsigned long long left = free_bytes("FAKE_FREE");
  return *memory = (struct memory){1ull << 36, left, (1ull << 36) - left}, 0;
}
// FAKE_LINK: the PCIe link of a device, generation and width now; both can be 5 and 16.
static int link_part(int part, unsigned *value) {
  const char *said = getenv("FAKE_LINK");
  unsigned parts[2] = {5, 16};
  if (said && sscanf(said, "%u %u", &parts[0], &parts[1]) != 2) return 999;
  return *value = parts[part], 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(void *device, unsigned *value) { return (void)device, link_part(0, value); }
int nvmlDeviceGetCurrPcieLinkWidth(void *device, unsigned *value) { return (void)device, link_part(1, value); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *device, unsigned *value) { return (void)device, *value = 5, 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *device, unsigned *value) { return (void)device, *value = 16, 0; }
