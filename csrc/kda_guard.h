/* kda_guard.h: copying out of a mapped file that may be cut short at any moment.
 *
 * Touching a page of a map whose file has become shorter is answered with SIGBUS, and no check
 * beforehand can rule that out. So there is a handler of SIGBUS for the whole process, as long as
 * somebody is between kda_guard_enter and kda_guard_leave. A fault in a guarded copy, in the thread
 * that makes it, ends the copy; every other SIGBUS goes to the handler that was there before, or
 * ends the process as it would have. A handler that other code sets meanwhile is on top of ours
 * until the next kda_guard_enter: it meets the fault of a guarded copy.
 */
#ifndef KDA_GUARD_H
#define KDA_GUARD_H

#include <stddef.h>

/* Sets the handler, or puts it on top again where another was set since.
 *
 * Returns 0, and kda_guard_leave is owed; or an errno, and it is not. Any number of threads may be
 * in here at once; a process that was forked meanwhile has none of its parent's. */
int kda_guard_enter(void);

/* Gives the signal back to whoever had it, when nobody else is in here and nobody took it since. */
void kda_guard_leave(void);

/* Lets SIGBUS through to the calling thread, which must not block it during a guarded copy.
 *
 * Returns 1 when the thread blocked it until now, else 0. */
int kda_guard_unblock(void);

/* Has the calling thread block SIGBUS. */
void kda_guard_block(void);

/* Copies `bytes` bytes that do not overlap, past the processor's caches where they are many.
 *
 * Returns 1; or 0 when a page of the source could not be had, after any part of the destination was
 * written. Outside of kda_guard_enter a page that cannot be had is a signal. */
int kda_guarded_copy(unsigned char *destination, const unsigned char *source, size_t bytes);

/* The same without a guard, for sources that cannot fault. */
void kda_plain_copy(unsigned char *destination, const unsigned char *source, size_t bytes);

#endif
