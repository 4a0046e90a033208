// A driver without a GPU, for tests: device memory is host memory, work waits in a queue until
// something waits for it, and what a program may not do is written down.
//
// The interface of the tests is at the end. Calls go to one process-wide state, so a test that wants
// its own loads its own copy of the library.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CONTEXT = 201, NOT_FOUND = 500, BAD_HANDLE = 400 };
enum { DEVICES = 2 };

static char said[1 << 20], wrong[1 << 16];
static size_t said_length;
static int capability = 90, total_gib = 4;
static long calls, fail_at;
static int fail_code, poisoned;
static char fail_only[64];

static void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  said_length += vsnprintf(said + said_length, sizeof said - said_length, format, arguments);
  va_end(arguments);
}
static void violation(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t used = strlen(wrong);
  vsnprintf(wrong + used, sizeof wrong - used, format, arguments);
  va_end(arguments);
}

// Counts the call; not zero where it was told to fail.
static int enter(const char *call) {
  say("%s\n", call);
  if (poisoned) return poisoned;
  if (fail_only[0] && strcmp(fail_only, call)) return 0;
  return ++calls == fail_at ? fail_code : 0;
}
#define ENTER(name) do { int failed = enter(#name); if (failed) return failed; } while (0)

// ---- Contexts ----

typedef struct { int retained; } Context;
static Context contexts[DEVICES];
static __thread Context *current;
#define IN_CONTEXT() do { if (!current || !current->retained) return NO_CONTEXT; } while (0)

// ---- Things that are made and destroyed ----

typedef enum { STREAM, EVENT, MEMORY, PINNED, MODULE, KINDS } Kind;
typedef struct Thing {
  struct Thing *next;
  Kind kind;
  Context *context;
  char *base;
  size_t bytes;
  long reached;  // events: when it was reached in the order of all work, 0 while it is not
  long marked;   // events: the number of the work after which it is reached
  char *image;   // modules
} Thing;
static Thing *things;

static Thing *make(Kind kind, size_t bytes) {
  Thing *thing = calloc(1, sizeof *thing);
  thing->kind = kind;
  thing->context = current;
  thing->bytes = bytes;
  if (bytes) {
    thing->base = aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset(thing->base, 0xA5, bytes);
  }
  thing->next = things;
  return things = thing;
}
static Thing *known(const void *handle, Kind kind) {
  for (Thing *thing = things; thing; thing = thing->next)
    if (thing == handle && thing->kind == kind) return thing;
  return 0;
}
static Thing *holding(const void *base, size_t bytes, Kind kind) {
  for (Thing *thing = things; thing; thing = thing->next)
    if (thing->kind == kind && thing->base <= (char *)base && (char *)base + bytes <= thing->base + thing->bytes)
      return thing;
  return 0;
}
static void forget(Thing *gone) {
  for (Thing **link = &things; *link; link = &(*link)->next)
    if (*link == gone) {
      *link = gone->next;
      if (gone->base) memset(gone->base, 0x5A, gone->bytes);
      free(gone->base);
      free(gone->image);
      free(gone);
      return;
    }
}

// ---- Work of all streams: done when something waits for it, and no sooner ----

typedef struct Work {
  struct Work *next;
  enum { COPY, SET, RECORD, WAIT, KERNEL } kind;
  Thing *stream;
  long number, after;
  char *dst;
  const char *src;
  size_t bytes;
  int byte;
  Thing *event;
} Work;
static Work *first, **last = &first;
static long numbers, done_count;

