// A driver with made-up devices, built as libcuda.so.1 and libnvidia-ml.so.1: what the doctor asks, by the interfaces of cuda.h and
// nvml.h. FAKE_INIT is the result of cuInit; "hang" never returns.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = (size_t)(at(device) + 1) << 36, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case COMPUTE_MODE: return *value = MODES[at(device)], 0;
    case MAJOR: return *value = 9, 0;
    case MINOR: return *value = 1, 0;
    default: return 1;
  }
}

struct memory { unsigned long long total, free, used; };
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned bytes) { return snprintf(version, bytes, "550.1.2"), 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
  if (strcmp(uuid, "GPU-11111111-1111-1111-1111-111111111100") != 0) return 6;
  return *device = (void *)uuid, 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
  (void)device;
  return *memory = (struct memory){1ull << 36, 1ull << 33, (1ull << 36) - (1ull << 33)}, 0;
}
