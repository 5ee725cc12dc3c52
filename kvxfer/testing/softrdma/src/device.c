/* Devices, their contexts, ports and addresses, and asynchronous events. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "objects.h"

enum { MAX_DEVICES = 4, PHYSICAL_STATE_DISABLED = 3, PHYSICAL_STATE_LINK_UP = 5 };

static struct ibv_device devices[MAX_DEVICES];

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct soft_context *contexts;

/* ---- the device list ---- */

/* The directory this library was loaded from. */
static void library_directory(char *path, size_t size) {
    Dl_info info;
    snprintf(path, size, ".");
    if (dladdr((void *)library_directory, &info) == 0 || info.dli_fname == NULL)
        return;
    snprintf(path, size, "%s", info.dli_fname);
    char *slash = strrchr(path, '/');
    if (slash != NULL)
        *slash = '\0';
    else
        snprintf(path, size, ".");
}

static void fill_in_devices(void) {
    char directory[IBV_SYSFS_PATH_MAX - 16];
    library_directory(directory, sizeof directory);
    for (int i = 0; i < MAX_DEVICES; i++) {
        struct ibv_device *device = &devices[i];
        device->node_type = IBV_NODE_CA;
        device->transport_type = IBV_TRANSPORT_IB;
        snprintf(device->name, sizeof device->name, "soft%d", i);
        snprintf(device->dev_name, sizeof device->dev_name, "uverbs%d", i);
        /* mori walks up this path until a component is a PCI address, and spins for ever on a
         * device that has none. */
        snprintf(device->ibdev_path, sizeof device->ibdev_path, "%s/0000:00:%02x.0", directory,
                 i + 1);
        mkdir(device->ibdev_path, 0755); /* usually there since the installation */
    }
}

SOFTIBV_API struct ibv_device **ibv_get_device_list(int *count) {
    static pthread_once_t filled_in = PTHREAD_ONCE_INIT;
    faults_init();
    pthread_once(&filled_in, fill_in_devices);
    int error = table == NULL ? table_attach(NULL, false) : 0;
    if (error != 0) {
        fprintf(stderr, "softibv: cannot attach to the shared table: %s\n", strerror(error));
        errno = error;
        return NULL;
    }
    long wanted = atomic_load(&knobs.devices);
    int present = wanted < 0 ? 0 : wanted > MAX_DEVICES ? MAX_DEVICES : (int)wanted;
    struct ibv_device **list = calloc(MAX_DEVICES + 1, sizeof *list);
    if (list == NULL)
        return NULL;
    for (int i = 0; i < present; i++)
        list[i] = &devices[i];
    if (count != NULL)
        *count = present;
    return list;
}

SOFTIBV_API void ibv_free_device_list(struct ibv_device **list) {
    free(list);
}

/* ---- contexts ---- */

SOFTIBV_API struct ibv_context *ibv_open_device(struct ibv_device *device) {
    struct soft_context *context = calloc(1, sizeof *context);
    int events[2];
    if (context == NULL || pipe2(events, O_CLOEXEC) != 0) {
        free(context);
        return NULL;
    }
    fcntl(events[1], F_SETFL, O_NONBLOCK); /* nobody reads: events are lost, we do not hang */
    context->base.device = device;
    context->base.cmd_fd = -1;
    context->base.async_fd = events[0];
    context->base.num_comp_vectors = 1;
    context->base.ops.poll_cq = cq_poll;
    context->base.ops.req_notify_cq = cq_request_notification;
    context->base.ops.post_send = qp_post_send;
    context->base.ops.post_recv = qp_post_receive;
    context->event_writer = events[1];
    pthread_mutex_lock(&contexts_lock);
    context->next = contexts;
    contexts = context;
    pthread_mutex_unlock(&contexts_lock);
    return &context->base;
}

SOFTIBV_API int ibv_close_device(struct ibv_context *base) {
    struct soft_context *context = (struct soft_context *)base;
    pthread_mutex_lock(&contexts_lock);
    struct soft_context **link = &contexts;
    while (*link != NULL && *link != context)
        link = &(*link)->next;
    if (*link != NULL)
        *link = context->next;
    pthread_mutex_unlock(&contexts_lock);
    close(context->base.async_fd);
    close(context->event_writer);
    free(context);
    return 0;
}

/* ---- attributes ---- */

