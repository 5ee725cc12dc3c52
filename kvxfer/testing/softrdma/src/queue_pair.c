/* Queue pairs: their life, and the worker that works the send queue off in order. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "objects.h"
#include "thread.h"

/* In every failed completion, so that a log tells our errors from a NIC's. */
enum { VENDOR_ERROR = 0x50f7 };

pthread_mutex_t all_qps_lock = PTHREAD_MUTEX_INITIALIZER;
struct soft_qp *all_qps;

void qp_pause(struct soft_qp *qp, long ms) {
    pthread_mutex_lock(&qp->lock);
    if (!atomic_load(&qp->stop))
        cond_wait_us(&qp->wake, &qp->lock, ms * 1000);
    pthread_mutex_unlock(&qp->lock);
}

/* ---- the worker ---- */

static enum ibv_wc_opcode completion_opcode(enum ibv_wr_opcode opcode) {
    switch (opcode) {
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    case IBV_WR_RDMA_WRITE:
        return IBV_WC_RDMA_WRITE;
    default:
        return IBV_WC_SEND;
    }
}

/* Takes the oldest work request off the queue and reports how it went. The lock is held. */
static void retire(struct soft_qp *qp, const struct send_work *work, enum ibv_wc_status status) {
    qp->send_first = (qp->send_first + 1) % qp->send_capacity;
    qp->send_count--;
    if (status == IBV_WC_SUCCESS) {
        atomic_fetch_add(&counters.executed, 1);
    } else if (status == IBV_WC_WR_FLUSH_ERR) {
        atomic_fetch_add(&counters.flushed, 1);
    } else {
        atomic_fetch_add(&counters.failed, 1);
    }
    if (status != IBV_WC_SUCCESS && atomic_exchange(&qp->entry->state, IBV_QPS_ERR) != IBV_QPS_ERR)
        doorbell_ring(); /* our receiver flushes the receive queue */
    if (status == IBV_WC_SUCCESS && !work->signaled)
        return;
    struct ibv_wc completion = {
        .wr_id = work->id,
        .status = status,
        .opcode = completion_opcode(work->opcode),
        .vendor_err = status == IBV_WC_SUCCESS ? 0 : VENDOR_ERROR,
        .qp_num = qp->base.qp_num,
    };
    cq_push(qp->base.send_cq, &completion);
}

static void *worker_main(void *argument) {
    struct soft_qp *qp = argument;
    pthread_mutex_lock(&qp->lock);
    while (!atomic_load(&qp->stop)) {
        if (qp->send_count == 0) {
            pthread_cond_wait(&qp->wake, &qp->lock);
            continue;
        }
        struct send_work work = qp->sends[qp->send_first];
        pthread_mutex_unlock(&qp->lock);
        enum ibv_wc_status status = transfer_execute(qp, &work);
        pthread_mutex_lock(&qp->lock);
        if (!atomic_load(&qp->stop))
            retire(qp, &work, status);
    }
    pthread_mutex_unlock(&qp->lock);
    return NULL;
}

static void worker_stop(struct soft_qp *qp) {
    pthread_mutex_lock(&qp->lock);
    atomic_store(&qp->stop, true);
    pthread_cond_broadcast(&qp->wake);
    pthread_mutex_unlock(&qp->lock);
    faults_wake(); /* it may wait at the gate */
    if (qp->worker_runs)
        pthread_join(qp->worker, NULL);
}

/* ---- create, destroy ---- */

static int check_capabilities(const struct ibv_qp_init_attr *attributes) {
    long error = atomic_load(&knobs.qp_errno);
    if (error != 0)
        return (int)error;
    if (attributes->qp_type != IBV_QPT_RC || attributes->srq != NULL)
        return EOPNOTSUPP;
    const struct ibv_qp_cap *cap = &attributes->cap;
    if (cap->max_send_wr > (unsigned long)atomic_load(&knobs.max_wr) ||
        cap->max_send_sge > MAX_SGE || cap->max_inline_data > MESSAGE_BYTES)
        return EINVAL;
    return 0;
}

