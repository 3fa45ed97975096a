/* kda_copy.c: threads that bring in a list of spans, piece by piece. See kda_copy.h. */
#define _DEFAULT_SOURCE
#if defined(__APPLE__)
#define _DARWIN_C_SOURCE
#endif

#include "kda_copy.h"

#include "kda_guard.h"
#include "kda_pieces.h"

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

/* The pieces that threads take: from the size with which four threads on a slow disk (20 MB/s) still
 * let the caller answer a signal within a tenth of a second, to the size at which the fastest disks
 * and memory gain no more. The first is one whose system calls and looks at the clock cost nothing. */
#define KDA_PIECE_BYTES_MIN ((uint64_t)256 << 10)
#define KDA_PIECE_BYTES_FIRST ((uint64_t)1 << 20)
#define KDA_PIECE_BYTES_MAX ((uint64_t)8 << 20)
#define KDA_DIRECT_BYTES_MAX ((uint64_t)4 << 20)

/* A piece that took less is followed by a longer one, one that took more by a shorter one. */
#define KDA_QUICK_NANOSECONDS ((uint64_t)4000000)
#define KDA_SLOW_NANOSECONDS ((uint64_t)20000000)

/* More do not help: memory is full at two, and disks at a few reads in flight. */
#define KDA_THREADS_MAX 16

/* Enough for the deepest call here, under the sanitizers too. */
#define KDA_STACK_BYTES ((size_t)256 << 10)

#define KDA_BLOCK_BYTES_MIN ((uint64_t)512)
#define KDA_BLOCK_BYTES_MAX ((uint64_t)64 << 10)

/* One copy, shared by its threads. What stands below the lock is under it. */
typedef struct kda_copy {
    const kda_span *spans;
    size_t count;
    unsigned char *destination;
    const kda_means *means;
    uint64_t bounce_bytes; /* of one thread */
    uint64_t begun;        /* when, by kda_now */
    uint64_t piece_bytes;  /* how long the threads' first pieces are */
    pthread_mutex_t lock;
    kda_cursor next;   /* what is to be taken next */
    int taken;         /* whether any piece was */
    int status;        /* not KDA_OK: nothing more is taken */
    int failed;        /* whether a piece failed */
    kda_cursor fault;  /* the first piece that failed, in the order of the list */
} kda_copy;

typedef struct kda_worker {
    kda_copy *copy;
    kda_bounce bounce;
    pthread_t thread;
} kda_worker;

