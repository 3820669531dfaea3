/* One fsync that fails with EIO: the CHAOS_FSYNC_FAILS_AT-th of a process that preloads this, unless the file
   CHAOS_FSYNC_FAILED is there already, which it makes: so it happens once in all processes that inherit this. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long seen;

int fsync(int file) {
    const char *at = getenv("CHAOS_FSYNC_FAILS_AT"), *mark = getenv("CHAOS_FSYNC_FAILED");
    if (at && mark && atomic_fetch_add(&seen, 1) + 1 == atol(at)) {
        int made = open(mark, O_CREAT | O_EXCL | O_WRONLY, 0600);
        if (made >= 0) {
            close(made);
            errno = EIO;
            return -1;
        }
    }
    return (int)syscall(SYS_fsync, file);
}
