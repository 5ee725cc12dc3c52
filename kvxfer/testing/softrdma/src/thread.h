/* Threads and time, the way every module of the library wants them. */
#ifndef SOFTIBV_THREAD_H
#define SOFTIBV_THREAD_H

#include <pthread.h>

/* Starts a thread with a small stack and all signals blocked: signals are the application's. */
int thread_start(pthread_t *thread, const char *name, void *(*function)(void *), void *argument);

/* Milliseconds of the monotonic clock. */
long now_ms(void);

void sleep_us(long microseconds);

/* Waits on the condition for at most `microseconds`. Returns 0 or ETIMEDOUT. */
int cond_wait_us(pthread_cond_t *condition, pthread_mutex_t *lock, long microseconds);

#endif