/* Nanoseconds on a clock that only moves forward. */
static uint64_t kda_now(void)
{
    struct timespec now = {0, 0};

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

/* 1 when the caller wants the copy to pause before the next piece. */
static int kda_is_over(const kda_copy *copy)
{
    const kda_means *means = copy->means;

    if (means->stop != NULL && __atomic_load_n(means->stop, __ATOMIC_RELAXED) != 0)
        return 1;
    return copy->taken && kda_now() - copy->begun >= means->nanoseconds_max;
}

/* Finds the next piece, under the lock; 0 when the list is done. */
static int kda_next_piece(kda_copy *copy, uint64_t bytes_max, kda_piece *piece)
{
    for (; copy->next.span < copy->count; copy->next.span++, copy->next.done = 0) {
        piece->span = &copy->spans[copy->next.span];
        kda_shape_of(piece->span, &piece->shape);
        if (copy->next.done == piece->shape.bytes)
            continue;
        piece->index = copy->next.span;
        piece->done = copy->next.done;
        piece->error = 0;
        if (piece->span->kind == KDA_DIRECT)
            bytes_max = kda_least(bytes_max, KDA_DIRECT_BYTES_MAX);
        kda_piece_cut(piece, bytes_max);
        return 1;
    }
    return 0;
}

/* Takes the next piece for a thread; 0 when there is none for it. */
static int kda_take(kda_copy *copy, uint64_t bytes_max, kda_piece *piece)
{
    int is_taken = 0;

    pthread_mutex_lock(&copy->lock);
    if (copy->status == KDA_OK && kda_next_piece(copy, bytes_max, piece)) {
        if (kda_is_over(copy)) {
            copy->status = KDA_PAUSED;
        } else {
            copy->next.done = piece->end;
            copy->taken = is_taken = 1;
        }
    }
    pthread_mutex_unlock(&copy->lock);
    return is_taken;
}

/* Notes that a piece failed; the first in the list is the one that counts. */
static void kda_give_up(kda_copy *copy, const kda_piece *piece, int status)
{
    const kda_cursor *fault = &copy->fault;

    pthread_mutex_lock(&copy->lock);
    if (!copy->failed || piece->index < fault->span ||
        (piece->index == fault->span && piece->done < fault->done)) {
        copy->failed = 1;
        copy->status = status;
        copy->fault.span = piece->index;
        copy->fault.done = piece->done;
        copy->fault.error = piece->error;
    }
    pthread_mutex_unlock(&copy->lock);
}

/* Brings in pieces until there are no more, or one fails; how long the last was. */
static uint64_t kda_work(const kda_worker *worker)
{
    uint64_t bytes = worker->copy->piece_bytes;
    kda_piece piece;

    while (kda_take(worker->copy, bytes, &piece)) {
        uint64_t begun = kda_now();
        int status = kda_piece_move(&piece, worker->copy->destination, &worker->bounce);
        uint64_t took = kda_now() - begun;

        if (status != KDA_OK) {
            kda_give_up(worker->copy, &piece, status);
            break;
        }
        if (took < KDA_QUICK_NANOSECONDS && bytes < KDA_PIECE_BYTES_MAX)
            bytes *= 2;
        else if (took > KDA_SLOW_NANOSECONDS && bytes > KDA_PIECE_BYTES_MIN)
            bytes /= 2;
    }
    return bytes;
}

static void *kda_thread(void *argument)
{
    (void)kda_work(argument);
    return NULL;
}

/* How many threads are worth their start for what is left. */
static unsigned kda_threads_for(const kda_copy *copy)
{
    uint64_t most = kda_least(copy->means->threads, KDA_THREADS_MAX);
    uint64_t bytes = 0;
    size_t i;

    for (i = copy->next.span; i < copy->count && bytes / KDA_PIECE_BYTES_FIRST < most; i++) {
        kda_shape shape;
        kda_shape_of(&copy->spans[i], &shape);
        bytes += shape.bytes - (i == copy->next.span ? copy->next.done : 0);
    }
    most = kda_least(most, bytes / KDA_PIECE_BYTES_FIRST);
    return most == 0 ? 1 : (unsigned)most;
}

/* Begins `count` more threads, or as many as the system gives; how many. They take no signals:
 * these are for the caller's threads. */
static unsigned kda_begin(kda_worker *workers, unsigned count)
{
    pthread_attr_t attributes;
    sigset_t all;
    sigset_t before;
    unsigned begun = 0;

    if (count == 0 || pthread_attr_init(&attributes) != 0)
        return 0;
    (void)pthread_attr_setstacksize(&attributes, KDA_STACK_BYTES);
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* a fault in a guarded copy; the others are of a crash alone */
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGILL);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGTRAP);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (begun < count &&
           pthread_create(&workers[begun].thread, &attributes, kda_thread, &workers[begun]) == 0)
        begun++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return begun;
}

/* Brings in what is left, in this thread and in others, which have ended when it returns. */
static void kda_run_threads(kda_copy *copy)
{
    kda_worker workers[KDA_THREADS_MAX];
    unsigned threads = kda_threads_for(copy);
    uint64_t piece_bytes;
    unsigned begun;
    unsigned i;
    int was_blocked;

    for (i = 0; i < threads; i++) {
        workers[i].copy = copy;
        workers[i].bounce.memory = copy->means->bounce;
        if (copy->bounce_bytes != 0)
            workers[i].bounce.memory += i * copy->bounce_bytes;
        workers[i].bounce.bytes = copy->bounce_bytes;
        workers[i].bounce.block_bytes = copy->means->block_bytes;
    }
    begun = kda_begin(workers + 1, threads - 1);
    was_blocked = kda_guard_unblock();
    piece_bytes = kda_work(&workers[0]);
    if (was_blocked)
        kda_guard_block();
    for (i = 1; i <= begun; i++)
        pthread_join(workers[i].thread, NULL);
    copy->piece_bytes = piece_bytes;
}

