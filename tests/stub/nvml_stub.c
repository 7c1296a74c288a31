/* A stand-in for libnvidia-ml.so.1: enough of NVML for nvidia-ml-py, Zeus and kareus-pp.
 *
 * The machine is one memory-mapped file (environment variable KAREUS_STUB_NVML), shared by every
 * process that loads this library and guarded by a robust process-shared mutex. Energy and heat
 * integrate lazily at each access; the visible counter moves at 100 ms ticks. Every call that
 * changes a device, and every fault, goes to a ring of events, which is what tests assert on.
 * Power, heat and clock semantics are a model and were never compared with a driver.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x6b61726575733031ull
#define MAX_DEVICES 16
#define MAX_FAULTS 32
#define MAX_EVENTS 65536
#define MAX_MAPPED 256
#define TICK_NS 100000000ull
#define MIG_PER_DEVICE 2

enum {
  OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4,
  NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, UNKNOWN = 999
};
enum { COUNTER_OK = 0, COUNTER_STUCK = 1, COUNTER_ABSENT = 2 };
enum { REASON_IDLE = 1, REASON_POWER_CAP = 4, REASON_THERMAL = 0x20 };

typedef struct {
  char uuid[96], name[96], pci[32];
  uint32_t index, minor, bus, lock_min, lock_max, mem_clock, processes[4];
  int32_t clock_min, clock_max, clock_step, clock_offset, counter_mode, mig, persistence, restricted;
  int32_t lost, lock_pid;
  double idle_w, dynamic_w, limit_w, load, ambient_c, temperature_c, energy_mj, visible_mj, jump_mj;
  double counter_factor, thermal_cap_mhz;
  uint64_t updated_ns, tick;
} Device;

typedef struct {
  char pattern[64];
  int32_t device, result, count;
  uint32_t delay_us;
} Fault;

typedef struct {
  uint64_t at_ns;
  int32_t pid, device, result;
  uint32_t first, second;
  char operation[52];
} Event;

typedef struct {
  uint64_t magic;
  pthread_mutex_t mutex;
  uint32_t device_count, driver_loaded;
  uint64_t event_count, call_count;
  Device devices[MAX_DEVICES];
  Fault faults[MAX_FAULTS];
  Event events[MAX_EVENTS];
} Machine;

static Machine *machine;
static Fault own_faults[MAX_FAULTS];
static struct { char path[512]; Machine *at; } mapped[MAX_MAPPED];
static int mapped_count;
static int users;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void lock(Machine *m) {
  if (pthread_mutex_lock(&m->mutex) == EOWNERDEAD) pthread_mutex_consistent(&m->mutex);
}

static void unlock(Machine *m) { pthread_mutex_unlock(&m->mutex); }

/* ---- the machine file ---- */

static void fill_device(Device *d, uint32_t index) {
  memset(d, 0, sizeof *d);
  snprintf(d->uuid, sizeof d->uuid, "GPU-%08x-%04x-4000-8000-00000000%04x", 0x57ab0000u + index * 0x1111u,
           index, index);
  snprintf(d->name, sizeof d->name, "Stub GPU 40GB");
  d->index = index;
  d->minor = 7 - index % 8; /* never the NVML index */
  d->bus = 0x10 + 0x10 * index;
  snprintf(d->pci, sizeof d->pci, "00000000:%02X:00.0", d->bus);
  d->clock_min = 210; d->clock_max = 1410; d->clock_step = 15; d->mem_clock = 1593;
  d->idle_w = 60; d->dynamic_w = 240; d->limit_w = 400; d->ambient_c = 30; d->temperature_c = 35;
  d->load = 1; d->counter_factor = 1; d->persistence = 1;
  d->updated_ns = now_ns();
  d->energy_mj = 1e6;
  d->visible_mj = 1e6;
}

