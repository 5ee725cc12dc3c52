/* Carrying out one work request: reach the peer, check both ends, move the bytes. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "objects.h"
#include "thread.h"

enum { RETRY_INTERVAL_MS = 1 };

static bool is_connected(uint32_t state) {
    return state == IBV_QPS_RTR || state == IBV_QPS_RTS;
}

static bool own_queue_pair_in_error(const struct soft_qp *qp) {
    return atomic_load(&qp->entry->state) == IBV_QPS_ERR;
}

/* ---- reaching the peer ---- */

static bool peer_process_lives(struct soft_qp *qp, const struct qp_entry *peer) {
    if (qp->peer_pidfd < 0)
        qp->peer_pidfd = process_open(&peer->owner);
    if (qp->peer_pidfd < 0)
        return !process_is_gone(&peer->owner);
    return !process_fd_ended(qp->peer_pidfd);
}

/* The peer's queue pair if it would answer: connected to us, and its process is alive. A stopped
 * process answers: nothing of this needs its CPU. */
static struct qp_entry *answering_peer(struct soft_qp *qp) {
    struct qp_entry *peer = table_find_queue_pair(atomic_load(&qp->entry->peer_number));
    if (peer == NULL || !is_connected(atomic_load(&peer->state)))
        return NULL;
    if (atomic_load(&peer->peer_number) != qp->base.qp_num)
        return NULL;
    return peer_process_lives(qp, peer) ? peer : NULL;
}

/* Tries as long as the transport would. NULL: the peer never answered. */
static struct qp_entry *reach_peer(struct soft_qp *qp) {
    long forced = atomic_load(&knobs.retry_ms);
    bool for_ever = forced < 0 && qp->retry_ms == 0;
    long deadline = now_ms() + (forced >= 0 ? forced : (long)qp->retry_ms);
    for (;;) {
        struct qp_entry *peer = answering_peer(qp);
        if (peer != NULL || atomic_load(&qp->stop) || own_queue_pair_in_error(qp))
            return peer;
        if (!for_ever && now_ms() >= deadline)
            return NULL;
        qp_pause(qp, RETRY_INTERVAL_MS);
    }
}

/* What an unreachable peer means for the work request. */
static enum ibv_wc_status unreachable(const struct soft_qp *qp) {
    return own_queue_pair_in_error(qp) ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RETRY_EXC_ERR;
}

/* ---- SEND ---- */

/* Puts the message where the peer's receiver finds it. When the ring is full the sender waits, as
 * with an infinite RNR retry count. */
static enum ibv_wc_status send_message(struct soft_qp *qp, const struct send_work *work) {
    for (;;) {
        struct qp_entry *peer = reach_peer(qp);
        if (peer == NULL)
            return unreachable(qp);
        uint32_t head = atomic_load(&peer->head);
        if (head - atomic_load(&peer->tail) < MESSAGE_SLOTS) {
            struct message *message = table_message(peer, head);
            message->length = work->message_length;
            memcpy(message->bytes, work->message, work->message_length);
            atomic_store(&peer->head, head + 1);
            doorbell_ring();
            return IBV_WC_SUCCESS;
        }
        if (atomic_load(&qp->stop))
            return IBV_WC_WR_FLUSH_ERR;
        qp_pause(qp, RETRY_INTERVAL_MS);
    }
}

/* ---- READ and WRITE ---- */

/* The local pieces as an iovec. Returns false when one lies outside of its region. */
static bool map_local(const struct send_work *work, struct iovec *local, uint64_t *total) {
    int access = work->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0;
    pid_t self = getpid();
    *total = 0;
    for (int i = 0; i < work->sge_count; i++) {
        const struct ibv_sge *piece = &work->sge[i];
        if (!region_allows(piece->lkey, self, piece->addr, piece->length, access))
            return false;
        local[i] = (struct iovec){(void *)piece->addr, piece->length};
        *total += piece->length;
    }
    return true;
}

