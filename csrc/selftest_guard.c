/* selftest_guard.c: the handler of SIGBUS, see kda_guard.h. What ends a process, or changes it for
 * good, is done in a child. See selftest.h. */
#include "selftest.h"

#include "kda_guard.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* Copies out of a map that ends within, by the guarded copy itself. */
static void test_a_guarded_copy_of_missing_pages(void)
{
    static const size_t sizes[] = {1, 100, 4096, 70000, 300000, 1000000};
    origin from = origin_new((size_t)(2 * MIB));
    target to = target_new((size_t)MIB);
    size_t i;
    int repeat;

    CHECK(kda_guard_enter() == 0);
    for (repeat = 0; repeat < 20; repeat++)
        for (i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            size_t kept = (size_t)(MIB - (uint64_t)repeat % 2 * 4096);
            const unsigned char *source = from.map + kept - sizes[i] + 1 + (size_t)repeat;

            origin_cut(&from, kept);
            target_clear(&to);
            CHECK(kda_guarded_copy(to.bytes, source, sizes[i]) == 0);
            CHECK(target_is_fenced(&to));
            origin_mend(&from);
            CHECK(kda_guarded_copy(to.bytes, source, sizes[i]) == 1);
            CHECK(memcmp(to.bytes, source, sizes[i]) == 0);
        }
    CHECK(kda_guard_enter() == 0); /* it is on top already */
    kda_guard_leave();
    kda_guard_leave();
    free(to.memory);
    origin_free(&from);
}

/* What the handlers below do with a fault that is not the guard's. */
const origin *volatile faulty;
volatile sig_atomic_t faults_met;
static struct sigaction handed_down;

void mend_it(int number)
{
    (void)number;
    ++faults_met;
    if (ftruncate(faulty->fd, (off_t)faulty->size) != 0)
        _exit(1);
}

static void mend_it_with_info(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (number == SIGBUS && info != NULL && info->si_signo == SIGBUS)
        mend_it(number);
}

/* Hands every fault down to the handler that was there before, which may end the process. */
static void hand_down(int number, siginfo_t *info, void *context)
{
    if (++faults_met > 100)
        _exit(1);
    if (handed_down.sa_flags & SA_SIGINFO)
        handed_down.sa_sigaction(number, info, context);
    else if (handed_down.sa_handler != SIG_DFL)
        handed_down.sa_handler(number);
    else
        _exit(0);
    keep_coverage();
}

void set_handler(void (*plain)(int), void (*informed)(int, siginfo_t *, void *), int flags)
{
    struct sigaction action;

    memset(&action, 0, sizeof action);
    sigemptyset(&action.sa_mask);
    action.sa_flags = flags;
    if (informed != NULL) {
        action.sa_flags |= SA_SIGINFO;
        action.sa_sigaction = informed;
    } else {
        action.sa_handler = plain;
    }
    need(sigaction(SIGBUS, &action, &handed_down) == 0, "sigaction");
}

unsigned touch_missing_page(void)
{
    origin_cut(faulty, 4096);
    return ((volatile unsigned char *)faulty->map)[8000];
}

void expect_guarded(void)
{
    unsigned char bytes[64];
    int before = faults_met;

    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(bytes, faulty->map + 8000, sizeof bytes) == 0);
    CHECK(faults_met == before);
}

void expect_foreign_faults_met(void)
{
    static const unsigned char above_or_below[64] = {1};
    unsigned char bytes[64] = {2};
    int before = faults_met;

    touch_missing_page();
    CHECK(faults_met == before + 1);
    expect_guarded();
    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(faulty->map + 8000, bytes, sizeof bytes) == 1);
    CHECK(faults_met == before + 2 && faulty->map[8000] == 2);
    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(faulty->map + 8000, above_or_below, sizeof bytes) == 1);
    CHECK(faults_met == before + 3 && faulty->map[8000] == 1);
    CHECK(raise(SIGBUS) == 0 && faults_met == before + 4);
    CHECK(kill(getpid(), SIGBUS) == 0 && faults_met == before + 5);
    expect_guarded();
    touch_missing_page(); /* at a place that a guarded copy which failed has left */
    CHECK(faults_met == before + 6);
    CHECK(kda_guarded_copy(bytes, faulty->map + 8000, sizeof bytes) == 1 && bytes[0] == 0);
    touch_missing_page(); /* and one that went well */
    CHECK(faults_met == before + 7);
}

