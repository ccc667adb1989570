/* A pretend libcuda.so.1, without a GPU: the part of the driver's interface that a CUDA-aware Open MPI 4.1 uses.
 *
 * An allocation is an anonymous memory file that is mapped twice. At its device address it has no permissions, so a host
 * load or store faults there, as with a GPU. At its alias it is readable and writable, for the copy functions here and
 * for pretend kernels (pretend_alias). An IPC handle names the file as /proc/<pid>/fd/<n>. Copies are done at once.
 * Each event reports twice that it is not ready. With PRETEND_CUDA_NO_IPC=1 no handle can be opened.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201, MAP_FAILURE = 205,
       NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_SYNC_MEMOPS = 6, ATTRIBUTE_BUFFER_ID = 7,
       ATTRIBUTE_IS_MANAGED = 8, MEMORY_TYPE_DEVICE = 2 };
typedef unsigned long long address;
typedef struct { char bytes[64]; } handle;
typedef struct { int pid, file; size_t size, number; } origin; /* the contents of an IPC handle; `number` makes it unique */
typedef struct region {
    struct region *next;
    char *device, *alias;
    size_t size;
    origin from;
    int openings; /* 0: an allocation of this process */
} region;

static region *regions;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int the_context;
static size_t allocations;
static _Thread_local void *context;
int pretend_opened, pretend_closed, pretend_device_copies;

static region *region_of(address where)
{
    for (region *r = regions; r; r = r->next)
        if (where >= (address)(uintptr_t)r->device && where < (address)(uintptr_t)(r->device + r->size)) return r;
    return NULL;
}

static region *map_file(int file, size_t size, origin from)
{
    region *r = calloc(1, sizeof *r);
    r->size = size;
    r->from = from;
    r->device = mmap(NULL, size, PROT_NONE, MAP_SHARED, file, 0);
    r->alias = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (r->device == MAP_FAILED || r->alias == MAP_FAILED) { free(r); return NULL; }
    r->next = regions;
    return regions = r;
}

static void unmap(region *gone)
{
    for (region **r = &regions; *r; r = &(*r)->next)
        if (*r == gone) { *r = gone->next; break; }
    munmap(gone->device, gone->size);
    munmap(gone->alias, gone->size);
    free(gone);
}

/* for the tests */
void pretend_use(void) { context = &the_context; }
void *pretend_alias(address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    pthread_mutex_unlock(&lock);
    return r ? r->alias + (where - (address)(uintptr_t)r->device) : NULL;
}

int cuInit(unsigned flags) { (void)flags; return OK; }
int cuCtxGetCurrent(void **c) { *c = context; return OK; }
int cuCtxSetCurrent(void *c) { context = c; return OK; }
int cuCtxGetDevice(int *device) { *device = 0; return OK; }
int cuDeviceGet(int *device, int number) { *device = number; return number == 0 ? OK : INVALID_DEVICE; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b; return OK; }

