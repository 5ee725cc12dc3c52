#define _GNU_SOURCE
#include "thread.h"

#include <signal.h>
#include <time.h>

enum { STACK_BYTES = 256 * 1024 };

int thread_start(pthread_t *thread, const char *name, void *(*function)(void *), void *argument) {
    pthread_attr_t attributes;
    sigset_t all;
    sigset_t before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, &attributes, function, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (error == 0)
        pthread_setname_np(*thread, name);
    return error;
}

long now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void sleep_us(long microseconds) {
    if (microseconds <= 0)
        return;
    struct timespec pause = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&pause, NULL);
}

int cond_wait_us(pthread_cond_t *condition, pthread_mutex_t *lock, long microseconds) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += microseconds / 1000000;
    until.tv_nsec += microseconds % 1000000 * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    return pthread_cond_clockwait(condition, lock, CLOCK_MONOTONIC, &until);
}