static void child_with_a_plain_handler(const void *given)
{
    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
}

static void child_with_an_informed_handler(const void *given)
{
    (void)given;
    set_handler(NULL, mend_it_with_info, 0);
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
}

/* A handler that is set later, in each form, is put below at the next copy. */
static void child_with_later_handlers(const void *given)
{
    int i;

    (void)given;
    CHECK(kda_guard_enter() == 0);
    for (i = 0; i < 6; i++) {
        set_handler(mend_it, i % 2 == 0 ? NULL : mend_it_with_info, i < 3 ? 0 : SA_NODEFER);
        touch_missing_page(); /* met by it alone, so far */
        CHECK(kda_guard_enter() == 0);
        expect_foreign_faults_met();
    }
}

/* A later handler that hands faults down to the guard's: each is met once by each, and then ends
 * the process, as the default below them does. */
static void child_with_handlers_in_turn(const void *given)
{
    set_handler(SIG_DFL, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    set_handler(NULL, hand_down, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    if (given != NULL)
        raise(SIGBUS);
    else
        touch_missing_page();
}

/* A handler that lies on top of the guard's: what it hands down is met as if it were not there. */
typedef struct below {
    void (*handler)(int); /* of the guard */
    int is_sent;          /* the signal; else it is a fault */
} below;

static void child_with_a_handler_on_top(const void *given)
{
    const below *handler_below = given;

    set_handler(handler_below->handler, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    set_handler(NULL, hand_down, 0);
    if (handler_below->is_sent)
        raise(SIGBUS);
    else
        touch_missing_page();
    CHECK(faults_met == 1);
}

/* The fault of a guarded copy, too, goes through such a handler, which has SIGBUS held back: it is
 * let through again after. */
static void child_with_a_handler_above_a_copy(const void *given)
{
    unsigned char bytes[64];
    sigset_t now;
    int i;

    (void)given;
    CHECK(kda_guard_enter() == 0);
    set_handler(NULL, hand_down, 0);
    origin_cut(faulty, 4096);
    for (i = 1; i <= 3; i++) {
        CHECK(kda_guarded_copy(bytes, faulty->map + 8000, sizeof bytes) == 0);
        CHECK(faults_met == i);
        need(pthread_sigmask(SIG_SETMASK, NULL, &now) == 0, "pthread_sigmask");
        CHECK(!sigismember(&now, SIGBUS));
    }
}

/* A later handler that hands on by raise(), twice: the first one meets both. */
static void raise_it_twice(int number)
{
    if (++faults_met > 100)
        _exit(1);
    raise(number);
    raise(number);
}

static void child_that_hands_on_by_raise(const void *given)
{
    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    set_handler(raise_it_twice, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    touch_missing_page();
    CHECK(faults_met == 3);
    expect_guarded();
}

/* A handler that meets a fault of its own: it is met by the same handler, not by the one below. */
static const origin *faulty_too;

static void mend_both(int number)
{
    mend_it(number);
    if (faults_met == 1) {
        const origin *first = faulty;

        faulty = faulty_too;
        (void)((volatile unsigned char *)faulty_too->map)[8000];
        faulty = first;
    }
}

static void child_whose_handler_faults(const void *given)
{
    origin another = origin_new(8192);

    (void)given;
    origin_cut(&another, 4096);
    faulty_too = &another;
    set_handler(SIG_DFL, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    set_handler(mend_both, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    touch_missing_page();
    CHECK(faults_met == 2 && faulty->map[8000] == 0 && another.map[8000] == 0);
    expect_guarded();
    origin_free(&another);
}

/* A signal that is sent in the midst of a guarded copy does not end it, whatever it says. */
static const unsigned char bytes_copied[64] = {3};

static void mend_it_and_send_one(int number)
{
    mend_it(number);
    if (faults_met == 1)
        send_bus_error(bytes_copied);
}

static void child_with_a_signal_amid_a_copy(const void *given)
{
    (void)given;
    set_handler(mend_it_and_send_one, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    origin_cut(faulty, 4096);
    CHECK(kda_guarded_copy(faulty->map + 8000, bytes_copied, sizeof bytes_copied) == 1);
    CHECK(faults_met == 2 && faulty->map[8000] == 3);
    expect_guarded();
}

/* A handler that asked to be called once: the second time ends the process. */
static void count_and_go_on(int number)
{
    (void)number;
    if (++faults_met > 100)
        _exit(1);
    keep_coverage();
}

static void child_with_a_handler_for_once(const void *given)
{
    (void)given;
    set_handler(count_and_go_on, NULL, (int)SA_RESETHAND);
    CHECK(kda_guard_enter() == 0);
    touch_missing_page();
}

/* A caller that lets no signal through is guarded all the same, and lets none through after. */
static void child_that_blocks_signals(const void *given)
{
    unsigned char bytes[64];
    kda_span span = memory_span(faulty->memory, sizeof bytes, 0);
    kda_cursor cursor = {0, 0, 0, 0};
    sigset_t all;
    sigset_t during;
    sigset_t after;

    (void)given;
    sigfillset(&all);
    CHECK(kda_guard_enter() == 0);
    need(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0, "pthread_sigmask");
    CHECK(kda_guard_unblock() == 1);
    expect_guarded();
    CHECK(kda_guard_unblock() == 0);
    need(pthread_sigmask(SIG_SETMASK, NULL, &during) == 0, "pthread_sigmask");
    CHECK(!sigismember(&during, SIGBUS) && sigismember(&during, SIGINT));
    kda_guard_block();
    CHECK_STATUS(copy_once(&span, 1, bytes, sizeof bytes, NO_LIMIT, &cursor), KDA_OK);
    need(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0, "pthread_sigmask");
    CHECK(sigismember(&after, SIGBUS) && sigismember(&after, SIGINT));
}

/* The signal is given back when the last one leaves, and not taken from who took it since. */
static void child_that_leaves(const void *given)
{
    struct sigaction now;

    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    CHECK(kda_guard_enter() == 0);
    kda_guard_leave();
    expect_guarded();
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == mend_it);
    kda_guard_leave(); /* owed to nobody */
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == mend_it);
    CHECK(kda_guard_enter() == 0);
    set_handler(SIG_IGN, NULL, 0);
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &now) == 0 && now.sa_handler == SIG_IGN);
}

/* Ignored where it is sent, and the guard stays. */
static void child_that_ignores(const void *given)
{
    (void)given;
    set_handler(SIG_IGN, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    CHECK(raise(SIGBUS) == 0);
    CHECK(kill(getpid(), SIGBUS) == 0);
    expect_guarded();
}

/* The three ways in which a signal that nobody handles ends a process. */
static void child_by_default(const void *given)
{
    const int *how = given;

    set_handler(SIG_DFL, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    if (*how == 0)
        touch_missing_page();
    else if (*how == 1)
        raise(SIGBUS);
    else
        kill(getpid(), SIGBUS);
}

static void test_handlers(void)
{
    static const below handlers_below[] = {{SIG_DFL, 0}, {SIG_DFL, 1}, {SIG_IGN, 0}, {SIG_IGN, 1}};
    static const int yes = 1;
    int how;

    EXPECT_CHILD(child_with_a_plain_handler, NULL);
    EXPECT_CHILD(child_with_an_informed_handler, NULL);
    EXPECT_CHILD(child_with_later_handlers, NULL);
    for (how = 0; how < 3; how++)
        EXPECT_SIGNAL(child_by_default, &how);
    EXPECT_CHILD(child_that_leaves, NULL);
    EXPECT_CHILD(child_that_ignores, NULL);
    EXPECT_CHILD(child_that_blocks_signals, NULL);
    EXPECT_SIGNAL(child_with_a_handler_for_once, NULL);
    EXPECT_SIGNAL(child_with_handlers_in_turn, NULL);
    EXPECT_SIGNAL(child_with_handlers_in_turn, &yes);
    for (how = 0; how < 3; how++)
        EXPECT_SIGNAL(child_with_a_handler_on_top, &handlers_below[how]);
    EXPECT_CHILD(child_with_a_handler_on_top, &handlers_below[3]);
    EXPECT_CHILD(child_with_a_handler_above_a_copy, NULL);
    EXPECT_CHILD(child_that_hands_on_by_raise, NULL);
    EXPECT_CHILD(child_whose_handler_faults, NULL);
    EXPECT_CHILD(child_with_a_signal_amid_a_copy, NULL);
}

void test_guard(void)
{
    origin of_two_pages = origin_new(8192);

    faulty = &of_two_pages;
    test_a_guarded_copy_of_missing_pages();
    test_handlers();
    origin_free(&of_two_pages);
}