static Machine *map_file(const char *path, int create, uint32_t devices) {
  for (int i = 0; i < mapped_count; i++)
    if (!strcmp(mapped[i].path, path)) return mapped[i].at;
  int fd = open(path, O_RDWR | (create ? O_CREAT : 0), 0600);
  if (fd < 0) return NULL;
  flock(fd, LOCK_EX);
  struct stat s;
  if (fstat(fd, &s) || (s.st_size < (off_t)sizeof(Machine) && (!create || ftruncate(fd, sizeof(Machine))))) {
    close(fd);
    return NULL;
  }
  Machine *m = mmap(NULL, sizeof(Machine), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (m == MAP_FAILED) { close(fd); return NULL; }
  if (m->magic != MAGIC) {
    pthread_mutexattr_t a;
    pthread_mutexattr_init(&a);
    pthread_mutexattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&a, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&m->mutex, &a);
    m->device_count = devices;
    m->driver_loaded = 1;
    for (uint32_t i = 0; i < devices; i++) fill_device(&m->devices[i], i);
    m->magic = MAGIC;
  }
  flock(fd, LOCK_UN);
  close(fd);
  if (mapped_count < MAX_MAPPED && strlen(path) < sizeof mapped[0].path) {
    strcpy(mapped[mapped_count].path, path);
    mapped[mapped_count++].at = m;
  }
  return m;
}

/* ---- the GPU model ---- */

static int is_locked(const Device *d) { return d->lock_max != 0; }

static double power_at(const Device *d, double mhz) {
  double ratio = mhz / d->clock_max;
  return d->idle_w + d->load * d->dynamic_w * ratio * ratio * ratio;
}

static int actual_clock(const Device *d, uint64_t *reasons) {
  uint64_t why = 0;
  double clock = d->clock_max;
  if (is_locked(d)) clock = d->lock_max + d->clock_offset;
  else if (d->load <= 0) { clock = d->clock_min; why |= REASON_IDLE; }
  if (d->thermal_cap_mhz > 0 && clock > d->thermal_cap_mhz) { clock = d->thermal_cap_mhz; why |= REASON_THERMAL; }
  while (clock > d->clock_min && power_at(d, clock) > d->limit_w) { clock -= d->clock_step; why |= REASON_POWER_CAP; }
  if (reasons) *reasons = why;
  return (int)clock;
}

static void advance(Device *d) {
  uint64_t now = now_ns();
  double seconds = (now - d->updated_ns) / 1e9;
  double watts = power_at(d, actual_clock(d, NULL));
  uint64_t tick = now / TICK_NS;
  d->energy_mj += watts * seconds * 1e3 * d->counter_factor;
  d->temperature_c += (d->ambient_c + 0.12 * watts - d->temperature_c) * (1 - exp(-seconds / 20));
  d->updated_ns = now;
  if (tick != d->tick) {
    if (d->counter_mode != COUNTER_STUCK) {
      double since_tick = (now - tick * TICK_NS) / 1e9;
      double visible = d->energy_mj - watts * since_tick * 1e3 * d->counter_factor;
      if (visible > d->visible_mj) d->visible_mj = visible;
    }
    d->tick = tick;
  }
  if (d->jump_mj != 0) { d->energy_mj += d->jump_mj; d->visible_mj += d->jump_mj; d->jump_mj = 0; }
}

/* ---- events and faults ---- */

static void record(Machine *m, const char *operation, int device, uint32_t first, uint32_t second, int result) {
  Event *e = &m->events[m->event_count++ % MAX_EVENTS];
  e->at_ns = now_ns();
  e->pid = getpid(); e->device = device; e->result = result; e->first = first; e->second = second;
  snprintf(e->operation, sizeof e->operation, "%s", operation);
}

static int matches(const Fault *f, const char *name, int device) {
  size_t n = strlen(f->pattern);
  if (!n || f->count == 0 || (f->device >= 0 && f->device != device)) return 0;
  if (f->pattern[n - 1] == '*') return !strncmp(f->pattern, name, n - 1);
  return !strcmp(f->pattern, name);
}

/* "name-or-prefix*@device=result,delay_us,count" joined by ';'; '*' is any device, -1 is for ever. */
static void parse_faults(Fault *table, const char *text) {
  memset(table, 0, sizeof(Fault) * MAX_FAULTS);
  char copy[4096];
  snprintf(copy, sizeof copy, "%s", text ? text : "");
  int used = 0;
  char *save = NULL;
  for (char *part = strtok_r(copy, ";", &save); part && used < MAX_FAULTS; part = strtok_r(NULL, ";", &save)) {
    Fault *f = &table[used];
    char device[16] = "*";
    if (sscanf(part, "%63[^@=]@%15[^=]=%d,%u,%d", f->pattern, device, &f->result, &f->delay_us, &f->count) < 5) {
      fprintf(stderr, "nvml stub: malformed fault '%s'\n", part);
      abort();
    }
    f->device = device[0] == '*' ? -1 : atoi(device);
    used++;
  }
}

