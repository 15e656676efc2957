/* SPDX-License-Identifier: Apache-2.0
 *
 * A context for each test that records, compiles and runs, and helpers of these tests. Teardown checks that the context
 * has no block left, so a leak fails the test.
 */
#ifndef RFT_CONTEXT_H
#define RFT_CONTEXT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "refrain/program.h"

extern rfr_ctx *ctx; /* the context of the running test */
int rft_context_setup(void **state);
int rft_context_teardown(void **state);
#define rft_context_test(f) cmocka_unit_test_setup_teardown(f, rft_context_setup, rft_context_teardown)

/* A context with one thread and only our own kernels, whose calls have a fixed order. */
rfr_ctx *rft_one_thread(void);

/* A call that must succeed; the test fails with its message. */
void rft_expect_ok(rfr_status s, const char *call, const char *file, int line);
#define OK(call) rft_expect_ok(call, #call, __FILE__, __LINE__)

/* Compiles a single trace; `o` may be NULL. */
rfr_programs *rft_compile(const rfr_trace *t, const rfr_compile_options *o);
/* Fills an f32 tensor with values of -1 .. 1 that depend only on the seed. */
void rft_fill(const rfr_tensor *x, uint64_t seed);
/* The same for all f32 tensors of a program, with a seed each. */
void rft_fill_inputs(rfr_programs *p);

#endif
