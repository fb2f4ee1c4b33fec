/* A stand-in for libnvidia-ml.so.1: two devices whose answers a test sets. -1: "not supported". */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, TIMEOUT = 10, LOST = 15 };
enum { DEVICES = 2, VALUES = 32, XIDS = 8 };

/* Values of a device, in the order of NAMES in stand_in.py. */
enum {
    UNCORRECTED, RETIRED, REMAP_PENDING, REMAP_FAILED, REASONS, OLD_REASONS, LINKS, LINK_ERRORS,
    WIDTH, MAX_WIDTH, GENERATION, MAX_GENERATION, CELSIUS, MAX_CELSIUS, IS_LOST
};

typedef struct { int64_t values[VALUES]; uint64_t xids[XIDS]; int num_xids; } Device;
static Device devices[DEVICES];
static int inits, shutdowns, registered;

void stand_in_set(int device, int value, int64_t to) { devices[device].values[value] = to; }
void stand_in_xid(int device, uint64_t xid) { devices[device].xids[devices[device].num_xids++] = xid; }
int stand_in_connections(void) { return inits - shutdowns; }
int stand_in_looks(void) { return registered; }

static int answer(Device *device, int value, unsigned *to) {
    if (device->values[value] < 0) return NOT_SUPPORTED;
    *to = (unsigned)device->values[value];
    return SUCCESS;
}

static int answer_long(Device *device, int value, unsigned long long *to) {
    if (device->values[value] < 0) return NOT_SUPPORTED;
    *to = (unsigned long long)device->values[value];
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; inits++; return SUCCESS; }
int nvmlShutdown(void) { shutdowns++; return SUCCESS; }
const char *nvmlErrorString(int code) { return code == LOST ? "GPU is lost" : "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = DEVICES; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
    if (index >= DEVICES) return INVALID;
    *device = devices + index;
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    if (strncmp(uuid, "GPU-", 4) || uuid[4] < '0' || uuid[4] >= '0' + DEVICES) return INVALID;
    *device = devices + (uuid[4] - '0');
    return SUCCESS;
}

int nvmlDeviceGetIndex(Device *device, unsigned *index) {
    if (device->values[IS_LOST] > 0) return LOST;
    *index = (unsigned)(device - devices);
    return SUCCESS;
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
    (void)device;
    strncpy(name, "NVIDIA Stand-in", size);
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
    if (type != 1 || counter != 0) return INVALID; /* uncorrected, since the driver was loaded */
    return answer_long(device, UNCORRECTED, count);
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned *pending) { return answer(device, RETIRED, pending); }

int nvmlDeviceGetRemappedRows(Device *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    *corrected = *uncorrected = 7; /* that is past */
    int code = answer(device, REMAP_PENDING, pending);
    return code ? code : answer(device, REMAP_FAILED, failed);
}

int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
    return answer_long(device, REASONS, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
    return answer_long(device, OLD_REASONS, reasons);
}

int nvmlDeviceGetNvLinkState(Device *device, unsigned link, unsigned *active) {
    if ((int64_t)link >= device->values[LINKS]) return NOT_SUPPORTED;
    *active = 1;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkErrorCounter(Device *device, unsigned link, int counter, unsigned long long *count) {
    if (link == 1 && counter == 1) return answer_long(device, LINK_ERRORS, count);
    *count = 0;
    return counter < 4 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrPcieLinkWidth(Device *device, unsigned *to) { return answer(device, WIDTH, to); }
int nvmlDeviceGetMaxPcieLinkWidth(Device *device, unsigned *to) { return answer(device, MAX_WIDTH, to); }
int nvmlDeviceGetCurrPcieLinkGeneration(Device *device, unsigned *to) { return answer(device, GENERATION, to); }
int nvmlDeviceGetMaxPcieLinkGeneration(Device *device, unsigned *to) { return answer(device, MAX_GENERATION, to); }

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *to) {
    return sensor == 0 ? answer(device, CELSIUS, to) : INVALID;
}

int nvmlDeviceGetTemperatureThreshold(Device *device, int kind, unsigned *to) {
    return kind == 3 ? answer(device, MAX_CELSIUS, to) : INVALID;
}

typedef struct { Device *device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } Event;
typedef struct { Device *device; } EventSet;
static EventSet sets[256];

int nvmlEventSetCreate(EventSet **set) { *set = sets + registered % 256; return SUCCESS; }

int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
    if (types != 8) return INVALID; /* critical Xid errors */
    registered++;
    set->device = device;
    return SUCCESS;
}

int nvmlEventSetWait_v2(EventSet *set, Event *event, unsigned timeout_ms) {
    Device *device = set->device;
    if (timeout_ms != 0 || !device || !device->num_xids) return TIMEOUT;
    memset(event, 0, sizeof *event);
    event->device = device;
    event->type = 8;
    event->data = device->xids[--device->num_xids];
    return SUCCESS;
}