static int injected(const char *name, int device) {
  int result = OK;
  uint32_t delay = 0;
  for (int table = 0; table < 2; table++)
    for (int i = 0; i < MAX_FAULTS; i++) {
      Fault *f = table ? &machine->faults[i] : &own_faults[i];
      if (!matches(f, name, device)) continue;
      if (f->count > 0) f->count--;
      delay += f->delay_us;
      if (f->result) result = f->result;
    }
  if (delay) {
    unlock(machine);
    usleep(delay);
    lock(machine);
  }
  return result;
}

static int is_mig_handle(void *handle) { return (uintptr_t)handle > 1000; }

/* Enter a call on a device: returns with the mutex held when *code is OK or a fault's code. */
static Device *enter(const char *name, void *handle, int *code) {
  *code = OK;
  if (!machine || !users) { *code = UNINITIALIZED; return NULL; }
  uintptr_t h = (uintptr_t)handle;
  uint32_t index = (uint32_t)((h > 1000 ? h / 1000 : h) - 1);
  lock(machine);
  machine->call_count++;
  if (index >= machine->device_count) { *code = INVALID_ARGUMENT; unlock(machine); return NULL; }
  Device *d = &machine->devices[index];
  *code = injected(name, (int)index);
  if (*code == OK && d->lost) *code = GPU_IS_LOST;
  if (*code != OK) {
    record(machine, name, (int)index, 0, 0, *code);
    unlock(machine);
    return NULL;
  }
  advance(d);
  return d;
}

static int leave(int code) { unlock(machine); return code; }

#define ENTER(handle) int code; Device *d = enter(__func__, handle, &code); if (!d) return code
#define GETTER(name, type, expression) \
  int name(void *h, type *out) { ENTER(h); *out = (type)(expression); return leave(OK); }

static int may_set(const Device *d) { return !d->restricted || getenv("KAREUS_STUB_PRIVILEGED") != NULL; }

/* ---- library ---- */

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  const char *path = getenv("KAREUS_STUB_NVML");
  machine = path ? map_file(path, 0, 0) : NULL;
  if (!machine || !machine->driver_loaded) return DRIVER_NOT_LOADED;
  parse_faults(own_faults, getenv("KAREUS_STUB_FAULTS"));
  lock(machine);
  int code = injected(__func__, -1);
  unlock(machine);
  if (code == OK) users++;
  return code;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { if (users) users--; return OK; }

const char *nvmlErrorString(int code) {
  switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
  }
}

static int text(char *out, unsigned size, const char *value) {
  if (strlen(value) + 1 > size) return INSUFFICIENT_SIZE;
  strcpy(out, value);
  return OK;
}
int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(out, size, "999.00.stub"); }
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return text(out, size, "13.999.00.stub"); }
int nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return OK; }
int nvmlSystemGetCudaDriverVersion(int *out) { *out = 13000; return OK; }
int nvmlDeviceGetCount_v2(unsigned *out) { if (!users) return UNINITIALIZED; *out = machine->device_count; return OK; }
int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  if (!users) return UNINITIALIZED;
  if (index >= machine->device_count) return INVALID_ARGUMENT;
  *out = (void *)(uintptr_t)(index + 1);
  return OK;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **out) { return nvmlDeviceGetHandleByIndex_v2(index, out); }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  if (!users) return UNINITIALIZED;
  for (uint32_t i = 0; i < machine->device_count; i++)
    if (!strcmp(machine->devices[i].uuid, uuid)) return nvmlDeviceGetHandleByIndex_v2(i, out);
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **out) {
  if (!users) return UNINITIALIZED;
  unsigned domain, bus, device, wanted = 0;
  if (sscanf(pci, "%x:%x:%x", &domain, &bus, &device) == 3) wanted = bus;
  for (uint32_t i = 0; i < machine->device_count; i++)
    if (machine->devices[i].bus == wanted) return nvmlDeviceGetHandleByIndex_v2(i, out);
  return NOT_FOUND;
}
int nvmlDeviceGetHandleByPciBusId(const char *pci, void **out) { return nvmlDeviceGetHandleByPciBusId_v2(pci, out); }

