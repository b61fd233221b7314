/*
 * A libnvidia-ml.so.1 that says what a JSON file tells it to, for tests on hosts without a GPU.
 *
 * NVML_DOUBLE names the file; it is read again whenever it has changed. A value that is not in
 * it is "not supported". As the real library does, it keeps files open from the first nvmlInit
 * to the last nvmlShutdown (nvidiactl and nvidia<minor>, beside the JSON file). Both calls are
 * noted in nvml.log there. Calls can be told to fail, to wait, to hang and to crash:
 *   {"fail": {"nvmlInitWithFlags": 9}, "delay_ms": {...}, "hang": ["..."], "crash": ["..."],
 *    "devices": [{"lost": true, "fail": {...}, ...}], "xids": [{"id": 1, "device": 0, "xid": 79}]}
 * Written from the documentation of NVML's API; signatures and layouts are facts of its ABI.
 */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "json.h"

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25
};
enum { MAX_DEVICES = 64, MAX_INSTANCES = 8, EVENT_XID = 8 };

typedef struct { int index, instance; } Device; /* instance -1: the whole device */
typedef struct { unsigned long long registered, last; } EventSet;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;
typedef struct { unsigned version; int sensor, temperature; } Temperature;
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } Fabric1;
typedef struct {
    unsigned version;
    unsigned char cluster[16];
    int status;
    unsigned clique;
    unsigned char state;
    unsigned mask;
    unsigned char summary; /* from version 3 on */
} FabricV;
typedef struct {
    Device *device;
    unsigned long long type, data;
    unsigned gi, ci;
} Event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Json *description;
static struct timespec read_at;
static ino_t read_inode;
static int users, count, files[MAX_DEVICES + 1], file_count;
static Device devices[MAX_DEVICES];
static Device instances[MAX_DEVICES][MAX_INSTANCES];

/* -- The description, and what it says about calls; all under the lock ----------------------- */

static void reload(void) {
    const char *path = getenv("NVML_DOUBLE");
    struct stat now;
    if (!path || stat(path, &now)) return;
    if (description && now.st_ino == read_inode && !memcmp(&now.st_mtim, &read_at, sizeof read_at))
        return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    char *text = calloc(1, now.st_size + 1);
    size_t length = fread(text, 1, now.st_size, file);
    fclose(file);
    text[length] = 0;
    Json *fresh = json_parse(text);
    free(text);
    if (!fresh) return; /* being written: what was read before still holds */
    json_free(description);
    description = fresh;
    read_at = now.st_mtim;
    read_inode = now.st_ino;
}

static const Json *json_of(const Device *device) {
    const Json *json = json_at(json_get(description, "devices"), device->index);
    if (json && device->instance >= 0)
        return json_at(json_get(json_get(json, "mig"), "instances"), device->instance);
    return json;
}

static int is_told(const char *what, const char *call, const Json *whole, const Json *device) {
    return json_has(json_get(whole, what), call) || json_has(json_get(device, what), call);
}

static void sleep_ms(double ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)(ms * 1e6) % 1000000000};
    nanosleep(&time, NULL);
}

static int end(int result) {
    pthread_mutex_unlock(&lock);
    return result;
}

/* Take the lock, do to the call what the file says, and find the device. */
static int begin(const char *call, const Device *device, const Json **found) {
    const Json *json = NULL;
    pthread_mutex_lock(&lock);
    reload();
    if (device) json = json_of(device);
    double delay = json_number(json_get(description, "delay_ms"), call, 0)
        + json_number(json_get(json, "delay_ms"), call, 0);
    if (delay > 0) {
        pthread_mutex_unlock(&lock);
        sleep_ms(delay);
        pthread_mutex_lock(&lock);
        reload();
        if (device) json = json_of(device);
    }
    while (is_told("hang", call, description, json)) {
        pthread_mutex_unlock(&lock);
        sleep_ms(10);
        pthread_mutex_lock(&lock);
        reload();
        if (device) json = json_of(device);
    }
    if (is_told("crash", call, description, json)) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    int failure = json_number(json_get(description, "fail"), call, OK);
    if (failure) return failure;
    if (!users && strcmp(call, "nvmlInitWithFlags")) return UNINITIALIZED;
    if (!device) return OK;
    const Json *whole = json_at(json_get(description, "devices"), device->index);
    if (!whole || json_number(whole, "lost", 0)) return GPU_IS_LOST;
    *found = json;
    return json ? (int)json_number(json_get(json, "fail"), call, OK) : NOT_FOUND;
}

