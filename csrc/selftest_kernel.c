/* selftest_kernel.c: takes the calls of the library to where `answers` says. See selftest.h. */
#include "selftest.h"

#if defined(KDA_ANSWERS)

#include <stdarg.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__GLIBC__) /* where functions with 64-bit offsets have these names */
#define PREAD(prefix) prefix##pread64
#define FSTATFS(prefix) prefix##fstatfs64
#else
#define PREAD(prefix) prefix##pread
#define FSTATFS(prefix) prefix##fstatfs
#endif

#if defined(SYS_cachestat)
#define CACHESTAT SYS_cachestat
#else
#define CACHESTAT 451
#endif

enum { EMPTY_PATH = 0x1000 }; /* AT_EMPTY_PATH */

ssize_t PREAD(__real_)(int fd, void *to, size_t bytes, off_t at);
int FSTATFS(__real_)(int fd, struct statfs *found);
int __real_madvise(void *start, size_t bytes, int advice);
int __real_sigaction(int number, const struct sigaction *action, struct sigaction *before);
int __real_pthread_attr_init(pthread_attr_t *attributes);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *argument);
int __real_clock_gettime(clockid_t clock, struct timespec *now);
long __real_syscall(long number, ...);

static int real_cachestat(int fd, const uint64_t *range, uint64_t *counts)
{
    return (int)__real_syscall(CACHESTAT, fd, range, counts, 0U);
}

static int real_statx(int fd, unsigned mask, uint32_t *found)
{
    return (int)__real_syscall(SYS_statx, fd, "", EMPTY_PATH, mask, found);
}

#define KERNEL                                                                                     \
    {                                                                                              \
        PREAD(__real_), __real_madvise, __real_sigaction, __real_pthread_attr_init,                \
            __real_pthread_create, __real_clock_gettime, FSTATFS(__real_), real_cachestat,         \
            real_statx                                                                             \
    }

const system_calls kernel = KERNEL;
system_calls answers = KERNEL;

ssize_t PREAD(__wrap_)(int fd, void *to, size_t bytes, off_t at);
ssize_t PREAD(__wrap_)(int fd, void *to, size_t bytes, off_t at)
{
    return answers.pread(fd, to, bytes, at);
}

int FSTATFS(__wrap_)(int fd, struct statfs *found);
int FSTATFS(__wrap_)(int fd, struct statfs *found)
{
    return answers.fstatfs(fd, found);
}

int __wrap_madvise(void *start, size_t bytes, int advice);
int __wrap_madvise(void *start, size_t bytes, int advice)
{
    return answers.madvise(start, bytes, advice);
}

int __wrap_sigaction(int number, const struct sigaction *action, struct sigaction *before);
int __wrap_sigaction(int number, const struct sigaction *action, struct sigaction *before)
{
    return answers.sigaction(number, action, before);
}

int __wrap_pthread_attr_init(pthread_attr_t *attributes);
int __wrap_pthread_attr_init(pthread_attr_t *attributes)
{
    return answers.pthread_attr_init(attributes);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *argument);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*body)(void *), void *argument)
{
    return answers.pthread_create(thread, attributes, body, argument);
}

int __wrap_clock_gettime(clockid_t clock, struct timespec *now);
int __wrap_clock_gettime(clockid_t clock, struct timespec *now)
{
    return answers.clock_gettime(clock, now);
}

long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
    va_list given;
    int fd;
    int answer;

    va_start(given, number);
    fd = va_arg(given, int);
    if (number == SYS_statx) {
        const char *path = va_arg(given, const char *);
        int flags = va_arg(given, int);
        unsigned mask = va_arg(given, unsigned);

        need(path[0] == '\0' && flags == EMPTY_PATH, "statx of the descriptor itself");
        answer = answers.statx(fd, mask, va_arg(given, void *));
    } else {
        const void *range = va_arg(given, const void *);

        need(number == CACHESTAT, "a system call that is known");
        answer = answers.cachestat(fd, range, va_arg(given, void *));
    }
    va_end(given);
    return answer;
}

int can_answer(void)
{
    return 1;
}

void send_bus_error(const void *address)
{
    siginfo_t said;

    memset(&said, 0, sizeof said);
    said.si_signo = SIGBUS;
    said.si_code = SI_QUEUE;
    said.si_addr = (void *)(uintptr_t)address;
    need(__real_syscall(SYS_rt_sigqueueinfo, getpid(), SIGBUS, &said) == 0, "rt_sigqueueinfo");
}

#else

const system_calls kernel;
system_calls answers;

int can_answer(void)
{
    leave_out("the linker cannot have the test answer for the system");
    return 0;
}

void send_bus_error(const void *address)
{
    (void)address;
    raise(SIGBUS);
}

#endif
