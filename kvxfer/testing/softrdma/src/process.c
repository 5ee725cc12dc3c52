#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Field 22 of /proc/PID/stat, in clock ticks since boot; 0 when the process does not exist. */
static uint64_t start_time_of(pid_t pid) {
    char path[64];
    char text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    /* The second field is the command in parentheses and may contain anything: skip past it. */
    char *field = strrchr(text, ')');
    for (int skipped = 1; field != NULL && skipped < 21; skipped++)
        field = strchr(field + 1, ' ');
    return field == NULL ? 0 : strtoull(field, NULL, 10);
}

struct process process_self(void) {
    pid_t pid = getpid();
    return (struct process){.pid = pid, .start_time = start_time_of(pid)};
}

int process_open(const struct process *process) {
    int fd = (int)syscall(SYS_pidfd_open, process->pid, 0);
    if (fd >= 0 && start_time_of(process->pid) != process->start_time) {
        close(fd); /* the pid belongs to somebody else by now */
        errno = ESRCH;
        return -1;
    }
    return fd;
}

bool process_fd_ended(int pidfd) {
    /* Readable when the whole thread group has ended: a zombie counts, a process whose first
     * thread alone has ended does not. */
    struct pollfd ended = {.fd = pidfd, .events = POLLIN};
    return poll(&ended, 1, 0) > 0;
}

bool process_is_gone(const struct process *process) {
    if (process->pid == 0)
        return true;
    int fd = process_open(process);
    if (fd < 0)
        return errno == ESRCH || (kill(process->pid, 0) != 0 && errno == ESRCH);
    bool gone = process_fd_ended(fd);
    close(fd);
    return gone;
}