#define BEGIN(device)                                   \
    const Json *json = NULL;                            \
    int result_ = begin(__func__, device, &json);       \
    if (result_) return end(result_);                   \
    (void)json

static int give_number(const Json *object, const char *key, unsigned *into) {
    if (!json_get(object, key)) return end(NOT_SUPPORTED);
    *into = (unsigned)json_number(object, key, 0);
    return end(OK);
}

static int give_text(const char *text, char *into, unsigned size) {
    if (!text) return end(NOT_SUPPORTED);
    if (strlen(text) >= size) return end(INSUFFICIENT_SIZE);
    strcpy(into, text);
    return end(OK);
}

/* -- Opening and closing --------------------------------------------------------------------- */

static void path_of(char *path, size_t size, const char *name) {
    snprintf(path, size, "%s", getenv("NVML_DOUBLE") ? getenv("NVML_DOUBLE") : "./x");
    char *slash = strrchr(path, '/');
    size_t used = slash ? (size_t)(slash - path) + 1 : 0;
    snprintf(path + used, size - used, "%s", name);
}

static void note(const char *call) {
    char path[4096], line[128];
    path_of(path, sizeof path, "nvml.log");
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    int length = snprintf(line, sizeof line, "%d %s\n", getpid(), call);
    if (fd >= 0 && write(fd, line, length) < 0) perror("nvml double");
    close(fd);
}

static void hold(const char *name) {
    char path[4096];
    path_of(path, sizeof path, name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) files[file_count++] = fd;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    BEGIN(NULL);
    note("init");
    if (!description) return end(DRIVER_NOT_LOADED);
    if (users++) return end(OK);
    const Json *list = json_get(description, "devices");
    count = json_length(list);
    hold("nvidiactl");
    for (int index = 0; index < count && index < MAX_DEVICES; ++index) {
        char name[32];
        devices[index] = (Device){index, -1};
        for (int place = 0; place < MAX_INSTANCES; ++place)
            instances[index][place] = (Device){index, place};
        snprintf(name, sizeof name, "nvidia%d", (int)json_number(json_at(list, index), "minor", index));
        hold(name);
    }
    return end(OK);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    BEGIN(NULL);
    note("shutdown");
    if (--users == 0)
        while (file_count) close(files[--file_count]);
    return end(OK);
}

const char *nvmlErrorString(int result) {
    (void)result;
    return "an error of the double";
}

/* -- The node -------------------------------------------------------------------------------- */

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
    BEGIN(NULL);
    return give_text(json_text(description, "driver_version"), version, size);
}

int nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    BEGIN(NULL);
    return give_text(json_text(description, "nvml_version"), version, size);
}

int nvmlSystemGetCudaDriverVersion_v2(unsigned *version) {
    BEGIN(NULL);
    return give_number(description, "cuda_version", version);
}

int nvmlDeviceGetCount_v2(unsigned *into) {
    BEGIN(NULL);
    *into = count;
    return end(OK);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= MAX_DEVICES) return INVALID_ARGUMENT;
    BEGIN(&devices[index]);
    if ((int)index >= count) return end(INVALID_ARGUMENT);
    *device = &devices[index];
    return end(OK);
}

/* -- A device -------------------------------------------------------------------------------- */

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
    BEGIN(device);
    return give_text(json_text(json, "uuid"), uuid, size);
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    BEGIN(device);
    return give_text(json_text(json, "name"), name, size);
}

static int give_pci(const char *bus_id, Pci *pci) {
    if (!bus_id) return end(NOT_SUPPORTED);
    memset(pci, 0, sizeof *pci);
    snprintf(pci->id, sizeof pci->id, "%s", bus_id);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    return end(OK);
}

int nvmlDeviceGetPciInfo_v3(Device *device, Pci *pci) {
    BEGIN(device);
    return give_pci(json_text(json, "bus_id"), pci);
}

int nvmlDeviceGetMinorNumber(Device *device, unsigned *minor) {
    BEGIN(device);
    return give_number(json, "minor", minor);
}

int nvmlDeviceGetNumaNodeId(Device *device, unsigned *node) {
    BEGIN(device);
    return give_number(json, "memory_numa_node", node);
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory2 *memory) {
    BEGIN(device);
    const Json *values = json_get(json, "memory");
    if (!values) return end(NOT_SUPPORTED);
    if (memory->version != (sizeof *memory | 2u << 24)) return end(VERSION_MISMATCH);
    memory->total = json_number(values, "total", 0);
    memory->reserved = json_number(values, "reserved", 0);
    memory->used = json_number(values, "used", 0);
    memory->free = memory->total - memory->reserved - memory->used;
    return end(OK);
}

