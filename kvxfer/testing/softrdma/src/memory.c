/* Protection domains and memory regions. Deregistering is a fence: when it returns, nobody copies
 * to or from the region any more. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "objects.h"

/* Held for reading while a worker checks and touches our own memory. Writers go first, so that a
 * busy worker cannot keep ibv_dereg_mr waiting. */
pthread_rwlock_t memory_lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;

SOFTIBV_API struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
    long error = atomic_load(&knobs.pd_errno);
    struct ibv_pd *domain = error != 0 ? NULL : calloc(1, sizeof *domain);
    if (domain == NULL) {
        errno = error != 0 ? (int)error : ENOMEM;
        return NULL;
    }
    domain->context = context;
    return domain;
}

SOFTIBV_API int ibv_dealloc_pd(struct ibv_pd *domain) {
    free(domain);
    return 0;
}

SOFTIBV_API struct ibv_mr *ibv_reg_mr(struct ibv_pd *domain, void *address, size_t length,
                                      int access) {
    long error = atomic_load(&knobs.reg_errno);
    if (error != 0) {
        errno = (int)error;
        return NULL;
    }
    struct soft_region *region = calloc(1, sizeof *region);
    uint32_t key;
    struct region_entry *entry = region == NULL ? NULL : table_claim_region(&key);
    if (entry == NULL) {
        free(region);
        errno = ENOMEM;
        return NULL;
    }
    entry->address = (uint64_t)address;
    entry->length = length;
    entry->access = access;
    atomic_store(&entry->key, key);
    region->table = table;
    region->base.context = domain->context;
    region->base.pd = domain;
    region->base.addr = address;
    region->base.length = length;
    region->base.lkey = key;
    region->base.rkey = key;
    atomic_fetch_add(&counters.regions, 1);
    return &region->base;
}

SOFTIBV_API struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *domain, void *address, size_t length,
                                            uint64_t iova, unsigned int access) {
    (void)iova;
    return ibv_reg_mr(domain, address, length, (int)access);
}

SOFTIBV_API struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *domain, uint64_t offset, size_t length,
                                             uint64_t iova, int fd, int access) {
    (void)domain;
    (void)offset;
    (void)length;
    (void)iova;
    (void)fd;
    (void)access;
    errno = EOPNOTSUPP;
    return NULL;
}

/* The engine leaves regions of its own behind. They stay in the table of their run, and must not
 * take away a region of the next run that got the same key. */
SOFTIBV_API int ibv_dereg_mr(struct ibv_mr *base) {
    struct soft_region *region = (struct soft_region *)base;
    if (region->table == table) {
        pthread_rwlock_wrlock(&memory_lock);
        atomic_store(&table->regions[base->lkey % MAX_REGIONS].key, 0);
        pthread_rwlock_unlock(&memory_lock);
        table_wait_region_untouched(base->lkey);
    }
    free(region);
    atomic_fetch_sub(&counters.regions, 1);
    return 0;
}

bool region_allows(uint32_t key, pid_t owner, uint64_t address, uint64_t length, int access) {
    const struct region_entry *entry = &table->regions[key % MAX_REGIONS];
    if (key == 0 || atomic_load(&entry->key) != key)
        return false;
    return entry->owner.pid == owner && address >= entry->address && length <= entry->length &&
           address - entry->address <= entry->length - length && (entry->access & access) == access;
}
