/* The shared table: attaching to it, claiming entries, and telling the living from the dead. */
#define _GNU_SOURCE
#include "table.h"

#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "thread.h"

#define CLAIMED 0xffffffffu /* an entry somebody is filling in */

struct table *table;

static pthread_mutex_t attach_lock = PTHREAD_MUTEX_INITIALIZER;
static int table_fd = -1;
static char table_name[NAME_MAX];
static struct process self;

/* ---- attaching ---- */

/* Opens the shared memory object and holds a shared lock on it for as long as this process lives.
 * Whoever wants to remove a left-over table takes the exclusive lock first: when that succeeds,
 * no process uses it. */
static int open_locked(const char *name) {
    for (;;) {
        int fd = shm_open(name, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
        if (fd < 0)
            return -1;
        struct stat info;
        if (flock(fd, LOCK_SH) != 0 || fstat(fd, &info) != 0) {
            int error = errno;
            close(fd);
            errno = error;
            return -1;
        }
        if (info.st_nlink > 0)
            return fd;
        close(fd); /* removed between open and lock: make a new one */
    }
}

/* Gives a new object its size. A table of another size belongs to another build: changing it would
 * pull the ground from under the processes that use it. */
static int check_size(int fd) {
    struct stat info;
    if (fstat(fd, &info) != 0)
        return errno;
    if (info.st_size == 0)
        return ftruncate(fd, sizeof(struct table)) == 0 ? 0 : errno;
    return info.st_size == sizeof(struct table) ? 0 : EPROTO;
}

static int check_layout(struct table *mapped) {
    uint32_t layout = 0; /* new: nobody has written to it */
    if (atomic_compare_exchange_strong(&mapped->layout, &layout, TABLE_LAYOUT))
        return 0;
    return layout == TABLE_LAYOUT ? 0 : EPROTO;
}

static int map_table(const char *name) {
    int fd = open_locked(name);
    if (fd < 0)
        return errno;
    struct table *mapped = MAP_FAILED;
    int error = check_size(fd);
    if (error == 0) {
        mapped = mmap(NULL, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        error = mapped == MAP_FAILED ? errno : check_layout(mapped);
    }
    if (error != 0) {
        if (mapped != MAP_FAILED)
            munmap(mapped, sizeof *mapped);
        close(fd);
        return error;
    }
    if (table != NULL) {
        munmap(table, sizeof *table);
        close(table_fd);
    }
    table = mapped;
    table_fd = fd;
    return 0;
}

int table_attach(const char *name, bool in_use) {
    char wanted[NAME_MAX];
    if (name == NULL)
        name = getenv("SOFTIBV_SHM");
    if (name != NULL && *name != '\0')
        snprintf(wanted, sizeof wanted, "/%s", name);
    else
        snprintf(wanted, sizeof wanted, "/softibv.%d", (int)getuid());

    pthread_mutex_lock(&attach_lock);
    int error = 0;
    if (table == NULL || strcmp(wanted, table_name) != 0) {
        error = table != NULL && in_use ? EBUSY : map_table(wanted);
        if (error == 0) {
            strcpy(table_name, wanted);
            self = process_self();
            /* Under Yama only a parent may read a process: let the peers of the run do it too. */
            prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
        }
    }
    pthread_mutex_unlock(&attach_lock);
    return error;
}

/* ---- entries ---- */

/* Takes an entry that is free or belongs to a dead process, and marks it CLAIMED. A process that is
 * killed right here loses the entry for the run: one of many, and the table ends with the run. */
static bool claim(_Atomic uint32_t *id, const struct process *owner) {
    uint32_t seen = atomic_load(id);
    if (seen == CLAIMED)
        return false;
    if (seen != 0 && !process_is_gone(owner))
        return false;
    return atomic_compare_exchange_strong(id, &seen, CLAIMED);
}

struct qp_entry *table_claim_queue_pair(uint32_t *number) {
    for (int tried = 0; tried < 2 * MAX_QUEUE_PAIRS; tried++) {
        /* Queue pair numbers are 24 bits wide on the wire. */
        uint32_t candidate = (atomic_fetch_add(&table->next_number, 1) + 1) & 0xffffff;
        struct qp_entry *entry = &table->queue_pairs[candidate % MAX_QUEUE_PAIRS];
        if (candidate == 0 || !claim(&entry->number, &entry->owner))
            continue;
        entry->owner = self;
        atomic_store(&entry->state, IBV_QPS_RESET);
        atomic_store(&entry->peer_number, 0);
        atomic_store(&entry->touching_qp, 0);
        atomic_store(&entry->touching_key, 0);
        atomic_store(&entry->head, 0);
        atomic_store(&entry->tail, 0);
        atomic_store(&entry->number, candidate);
        *number = candidate;
        return entry;
    }
    return NULL;
}

struct qp_entry *table_find_queue_pair(uint32_t number) {
    struct qp_entry *entry = &table->queue_pairs[number % MAX_QUEUE_PAIRS];
    return number != 0 && atomic_load(&entry->number) == number ? entry : NULL;
}

struct message *table_message(const struct qp_entry *entry, uint32_t index) {
    return &table->messages[entry - table->queue_pairs][index % MESSAGE_SLOTS];
}

struct region_entry *table_claim_region(uint32_t *key) {
    for (int tried = 0; tried < 2 * MAX_REGIONS; tried++) {
        uint32_t candidate = atomic_fetch_add(&table->next_key, 1) + 1;
        struct region_entry *entry = &table->regions[candidate % MAX_REGIONS];
        if (candidate == 0 || candidate == CLAIMED || !claim(&entry->key, &entry->owner))
            continue;
        entry->owner = self;
        *key = candidate;
        return entry; /* the caller fills it in and stores the key last */
    }
    return NULL;
}

enum { ALIVE_CHECK_INTERVAL = 64 }; /* asking the kernel is slower than looking again */

static void wait_untouched(_Atomic uint32_t *touching, uint32_t value,
                           const struct process *toucher) {
    for (int round = 1; atomic_load(touching) == value; round++) {
        if (round % ALIVE_CHECK_INTERVAL == 0 && process_is_gone(toucher))
            return;
        sleep_us(50);
    }
}

void table_wait_queue_pair_untouched(uint32_t number) {
    for (int i = 0; i < MAX_QUEUE_PAIRS; i++) {
        struct qp_entry *entry = &table->queue_pairs[i];
        wait_untouched(&entry->touching_qp, number, &entry->owner);
    }
}

void table_wait_region_untouched(uint32_t key) {
    for (int i = 0; i < MAX_QUEUE_PAIRS; i++) {
        struct qp_entry *entry = &table->queue_pairs[i];
        wait_untouched(&entry->touching_key, key, &entry->owner);
    }
}

/* ---- the doorbell ---- */

uint32_t doorbell_read(void) {
    return atomic_load(&table->doorbell);
}

void doorbell_ring(void) {
    atomic_fetch_add(&table->doorbell, 1);
    syscall(SYS_futex, &table->doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void doorbell_wait(uint32_t seen, long timeout_ms) {
    struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000};
    syscall(SYS_futex, &table->doorbell, FUTEX_WAIT, seen, &timeout, NULL, 0);
}
