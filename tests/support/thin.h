/* SPDX-License-Identifier: Apache-2.0
 *
 * Tables of cases in builds with a sanitizer, where a run takes 5 to 20 times as long. Their cases differ in what is
 * computed, and share the code: a build without sanitizers runs each of them.
 */
#ifndef RFT_THIN_H
#define RFT_THIN_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Whether case k of a table is left out: with a sanitizer only one of n cases runs. */
#ifdef RFT_SANITIZED
#define RFT_LEFT_OUT(k, n) ((k) % (n) != 0)
#else
#define RFT_LEFT_OUT(k, n) ((void)(k), 0)
#endif

/* A number of steps, smaller with a sanitizer: all later steps make the same calls as the second. RFT_STRING: as
 * text. */
#ifdef RFT_SANITIZED
#define RFT_FEWER(n, fewer) fewer
#else
#define RFT_FEWER(n, fewer) n
#endif
#define RFT_STRING_OF(x) #x
#define RFT_STRING(x) RFT_STRING_OF(x)

/* Whether the address sanitizer looks for leaks in programs under mpirun that start after this. For the suppressions it
 * needs whole stacks of all blocks that Open MPI allocates, which takes four fifths of the time of a short run. */
static inline void rft_find_leaks(bool wanted) {
  char options[4096];
  const char *given = getenv("ASAN_OPTIONS");
  snprintf(options, sizeof options, "%s:%s", given ? given : "", /* the last value of an option counts */
           wanted ? "detect_leaks=1:fast_unwind_on_malloc=0" : "detect_leaks=0:fast_unwind_on_malloc=1");
  setenv("ASAN_OPTIONS", options, 1);
}

/* For cmocka: a test in which nothing starts a thread; the library does so for ranks alone. The thread sanitizer finds
 * nothing in it, so its build leaves it out. */
#ifdef __SANITIZE_THREAD__
#define rft_one_thread_test(f) ((struct CMUnitTest){#f, 0 ? f : NULL, NULL, NULL, NULL})
#else
#define rft_one_thread_test(f) ((struct CMUnitTest)cmocka_unit_test(f))
#endif

#endif
