/* Preloaded into a redis-server under test: its wall clock reads as many microseconds more as the file in STEP_CLOCK says
   (8 bytes, signed, in the machine's order), from one reading to the next. Other clocks are left alone. (libfaketime does the
   same, and hangs where Redis is linked with jemalloc.) */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("STEP_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *map = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) offset = map;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *to) {
    int failed = (int)syscall(SYS_clock_gettime, id, to);
    if (failed || !offset || (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE)) return failed;
    int64_t us = (int64_t)to->tv_sec * 1000000 + to->tv_nsec / 1000 + *offset;
    to->tv_sec = us / 1000000;
    to->tv_nsec = us % 1000000 * 1000 + to->tv_nsec % 1000;
    return 0;
}

int gettimeofday(struct timeval *to, void *zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now = {0};
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
