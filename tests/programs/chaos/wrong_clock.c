/* A wall clock that is wrong by CHAOS_CLOCK_SHIFT_SECONDS, for a process that preloads this; monotonic time is left
   alone, as it is on a machine whose clock is set. libfaketime breaks clock_nanosleep(2) with an absolute monotonic
   deadline, which is what Python's sleep is. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift;

__attribute__((constructor)) static void read_shift(void) {
    const char *given = getenv("CHAOS_CLOCK_SHIFT_SECONDS");
    shift = given ? atol(given) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = (int)syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += shift;
    return failed;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
