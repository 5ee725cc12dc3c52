/* The objects behind the handles that an application holds, and what the modules call of each
 * other. Each object begins with the public struct, so that a pointer to one is a pointer to the
 * other. */
#ifndef SOFTIBV_OBJECTS_H
#define SOFTIBV_OBJECTS_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "faults.h"
#include "table.h"

/* <infiniband/verbs.h> wraps these two in macros; we define the functions behind them. */
#undef ibv_reg_mr
#undef ibv_query_port

#define MAX_SGE 30

struct soft_context {
    struct ibv_context base; /* base.async_fd is the reading end */
    int event_writer;
    struct soft_context *next;
};

struct soft_region {
    struct ibv_mr base;
    const struct table *table; /* where it is entered; that table may be gone by now */
};

struct soft_channel {
    struct ibv_comp_channel base; /* base.fd is the reading end */
    int writer;
};

struct soft_cq {
    struct ibv_cq base;
    pthread_mutex_t lock;
    struct ibv_wc *completions; /* a ring */
    int capacity, first, count;
    bool armed; /* the next completion writes to the channel */
};

struct send_work {
    uint64_t id;
    enum ibv_wr_opcode opcode;
    bool signaled;
    uint64_t remote_address;
    uint32_t remote_key;
    int sge_count;
    struct ibv_sge sge[MAX_SGE];
    uint32_t message_length; /* SEND: the payload is copied when it is posted */
    unsigned char message[MESSAGE_BYTES];
};

struct receive_work {
    uint64_t id;
    struct ibv_sge sge;
};

struct soft_qp {
    struct ibv_qp base;
    struct qp_entry *entry; /* our place in the shared table */
    int peer_pidfd;         /* the connected peer's process; -1 until it was first reached */
    int max_sge;
    uint32_t retry_ms; /* how long the transport tries an unreachable peer; 0: for ever */

    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t wake;  /* the worker has something to do */
    pthread_t worker;
    bool worker_runs;
    atomic_bool stop;
    struct send_work *sends; /* rings */
    struct receive_work *receives;
    uint32_t send_capacity, send_first, send_count;
    uint32_t receive_capacity, receive_first, receive_count;

    struct soft_qp *next; /* all queue pairs of this process, guarded by all_qps_lock */
};

extern pthread_mutex_t all_qps_lock;
extern struct soft_qp *all_qps;

/* device.c */
bool context_deliver(struct ibv_context *context, const struct ibv_async_event *event);

/* completion.c */
void cq_push(struct ibv_cq *cq, const struct ibv_wc *completion);
int cq_poll(struct ibv_cq *cq, int count, struct ibv_wc *completions);
int cq_request_notification(struct ibv_cq *cq, int solicited_only);

/* memory.c: the answer holds for as long as memory_lock is held for reading (our own memory) or the
 * key is named in our touching_key (a peer's memory). */
extern pthread_rwlock_t memory_lock;
bool region_allows(uint32_t key, pid_t owner, uint64_t address, uint64_t length, int access);

/* queue_pair.c: waits, but not longer than until the queue pair stops. */
void qp_pause(struct soft_qp *qp, long ms);

/* post.c */
int qp_post_send(struct ibv_qp *qp, struct ibv_send_wr *work, struct ibv_send_wr **refused);
int qp_post_receive(struct ibv_qp *qp, struct ibv_recv_wr *work, struct ibv_recv_wr **refused);

/* transfer.c: carries out one work request and returns its completion status. */
enum ibv_wc_status transfer_execute(struct soft_qp *qp, const struct send_work *work);

/* receive.c: the thread that delivers what peers sent. It runs while anyone has acquired it. */
int receiver_acquire(void);
void receiver_release(void);

#endif