int nvmlDeviceGetMemoryInfo(Device *device, Memory *memory) {
    BEGIN(device);
    const Json *values = json_get(json, "memory");
    if (!values) return end(NOT_SUPPORTED);
    memory->total = json_number(values, "total", 0);
    memory->used = json_number(values, "used", 0) + json_number(values, "reserved", 0);
    memory->free = memory->total - memory->used;
    return end(OK);
}

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
    BEGIN(device);
    const Json *values = json_get(json, "utilisation");
    if (!values) return end(NOT_SUPPORTED);
    utilization->gpu = json_number(values, "gpu", 0);
    utilization->memory = json_number(values, "memory", 0);
    return end(OK);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *size, Process *processes) {
    BEGIN(device);
    if (!json_get(json, "processes")) return end(NOT_SUPPORTED);
    unsigned running = json_number(json, "processes", 0), room = *size;
    *size = running;
    if (room < running) return end(INSUFFICIENT_SIZE);
    for (unsigned place = 0; place < running; ++place)
        processes[place] = (Process){1000 + place, 1 << 20, ~0u, ~0u};
    return end(OK);
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *errors) {
    BEGIN(device);
    const Json *values = json_get(json, "ecc");
    if (!values || type != 1) return end(NOT_SUPPORTED);
    *errors = json_number(values, counter ? "ever" : "since_driver", 0);
    return end(OK);
}

int nvmlDeviceGetRemappedRows(
    Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure) {
    BEGIN(device);
    const Json *values = json_get(json, "remapped_rows");
    if (!values) return end(NOT_SUPPORTED);
    *corrected = json_number(values, "corrected", 0);
    *uncorrected = json_number(values, "uncorrected", 0);
    *pending = json_number(values, "pending", 0);
    *failure = json_number(values, "failure", 0);
    return end(OK);
}

static int give_clock_reasons(const Json *json, unsigned long long *reasons) {
    if (!json_get(json, "clock_reasons")) return end(NOT_SUPPORTED);
    *reasons = json_number(json, "clock_reasons", 0);
    return end(OK);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device);
    return give_clock_reasons(json, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    BEGIN(device);
    return give_clock_reasons(json, reasons);
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
    BEGIN(device);
    return give_number(json, "power_mw", milliwatts);
}

int nvmlDeviceGetEnforcedPowerLimit(Device *device, unsigned *milliwatts) {
    BEGIN(device);
    return give_number(json, "power_limit_mw", milliwatts);
}

int nvmlDeviceGetTemperatureV(Device *device, Temperature *temperature) {
    BEGIN(device);
    if (temperature->version != (sizeof *temperature | 1u << 24)) return end(VERSION_MISMATCH);
    return give_number(json, "temperature", (unsigned *)&temperature->temperature);
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *temperature) {
    (void)sensor;
    BEGIN(device);
    return give_number(json, "temperature", temperature);
}

#define PCIE(name, key)                                    \
    int name(Device *device, unsigned *value) {            \
        BEGIN(device);                                     \
        return give_number(json_get(json, "pcie"), key, value); \
    }
PCIE(nvmlDeviceGetCurrPcieLinkGeneration, "generation")
PCIE(nvmlDeviceGetMaxPcieLinkGeneration, "generation_max")
PCIE(nvmlDeviceGetCurrPcieLinkWidth, "width")
PCIE(nvmlDeviceGetMaxPcieLinkWidth, "width_max")

/* -- NVLink, MIG, fabric, pairs -------------------------------------------------------------- */

#define NVLINK(device, number)                              \
    BEGIN(device);                                          \
    const Json *links = json_get(json, "nvlinks");          \
    if (!links) return end(NOT_SUPPORTED);                  \
    const Json *link = json_at(links, number);              \
    if (!link) return end(INVALID_ARGUMENT)

int nvmlDeviceGetNvLinkState(Device *device, unsigned number, unsigned *active) {
    NVLINK(device, number);
    return give_number(link, "active", active);
}