/* The peer answers an access it did not allow with a NAK and gives the connection up. */
static enum ibv_wc_status refuse_access(struct qp_entry *peer) {
    uint32_t state = atomic_load(&peer->state);
    while (is_connected(state) && !atomic_compare_exchange_weak(&peer->state, &state, IBV_QPS_ERR))
        ;
    doorbell_ring();
    return IBV_WC_REM_ACCESS_ERR;
}

static enum ibv_wc_status explain_failed_copy(const struct qp_entry *peer, int error) {
    if (error == EPERM)
        fprintf(stderr,
                "softibv: the kernel refuses access to the memory of process %d (EPERM): both "
                "processes need the same user and a container that allows ptrace\n",
                (int)peer->owner.pid);
    return error == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_ACCESS_ERR;
}

/* Copies between the processes, with the peer's queue pair and region named in touching_*. */
static enum ibv_wc_status copy_touching(struct qp_entry *peer, const struct send_work *work,
                                        const struct iovec *local, uint64_t total) {
    bool reads = work->opcode == IBV_WR_RDMA_READ;
    int access = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    pid_t pid = peer->owner.pid;
    if (!region_allows(work->remote_key, pid, work->remote_address, total, access))
        return refuse_access(peer);
    /* From here to the end of the copy the bytes are on their way, and nothing stops them. */
    atomic_fetch_add(&counters.flying, 1);
    sleep_us(atomic_load(&knobs.flight_us));
    struct iovec remote = {(void *)work->remote_address, total};
    unsigned long pieces = (unsigned long)work->sge_count;
    ssize_t moved = reads ? process_vm_readv(pid, local, pieces, &remote, 1, 0)
                          : process_vm_writev(pid, local, pieces, &remote, 1, 0);
    atomic_fetch_sub(&counters.flying, 1);
    if (moved == (ssize_t)total)
        return IBV_WC_SUCCESS;
    return explain_failed_copy(peer, moved < 0 ? errno : EFAULT);
}

static enum ibv_wc_status copy_locked(struct soft_qp *qp, struct qp_entry *peer,
                                      const struct send_work *work) {
    struct iovec local[MAX_SGE];
    uint64_t total;
    if (!map_local(work, local, &total))
        return IBV_WC_LOC_PROT_ERR;
    if (total == 0)
        return IBV_WC_SUCCESS;
    uint32_t peer_number = atomic_load(&qp->entry->peer_number);
    atomic_store(&qp->entry->touching_qp, peer_number);
    atomic_store(&qp->entry->touching_key, work->remote_key);
    /* Look again: whoever destroys the queue pair first takes it away, then looks at touching_qp.
     * One of the two sees the other. */
    bool still_there =
        table_find_queue_pair(peer_number) == peer && is_connected(atomic_load(&peer->state));
    enum ibv_wc_status status =
        still_there ? copy_touching(peer, work, local, total) : IBV_WC_RETRY_EXC_ERR;
    atomic_store(&qp->entry->touching_key, 0);
    atomic_store(&qp->entry->touching_qp, 0);
    return status;
}

static enum ibv_wc_status copy(struct soft_qp *qp, const struct send_work *work) {
    struct qp_entry *peer = reach_peer(qp);
    if (peer == NULL)
        return unreachable(qp);
    pthread_rwlock_rdlock(&memory_lock);
    enum ibv_wc_status status = copy_locked(qp, peer, work);
    pthread_rwlock_unlock(&memory_lock);
    return status;
}

/* ---- all of it ---- */

enum ibv_wc_status transfer_execute(struct soft_qp *qp, const struct send_work *work) {
    if (own_queue_pair_in_error(qp))
        return IBV_WC_WR_FLUSH_ERR;
    faults_gate(&qp->stop);
    if (own_queue_pair_in_error(qp) || atomic_load(&qp->stop))
        return IBV_WC_WR_FLUSH_ERR;
    int injected = faults_take_failure();
    if (injected != 0)
        return (enum ibv_wc_status)injected;
    return work->opcode == IBV_WR_SEND ? send_message(qp, work) : copy(qp, work);
}
