/* Gives a process a wall clock that is wrong, for tests: preloaded with LD_PRELOAD, it adds an offset to what the wall
 * clock says and leaves the monotonic clocks alone. The offset (64 bits, microseconds) is the content of the file named
 * by WRONG_CLOCK_FILE, mapped, so that the test can step the clock while the process runs. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile const int64_t *mapped;

static int64_t offset_us(void) {
    if (!mapped) {
        const char *file = getenv("WRONG_CLOCK_FILE");
        int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
        if (fd < 0) return 0;
        void *at = mmap(NULL, sizeof *mapped, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
        if (at == MAP_FAILED) return 0;
        mapped = at;
    }
    return *mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t us = (int64_t)now->tv_sec * 1000000 + now->tv_nsec / 1000 + offset_us();
        now->tv_nsec = now->tv_nsec % 1000 + us % 1000000 * 1000;
        now->tv_sec = us / 1000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    int failed = clock_gettime(CLOCK_REALTIME, &precise);
    if (!failed && now) {
        now->tv_sec = precise.tv_sec;
        now->tv_usec = precise.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *now) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return (time_t)-1;
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
