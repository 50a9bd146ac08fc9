/* The functions of libnvidia-ml.so.1, answered from shared memory that another process writes.
 *
 * functions.inc holds X(index, name, pattern) for each plain function; the letters of a pattern
 * are its arguments, each of which fits into a register:
 *   d  device            e  another device, as a number that is part of the question
 *                        i  number that is part of the question      -  any argument, ignored
 *   oN result, N bytes   s  string result (its length follows as -)
 *   qN newest time stamp seen; it is at byte N of an item
 *   c  count, in and out t  value type, 4 bytes                      lN list of items of N bytes
 * An answer consists of its results one after the other, or of the items of its list.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID = 2, NOT_FOUND = 6, INSUFFICIENT = 7,
       DRIVER_NOT_LOADED = 9, TIMED_OUT = 10 };
enum { SLOTS = 8192, WANTED = 1024, ARGUMENTS = 8, FIRST_DEVICE = 0x1000 };
enum { WAIT_MICROSECONDS = 1000, WAITS = 5000 };

struct question { uint32_t function, device, first, second; };
struct slot { struct question asked; uint32_t version; int32_t error; uint32_t offset, length; };
struct shared {
    uint32_t devices, wanted_count;
    struct question wanted[WANTED];
    struct slot slots[SLOTS];
    unsigned char arena[];
};

static struct shared *shared;
static uint64_t users;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;

static int same(const struct question *one, const struct question *other) {
    return memcmp(one, other, sizeof *one) == 0;
}

/* Consecutive numbers must not get adjacent slots: searches would cost the agent time. */
static uint32_t place_of(const struct question *asked) {
    uint32_t at = asked->function * 2654435761u ^ asked->device * 2246822519u
        ^ asked->first * 3266489917u ^ asked->second * 668265263u;
    at = (at ^ at >> 15) * 739982445u;
    return at ^ at >> 12;
}

static struct slot *find(const struct question *asked) {
    uint32_t at = place_of(asked);
    for (uint32_t step = 0; step < SLOTS; step++) {
        struct slot *slot = &shared->slots[(at + step) % SLOTS];
        if (!__atomic_load_n(&slot->version, __ATOMIC_ACQUIRE)) return NULL;
        if (same(&slot->asked, asked)) return slot;
    }
    return NULL;
}

/* Find the answer; request it from the player if the question is new. */
static struct slot *wanted(const struct question *asked) {
    struct slot *slot = find(asked);
    if (slot) return slot;
    pthread_mutex_lock(&asking);
    shared->wanted[shared->wanted_count % WANTED] = *asked;
    __atomic_add_fetch(&shared->wanted_count, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&asking);
    for (int waited = 0; waited < WAITS && !slot; waited++) {
        usleep(WAIT_MICROSECONDS);
        slot = find(asked);
    }
    return slot;
}

/* Copy an answer that is not being written at the same time; returns its error and length. */
static int take(const struct question *asked, unsigned char *into, uint32_t room, uint32_t *length) {
    struct slot *slot = wanted(asked);
    if (!slot) return TIMED_OUT;
    for (;;) {
        uint32_t before = __atomic_load_n(&slot->version, __ATOMIC_ACQUIRE);
        if (before & 1) {
            int error = slot->error;
            *length = slot->length < room ? slot->length : room;
            memcpy(into, shared->arena + slot->offset, *length);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            if (__atomic_load_n(&slot->version, __ATOMIC_RELAXED) == before) return error;
        }
        usleep(20);
    }
}

static uint32_t newer(unsigned char *items, uint32_t count, uint32_t size, int stamp, uint64_t seen) {
    uint32_t kept = 0;
    for (uint32_t place = 0; place < count; place++) {
        uint64_t at;
        memcpy(&at, items + place * size + stamp, sizeof at);
        if (at > seen) memmove(items + kept++ * size, items + place * size, size);
    }
    return kept;
}

static int answer(uint32_t function, const char *pattern, const uintptr_t *arguments) {
    struct question asked = { function, 0, 0, 0 };
    uint32_t *next = &asked.first, length = 0, *count = NULL, size = 0;
    uintptr_t results[ARGUMENTS], list = 0;
    uint32_t sizes[ARGUMENTS];
    int found = 0, is_list = 0, stamp = -1;
    uint32_t *type = NULL;
    uint64_t seen = 0;
    if (!shared || !users) return UNINITIALIZED;
    for (const char *at = pattern; *at; arguments++) {
        char kind = *at++;
        uint32_t number = (uint32_t)strtoul(at, (char **)&at, 10);
        switch (kind) {
        case 'd':
            asked.device = (uint32_t)(*arguments - FIRST_DEVICE);
            if (asked.device >= shared->devices) return INVALID;
            break;
        case 'e': *next++ = (uint32_t)(*arguments - FIRST_DEVICE); break;
        case 'i': *next++ = (uint32_t)*arguments; break;
        case 'q': seen = *arguments; stamp = (int)number; break;
        case 's': results[found] = *arguments; sizes[found++] = 0; break;
        case 'o': results[found] = *arguments; sizes[found++] = number; break;
        case 'c': count = (uint32_t *)*arguments; break;
        case 't': type = (uint32_t *)*arguments; break;
        case 'l': list = *arguments; size = number; is_list = 1; break;
        default: break;
        }
    }
    unsigned char bytes[16384];
    int error = take(&asked, bytes, sizeof bytes, &length);
    if (error) return error;
    if (!is_list) {
        unsigned char *from = bytes;
        for (int place = 0; place < found; place++) {
            uint32_t much = sizes[place] ? sizes[place] : (uint32_t)strlen((char *)from) + 1;
            memcpy((void *)results[place], from, much);
            from += much;
        }
        return SUCCESS;
    }
    uint32_t items = length / size;
    if (stamp >= 0) {
        items = newer(bytes, items, size, stamp, seen);
        if (!items) return NOT_FOUND;
    }
    if (type) *type = 1; /* unsigned int */
    uint32_t room = *count;
    *count = items;
    if (!items || (!list && type)) return SUCCESS;
    if (!list || room < items) return INSUFFICIENT;
    memcpy((void *)list, bytes, (size_t)items * size);
    return SUCCESS;
}

