/* The state that all processes of one run share: a table in /dev/shm.
 *
 * It holds what a fabric would know: which queue pairs exist, which memory is registered under
 * which key, and small messages (SENDs) on their way. Payload never goes through it: READ and
 * WRITE copy straight between the two processes.
 *
 * Everything here must survive a process that is killed at any instruction, so there are no locks
 * in shared memory: entries are claimed with compare-and-swap, and entries of dead processes are
 * claimed again by whoever needs one.
 */
#ifndef SOFTIBV_TABLE_H
#define SOFTIBV_TABLE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "process.h"

/* Raised whenever the layout below changes: two builds that differ must not share a table. */
#define TABLE_LAYOUT 0x73690003u

#define MAX_QUEUE_PAIRS 1024
#define MAX_REGIONS     65536
#define MESSAGE_SLOTS   256 /* per queue pair; a power of two, so that the indices may wrap */
#define MESSAGE_BYTES   64  /* largest SEND, and largest inline payload */

/* One registered memory region. The entry of key K is regions[K % MAX_REGIONS]. */
struct region_entry {
    _Atomic uint32_t key; /* 0: free */
    struct process owner;
    uint64_t address;
    uint64_t length;
    int access;
};

struct message {
    uint32_t length;
    unsigned char bytes[MESSAGE_BYTES];
};

/* One queue pair. The entry of number N is queue_pairs[N % MAX_QUEUE_PAIRS]. */
struct qp_entry {
    _Atomic uint32_t number; /* 0: free */
    struct process owner;
    _Atomic uint32_t state; /* enum ibv_qp_state; a peer may move it to ERR */
    _Atomic uint32_t peer_number;

    /* What the owner's worker is copying to or from right now. Whoever destroys a queue pair or
     * deregisters memory waits until nobody names it here: that makes both a fence. */
    _Atomic uint32_t touching_qp;
    _Atomic uint32_t touching_key;

    /* Messages sent to this queue pair. Reliable connections have one sender and one receiver, so
     * a ring with two indices is enough. */
    _Atomic uint32_t head; /* advanced by the sender */
    _Atomic uint32_t tail; /* advanced by the owner */
};

struct table {
    _Atomic uint32_t layout;
    _Atomic uint32_t next_number;
    _Atomic uint32_t next_key;
    _Atomic uint32_t doorbell; /* futex: something arrived for some queue pair */
    struct region_entry regions[MAX_REGIONS];
    struct qp_entry queue_pairs[MAX_QUEUE_PAIRS];
    /* Apart from the entries, so that a walk over all of those stays within a few pages. */
    struct message messages[MAX_QUEUE_PAIRS][MESSAGE_SLOTS];
};

/* The attached table, NULL before table_attach(). */
extern struct table *table;

/* Attaches this process to the table `name` (created when missing); NULL takes the environment's
 * SOFTIBV_SHM or a default per user. Returns 0 or an errno: EBUSY when another table is attached
 * and `in_use` is true, EPROTO when the table was made by another build of this library. */
int table_attach(const char *name, bool in_use);

/* Entries. The claim functions return NULL when the table is full. */
struct qp_entry *table_claim_queue_pair(uint32_t *number);
struct qp_entry *table_find_queue_pair(uint32_t number);
struct region_entry *table_claim_region(uint32_t *key);

/* Slot `index` (a value of head or tail) of the queue pair's message ring. */
struct message *table_message(const struct qp_entry *entry, uint32_t index);

/* Wait until no live process names the queue pair or the key in its touching_* field. */
void table_wait_queue_pair_untouched(uint32_t number);
void table_wait_region_untouched(uint32_t key);

/* The doorbell. ring: after a change that another process must notice. wait: returns when it was
 * rung after `seen` was read, or after the timeout. */
uint32_t doorbell_read(void);
void doorbell_ring(void);
void doorbell_wait(uint32_t seen, long timeout_ms);

#endif
