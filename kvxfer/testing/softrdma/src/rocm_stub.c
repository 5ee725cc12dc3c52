/* Stand-ins for the few ROCm, PCI and NUMA functions whose answer mori looks at when it runs on a
 * machine without a GPU. Every other function that the wheel links against gets a generated stub
 * that returns an error (see stubs.py). The signatures are ours: only the calling convention
 * matters, and none of the real headers are needed. */
#include <stdbool.h>
#include <stdint.h>

enum { HIP_ERROR_NO_DEVICE = 100, RSMI_OK = 0, RSMI_NOT_AVAILABLE = 1 };

/* What every generated stub jumps to: an error for the libraries whose functions return one. */
int stub_unavailable(void) {
    return HIP_ERROR_NO_DEVICE;
}

/* ---- HIP: no device, but a text to every error ---- */

const char *hipGetErrorString(int error) {
    (void)error;
    return "stub HIP: no device";
}

const char *hipGetErrorName(int error) {
    (void)error;
    return "hipErrorNoDevice";
}

int hipGetDeviceCount(int *count) {
    if (count)
        *count = 0;
    return HIP_ERROR_NO_DEVICE;
}

int hipGetLastError(void) {
    return 0;
}

/* Called by static initialisers of the wheel, which keep the handle. */
void **__hipRegisterFatBinary(const void *data) {
    static void *handle;
    (void)data;
    return &handle;
}

/* ---- ROCm SMI: one GPU, because mori ends the process when there is none ---- */

int rsmi_init(uint64_t flags) {
    (void)flags;
    return RSMI_OK;
}

int rsmi_shut_down(void) {
    return RSMI_OK;
}

int rsmi_num_monitor_devices(uint32_t *count) {
    *count = 1;
    return RSMI_OK;
}

int rsmi_dev_pci_id_get(uint32_t index, uint64_t *bus_id) {
    (void)index;
    *bus_id = 0x100; /* 0000:01:00.0 */
    return RSMI_OK;
}

int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, bool *accessible) {
    (void)from;
    (void)to;
    *accessible = false;
    return RSMI_OK;
}

int rsmi_topo_get_link_type(void) {
    return RSMI_NOT_AVAILABLE;
}

int rsmi_topo_get_link_weight(void) {
    return RSMI_NOT_AVAILABLE;
}

int rsmi_status_string(int status, const char **text) {
    (void)status;
    *text = "stub";
    return RSMI_OK;
}

/* ---- libpci: an empty bus (the real one ends the process on a machine without PCI) ---- */

void *pci_alloc(void) {
    static long access_struct[1024]; /* all zero: no devices, no methods */
    return access_struct;
}

/* ---- libnuma: not available ---- */

int numa_available(void) {
    return -1;
}
