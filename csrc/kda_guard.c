/* kda_guard.c: see kda_guard.h, where the contracts are. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _DEFAULT_SOURCE /* SA_ONSTACK, sigjmp_buf */
#endif

#include "kda_guard.h"

#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* From this size on a copy goes past the caches: what a GPU reads next need not be in them, and
 * memory is not read only to be overwritten. Below it a plain memcpy is as fast. */
#define KDA_STREAM_BYTES ((size_t)256 << 10)

#define KDA_LINE_BYTES ((size_t)64)

/* The guarded copy that a thread is in. */
typedef struct kda_watch {
    const unsigned char *begin;
    const unsigned char *end;
    sigjmp_buf back;
} kda_watch;

#if defined(__ELF__) /* reading it in the handler must not make the thread's copy of it */
#define KDA_READY_AT_ONCE __attribute__((tls_model("initial-exec")))
#else
#define KDA_READY_AT_ONCE
#endif

static _Thread_local kda_watch *volatile kda_watched KDA_READY_AT_ONCE;

static struct sigaction kda_previous; /* written before the handler is set, by kda_guard_install */
static atomic_int kda_installer;      /* the process in it; a fork may carry over another's */

/* Hands a fault that is not ours to whoever had the signal before. */
static void kda_pass_on(int number, siginfo_t *info, void *context)
{
    if (kda_previous.sa_flags & SA_SIGINFO) {
        kda_previous.sa_sigaction(number, info, context);
    } else if (kda_previous.sa_handler == SIG_DFL || kda_previous.sa_handler == SIG_IGN) {
        (void)sigaction(number, &kda_previous, NULL); /* the fault comes again, and is met there */
        if (info->si_code <= 0)                       /* sent by a process: it would not */
            (void)raise(number);
    } else {
        kda_previous.sa_handler(number);
    }
}

static void kda_on_bus_error(int number, siginfo_t *info, void *context)
{
    kda_watch *watch = kda_watched;
    const unsigned char *at = info->si_addr;

    if (watch != NULL && info->si_code > 0 && at >= watch->begin && at < watch->end)
        siglongjmp(watch->back, 1);
    kda_pass_on(number, info, context);
}

int kda_guard_install(void)
{
    struct sigaction ours;
    struct sigaction now;
    int process = (int)getpid();
    int owner = 0;
    int error = 0;

    while (!atomic_compare_exchange_weak(&kda_installer, &owner, process))
        if (owner == process)
            owner = 0;
    if (sigaction(SIGBUS, NULL, &now) != 0) {
        error = errno;
    } else if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != kda_on_bus_error) {
        memset(&ours, 0, sizeof ours);
        sigemptyset(&ours.sa_mask);
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        ours.sa_sigaction = kda_on_bus_error;
        kda_previous = now;
        if (sigaction(SIGBUS, &ours, NULL) != 0)
            error = errno;
    }
    atomic_store(&kda_installer, 0);
    return error;
}

int kda_guarded_copy(unsigned char *destination, const unsigned char *source, size_t bytes)
{
    kda_watch watch;

    watch.begin = source;
    watch.end = source + bytes;
    if (sigsetjmp(watch.back, 0) != 0) {
        kda_watched = NULL;
        return 0;
    }
    kda_watched = &watch;
    atomic_signal_fence(memory_order_seq_cst);
    kda_plain_copy(destination, source, bytes);
    atomic_signal_fence(memory_order_seq_cst);
    kda_watched = NULL;
    return 1;
}

#if defined(__SSE2__)
/* Copies whole lines to a destination at a line's start; what a compiler makes of a loop over
 * 16-byte stores is as fast here as wider ones were measured to be. */
static void kda_stream_lines(unsigned char *destination, const unsigned char *source, size_t bytes)
{
    size_t at;

    for (at = 0; at < bytes; at += KDA_LINE_BYTES) {
        const __m128i *from = (const void *)(source + at);
        __m128i *to = (void *)(destination + at);
        __m128i a = _mm_loadu_si128(from);
        __m128i b = _mm_loadu_si128(from + 1);
        __m128i c = _mm_loadu_si128(from + 2);
        __m128i d = _mm_loadu_si128(from + 3);

        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
}
#endif

void kda_plain_copy(unsigned char *destination, const unsigned char *source, size_t bytes)
{
#if defined(__SSE2__)
    if (bytes >= KDA_STREAM_BYTES) {
        size_t head = (size_t)(-(uintptr_t)destination & (KDA_LINE_BYTES - 1));
        size_t lines = (bytes - head) / KDA_LINE_BYTES * KDA_LINE_BYTES;

        memcpy(destination, source, head);
        kda_stream_lines(destination + head, source + head, lines);
        memcpy(destination + head + lines, source + head + lines, bytes - head - lines);
        return;
    }
#endif
    memcpy(destination, source, bytes);
}
