/* Completion channels and completion queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "objects.h"

/* Room beyond what was asked for, as hardware rounds up too. */
enum { SPARE_COMPLETIONS = 16 };

/* ---- channels ---- */

SOFTIBV_API struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
    long error = atomic_load(&knobs.channel_errno);
    if (error != 0) {
        errno = (int)error;
        return NULL;
    }
    struct soft_channel *channel = calloc(1, sizeof *channel);
    int ends[2];
    if (channel == NULL || pipe2(ends, O_CLOEXEC) != 0) {
        free(channel);
        return NULL;
    }
    channel->base.context = context;
    channel->base.fd = ends[0];
    channel->writer = ends[1];
    return &channel->base;
}

SOFTIBV_API int ibv_destroy_comp_channel(struct ibv_comp_channel *base) {
    struct soft_channel *channel = (struct soft_channel *)base;
    close(channel->base.fd);
    close(channel->writer);
    free(channel);
    return 0;
}

/* An event on a channel is the address of the queue that has something. */
static void notify(struct ibv_cq *cq) {
    struct soft_channel *channel = (struct soft_channel *)cq->channel;
    if (channel != NULL && write(channel->writer, &cq, sizeof cq) != sizeof cq)
        perror("softibv: completion channel");
}

SOFTIBV_API int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq,
                                 void **cq_context) {
    if (read(channel->fd, cq, sizeof *cq) != sizeof *cq)
        return -1;
    *cq_context = (*cq)->cq_context;
    return 0;
}

SOFTIBV_API void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count) {
    (void)cq;
    (void)count;
}

/* ---- queues ---- */

SOFTIBV_API struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *cq_context,
                                         struct ibv_comp_channel *channel, int vector) {
    (void)vector;
    long error = atomic_load(&knobs.cq_errno);
    struct soft_cq *cq = error != 0 ? NULL : calloc(1, sizeof *cq);
    if (cq != NULL) {
        cq->capacity = entries + SPARE_COMPLETIONS;
        cq->completions = calloc((size_t)cq->capacity, sizeof *cq->completions);
    }
    if (cq == NULL || cq->completions == NULL) {
        free(cq);
        errno = error != 0 ? (int)error : ENOMEM;
        return NULL;
    }
    cq->base.context = context;
    cq->base.cq_context = cq_context;
    cq->base.channel = channel;
    cq->base.cqe = entries;
    pthread_mutex_init(&cq->lock, NULL);
    return &cq->base;
}

SOFTIBV_API int ibv_destroy_cq(struct ibv_cq *base) {
    struct soft_cq *cq = (struct soft_cq *)base;
    pthread_mutex_destroy(&cq->lock);
    free(cq->completions);
    free(cq);
    return 0;
}

/* A full completion queue is an error of the application; hardware reports it as an event. */
static void report_overrun(struct ibv_cq *cq) {
    struct ibv_async_event event = {.event_type = IBV_EVENT_CQ_ERR, .element.cq = cq};
    fprintf(stderr, "softibv: completion queue of %d entries overran\n", cq->cqe);
    context_deliver(cq->context, &event);
}

void cq_push(struct ibv_cq *base, const struct ibv_wc *completion) {
    struct soft_cq *cq = (struct soft_cq *)base;
    pthread_mutex_lock(&cq->lock);
    bool overrun = cq->count == cq->capacity;
    if (!overrun) {
        cq->completions[(cq->first + cq->count) % cq->capacity] = *completion;
        cq->count++;
    }
    bool wanted = cq->armed;
    cq->armed = false;
    pthread_mutex_unlock(&cq->lock);
    if (overrun)
        report_overrun(base);
    if (wanted)
        notify(base);
}

int cq_poll(struct ibv_cq *base, int count, struct ibv_wc *completions) {
    struct soft_cq *cq = (struct soft_cq *)base;
    int taken = 0;
    pthread_mutex_lock(&cq->lock);
    while (taken < count && cq->count > 0) {
        completions[taken++] = cq->completions[cq->first];
        cq->first = (cq->first + 1) % cq->capacity;
        cq->count--;
    }
    pthread_mutex_unlock(&cq->lock);
    return taken;
}

int cq_request_notification(struct ibv_cq *base, int solicited_only) {
    (void)solicited_only;
    struct soft_cq *cq = (struct soft_cq *)base;
    pthread_mutex_lock(&cq->lock);
    /* Hardware would stay silent about what is there already. Telling at once is allowed too, and
     * spares tests a lost wake-up that no NIC test could provoke on purpose. */
    bool pending = cq->count > 0;
    cq->armed = !pending;
    pthread_mutex_unlock(&cq->lock);
    if (pending)
        notify(base);
    return 0;
}