static Work *queue(int kind, Thing *stream) {
  Work *work = calloc(1, sizeof *work);
  work->kind = kind;
  work->stream = stream;
  work->number = ++numbers;
  *last = work;
  last = &work->next;
  return work;
}
static void finish(long number);
// Does the first work of a stream; 0 where there is none.
static int step(Thing *stream) {
  Work **link = &first;
  while (*link && (*link)->stream != stream) link = &(*link)->next;
  Work *work = *link;
  if (!work) return 0;
  if (work->kind == WAIT) {
    finish(work->after);
    // What was waited for may have been before this one.
    for (link = &first; *link != work;) link = &(*link)->next;
  }
  *link = work->next;
  if (last == &work->next) last = link;
  done_count++;
  if (work->kind == COPY) memmove(work->dst, work->src, work->bytes);
  if (work->kind == SET) memset(work->dst, work->byte, work->bytes);
  if (work->kind == RECORD) work->event->reached = done_count;
  free(work);
  return 1;
}
// Does the work of this number, and what has to come before it.
static void finish(long number) {
  for (;;) {
    Work *work = first;
    while (work && work->number != number) work = work->next;
    if (!work) return;
    step(work->stream);
  }
}
static void drain(Thing *stream) {
  while (step(stream)) {}
}
static int waiting_for(const char *base, size_t bytes) {
  for (Work *work = first; work; work = work->next)
    if ((work->dst < base + bytes && base < work->dst + work->bytes) ||
        (work->src && work->src < base + bytes && base < work->src + work->bytes))
      return 1;
  return 0;
}

// ---- The driver ----

