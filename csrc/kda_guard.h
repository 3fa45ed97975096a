/* kda_guard.h: copying out of a mapped file that may be cut short at any moment.
 *
 * Touching a page of a map whose file has become shorter is answered with SIGBUS, and no check
 * beforehand can rule that out. So there is a handler of SIGBUS for the whole process. A fault in a
 * guarded copy, in the thread that makes it, ends the copy; every other SIGBUS goes to the handler
 * that was there before, or ends the process as it would have.
 */
#ifndef KDA_GUARD_H
#define KDA_GUARD_H

#include <stddef.h>

/* Sets the handler, or puts it on top again where another was set since; it stays.
 *
 * Returns 0, or an errno. Any number of threads may call this at once; a process that was forked
 * meanwhile is not held up by it. */
int kda_guard_install(void);

/* Copies `bytes` bytes that do not overlap, past the processor's caches where they are many.
 *
 * Returns 1; or 0 when a page of the source could not be had, after any part of the destination was
 * written. Without kda_guard_install a page that cannot be had is a signal. */
int kda_guarded_copy(unsigned char *destination, const unsigned char *source, size_t bytes);

/* The same without a guard, for sources that cannot fault. */
void kda_plain_copy(unsigned char *destination, const unsigned char *source, size_t bytes);

#endif