int nvmlDeviceGetNvLinkVersion(Device *device, unsigned number, unsigned *version) {
    NVLINK(device, number);
    return give_number(link, "version", version);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Device *device, unsigned number, unsigned *type) {
    NVLINK(device, number);
    return give_number(link, "remote_type", type);
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device *device, unsigned number, Pci *pci) {
    NVLINK(device, number);
    return give_pci(json_text(link, "remote_bus_id"), pci);
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    BEGIN(device);
    const Json *mig = json_get(json, "mig");
    if (!mig) return end(NOT_SUPPORTED);
    *current = json_number(mig, "enabled", 0);
    *pending = json_number(mig, "pending", *current);
    return end(OK);
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *most) {
    BEGIN(device);
    *most = json_get(json, "mig") ? MAX_INSTANCES - 1 : 0;
    return end(OK);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned place, Device **instance) {
    BEGIN(device);
    if (!json_at(json_get(json_get(json, "mig"), "instances"), place)) return end(NOT_FOUND);
    *instance = &instances[device->index][place];
    return end(OK);
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) {
    BEGIN(device);
    return give_number(json, "gpu_instance", id);
}

int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) {
    BEGIN(device);
    return give_number(json, "compute_instance", id);
}

static void fill_cluster(const Json *fabric, unsigned char *cluster) {
    const char *digits = json_text(fabric, "cluster");
    memset(cluster, 0, 16);
    for (int place = 0; digits && place < 16; ++place) {
        unsigned value = 0;
        sscanf(digits + 2 * place, "%2x", &value);
        cluster[place] = value;
    }
}

int nvmlDeviceGetGpuFabricInfo(Device *device, Fabric1 *info) {
    BEGIN(device);
    const Json *fabric = json_get(json, "fabric");
    if (!fabric) return end(NOT_SUPPORTED);
    fill_cluster(fabric, info->cluster);
    info->status = json_number(fabric, "status", 0);
    info->clique = json_number(fabric, "clique", 0);
    info->state = json_number(fabric, "state", 0);
    return end(OK);
}

int nvmlDeviceGetGpuFabricInfoV(Device *device, FabricV *info) {
    BEGIN(device);
    const Json *fabric = json_get(json, "fabric");
    if (!fabric) return end(NOT_SUPPORTED);
    unsigned version = info->version >> 24;
    if (version < 2 || version > json_number(description, "fabric_version", 3))
        return end(VERSION_MISMATCH);
    fill_cluster(fabric, info->cluster);
    info->status = json_number(fabric, "status", 0);
    info->clique = json_number(fabric, "clique", 0);
    info->state = json_number(fabric, "state", 0);
    info->mask = json_number(fabric, "mask", 0);
    if (version >= 3) info->summary = json_number(fabric, "summary", 0);
    return end(OK);
}

int nvmlDeviceGetTopologyCommonAncestor(Device *device, Device *other, int *level) {
    BEGIN(device);
    const Json *levels = json_get(json, "ancestors");
    const Json *found = json_at(levels, other->index);
    if (!found) return end(NOT_SUPPORTED);
    *level = found->number;
    return end(OK);
}

int nvmlDeviceGetP2PStatus(Device *device, Device *other, int capability, int *status) {
    (void)other;
    BEGIN(device);
    return give_number(json_get(json, "p2p"), capability == 2 ? "nvlink" : "read", (unsigned *)status);
}

/* -- Events ---------------------------------------------------------------------------------- */

static const Json *next_xid(unsigned long long after) {
    const Json *xids = json_get(description, "xids");
    for (const Json *xid = xids ? xids->first : NULL; xid; xid = xid->next)
        if (json_number(xid, "id", 0) > after) return xid;
    return NULL;
}

int nvmlEventSetCreate(EventSet **set) {
    BEGIN(NULL);
    *set = calloc(1, sizeof **set);
    for (const Json *xid; (xid = next_xid((*set)->last));) (*set)->last = json_number(xid, "id", 0);
    return end(OK);
}

int nvmlEventSetFree(EventSet *set) {
    BEGIN(NULL);
    free(set);
    return end(OK);
}

int nvmlDeviceGetSupportedEventTypes(Device *device, unsigned long long *types) {
    BEGIN(device);
    *types = json_number(json, "event_types", 0x1f);
    return end(OK);
}

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    BEGIN(device);
    if (!types) return end(NOT_SUPPORTED);
    set->registered |= 1ull << device->index;
    return end(OK);
}

int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms) {
    for (unsigned waited = 0; waited <= timeout_ms; waited += 10) {
        BEGIN(NULL);
        const Json *xid = next_xid(set->last);
        if (xid) {
            int index = json_number(xid, "device", 0);
            set->last = json_number(xid, "id", 0);
            if (set->registered & 1ull << index) {
                *event = (Event){&devices[index], EVENT_XID, json_number(xid, "xid", 0), ~0u, ~0u};
                return end(OK);
            }
        }
        end(OK);
        sleep_ms(10);
    }
    return TIMEOUT;
}