int cuInit(unsigned flags) { ENTER(cuInit); return OK; }
int cuDriverGetVersion(int *version) { ENTER(cuDriverGetVersion); *version = 13000; return OK; }
int cuDeviceGetCount(int *count) { ENTER(cuDeviceGetCount); *count = DEVICES; return OK; }
int cuDeviceGet(int *device, int index) { ENTER(cuDeviceGet); *device = index; return OK; }
int cuDeviceGetName(char *name, int length, int device) {
  ENTER(cuDeviceGetName);
  snprintf(name, length, "Mock %d", device);
  return OK;
}
// No call that a test counts: who does not hear an answer does without.
int cuDeviceGetPCIBusId(char *bus, int length, int device) {
  snprintf(bus, length, "0000:1b:%02d.0", device);
  return OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  ENTER(cuDeviceTotalMem_v2);
  *bytes = (size_t)total_gib << 30;
  return OK;
}
int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
  ENTER(cuDeviceGetAttribute);
  switch (attribute) {
    case 16: *value = 132; return OK;
    case 38: *value = 50 << 20; return OK;
    case 75: *value = capability / 10; return OK;
    case 76: *value = capability % 10; return OK;
    case 97: *value = 227 << 10; return OK;
    default: return INVALID;
  }
}
int cuDevicePrimaryCtxRetain(Context **context, int device) {
  ENTER(cuDevicePrimaryCtxRetain);
  contexts[device].retained++;
  *context = &contexts[device];
  return OK;
}
int cuDevicePrimaryCtxRelease_v2(int device) {
  int failed = enter("cuDevicePrimaryCtxRelease_v2");
  if (--contexts[device].retained == 0)
    for (Thing *thing = things; thing; thing = thing->next)
      if (thing->context == &contexts[device]) violation("a context is released before a thing of kind %d in it\n", thing->kind);
  return failed;
}
int cuCtxSetCurrent(Context *context) {
  ENTER(cuCtxSetCurrent);
  if (context && !context->retained) return NO_CONTEXT;
  current = context;
  return OK;
}
int cuMemGetInfo_v2(size_t *available, size_t *total) {
  ENTER(cuMemGetInfo_v2);
  IN_CONTEXT();
  *total = (size_t)total_gib << 30;
  // A module takes a MiB.
  *available = (size_t)1 << 30;
  for (Thing *thing = things; thing; thing = thing->next)
    if (thing->context == current) *available -= thing->kind == MODULE ? 1 << 20 : thing->kind == MEMORY ? thing->bytes : 0;
  return OK;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  ENTER(cuMemAlloc_v2);
  IN_CONTEXT();
  if (!bytes) return INVALID;
  if (bytes > (size_t)1 << 30) return NO_MEMORY;
  *address = (uint64_t)make(MEMORY, bytes)->base;
  return OK;
}
int cuMemFree_v2(uint64_t address) {
  // Done even when told to fail, as other ways to destroy: the real one reports failures of work
  // that came before.
  int failed = enter("cuMemFree_v2");
  Thing *memory = holding((void *)address, 1, MEMORY);
  if (!memory || memory->base != (char *)address) { violation("freeing what is not allocated\n"); return INVALID; }
  if (memory->context != current) violation("freeing in another context\n");
  if (!poisoned && waiting_for(memory->base, memory->bytes)) violation("freeing memory that work waits for\n");
  forget(memory);
  return failed;
}
int cuMemHostAlloc(void **base, size_t bytes, unsigned flags) {
  ENTER(cuMemHostAlloc);
  IN_CONTEXT();
  *base = make(PINNED, bytes)->base;
  return OK;
}
int cuMemFreeHost(void *base) {
  int failed = enter("cuMemFreeHost");
  Thing *memory = holding(base, 1, PINNED);
  if (!memory) { violation("freeing what is not pinned\n"); return INVALID; }
  if (!poisoned && waiting_for(memory->base, memory->bytes)) violation("freeing pinned memory that work waits for\n");
  forget(memory);
  return failed;
}
static int device_range(uint64_t address, size_t bytes) {
  Thing *memory = holding((void *)address, bytes, MEMORY);
  if (!memory) { violation("%zu bytes outside of what is allocated\n", bytes); return 0; }
  if (memory->context != current) { violation("memory of another context\n"); return 0; }
  return 1;
}
int cuMemcpyHtoDAsync_v2(uint64_t dst, const void *src, size_t bytes, Thing *stream) {
  ENTER(cuMemcpyHtoDAsync_v2);
  IN_CONTEXT();
  if (!known(stream, STREAM)) return BAD_HANDLE;
  if (!device_range(dst, bytes)) return INVALID;
  if (!holding(src, bytes, PINNED)) violation("an upload from memory that is not pinned\n");
  Work *work = queue(COPY, stream);
  work->dst = (char *)dst, work->src = src, work->bytes = bytes;
  return OK;
}
int cuMemcpyDtoHAsync_v2(void *dst, uint64_t src, size_t bytes, Thing *stream) {
  ENTER(cuMemcpyDtoHAsync_v2);
  IN_CONTEXT();
  if (!known(stream, STREAM)) return BAD_HANDLE;
  if (!device_range(src, bytes)) return INVALID;
  Work *work = queue(COPY, stream);
  work->dst = dst, work->src = (char *)src, work->bytes = bytes;
  return OK;
}
int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, Thing *stream) {
  ENTER(cuMemcpyDtoDAsync_v2);
  IN_CONTEXT();
  if (!known(stream, STREAM)) return BAD_HANDLE;
  if (!device_range(src, bytes) || !device_range(dst, bytes)) return INVALID;
  Work *work = queue(COPY, stream);
  work->dst = (char *)dst, work->src = (char *)src, work->bytes = bytes;
  return OK;
}
int cuMemsetD8Async(uint64_t dst, unsigned char byte, size_t bytes, Thing *stream) {
  ENTER(cuMemsetD8Async);
  IN_CONTEXT();
  if (!known(stream, STREAM)) return BAD_HANDLE;
  if (!device_range(dst, bytes)) return INVALID;
  Work *work = queue(SET, stream);
  work->dst = (char *)dst, work->byte = byte, work->bytes = bytes;
  return OK;
}
int cuStreamCreate(Thing **stream, unsigned flags) {
  ENTER(cuStreamCreate);
  IN_CONTEXT();
  if (flags != 1) violation("a stream that waits for the default one\n");
  *stream = make(STREAM, 0);
  return OK;
}
static int destroy(const char *call, Thing *thing, Kind kind) {
  int failed = enter(call);
  if (!known(thing, kind)) { violation("%s of what is not there\n", call); return BAD_HANDLE; }
  if (kind == EVENT) finish(thing->marked);
  if (kind == STREAM) drain(thing);
  forget(thing);
  return failed;
}
int cuStreamDestroy_v2(Thing *stream) { return destroy("cuStreamDestroy_v2", stream, STREAM); }
int cuStreamSynchronize(Thing *stream) {
  int failed = enter("cuStreamSynchronize");
  if (!known(stream, STREAM)) return BAD_HANDLE;
  drain(stream);
  return failed;
}
// Asking does a piece of the work, so that whoever asks on and on sees it done.
int cuStreamQuery(Thing *stream) {
  ENTER(cuStreamQuery);
  if (!known(stream, STREAM)) return BAD_HANDLE;
  return step(stream) ? 600 : OK;
}
int cuStreamWaitEvent(Thing *stream, Thing *event, unsigned flags) {
  ENTER(cuStreamWaitEvent);
  if (!known(stream, STREAM) || !known(event, EVENT)) return BAD_HANDLE;
  queue(WAIT, stream)->after = event->marked;
  return OK;
}
int cuEventCreate(Thing **event, unsigned flags) {
  ENTER(cuEventCreate);
  IN_CONTEXT();
  *event = make(EVENT, 0);
  return OK;
}
int cuEventDestroy_v2(Thing *event) { return destroy("cuEventDestroy_v2", event, EVENT); }
int cuEventRecord(Thing *event, Thing *stream) {
  ENTER(cuEventRecord);
  if (!known(stream, STREAM) || !known(event, EVENT)) return BAD_HANDLE;
  Work *work = queue(RECORD, stream);
  work->event = event;
  event->marked = work->number;
  return OK;
}
// Asking does the work before it, the next time it is asked.
int cuEventQuery(Thing *event) {
  ENTER(cuEventQuery);
  if (!known(event, EVENT)) return BAD_HANDLE;
  if (event->marked && !event->reached) { finish(event->marked); return 600; }
  return OK;
}
int cuEventSynchronize(Thing *event) {
  ENTER(cuEventSynchronize);
  if (!known(event, EVENT)) return BAD_HANDLE;
  finish(event->marked);
  return OK;
}
int cuEventElapsedTime(float *milliseconds, Thing *start, Thing *end) {
  ENTER(cuEventElapsedTime);
  if (!known(start, EVENT) || !known(end, EVENT)) return BAD_HANDLE;
  if (!start->reached || !end->reached) return 600;
  *milliseconds = end->reached - start->reached;
  return OK;
}

