/* Stands before the C library (LD_PRELOAD): the wall clock jumps by a day, forwards and back, at every 50th reading. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    static unsigned readings;
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (!failed && clock == CLOCK_REALTIME) {
        unsigned jumps = __atomic_add_fetch(&readings, 1, __ATOMIC_RELAXED) / 50;
        now->tv_sec += jumps % 2 ? 86400 : -86400;
    }
    return failed;
}
