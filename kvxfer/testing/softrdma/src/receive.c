/* The receiver: one thread per process that delivers messages to posted receives and notices queue
 * pairs that a peer broke. It is apart from the workers, so that a held or delayed send queue does
 * not keep messages from arriving. */
#define _GNU_SOURCE
#include <string.h>

#include "objects.h"
#include "thread.h"

/* Every change is announced by the doorbell; looking now and then costs nothing. */
enum { IDLE_CHECK_MS = 200 };

static pthread_mutex_t receiver_lock = PTHREAD_MUTEX_INITIALIZER;
static int users;
static pthread_t receiver;
static atomic_bool stop;

static struct receive_work take_receive(struct soft_qp *qp) {
    struct receive_work work = qp->receives[qp->receive_first];
    qp->receive_first = (qp->receive_first + 1) % qp->receive_capacity;
    qp->receive_count--;
    return work;
}

static void complete_receive(struct soft_qp *qp, const struct receive_work *work,
                             enum ibv_wc_status status, uint32_t length) {
    struct ibv_wc completion = {
        .wr_id = work->id,
        .status = status,
        .opcode = IBV_WC_RECV,
        .byte_len = length,
        .qp_num = qp->base.qp_num,
    };
    cq_push(qp->base.recv_cq, &completion);
}

static void deliver_message(struct soft_qp *qp) {
    uint32_t tail = atomic_load(&qp->entry->tail);
    const struct message *message = table_message(qp->entry, tail);
    struct receive_work work = take_receive(qp);
    uint32_t length = message->length;
    if (length > work.sge.length) {
        complete_receive(qp, &work, IBV_WC_LOC_LEN_ERR, 0);
        atomic_store(&qp->entry->state, IBV_QPS_ERR);
        return;
    }
    memcpy((void *)work.sge.addr, message->bytes, length);
    atomic_store(&qp->entry->tail, tail + 1);
    complete_receive(qp, &work, IBV_WC_SUCCESS, length);
}

static bool message_waits(const struct soft_qp *qp) {
    uint32_t state = atomic_load(&qp->entry->state);
    return (state == IBV_QPS_RTR || state == IBV_QPS_RTS) &&
           atomic_load(&qp->entry->head) != atomic_load(&qp->entry->tail);
}

static void serve(struct soft_qp *qp) {
    pthread_mutex_lock(&qp->lock);
    while (qp->receive_count > 0 && message_waits(qp))
        deliver_message(qp);
    if (atomic_load(&qp->entry->state) == IBV_QPS_ERR) {
        while (qp->receive_count > 0) {
            struct receive_work work = take_receive(qp);
            complete_receive(qp, &work, IBV_WC_WR_FLUSH_ERR, 0);
        }
        pthread_cond_broadcast(&qp->wake); /* the worker may be trying to reach the peer */
    }
    pthread_mutex_unlock(&qp->lock);
}

static void *receiver_main(void *argument) {
    (void)argument;
    while (!atomic_load(&stop)) {
        uint32_t seen = doorbell_read();
        pthread_mutex_lock(&all_qps_lock);
        for (struct soft_qp *qp = all_qps; qp != NULL; qp = qp->next)
            serve(qp);
        pthread_mutex_unlock(&all_qps_lock);
        if (!atomic_load(&stop))
            doorbell_wait(seen, IDLE_CHECK_MS);
    }
    return NULL;
}

int receiver_acquire(void) {
    int error = 0;
    pthread_mutex_lock(&receiver_lock);
    if (users == 0) {
        atomic_store(&stop, false);
        error = thread_start(&receiver, "softibv-recv", receiver_main, NULL);
    }
    if (error == 0)
        users++;
    pthread_mutex_unlock(&receiver_lock);
    return error;
}

void receiver_release(void) {
    pthread_mutex_lock(&receiver_lock);
    if (--users == 0) {
        atomic_store(&stop, true);
        doorbell_ring();
        pthread_join(receiver, NULL);
    }
    pthread_mutex_unlock(&receiver_lock);
}