SOFTIBV_API int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes) {
    (void)context;
    memset(attributes, 0, sizeof *attributes);
    snprintf(attributes->fw_ver, sizeof attributes->fw_ver, "soft");
    attributes->max_mr_size = UINT64_MAX;
    attributes->max_qp = MAX_QUEUE_PAIRS;
    attributes->max_qp_wr = (int)atomic_load(&knobs.max_wr);
    attributes->max_sge = MAX_SGE;
    attributes->max_cq = 4096;
    attributes->max_cqe = 65536;
    attributes->max_mr = MAX_REGIONS;
    attributes->max_pd = 1024;
    attributes->max_qp_rd_atom = 128;
    attributes->max_qp_init_rd_atom = 128;
    attributes->phys_port_cnt = 1;
    return 0;
}

SOFTIBV_API int ibv_query_port(struct ibv_context *context, uint8_t port,
                               struct _compat_ibv_port_attr *result) {
    (void)context;
    (void)port;
    bool down = atomic_load(&knobs.port_down) != 0;
    struct ibv_port_attr attributes = {
        .state = down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
        .phys_state = down ? PHYSICAL_STATE_DISABLED : PHYSICAL_STATE_LINK_UP,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = IBV_MTU_4096,
        .gid_tbl_len = 1,
        .max_msg_sz = (uint32_t)atomic_load(&knobs.max_msg),
        .active_width = 2,
        .active_speed = 1,
        .link_layer = IBV_LINK_LAYER_ETHERNET,
    };
    /* Callers of this symbol know the struct without its newest fields. */
    memcpy(result, &attributes, offsetof(struct ibv_port_attr, port_cap_flags2));
    return 0;
}

/* The RoCE v2 address of device N is 127.0.0.(N+1), as an IPv4-mapped one. */
static void address_of(const struct ibv_context *context, union ibv_gid *gid) {
    memset(gid, 0, sizeof *gid);
    gid->raw[10] = 0xff;
    gid->raw[11] = 0xff;
    gid->raw[12] = 127;
    gid->raw[15] = (uint8_t)(context->device - devices + 1);
}

SOFTIBV_API int ibv_query_gid(struct ibv_context *context, uint8_t port, int index,
                              union ibv_gid *gid) {
    (void)port;
    if (index != 0) {
        errno = EINVAL;
        return -1;
    }
    address_of(context, gid);
    return 0;
}

SOFTIBV_API int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index,
                                  struct ibv_gid_entry *entry, uint32_t flags, size_t size) {
    (void)flags;
    if (index != 0)
        return ENODATA;
    memset(entry, 0, size);
    address_of(context, &entry->gid);
    entry->gid_index = index;
    entry->port_num = port;
    entry->gid_type = IBV_GID_TYPE_ROCE_V2;
    return 0;
}

/* ---- asynchronous events ---- */

bool context_deliver(struct ibv_context *base, const struct ibv_async_event *event) {
    struct soft_context *context = (struct soft_context *)base;
    return write(context->event_writer, event, sizeof *event) == sizeof *event;
}

SOFTIBV_API int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
    ssize_t length = read(context->async_fd, event, sizeof *event);
    if (length == sizeof *event)
        return 0;
    if (length >= 0)
        errno = EAGAIN;
    return -1;
}

SOFTIBV_API void ibv_ack_async_event(struct ibv_async_event *event) {
    (void)event;
}

static int deliver_to_queue_pairs(enum ibv_event_type type) {
    int delivered = 0;
    pthread_mutex_lock(&all_qps_lock);
    for (struct soft_qp *qp = all_qps; qp != NULL; qp = qp->next) {
        struct ibv_async_event event = {.event_type = type};
        if (type == IBV_EVENT_CQ_ERR)
            event.element.cq = qp->base.send_cq;
        else
            event.element.qp = &qp->base;
        delivered += context_deliver(qp->base.context, &event);
    }
    pthread_mutex_unlock(&all_qps_lock);
    return delivered;
}

static int deliver_to_contexts(enum ibv_event_type type) {
    int delivered = 0;
    struct ibv_async_event event = {.event_type = type, .element.port_num = 1};
    pthread_mutex_lock(&contexts_lock);
    for (struct soft_context *context = contexts; context != NULL; context = context->next)
        delivered += context_deliver(&context->base, &event);
    pthread_mutex_unlock(&contexts_lock);
    return delivered;
}

int softibv_async(int event_type) {
    switch (event_type) {
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return deliver_to_queue_pairs((enum ibv_event_type)event_type);
    default:
        return deliver_to_contexts((enum ibv_event_type)event_type);
    }
}