/* All arguments travel in registers or, from the seventh on, in whole words of the stack. */
#define X(index, name, pattern) \
    int name(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f) { \
        uintptr_t arguments[ARGUMENTS] = { a, b, c, d, e, f }; \
        return answer(index, pattern, arguments); \
    }
#include "functions.inc"
#undef X

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!shared) {
        struct stat size;
        const char *path = getenv("NVML_STUB_MEMORY");
        int file = path ? open(path, O_RDWR) : -1;
        if (file < 0 || fstat(file, &size)) return DRIVER_NOT_LOADED;
        void *mapped = mmap(NULL, (size_t)size.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (mapped == MAP_FAILED) return DRIVER_NOT_LOADED;
        shared = mapped;
    }
    __atomic_add_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    __atomic_sub_fetch(&users, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}

const char *nvmlErrorString(int error) { return error ? "error" : "success"; }

int nvmlDeviceGetCount_v2(uint32_t *count) {
    if (!users) return UNINITIALIZED;
    *count = shared->devices;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(uint32_t index, uintptr_t *device) {
    if (!users) return UNINITIALIZED;
    if (index >= shared->devices) return INVALID;
    *device = FIRST_DEVICE + index;
    return SUCCESS;
}

/* Fields and profiling metrics: many questions in one call. */
struct field { uint32_t id, scope; unsigned char rest[32]; };

int nvmlDeviceGetFieldValues(uintptr_t device, int32_t count, struct field *fields) {
    for (int place = 0; place < count; place++) {
        uint32_t length;
        struct question asked = {
            FIELD_VALUES, (uint32_t)(device - FIRST_DEVICE), fields[place].id, fields[place].scope };
        int error = take(&asked, (unsigned char *)&fields[place], sizeof *fields, &length);
        if (error) return error;
    }
    return SUCCESS;
}

struct metric { uint32_t id, error; double value; const char *names[3]; };
struct metrics { uint32_t version, count; uint32_t *before, *after; struct metric all[]; };

int nvmlGpmSampleAlloc(uint32_t **sample) {
    *sample = calloc(1, sizeof **sample);
    return SUCCESS;
}

int nvmlGpmSampleFree(uint32_t *sample) {
    free(sample);
    return SUCCESS;
}

int nvmlGpmSampleGet(uintptr_t device, uint32_t *sample) {
    *sample = (uint32_t)(device - FIRST_DEVICE);
    return SUCCESS;
}

int nvmlGpmMetricsGet(struct metrics *wanted_metrics) {
    for (uint32_t place = 0; place < wanted_metrics->count; place++) {
        struct metric *metric = &wanted_metrics->all[place];
        uint32_t length;
        struct question asked = { GPM_METRICS, *wanted_metrics->after, metric->id, 0 };
        int error = take(&asked, (unsigned char *)metric, 16, &length);
        if (error) return error;
    }
    return SUCCESS;
}

/* Events: nothing happens, so a wait costs as much as on a healthy node. */
static int wait_in_vain(uint32_t milliseconds) {
    usleep(milliseconds * 1000u);
    return TIMED_OUT;
}

int nvmlEventSetCreate(uintptr_t *set) { *set = 1; return SUCCESS; }
int nvmlEventSetFree(uintptr_t set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(uintptr_t device, uint64_t types, uintptr_t set) {
    (void)device, (void)types, (void)set;
    return SUCCESS;
}
int nvmlEventSetWait_v2(uintptr_t set, void *data, uint32_t milliseconds) {
    (void)set, (void)data;
    return wait_in_vain(milliseconds);
}

struct set_request { uint32_t version; uint32_t types; uintptr_t set; };
struct wait_request { uint32_t version, milliseconds; uintptr_t set, data; uint32_t room, found; };

int nvmlSystemEventSetCreate(struct set_request *request) {
    memcpy((char *)request + 8, &(uintptr_t){ 1 }, sizeof(uintptr_t));
    return SUCCESS;
}
int nvmlSystemEventSetFree(void *request) { (void)request; return SUCCESS; }
int nvmlSystemRegisterEvents(void *request) { (void)request; return SUCCESS; }
int nvmlSystemEventSetWait(struct wait_request *request) {
    request->found = 0;
    return wait_in_vain(request->milliseconds);
}