/* ---- identity ---- */

int nvmlDeviceGetName(void *h, char *out, unsigned size) { ENTER(h); return leave(text(out, size, d->name)); }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) {
  ENTER(h);
  char mig[96];
  snprintf(mig, sizeof mig, "MIG-%08x-0000-4000-8000-%012x", 0x316u + d->index, (unsigned)((uintptr_t)h % 1000));
  return leave(text(out, size, is_mig_handle(h) ? mig : d->uuid));
}
GETTER(nvmlDeviceGetIndex, unsigned, d->index)
GETTER(nvmlDeviceGetMinorNumber, unsigned, d->minor)
GETTER(nvmlDeviceGetArchitecture, unsigned, 7)
GETTER(nvmlDeviceGetNumGpuCores, unsigned, 6912)

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char full[32]; } PciInfo;
int nvmlDeviceGetPciInfo_v3(void *h, PciInfo *out) {
  ENTER(h);
  memset(out, 0, sizeof *out);
  out->bus = d->bus;
  strcpy(out->full, d->pci);
  snprintf(out->legacy, sizeof out->legacy, "%s", d->pci + 4);
  return leave(OK);
}
int nvmlDeviceGetPciInfo(void *h, PciInfo *out) { return nvmlDeviceGetPciInfo_v3(h, out); }

/* ---- clocks ---- */

int nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *count, unsigned *out) {
  ENTER(h);
  unsigned size = *count;
  *count = 1;
  if (!out || size < 1) return leave(INSUFFICIENT_SIZE);
  out[0] = d->mem_clock;
  return leave(OK);
}
int nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory, unsigned *count, unsigned *out) {
  ENTER(h);
  if (memory != d->mem_clock) return leave(NOT_FOUND);
  unsigned size = *count, n = (unsigned)((d->clock_max - d->clock_min) / d->clock_step + 1);
  *count = n;
  if (!out || size < n) return leave(INSUFFICIENT_SIZE);
  for (unsigned i = 0; i < n; i++) out[i] = (unsigned)(d->clock_max - (int)i * d->clock_step);
  return leave(OK);
}
int nvmlDeviceSetGpuLockedClocks(void *h, unsigned low, unsigned high) {
  ENTER(h);
  int result = !may_set(d) ? NO_PERMISSION : (low > high || !high || is_mig_handle(h)) ? INVALID_ARGUMENT : OK;
  if (result == OK) { d->lock_min = low; d->lock_max = high; d->lock_pid = getpid(); }
  record(machine, __func__, (int)d->index, low, high, result);
  return leave(result);
}
int nvmlDeviceResetGpuLockedClocks(void *h) {
  ENTER(h);
  int result = may_set(d) ? OK : NO_PERMISSION;
  if (result == OK) d->lock_min = d->lock_max = d->lock_pid = 0;
  record(machine, __func__, (int)d->index, 0, 0, result);
  return leave(result);
}
/* What the plugin must never touch is recorded, so that a test can say so. */
#define FORBIDDEN(name, parameters, a, b) \
  int name parameters { ENTER(h); record(machine, __func__, (int)d->index, (uint32_t)(a), (uint32_t)(b), OK); return leave(OK); }
FORBIDDEN(nvmlDeviceSetMemoryLockedClocks, (void *h, unsigned low, unsigned high), low, high)
FORBIDDEN(nvmlDeviceResetMemoryLockedClocks, (void *h), 0, 0)
FORBIDDEN(nvmlDeviceSetApplicationsClocks, (void *h, unsigned memory, unsigned graphics), memory, graphics)
FORBIDDEN(nvmlDeviceResetApplicationsClocks, (void *h), 0, 0)
FORBIDDEN(nvmlDeviceSetPowerManagementLimit, (void *h, unsigned limit), limit, 0)
FORBIDDEN(nvmlDeviceSetPersistenceMode, (void *h, unsigned mode), mode, 0)

