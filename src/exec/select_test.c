/* SPDX-License-Identifier: Apache-2.0
 *
 * Selecting kernels: sizes that a library does not support, ops without a kernel.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "exec/exec.h"
#include "refrain/ops.h"
#include "support/context.h"

/* A GEMM with more than 2^32 elements, planned without memory. */
static void plan_product(rfr_dtype dtype, int64_t batch, int64_t M, int64_t N, int64_t K, bool ta) {
  rfr_trace *t;
  rfr_plan_summary sum;
  rfr_compile_options o = rfr_compile_options_default();
  o.plan_only = 1;
  OK(rfr_trace_create(ctx, &t));
  const int rank = batch ? 3 : 2, skip = 3 - rank;
  const int64_t a[] = {batch, ta ? K : M, ta ? M : K}, b[] = {batch, N, K};
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, dtype, rank, a + skip);
  rfr_value w = rfr_input(t, "w", RFR_ROLE_FROZEN, dtype, rank, b + skip);
  rfr_output(t, "y", rfr_matmul(t, x, w, RFR_NONE, ta, 1, dtype));
  OK(rfr_trace_finish(t));
  rfr_programs *p = rft_compile(t, &o);
  OK(rfr_program_plan(p, 0, &sum));
  assert_true(sum.planned_bytes > (int64_t)1 << 32);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* oneDNN uses 32-bit sizes in places: it divides by zero at multiples of 2^32. */
static void test_huge_gemms(void **state) {
  (void)state;
  static const int64_t huge[] = {(int64_t)1 << 31, (int64_t)1 << 32, ((int64_t)1 << 32) + 64, (int64_t)1 << 33};
  static const rfr_dtype dtypes[] = {RFR_F32, RFR_BF16};
  for (int d = 0; d < 2; d++)
    for (size_t k = 0; k < sizeof huge / sizeof huge[0]; k++)
      for (int ta = 0; ta < 2; ta++) {
        plan_product(dtypes[d], 0, huge[k], 48, 64, ta);
        plan_product(dtypes[d], 0, 48, huge[k], 64, ta);
        plan_product(dtypes[d], 0, 48, 64, huge[k], ta);
        plan_product(dtypes[d], huge[k], 2, 3, 5, ta);
      }
}

static const char *same(const rfr_infer *c) {
  c->out[0] = c->in[0];
  return NULL;
}
static size_t launcher_workspace(const rfr_call *c) { return c->library ? 0 : 4096; }
static rfr_status launcher(const rfr_call *c) {
  (void)c;
  return RFR_OK;
}

/* A registered op runs on a GPU if it has a launcher; without one, compiling reports which field is missing. */
static void test_registered_launcher(void **state) {
  (void)state;
  rfr_ctx_options co = rfr_ctx_options_default();
  const rfi_backend *backend;
  co.device = "cuda:none";
  OK(rfr_ctx_create(&co, &ctx));
  if (rfi_backend_find(ctx, &backend) != RFR_OK) {
    print_message("not built: %s\n", rfr_last_error()->message);
    rfr_ctx_destroy(ctx);
    ctx = NULL;
    skip();
  }
  for (int with = 0; with < 2; with++) {
    rfr_op_desc d = rfr_op_desc_default();
    const rfr_op *op;
    rfr_trace *t;
    rfr_programs *p;
    d.name = with ? "mine.with" : "mine.without";
    d.operands = "x";
    d.shape = same;
    d.cuda = with ? launcher : NULL;
    d.cuda_workspace = launcher_workspace;
    OK(rfr_op_register(ctx, &d, &op));
    OK(rfr_trace_create(ctx, &t));
    rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, ((int64_t[]){64}));
    rfr_output(t, "y", rfr_record(t, op, 1, &x, NULL, NULL));
    OK(rfr_trace_finish(t));
    const rfr_trace *traces[] = {t};
    const rfr_status s = rfr_compile(ctx, 1, traces, NULL, NULL, &p);
    assert_int_equal(s, with ? RFR_OK : RFR_UNSUPPORTED);
    if (with) {
      assert_string_equal(p->program[0].u.bound[0].kernel, "registered");
      assert_int_equal(p->program[0].u.bound[0].workspace, 4096);
    } else {
      assert_string_equal(rfr_last_error()->slug, "bind.no_kernel");
      assert_non_null(strstr(rfr_last_error()->message, "rfr_op_desc.cuda is not set"));
    }
    rfr_programs_destroy(p);
    rfr_trace_destroy(t);
  }
  rfr_ctx_destroy(ctx);
  ctx = NULL;
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_huge_gemms), cmocka_unit_test(test_registered_launcher)};
  return cmocka_run_group_tests_name("select", tests, NULL, NULL);
}