// ---- Programs: text of lines `kernel NAME THREADS SIZE SIZE ...`, sizes of parameters ----

typedef struct Kernel {
  struct Kernel *next;
  char name[64];
  int threads, shared, count;
  int sizes[32];
} Kernel;
static Kernel *kernels;

int cuModuleLoadData(Thing **module, const char *image) {
  ENTER(cuModuleLoadData);
  IN_CONTEXT();
  if (strncmp(image, "kernel ", 7) && strncmp(image, "\x7f" "ELF", 4)) return 200;
  *module = make(MODULE, 0);
  (*module)->image = strdup(image);
  return OK;
}
int cuModuleUnload(Thing *module) { return destroy("cuModuleUnload", module, MODULE); }
int cuModuleGetFunction(Kernel **function, Thing *module, const char *name) {
  ENTER(cuModuleGetFunction);
  if (!known(module, MODULE)) return BAD_HANDLE;
  for (const char *line = module->image; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : 0) {
    Kernel kernel = {.shared = 48 << 10};
    int length = 0;
    if (sscanf(line, "kernel %63s %d%n", kernel.name, &kernel.threads, &length) < 2 || strcmp(kernel.name, name)) continue;
    for (const char *rest = line + length; *rest == ' ';) {
      kernel.sizes[kernel.count++] = strtol(rest, (char **)&rest, 10);
    }
    *function = malloc(sizeof kernel);
    **function = kernel;
    (*function)->next = kernels;
    kernels = *function;
    return OK;
  }
  return NOT_FOUND;
}
int cuFuncGetAttribute(int *value, unsigned attribute, Kernel *kernel) {
  ENTER(cuFuncGetAttribute);
  if (attribute != 0) return INVALID;
  *value = kernel->threads;
  return OK;
}
int cuFuncSetAttribute(Kernel *kernel, unsigned attribute, int value) {
  ENTER(cuFuncSetAttribute);
  if (attribute != 8 || value > 227 << 10) return INVALID;
  kernel->shared = value;
  say("  %s may have %d bytes of shared memory\n", kernel->name, value);
  return OK;
}
int cuFuncGetParamInfo(Kernel *kernel, size_t index, size_t *offset, size_t *size) {
  ENTER(cuFuncGetParamInfo);
  if (index >= (size_t)kernel->count) return INVALID;
  *offset = 0;
  *size = kernel->sizes[index];
  return OK;
}
int cuLaunchKernel(Kernel *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, Thing *stream, void **arguments, void **extra) {
  ENTER(cuLaunchKernel);
  IN_CONTEXT();
  if (!known(stream, STREAM)) return BAD_HANDLE;
  if (!x || !y || !z || !threads || ty != 1 || tz != 1 || extra) return INVALID;
  if (threads > (unsigned)kernel->threads) return 701;
  if (shared > (unsigned)kernel->shared) return INVALID;
  say("  %s [%u %u %u] x %u, %u bytes shared:", kernel->name, x, y, z, threads, shared);
  for (int i = 0; i < kernel->count; i++) {
    uint64_t value = 0;
    memcpy(&value, arguments[i], kernel->sizes[i] < 8 ? kernel->sizes[i] : 8);
    if (kernel->sizes[i] == 8) say(" %s", holding((void *)value, 1, MEMORY) ? "memory" : value ? "number" : "null");
    else say(" %#lx", (unsigned long)value);
  }
  say("\n");
  queue(KERNEL, stream);
  return OK;
}