static struct soft_qp *allocate(const struct ibv_qp_cap *cap) {
    struct soft_qp *qp = calloc(1, sizeof *qp);
    if (qp == NULL)
        return NULL;
    qp->max_sge = (int)cap->max_send_sge;
    qp->peer_pidfd = -1;
    qp->send_capacity = cap->max_send_wr > 0 ? cap->max_send_wr : 1;
    qp->receive_capacity = cap->max_recv_wr > 0 ? cap->max_recv_wr : 1;
    qp->sends = calloc(qp->send_capacity, sizeof *qp->sends);
    qp->receives = calloc(qp->receive_capacity, sizeof *qp->receives);
    uint32_t number = 0;
    if (qp->sends != NULL && qp->receives != NULL)
        qp->entry = table_claim_queue_pair(&number);
    if (qp->entry == NULL) {
        free(qp->sends);
        free(qp->receives);
        free(qp);
        return NULL;
    }
    qp->base.qp_num = number;
    pthread_mutex_init(&qp->lock, NULL);
    pthread_cond_init(&qp->wake, NULL);
    return qp;
}

static void release(struct soft_qp *qp) {
    atomic_store(&qp->entry->number, 0);
    if (qp->peer_pidfd >= 0)
        close(qp->peer_pidfd);
    pthread_mutex_destroy(&qp->lock);
    pthread_cond_destroy(&qp->wake);
    free(qp->sends);
    free(qp->receives);
    free(qp);
}

SOFTIBV_API struct ibv_qp *ibv_create_qp(struct ibv_pd *domain,
                                         struct ibv_qp_init_attr *attributes) {
    int error = check_capabilities(attributes);
    struct soft_qp *qp = error != 0 ? NULL : allocate(&attributes->cap);
    if (error == 0)
        error = qp == NULL ? ENOMEM : receiver_acquire();
    if (error != 0) {
        if (qp != NULL)
            release(qp);
        errno = error;
        return NULL;
    }
    qp->base.context = domain->context;
    qp->base.pd = domain;
    qp->base.send_cq = attributes->send_cq;
    qp->base.recv_cq = attributes->recv_cq;
    qp->base.qp_type = attributes->qp_type;
    qp->base.state = IBV_QPS_RESET;
    pthread_mutex_lock(&all_qps_lock);
    qp->next = all_qps;
    all_qps = qp;
    pthread_mutex_unlock(&all_qps_lock);
    atomic_fetch_add(&counters.queue_pairs, 1);
    return &qp->base;
}

SOFTIBV_API int ibv_destroy_qp(struct ibv_qp *base) {
    struct soft_qp *qp = (struct soft_qp *)base;
    pthread_mutex_lock(&all_qps_lock);
    struct soft_qp **link = &all_qps;
    while (*link != NULL && *link != qp)
        link = &(*link)->next;
    if (*link != NULL)
        *link = qp->next;
    pthread_mutex_unlock(&all_qps_lock);

    worker_stop(qp);
    /* From here on no peer starts on it, and once nobody names it nothing lands through it. */
    atomic_store(&qp->entry->state, IBV_QPS_RESET);
    table_wait_queue_pair_untouched(qp->base.qp_num);
    release(qp);
    receiver_release();
    atomic_fetch_sub(&counters.queue_pairs, 1);
    return 0;
}

/* ---- state changes ---- */

static long injected_errno(enum ibv_qp_state wanted) {
    switch (wanted) {
    case IBV_QPS_INIT:
        return atomic_load(&knobs.init_errno);
    case IBV_QPS_RTR:
        return atomic_load(&knobs.rtr_errno);
    case IBV_QPS_RTS:
        return atomic_load(&knobs.rts_errno);
    default:
        return 0;
    }
}

