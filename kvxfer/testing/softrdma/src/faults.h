/* Faults and counters of this process, set from outside while the engine runs.
 *
 * Every fault acts on the work requests and calls of this process only: to break a peer, ask the
 * peer's process.
 */
#ifndef SOFTIBV_FAULTS_H
#define SOFTIBV_FAULTS_H

#include <stdatomic.h>
#include <stdbool.h>

#define SOFTIBV_API __attribute__((visibility("default")))

/* Values that a test sets. All are 0 when unset, unless said otherwise. */
struct knobs {
    atomic_long hold;        /* work requests wait at the gate before they move any byte */
    atomic_long permits;     /* how many may pass the gate while it holds */
    atomic_long delay_us;    /* every work request takes at least this long */
    atomic_long flight_us;   /* between the peer's permission and the bytes' arrival */
    atomic_long fail_status; /* enum ibv_wc_status of the next failure, used once */
    atomic_long fail_after;  /* work requests that still succeed before it */
    atomic_long post_errno;  /* what ibv_post_send answers */
    atomic_long post_after;  /* work requests that are still accepted before it */
    atomic_long post_times;  /* how many calls are refused; set to 1 by post_errno */
    atomic_long retry_ms;    /* how long an unreachable peer is tried; -1: as the queue pair says */
    atomic_long port_down;   /* the port reports itself as down */
    atomic_long devices;     /* how many devices exist; default 1 */
    atomic_long max_wr;      /* largest send queue the device grants */
    atomic_long max_msg;     /* largest message in bytes the port reports */
    /* errno of a call that shall fail, until it is set to 0 again */
    atomic_long reg_errno;
    atomic_long pd_errno;
    atomic_long channel_errno;
    atomic_long cq_errno;
    atomic_long qp_errno;
    atomic_long init_errno;
    atomic_long rtr_errno;
    atomic_long rts_errno;
};

/* Values that a test reads. */
struct counters {
    atomic_long posted;      /* work requests accepted by ibv_post_send */
    atomic_long refused;     /* calls of ibv_post_send that were refused */
    atomic_long executed;    /* work requests that succeeded */
    atomic_long failed;      /* work requests that failed, flushes not counted */
    atomic_long flushed;     /* work requests flushed by a queue pair in error */
    atomic_long held;        /* work requests that wait at the gate now */
    atomic_long flying;      /* work requests whose bytes are on their way now */
    atomic_long queue_pairs; /* queue pairs that exist now */
    atomic_long regions;     /* memory regions that exist now */
};

extern struct knobs knobs;
extern struct counters counters;

/* Reads the environment once; every entry point of the library calls it. */
void faults_init(void);

/* Waits while the gate holds, then for delay_us. Returns early once *stop is set; whoever sets it
 * calls faults_wake(). */
void faults_gate(const atomic_bool *stop);
void faults_wake(void);

/* The injected failure for this work request, or 0 (IBV_WC_SUCCESS). */
int faults_take_failure(void);

/* The injected refusal for this work request, or 0. */
int faults_take_refusal(void);

/* ---- called from outside, by name, through ctypes ---- */

/* Sets a knob. Returns 0, or -1 when there is none of that name. */
SOFTIBV_API int softibv_set(const char *name, long value);

/* Reads a knob or a counter; LONG_MIN when there is none of that name. */
SOFTIBV_API long softibv_get(const char *name);

/* Every knob back to what it was when the process started. */
SOFTIBV_API void softibv_reset(void);

/* Attaches this process to the shared table `name`. Returns 0 or an errno; EBUSY while queue pairs
 * of another table exist. */
SOFTIBV_API int softibv_attach(const char *name);

/* Delivers an asynchronous event: queue pair and completion queue events for each queue pair of
 * this process, all others once per open device. Returns how many were delivered. */
SOFTIBV_API int softibv_async(int event_type);

#endif