int nvmlDeviceGetClockInfo(void *h, unsigned type, unsigned *out) {
  ENTER(h);
  *out = type == 2 ? d->mem_clock : (unsigned)actual_clock(d, NULL);
  return leave(OK);
}
int nvmlDeviceGetMaxClockInfo(void *h, unsigned type, unsigned *out) {
  ENTER(h);
  *out = type == 2 ? d->mem_clock : (unsigned)d->clock_max;
  return leave(OK);
}

/* ---- telemetry ---- */

int nvmlDeviceGetTotalEnergyConsumption(void *h, unsigned long long *out) {
  ENTER(h);
  if (d->counter_mode == COUNTER_ABSENT) return leave(NOT_SUPPORTED);
  *out = (unsigned long long)d->visible_mj;
  return leave(OK);
}
GETTER(nvmlDeviceGetPowerUsage, unsigned, power_at(d, actual_clock(d, NULL)) * 1e3)
GETTER(nvmlDeviceGetPowerManagementLimit, unsigned, d->limit_w * 1e3)
GETTER(nvmlDeviceGetEnforcedPowerLimit, unsigned, d->limit_w * 1e3)
GETTER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, d->limit_w * 1e3)
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *low, unsigned *high) {
  ENTER(h);
  *low = 100000;
  *high = 400000;
  return leave(OK);
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *out) {
  (void)sensor;
  ENTER(h);
  *out = (unsigned)d->temperature_c;
  return leave(OK);
}
typedef struct { unsigned version, sensor; int temperature; } TemperatureV1;
int nvmlDeviceGetTemperatureV(void *h, TemperatureV1 *out) {
  ENTER(h);
  out->temperature = (int)d->temperature_c;
  return leave(OK);
}
static uint64_t reasons_of(const Device *d) { uint64_t why; actual_clock(d, &why); return why; }
GETTER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, reasons_of(d))
GETTER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, reasons_of(d))

typedef struct { uint32_t id, scope; int64_t at, latency; int32_t type, result; unsigned long long value; } FieldValue;
int nvmlDeviceGetFieldValues(void *h, int count, FieldValue *values) {
  ENTER(h);
  for (int i = 0; i < count; i++) {
    FieldValue *v = &values[i];
    v->value = 0;
    v->type = 1;
    v->result = NOT_SUPPORTED;
    if ((v->id == 185 || v->id == 186) && v->scope == 0) {
      v->value = (unsigned long long)(power_at(d, actual_clock(d, NULL)) * 1e3);
      v->result = OK;
    }
  }
  return leave(OK);
}
typedef struct { unsigned gpu, memory; } Utilization;
int nvmlDeviceGetUtilizationRates(void *h, Utilization *out) {
  ENTER(h);
  out->gpu = (unsigned)(d->load * 100);
  out->memory = out->gpu / 2;
  return leave(OK);
}
int nvmlDeviceGetFanSpeed(void *h, unsigned *out) { (void)out; ENTER(h); (void)d; return leave(NOT_SUPPORTED); }
int nvmlDeviceGetC2cModeInfoV(void *h, void *out) { (void)out; ENTER(h); (void)d; return leave(NOT_SUPPORTED); }

/* ---- policy and MIG ---- */

int nvmlDeviceGetMigMode(void *h, unsigned *current, unsigned *pending) {
  ENTER(h);
  *current = *pending = (unsigned)d->mig;
  return leave(OK);
}
GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned, d->mig ? MIG_PER_DEVICE : 0)
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **out) {
  ENTER(h);
  if (!d->mig || index >= MIG_PER_DEVICE) return leave(NOT_FOUND);
  *out = (void *)(uintptr_t)((d->index + 1) * 1000 + index + 1);
  return leave(OK);
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) {
  ENTER(h);
  *out = (void *)(uintptr_t)(d->index + 1);
  return leave(OK);
}
GETTER(nvmlDeviceGetPersistenceMode, unsigned, d->persistence)
int nvmlDeviceGetAPIRestriction(void *h, unsigned api, unsigned *out) {
  (void)api;
  ENTER(h);
  *out = (unsigned)d->restricted;
  return leave(OK);
}
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } Process;
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, Process *out) {
  ENTER(h);
  unsigned size = *count, n = 0;
  for (int i = 0; i < 4; i++) n += d->processes[i] != 0;
  *count = n;
  if (!n) return leave(OK);
  if (!out || size < n) return leave(INSUFFICIENT_SIZE);
  for (unsigned i = 0; i < n; i++) out[i] = (Process){d->processes[i], 1ull << 30, ~0u, ~0u};
  return leave(OK);
}