static bool may_follow(enum ibv_qp_state current, enum ibv_qp_state wanted) {
    switch (wanted) {
    case IBV_QPS_RESET:
    case IBV_QPS_ERR:
        return true;
    case IBV_QPS_INIT:
        return current == IBV_QPS_RESET || current == IBV_QPS_INIT;
    case IBV_QPS_RTR:
        return current == IBV_QPS_INIT;
    case IBV_QPS_RTS:
        return current == IBV_QPS_RTR || current == IBV_QPS_RTS;
    default:
        return false;
    }
}

/* The time the transport takes to give up on a silent peer: 4.096 us * 2^timeout per try, the
 * first one included (InfiniBand specification, local ACK timeout). 0: never. */
static uint32_t retry_budget_ms(const struct ibv_qp_attr *attributes) {
    if (attributes->timeout == 0)
        return 0;
    uint64_t try_ns = 4096ull << attributes->timeout;
    uint64_t budget_ms = try_ns * (attributes->retry_cnt + 1ull) / 1000000;
    return budget_ms > 0 ? (uint32_t)budget_ms : 1;
}

static int change_state(struct soft_qp *qp, enum ibv_qp_state wanted) {
    long error = injected_errno(wanted);
    if (error != 0)
        return (int)error;
    uint32_t current = atomic_load(&qp->entry->state);
    if (!may_follow(current, wanted))
        return EINVAL;
    if (wanted == IBV_QPS_RTS && !qp->worker_runs) {
        int failed = thread_start(&qp->worker, "softibv-send", worker_main, qp);
        if (failed != 0)
            return failed;
        qp->worker_runs = true;
    }
    /* A peer may have broken the connection meanwhile; that must not be undone. */
    if (!atomic_compare_exchange_strong(&qp->entry->state, &current, wanted) &&
        wanted != IBV_QPS_ERR && wanted != IBV_QPS_RESET)
        return EINVAL;
    if (wanted == IBV_QPS_ERR || wanted == IBV_QPS_RESET) {
        atomic_store(&qp->entry->state, wanted);
        table_wait_queue_pair_untouched(qp->base.qp_num);
    }
    qp->base.state = wanted;
    doorbell_ring(); /* messages that came early, or receives to flush */
    return 0;
}

SOFTIBV_API int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attributes, int mask) {
    struct soft_qp *qp = (struct soft_qp *)base;
    if (mask & IBV_QP_DEST_QPN)
        atomic_store(&qp->entry->peer_number, attributes->dest_qp_num);
    if (mask & IBV_QP_TIMEOUT)
        qp->retry_ms = retry_budget_ms(attributes);
    return mask & IBV_QP_STATE ? change_state(qp, attributes->qp_state) : 0;
}

SOFTIBV_API int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attributes, int mask,
                             struct ibv_qp_init_attr *initial) {
    (void)mask;
    const struct soft_qp *qp = (const struct soft_qp *)base;
    memset(attributes, 0, sizeof *attributes);
    attributes->qp_state = atomic_load(&qp->entry->state);
    attributes->dest_qp_num = atomic_load(&qp->entry->peer_number);
    attributes->cap.max_send_wr = qp->send_capacity;
    attributes->cap.max_recv_wr = qp->receive_capacity;
    attributes->cap.max_send_sge = (uint32_t)qp->max_sge;
    attributes->cap.max_inline_data = MESSAGE_BYTES;
    if (initial != NULL) {
        memset(initial, 0, sizeof *initial);
        initial->send_cq = base->send_cq;
        initial->recv_cq = base->recv_cq;
        initial->cap = attributes->cap;
        initial->qp_type = base->qp_type;
    }
    return 0;
}

/* Shared receive queues do not exist here. */
SOFTIBV_API struct ibv_srq *ibv_create_srq(struct ibv_pd *domain,
                                           struct ibv_srq_init_attr *attributes) {
    (void)domain;
    (void)attributes;
    errno = EOPNOTSUPP;
    return NULL;
}

SOFTIBV_API int ibv_destroy_srq(struct ibv_srq *queue) {
    (void)queue;
    return EINVAL;
}