int cuMemAlloc_v2(address *where, size_t size)
{
    context = &the_context;
    size = (size + 4095) & ~(size_t)4095;
    int file = memfd_create("pretend device memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    region *r = map_file(file, size, (origin){getpid(), file, size, ++allocations});
    pthread_mutex_unlock(&lock);
    if (r) *where = (address)(uintptr_t)r->device;
    return r ? OK : OUT_OF_MEMORY;
}

int cuMemFree_v2(address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    int fine = r && !r->openings && (address)(uintptr_t)r->device == where;
    if (fine) { close(r->from.file); unmap(r); }
    pthread_mutex_unlock(&lock);
    return fine ? OK : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(address *base, size_t *size, address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    if (r && base) *base = (address)(uintptr_t)r->device;
    if (r && size) *size = r->size;
    pthread_mutex_unlock(&lock);
    return r ? OK : NOT_FOUND;
}

static int attribute_of(void *out, int what, region *r)
{
    switch (what) {
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = r ? MEMORY_TYPE_DEVICE : 0; return OK;
    case ATTRIBUTE_CONTEXT: *(void **)out = r ? (void *)&the_context : NULL; return OK;
    case ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; return OK;
    case ATTRIBUTE_BUFFER_ID: *(address *)out = r ? (address)(uintptr_t)r->device : 0; return OK;
    default: return INVALID_VALUE;
    }
}

int cuPointerGetAttribute(void *out, int what, address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    int code = r ? attribute_of(out, what, r) : INVALID_VALUE;
    pthread_mutex_unlock(&lock);
    return code;
}

int cuPointerGetAttributes(unsigned count, int *what, void **out, address where) /* host pointers are no error */
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    for (unsigned i = 0; i < count; i++) attribute_of(out[i], what[i], r);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuPointerSetAttribute(const void *value, int what, address where)
{
    (void)value;
    return what == ATTRIBUTE_SYNC_MEMOPS && pretend_alias(where) ? OK : INVALID_VALUE;
}

int cuMemcpy(address to, address from, size_t size)
{
    if (!context) return INVALID_CONTEXT;
    void *target = pretend_alias(to), *source = pretend_alias(from);
    if (target || source) __atomic_fetch_add(&pretend_device_copies, 1, __ATOMIC_RELAXED);
    memmove(target ? target : (void *)(uintptr_t)to, source ? source : (void *)(uintptr_t)from, size);
    return OK;
}
int cuMemcpyAsync(address to, address from, size_t size, void *stream) { (void)stream; return cuMemcpy(to, from, size); }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; return context ? OK : INVALID_CONTEXT; }
int cuMemHostUnregister(void *p) { (void)p; return OK; }

int cuStreamCreate(void **stream, unsigned flags) { (void)flags; *stream = malloc(8); return OK; }
int cuStreamDestroy_v2(void *stream) { free(stream); return OK; }
int cuStreamSynchronize(void *stream) { (void)stream; return OK; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream; (void)event; (void)flags; return OK; }
int cuEventCreate(int **event, unsigned flags) { (void)flags; *event = calloc(1, sizeof **event); return OK; }
int cuEventDestroy_v2(int *event) { free(event); return OK; }
int cuEventRecord(int *event, void *stream) { (void)stream; *event = 2; return OK; }
int cuEventQuery(int *event) { return *event > 0 && (*event)-- ? NOT_READY : OK; }
int cuEventSynchronize(int *event) { *event = 0; return OK; }
int cuIpcGetEventHandle(handle *h, int *event) { (void)event; memset(h, 0, sizeof *h); return OK; }
int cuIpcOpenEventHandle(int **event, handle h) { (void)h; return cuEventCreate(event, 0); }

int cuIpcGetMemHandle(handle *h, address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    int fine = r && !r->openings;
    memset(h, 0, sizeof *h);
    if (fine) memcpy(h, &r->from, sizeof r->from);
    pthread_mutex_unlock(&lock);
    return fine ? OK : INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(address *where, handle h, unsigned flags)
{
    (void)flags;
    if (getenv("PRETEND_CUDA_NO_IPC")) return NOT_SUPPORTED;
    origin from;
    memcpy(&from, &h, sizeof from);
    if (from.pid == getpid()) return INVALID_CONTEXT; /* as in CUDA, the process that made it cannot open it */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", from.pid, from.file);
    pthread_mutex_lock(&lock);
    region *r = regions;
    while (r && !(r->openings && !memcmp(&r->from, &from, sizeof from))) r = r->next;
    if (!r) {
        int file = open(path, O_RDWR);
        r = file < 0 ? NULL : map_file(file, from.size, from);
        if (file >= 0) close(file);
    }
    if (r) { r->openings++; pretend_opened++; *where = (address)(uintptr_t)r->device; }
    pthread_mutex_unlock(&lock);
    return r ? OK : MAP_FAILURE;
}

int cuIpcCloseMemHandle(address where)
{
    pthread_mutex_lock(&lock);
    region *r = region_of(where);
    int fine = r && r->openings;
    if (fine) { pretend_closed++; if (--r->openings == 0) unmap(r); }
    pthread_mutex_unlock(&lock);
    return fine ? OK : INVALID_VALUE;
}
