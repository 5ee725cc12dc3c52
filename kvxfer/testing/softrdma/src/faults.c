/* Faults and counters: the names that tests use, the gate, and one-shot failures. */
#define _GNU_SOURCE
#include "faults.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"
#include "thread.h"

enum { DEFAULT_MAX_WR = 16384, DEFAULT_MAX_MSG = 1 << 30 };

struct knobs knobs;
struct counters counters;

struct named_value {
    const char *name;
    atomic_long *value;
    const char *environment; /* where the initial value comes from, NULL: nowhere */
    long initial;
};

#define KNOB(field, environment, initial) {#field, &knobs.field, environment, initial}

static const struct named_value knob_names[] = {
    KNOB(hold, NULL, 0),
    KNOB(permits, NULL, 0),
    KNOB(delay_us, NULL, 0),
    KNOB(flight_us, NULL, 0),
    KNOB(fail_status, NULL, 0),
    KNOB(fail_after, NULL, 0),
    KNOB(post_errno, NULL, 0),
    KNOB(post_after, NULL, 0),
    KNOB(post_times, NULL, 0),
    KNOB(retry_ms, "SOFTIBV_RETRY_MS", -1),
    KNOB(port_down, "SOFTIBV_PORT_DOWN", 0),
    KNOB(devices, "SOFTIBV_DEVICES", 1),
    KNOB(max_wr, "SOFTIBV_MAX_WR", DEFAULT_MAX_WR),
    KNOB(max_msg, "SOFTIBV_MAX_MSG", DEFAULT_MAX_MSG),
    KNOB(reg_errno, "SOFTIBV_REG_ERRNO", 0),
    KNOB(pd_errno, NULL, 0),
    KNOB(channel_errno, NULL, 0),
    KNOB(cq_errno, NULL, 0),
    KNOB(qp_errno, NULL, 0),
    KNOB(init_errno, NULL, 0),
    KNOB(rtr_errno, NULL, 0),
    KNOB(rts_errno, NULL, 0),
};

static const struct named_value counter_names[] = {
    {"posted", &counters.posted, NULL, 0},     {"refused", &counters.refused, NULL, 0},
    {"executed", &counters.executed, NULL, 0}, {"failed", &counters.failed, NULL, 0},
    {"flushed", &counters.flushed, NULL, 0},   {"held", &counters.held, NULL, 0},
    {"flying", &counters.flying, NULL, 0},     {"queue_pairs", &counters.queue_pairs, NULL, 0},
    {"regions", &counters.regions, NULL, 0},
};

#define LENGTH(array) (sizeof(array) / sizeof *(array))

static const struct named_value *find(const struct named_value *names, size_t count,
                                      const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i].name, name) == 0)
            return &names[i];
    return NULL;
}

static pthread_once_t initialised = PTHREAD_ONCE_INIT;

static void set_initial_values(void) {
    for (size_t i = 0; i < LENGTH(knob_names); i++) {
        const struct named_value *knob = &knob_names[i];
        const char *text = knob->environment == NULL ? NULL : getenv(knob->environment);
        atomic_store(knob->value, text != NULL && *text != '\0' ? atol(text) : knob->initial);
    }
}

void faults_init(void) {
    pthread_once(&initialised, set_initial_values);
}

/* ---- the gate ---- */

static pthread_mutex_t gate_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t gate_opened = PTHREAD_COND_INITIALIZER;

void faults_wake(void) {
    pthread_mutex_lock(&gate_lock);
    pthread_cond_broadcast(&gate_opened);
    pthread_mutex_unlock(&gate_lock);
}

/* Waits on the gate's condition, so that stop ends a long delay. */
static void wait_delay(const atomic_bool *stop, long microseconds) {
    while (!atomic_load(stop) && cond_wait_us(&gate_opened, &gate_lock, microseconds) != ETIMEDOUT)
        ;
}

void faults_gate(const atomic_bool *stop) {
    if (!atomic_load(&knobs.hold) && !atomic_load(&knobs.delay_us))
        return;
    pthread_mutex_lock(&gate_lock);
    if (atomic_load(&knobs.hold)) {
        atomic_fetch_add(&counters.held, 1);
        while (atomic_load(&knobs.hold) && atomic_load(&knobs.permits) <= 0 && !atomic_load(stop))
            pthread_cond_wait(&gate_opened, &gate_lock);
        if (atomic_load(&knobs.permits) > 0)
            atomic_fetch_sub(&knobs.permits, 1);
        atomic_fetch_sub(&counters.held, 1);
    }
    long delay = atomic_load(&knobs.delay_us);
    if (delay > 0)
        wait_delay(stop, delay);
    pthread_mutex_unlock(&gate_lock);
}

/* ---- one-shot failures ---- */

/* Counts down `after`; true for the work request that finds nothing left. */
static bool countdown_over(atomic_long *after) {
    return atomic_fetch_sub(after, 1) <= 0;
}

int faults_take_failure(void) {
    if (atomic_load(&knobs.fail_status) == 0 || !countdown_over(&knobs.fail_after))
        return 0;
    return (int)atomic_exchange(&knobs.fail_status, 0);
}

int faults_take_refusal(void) {
    int error = (int)atomic_load(&knobs.post_errno);
    if (error == 0 || !countdown_over(&knobs.post_after))
        return 0;
    if (atomic_fetch_sub(&knobs.post_times, 1) <= 1)
        atomic_store(&knobs.post_errno, 0);
    return error;
}

/* ---- control from outside ---- */

int softibv_set(const char *name, long value) {
    faults_init();
    const struct named_value *knob = find(knob_names, LENGTH(knob_names), name);
    if (knob == NULL)
        return -1;
    /* Arming a refusal means one, unless post_times was set before. */
    if (knob->value == &knobs.post_errno && value != 0 && atomic_load(&knobs.post_times) <= 0)
        atomic_store(&knobs.post_times, 1);
    atomic_store(knob->value, value);
    faults_wake();
    return 0;
}

long softibv_get(const char *name) {
    faults_init();
    const struct named_value *entry = find(knob_names, LENGTH(knob_names), name);
    if (entry == NULL)
        entry = find(counter_names, LENGTH(counter_names), name);
    return entry == NULL ? LONG_MIN : atomic_load(entry->value);
}

void softibv_reset(void) {
    faults_init();
    set_initial_values();
    faults_wake();
}

int softibv_attach(const char *name) {
    faults_init();
    return table_attach(name, atomic_load(&counters.queue_pairs) > 0);
}