/* ---- control, for the tests ---- */

int stub_create(const char *path, unsigned devices) {
  return devices <= MAX_DEVICES && map_file(path, 1, devices) ? 0 : -1;
}

static double *number(Device *d, const char *key) {
  if (!strcmp(key, "load")) return &d->load;
  if (!strcmp(key, "limit_w")) return &d->limit_w;
  if (!strcmp(key, "idle_w")) return &d->idle_w;
  if (!strcmp(key, "dynamic_w")) return &d->dynamic_w;
  if (!strcmp(key, "jump_mj")) return &d->jump_mj;
  if (!strcmp(key, "counter_factor")) return &d->counter_factor;
  if (!strcmp(key, "thermal_cap_mhz")) return &d->thermal_cap_mhz;
  if (!strcmp(key, "temperature_c")) return &d->temperature_c;
  if (!strcmp(key, "energy_mj")) return &d->energy_mj;
  return NULL;
}
static int32_t *integer(Device *d, const char *key) {
  if (!strcmp(key, "clock_min")) return &d->clock_min;
  if (!strcmp(key, "clock_max")) return &d->clock_max;
  if (!strcmp(key, "clock_step")) return &d->clock_step;
  if (!strcmp(key, "clock_offset")) return &d->clock_offset;
  if (!strcmp(key, "counter_mode")) return &d->counter_mode;
  if (!strcmp(key, "mig")) return &d->mig;
  if (!strcmp(key, "persistence")) return &d->persistence;
  if (!strcmp(key, "restricted")) return &d->restricted;
  if (!strcmp(key, "lost")) return &d->lost;
  if (!strcmp(key, "lock_mhz")) return (int32_t *)&d->lock_max;
  if (!strcmp(key, "lock_pid")) return &d->lock_pid;
  if (!strcmp(key, "process")) return (int32_t *)&d->processes[0];
  return NULL;
}
int stub_set(const char *path, unsigned device, const char *key, double value) {
  Machine *m = map_file(path, 0, 0);
  if (!m) return -1;
  if (!strcmp(key, "driver_loaded")) { m->driver_loaded = (uint32_t)value; return 0; }
  lock(m);
  Device *d = &m->devices[device];
  advance(d);
  double *n = number(d, key);
  int32_t *i = n ? NULL : integer(d, key);
  if (n) *n = value;
  if (i) *i = (int32_t)value;
  unlock(m);
  return n || i ? 0 : -1;
}
double stub_get(const char *path, unsigned device, const char *key) {
  Machine *m = map_file(path, 0, 0);
  if (!m) return NAN;
  if (!strcmp(key, "events")) return (double)m->event_count;
  if (!strcmp(key, "calls")) return (double)m->call_count;
  lock(m);
  Device *d = &m->devices[device];
  double *n = number(d, key);
  int32_t *i = n ? NULL : integer(d, key);
  double value = n ? *n : i ? *i : NAN;
  unlock(m);
  return value;
}
int stub_set_text(const char *path, unsigned device, const char *key, const char *value) {
  Machine *m = map_file(path, 0, 0);
  if (!m) return -1;
  lock(m);
  if (!strcmp(key, "faults")) parse_faults(m->faults, value);
  else if (!strcmp(key, "name")) snprintf(m->devices[device].name, sizeof m->devices[device].name, "%s", value);
  else if (!strcmp(key, "uuid")) snprintf(m->devices[device].uuid, sizeof m->devices[device].uuid, "%s", value);
  unlock(m);
  return 0;
}
/* Copies the events from number `from` on; returns how many. */
int stub_events(const char *path, uint64_t from, Event *out, int most) {
  Machine *m = map_file(path, 0, 0);
  if (!m) return -1;
  lock(m);
  int n = 0;
  for (uint64_t i = from; i < m->event_count && n < most; i++) out[n++] = m->events[i % MAX_EVENTS];
  unlock(m);
  return n;
}
