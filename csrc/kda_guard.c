/* kda_guard.c: see kda_guard.h, where the contracts are. */
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#else
#define _DEFAULT_SOURCE /* SA_ONSTACK, sigjmp_buf */
#endif

#include "kda_guard.h"

#include <errno.h>
#include <pthread.h>
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

#define KDA_PAGE_BYTES_MAX ((uintptr_t)64 << 10)

/* The guarded copy that a thread is in. */
typedef struct kda_watch {
    const unsigned char *begin;
    const unsigned char *end;
    sigjmp_buf back;
} kda_watch;

#if defined(__GLIBC__) /* reading it in the handler must not make the thread's copy of it */
#define KDA_READY_AT_ONCE __attribute__((tls_model("initial-exec")))
#else
#define KDA_READY_AT_ONCE
#endif

static _Thread_local kda_watch *volatile kda_watched KDA_READY_AT_ONCE;
static _Thread_local siginfo_t *volatile kda_passing KDA_READY_AT_ONCE; /* what is handed on */

/* Written before our handler is set, under the lock. */
static struct sigaction kda_first;    /* what was there before ours was set at all */
static struct sigaction kda_previous; /* what was there before ours was put on top last */
static int kda_users;                 /* how many are between enter and leave, */
static int kda_users_process;         /* in the process with this number */

static atomic_int kda_lock; /* the process that holds it, or 0; a fork may carry over another's */

/* Lets the signal do what it does without any handler. */
static void kda_meet_default(int number, const siginfo_t *info)
{
    struct sigaction nobody;

    memset(&nobody, 0, sizeof nobody);
    sigemptyset(&nobody.sa_mask);
    nobody.sa_handler = SIG_DFL;
    (void)sigaction(number, &nobody, NULL); /* a fault comes again, and ends the process */
    if (info->si_code <= 0)                 /* a signal that was sent does not */
        (void)raise(number);
}

/* Hands a signal that is not ours to whoever had it before. A handler that was set after ours and
 * hands on what it does not know, by a call or by raise(), hands it to us again: then it goes to
 * who was there first. */
static void kda_pass_on(int number, siginfo_t *info, void *context)
{
    int is_back = kda_passing != NULL && (kda_passing == info || info->si_code <= 0);
    struct sigaction *below = is_back ? &kda_first : &kda_previous;
    struct sigaction handler = *below;
    int is_handled = (handler.sa_flags & SA_SIGINFO) != 0 ||
                     (handler.sa_handler != SIG_DFL && handler.sa_handler != SIG_IGN);
    siginfo_t *before = kda_passing;

    if (!is_handled) {
        if (handler.sa_handler == SIG_DFL || info->si_code > 0) /* a fault cannot be ignored */
            kda_meet_default(number, info);
        return;
    }
    if (((unsigned)handler.sa_flags & (unsigned)SA_RESETHAND) != 0) {
        below->sa_flags = 0;
        below->sa_handler = SIG_DFL;
    }
    kda_passing = info;
    if (handler.sa_flags & SA_SIGINFO)
        handler.sa_sigaction(number, info, context);
    else
        handler.sa_handler(number);
    kda_passing = before;
}

static void kda_on_bus_error(int number, siginfo_t *info, void *context)
{
    kda_watch *watch = kda_watched;
    const unsigned char *at = info->si_addr;

    if (watch != NULL && info->si_code > 0 && at >= watch->begin && at < watch->end)
        siglongjmp(watch->back, 1);
    kda_pass_on(number, info, context);
}

static void kda_take_lock(void)
{
    int process = (int)getpid();
    int owner = 0;

    while (!atomic_compare_exchange_weak(&kda_lock, &owner, process))
        if (owner == process)
            owner = 0;
    if (kda_users_process != process) {
        kda_users_process = process;
        kda_users = 0;
    }
}

static int kda_is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) != 0 && action->sa_sigaction == kda_on_bus_error;
}

/* Sets our handler on top of `now`; 0 or an errno. Under the lock. */
static int kda_set_on_top(const struct sigaction *now)
{
    struct sigaction ours;

    memset(&ours, 0, sizeof ours);
    sigemptyset(&ours.sa_mask);
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    ours.sa_sigaction = kda_on_bus_error;
    if (kda_users == 0)
        kda_first = *now;
    kda_previous = *now;
    return sigaction(SIGBUS, &ours, NULL) == 0 ? 0 : errno;
}

int kda_guard_enter(void)
{
    struct sigaction now;
    int error = 0;

    kda_take_lock();
    if (sigaction(SIGBUS, NULL, &now) != 0)
        error = errno;
    else if (!kda_is_ours(&now))
        error = kda_set_on_top(&now);
    if (error == 0)
        kda_users++;
    atomic_store(&kda_lock, 0);
    return error;
}

void kda_guard_leave(void)
{
    struct sigaction now;

    kda_take_lock();
    if (kda_users > 0 && --kda_users == 0 && sigaction(SIGBUS, NULL, &now) == 0 &&
        kda_is_ours(&now))
        (void)sigaction(SIGBUS, &kda_previous, NULL);
    atomic_store(&kda_lock, 0);
}

/* Blocks or lets through SIGBUS in this thread; 1 when it was blocked before. */
static int kda_mask(int how)
{
    sigset_t ours;
    sigset_t before;

    sigemptyset(&before);
    sigemptyset(&ours);
    sigaddset(&ours, SIGBUS);
    (void)pthread_sigmask(how, &ours, &before);
    return sigismember(&before, SIGBUS) == 1;
}

int kda_guard_unblock(void)
{
    return kda_mask(SIG_UNBLOCK);
}

void kda_guard_block(void)
{
    (void)kda_mask(SIG_BLOCK);
}

int kda_guarded_copy(unsigned char *destination, const unsigned char *source, size_t bytes)
{
    kda_watch watch;

    watch.begin = source - (uintptr_t)source % KDA_PAGE_BYTES_MAX; /* a page may be named whole */
    watch.end = source + bytes;
    if (sigsetjmp(watch.back, 0) != 0) {
        kda_watched = NULL;
        (void)kda_guard_unblock(); /* whoever handed the signal to us may have blocked it */
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