int cuTensorMapEncodeTiled(uint64_t *map, unsigned type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *step, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned fill) {
  ENTER(cuTensorMapEncodeTiled);
  if ((uintptr_t)map % 64 || (uintptr_t)address % 16 || rank < 1 || rank > 5) return INVALID;
  say("  type %u swizzle %u interleave %u promotion %u fill %u:", type, swizzle, interleave, promotion, fill);
  for (unsigned i = 0; i < rank; i++) {
    if (box[i] > 256 || step[i] != 1 || (i > 0 && strides[i - 1] % 16)) return INVALID;
    say(" %lu/%u", (unsigned long)dims[i], box[i]);
    if (i > 0) say("+%lu", (unsigned long)strides[i - 1]);
  }
  say("\n");
  for (int i = 0; i < 16; i++) map[i] = 0x1000 + i;
  return OK;
}
int cuGetErrorName(int code, const char **name) {
  *name = code == 12345 ? "CUDA_ERROR_OF_THE_FUTURE" : 0;
  return *name ? OK : INVALID;
}

// ---- For the tests ----

const char *mock_said(void) { return said; }
const char *mock_wrong(void) { return wrong; }
void mock_capability(int value) { capability = value; }
// Fails the n-th call from now, or the n-th of one function where `only` names it.
void mock_fail(long n, int code, const char *only) {
  calls = 0, fail_at = n, fail_code = code;
  snprintf(fail_only, sizeof fail_only, "%s", only ? only : "");
}
// Fails every call from now on; what waits in the queue is lost.
void mock_poison(int code) {
  poisoned = code;
  while (first) {
    Work *work = first;
    first = work->next;
    free(work);
  }
  last = &first;
}
long mock_calls(void) { return calls; }
// What was made and not destroyed, and contexts that are retained.
long mock_alive(void) {
  long alive = contexts[0].retained + contexts[1].retained;
  for (Thing *thing = things; thing; thing = thing->next) alive++;
  return alive;
}
