/* Posting work requests: what a queue pair accepts, and copying it into its queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "objects.h"

static int check_send(const struct soft_qp *qp, const struct ibv_send_wr *work) {
    if (qp->send_count == qp->send_capacity)
        return ENOMEM;
    if (work->num_sge > qp->max_sge)
        return EINVAL;
    switch (work->opcode) {
    case IBV_WR_RDMA_READ:
    case IBV_WR_RDMA_WRITE:
        return 0;
    case IBV_WR_SEND:
        return work->num_sge == 1 && work->sg_list[0].length <= MESSAGE_BYTES ? 0 : EINVAL;
    default:
        return EOPNOTSUPP;
    }
}

static void enqueue_send(struct soft_qp *qp, const struct ibv_send_wr *work) {
    uint32_t slot = (qp->send_first + qp->send_count) % qp->send_capacity;
    struct send_work *copy = &qp->sends[slot];
    copy->id = work->wr_id;
    copy->opcode = work->opcode;
    copy->signaled = (work->send_flags & IBV_SEND_SIGNALED) != 0;
    copy->remote_address = work->wr.rdma.remote_addr;
    copy->remote_key = work->wr.rdma.rkey;
    copy->sge_count = work->num_sge;
    memcpy(copy->sge, work->sg_list, (size_t)work->num_sge * sizeof *work->sg_list);
    if (work->opcode == IBV_WR_SEND) {
        copy->message_length = work->sg_list[0].length;
        memcpy(copy->message, (const void *)work->sg_list[0].addr, copy->message_length);
    }
    qp->send_count++;
    atomic_fetch_add(&counters.posted, 1);
}

/* A slot of the send queue is free again as soon as its work request is carried out; hardware
 * frees it when a later signaled completion is polled. mori keeps its own count of the depth. */
int qp_post_send(struct ibv_qp *base, struct ibv_send_wr *work, struct ibv_send_wr **refused) {
    struct soft_qp *qp = (struct soft_qp *)base;
    uint32_t state = atomic_load(&qp->entry->state);
    int error = state == IBV_QPS_RTS || state == IBV_QPS_ERR ? 0 : EINVAL;
    pthread_mutex_lock(&qp->lock);
    for (; error == 0 && work != NULL; work = work->next) {
        error = faults_take_refusal();
        if (error == 0)
            error = check_send(qp, work);
        if (error != 0)
            break;
        enqueue_send(qp, work);
    }
    pthread_cond_broadcast(&qp->wake);
    pthread_mutex_unlock(&qp->lock);
    if (error != 0) {
        *refused = work;
        atomic_fetch_add(&counters.refused, 1);
    }
    return error;
}

int qp_post_receive(struct ibv_qp *base, struct ibv_recv_wr *work, struct ibv_recv_wr **refused) {
    struct soft_qp *qp = (struct soft_qp *)base;
    int error = 0;
    pthread_mutex_lock(&qp->lock);
    for (; work != NULL; work = work->next) {
        if (qp->receive_count == qp->receive_capacity) {
            error = ENOMEM;
            break;
        }
        if (work->num_sge > 1) {
            error = EINVAL;
            break;
        }
        uint32_t slot = (qp->receive_first + qp->receive_count) % qp->receive_capacity;
        struct receive_work *copy = &qp->receives[slot];
        memset(copy, 0, sizeof *copy);
        copy->id = work->wr_id;
        if (work->num_sge == 1)
            copy->sge = work->sg_list[0];
        qp->receive_count++;
    }
    bool wanted = atomic_load(&qp->entry->head) != atomic_load(&qp->entry->tail) ||
                  atomic_load(&qp->entry->state) == IBV_QPS_ERR;
    pthread_mutex_unlock(&qp->lock);
    if (error != 0)
        *refused = work;
    if (wanted)
        doorbell_ring(); /* a message waits for it, or it must be flushed */
    return error;
}