/* How long the first pieces are: as in the call before, if that left something sensible. */
static uint64_t kda_piece_bytes(const kda_cursor *cursor)
{
    uint64_t bytes = cursor->piece_bytes;

    if (bytes < KDA_PIECE_BYTES_MIN || bytes > KDA_PIECE_BYTES_MAX)
        return KDA_PIECE_BYTES_FIRST;
    return bytes;
}

/* Checks what reading whole blocks needs, and works out each thread's part of the bounce memory. */
static int kda_check_bounce(const kda_means *means, uint64_t *each)
{
    uint64_t block = means->block_bytes;
    uint64_t threads = kda_least(means->threads == 0 ? 1 : means->threads, KDA_THREADS_MAX);

    if (block < KDA_BLOCK_BYTES_MIN || block > KDA_BLOCK_BYTES_MAX || (block & (block - 1)) != 0)
        return KDA_BAD_ARGUMENT;
    if (means->bounce == NULL || (uintptr_t)means->bounce % block != 0)
        return KDA_BAD_ARGUMENT;
    *each = means->bounce_bytes / threads / block * block;
    return *each == 0 ? KDA_BAD_ARGUMENT : KDA_OK;
}

/* Checks the means and the cursor against the list, which is right already. */
static int kda_check_copy(kda_copy *copy, const kda_cursor *cursor)
{
    kda_shape shape;
    int status = KDA_OK;
    size_t i;

    if (cursor->span > copy->count)
        return KDA_BAD_ARGUMENT;
    memset(&shape, 0, sizeof shape);
    if (cursor->span < copy->count)
        kda_shape_of(&copy->spans[cursor->span], &shape);
    if (cursor->done > shape.bytes)
        return KDA_BAD_ARGUMENT;
    for (i = 0; i < copy->count && status == KDA_OK && copy->bounce_bytes == 0; i++)
        if (copy->spans[i].kind == KDA_DIRECT)
            status = kda_check_bounce(copy->means, &copy->bounce_bytes);
    return status;
}

/* 1 when a mapped file is among the sources that are left. */
static int kda_needs_guard(const kda_copy *copy)
{
    size_t i;

    for (i = copy->next.span; i < copy->count; i++)
        if (copy->spans[i].kind == KDA_MAPPED)
            return 1;
    return 0;
}

int kda_spans_copy(const kda_span *spans, size_t count, unsigned char *destination,
                   uint64_t destination_bytes, const kda_means *means, kda_cursor *cursor)
{
    kda_copy copy;
    size_t failed;
    int is_guarded;
    int status;

    if (cursor == NULL)
        return KDA_BAD_ARGUMENT;
    cursor->error = 0;
    if (means == NULL)
        return KDA_BAD_ARGUMENT;
    status = kda_spans_check(spans, count, destination, destination_bytes, &failed);
    if (status != KDA_OK) {
        cursor->span = failed;
        cursor->done = 0;
        return status;
    }
    memset(&copy, 0, sizeof copy);
    copy.spans = spans;
    copy.count = count;
    copy.destination = destination;
    copy.means = means;
    copy.begun = kda_now();
    copy.next = *cursor;
    copy.piece_bytes = kda_piece_bytes(cursor);
    status = kda_check_copy(&copy, cursor);
    if (status != KDA_OK)
        return status;
    is_guarded = kda_needs_guard(&copy);
    if (is_guarded && (cursor->error = kda_guard_enter()) != 0)
        return KDA_NO_GUARD;
    pthread_mutex_init(&copy.lock, NULL);
    kda_run_threads(&copy);
    pthread_mutex_destroy(&copy.lock);
    if (is_guarded)
        kda_guard_leave();
    *cursor = copy.failed ? copy.fault : copy.next;
    cursor->piece_bytes = copy.piece_bytes;
    return copy.status;
}
