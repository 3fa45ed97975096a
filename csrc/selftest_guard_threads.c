/* selftest_guard_threads.c: the handler of SIGBUS amid threads and forks. See selftest.h. */
#include "selftest.h"

#include "kda_guard.h"

#include <stdlib.h>
#include <time.h>

/* Copies in one thread, and foreign faults in another: each is met where it belongs. */
static void *guarded_again_and_again(void *argument)
{
    static unsigned char bytes[8192];
    const unsigned char *map = argument;
    long guarded = 0;
    int i;

    for (i = 0; i < 20000; i++)
        guarded += kda_guarded_copy(bytes, map, sizeof bytes) == 0;
    return (void *)guarded;
}

static void child_with_two_threads(const void *given)
{
    origin cut = origin_new(8192);
    pthread_t thread;
    void *guarded = NULL;
    int i;

    (void)given;
    set_handler(mend_it, NULL, 0);
    CHECK(kda_guard_enter() == 0);
    origin_cut(&cut, 4096);
    need(pthread_create(&thread, NULL, guarded_again_and_again, cut.map) == 0, "pthread_create");
    for (i = 0; i < 2000; i++) {
        touch_missing_page();
        expect_guarded();
    }
    need(pthread_join(thread, &guarded) == 0, "pthread_join");
    CHECK(faults_met == 2000 && (long)guarded == 20000);
    origin_free(&cut);
    forget_coverage();
}

/* Many threads install the guard while others set handlers, and processes are forked meanwhile. */
static int installers_are_over;

static void *install_again_and_again(void *argument)
{
    while (!__atomic_load_n(&installers_are_over, __ATOMIC_ACQUIRE)) {
        if (argument != NULL)
            set_handler(mend_it, NULL, 0);
        if (kda_guard_enter() != 0)
            abort();
    }
    return NULL;
}

static void child_of_installers(const void *given)
{
    (void)given;
    forget_coverage();
    CHECK(kda_guard_enter() == 0);
    expect_guarded();
}

static void child_with_installers(const void *given)
{
    pthread_t threads[3];
    int i;

    for (i = 0; i < 3; i++)
        need(pthread_create(&threads[i], NULL, install_again_and_again,
                            i == 0 ? &installers_are_over : NULL) == 0,
             "pthread_create");
    for (i = 0; i < 30; i++)
        EXPECT_CHILD(child_of_installers, given);
    __atomic_store_n(&installers_are_over, 1, __ATOMIC_RELEASE);
    for (i = 0; i < 3; i++)
        need(pthread_join(threads[i], NULL) == 0, "pthread_join");
    CHECK(kda_guard_enter() == 0);
    expect_foreign_faults_met();
    forget_coverage();
}

static pthread_t other_thread;
static int is_other_begun;

static void *enter_and_leave(void *argument)
{
    __atomic_store_n(&is_other_begun, 1, __ATOMIC_RELEASE);
    if (kda_guard_enter() != 0)
        abort();
    kda_guard_leave();
    return argument;
}

/* It is forked under the lock, and finds it taken by a process that it has not. It owes nothing for
 * its parent, who was in the guard: the signal is given back when it leaves. */
static void child_that_was_forked_in_the_guard(const void *given)
{
    const struct sigaction *before = given;
    struct sigaction after;

    CHECK(kda_guard_enter() == 0);
    expect_guarded();
    kda_guard_leave();
    CHECK(sigaction(SIGBUS, NULL, &after) == 0 && after.sa_handler == before->sa_handler);
}

static struct sigaction before_the_guard;

/* Under the guard's lock another thread comes to it, and a child is forked. */
static int sigaction_amid_others(int number, const struct sigaction *action,
                                 struct sigaction *before)
{
    static const struct timespec nap = {0, 1000000};
    int naps;

    answers = kernel;
    need(pthread_create(&other_thread, NULL, enter_and_leave, NULL) == 0, "pthread_create");
    for (naps = 0; naps < 20 || !__atomic_load_n(&is_other_begun, __ATOMIC_ACQUIRE); naps++)
        nanosleep(&nap, NULL);
    EXPECT_CHILD(child_that_was_forked_in_the_guard, &before_the_guard);
    return kernel.sigaction(number, action, before);
}

static void test_a_lock_that_is_held(void)
{
    struct sigaction after;

    need(sigaction(SIGBUS, NULL, &before_the_guard) == 0, "sigaction");
    CHECK(kda_guard_enter() == 0);
    answers.sigaction = sigaction_amid_others;
    CHECK(kda_guard_enter() == 0);
    need(pthread_join(other_thread, NULL) == 0, "pthread_join");
    expect_guarded();
    kda_guard_leave();
    expect_guarded();
    kda_guard_leave();
    need(sigaction(SIGBUS, NULL, &after) == 0, "sigaction");
    CHECK(after.sa_handler == before_the_guard.sa_handler);
}

void test_guard_threads(void)
{
    origin of_two_pages = origin_new(8192);

    faulty = &of_two_pages;
    if (can_answer())
        test_a_lock_that_is_held();
    EXPECT_CHILD(child_with_two_threads, NULL);
    EXPECT_CHILD(child_with_installers, NULL);
    origin_free(&of_two_pages);
}
