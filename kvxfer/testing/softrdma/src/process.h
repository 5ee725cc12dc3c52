/* Processes: naming one for good, and finding out that it has ended. */
#ifndef SOFTIBV_PROCESS_H
#define SOFTIBV_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* A process, told apart from a later one that got the same pid. */
struct process {
    pid_t pid;
    uint64_t start_time;
};

/* The calling process. */
struct process process_self(void);

/* A pidfd of the process. -1 with errno ESRCH when it is gone, another errno when the kernel does
 * not give pidfds. */
int process_open(const struct process *process);

/* True once every thread of the process has ended, even if nobody has reaped it yet. */
bool process_fd_ended(int pidfd);
bool process_is_gone(const struct process *process);

#endif
