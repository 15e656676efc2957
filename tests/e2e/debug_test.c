/* SPDX-License-Identifier: Apache-2.0
 *
 * The checked runner finds errors of kernels and names the op: writes past the end of a result, into
 * a dead buffer, past the end of the workspace, and results that are not finite; on the host and on a
 * separate device, whose errors begin with the op's name. It may use more memory than the budget,
 * which counts the program without guards.
 */
#include <math.h>
#include <string.h>

#include "exec/exec.h"
#include "refrain/op.h"
#include "support/backend.h"
#include "support/context.h"
#include "support/fault_backend.h"

enum { N = 48, OPS = 4, SMALL = 64, LARGE = 256 };

/* A chain of ops, in which call number `at` makes the error `wrong`. */
typedef struct chain {
  enum {
    NOTHING,
    PAST_RESULT,
    DEAD_VALUE,
    PAST_SMALL_WORKSPACE,
    PAST_LARGE_WORKSPACE,
    BEFORE_ALL,
    NOT_FINITE,
    WRONGS
  } wrong;
  int at, call;
  char *first; /* the result of the first op */
  const rfr_op *small, *large;
} chain;
static chain k;
static int64_t blocks; /* blocks of the context once the ops are registered */

static rfr_status run(const rfr_call *c) {
  const float *x = c->in[0].data;
  float *y = c->out[0].data;
  for (int i = 0; i < N; i++) y[i] = x[i] + 1;
  if (k.call == 0) k.first = (char *)y;
  if (k.call++ != k.at) return RFR_OK;
  switch (k.wrong) {
    case PAST_RESULT: ((char *)y)[sizeof *y * N + 3] = 1; break;
    case DEAD_VALUE: k.first[5] = 1; break;
    case PAST_SMALL_WORKSPACE: ((char *)c->workspace)[SMALL] = 1; break;
    case PAST_LARGE_WORKSPACE: ((char *)c->workspace)[LARGE + 1] = 1; break;
    case BEFORE_ALL: ((char *)c->workspace)[-1] = 1; break;
    case NOT_FINITE: y[7] = INFINITY; break;
    default: break;
  }
  return RFR_OK;
}

static const char *shape(const rfr_infer *c) {
  c->out[0] = c->in[0];
  return NULL;
}
static size_t small_workspace(const rfr_call *c) { return (void)c, SMALL; }
static size_t large_workspace(const rfr_call *c) { return (void)c, LARGE; }

static const rfr_op *op(const char *name, rfr_workspace_fn workspace) {
  const rfr_op *out;
  rfr_op_desc d = rfr_op_desc_default();
  d.name = name, d.operands = "x", d.results = "y", d.shape = shape;
  d.cpu = run, d.cpu_workspace = workspace;
  OK(rfr_op_register(ctx, &d, &out));
  return out;
}

static int setup(void **state) {
  rft_context_setup(state);
  k = (chain){.at = -1, .small = op("mine.small", small_workspace), .large = op("mine.large", large_workspace)};
  blocks = rfr_ctx_get_stats(ctx).live_blocks;
  return 0;
}

static int teardown(void **state) {
  (void)state;
  const int64_t left = rfr_ctx_get_stats(ctx).live_blocks - blocks;
  rfr_ctx_destroy(ctx);
  return (int)left;
}
#define debug_test(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

/* Ops small, large, small, large: the third no longer reads the result of the first, so that is dead. */
static rfr_trace *record(void) {
  rfr_trace *t;
  const int64_t n = N;
  OK(rfr_trace_create(ctx, &t));
  rfr_value x = rfr_input(t, "x", RFR_ROLE_INPUT, RFR_F32, 1, &n);
  for (int i = 0; i < OPS; i++) {
    rfr_scope(t, i == 2 ? "layer7" : "");
    x = rfr_record(t, i % 2 ? k.large : k.small, 1, &x, NULL, NULL);
  }
  rfr_output(t, "y", x);
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *debugged(const rfr_trace *t) {
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1;
  return rft_compile(t, &o);
}

/* Runs with inputs of zero. */
static rfr_status run_from_zeros(rfr_programs *p) {
  const float x[N] = {0};
  rfr_tensor in;
  OK(rfr_programs_tensor(p, "x", &in));
  OK(rfr_programs_write(p, &in, x));
  return rfr_program_run(p, 0);
}

static void test_violations(void **state) {
  (void)state;
  const struct {
    int at;
    const char *slug, *says[2];
  } expected[WRONGS] = {
      [PAST_RESULT] = {1, "debug.overrun", {"op 1 mine.large", "wrote past the end of an unnamed value"}},
      [DEAD_VALUE] = {2, "debug.overrun", {"op 2 mine.small", "wrote into the dead buffer of an unnamed value"}},
      [PAST_SMALL_WORKSPACE] = {2, "debug.overrun", {"op 2 mine.small", "wrote past the end of a workspace"}},
      [PAST_LARGE_WORKSPACE] = {3, "debug.overrun", {"op 3 mine.large", "wrote past the end of a workspace"}},
      [BEFORE_ALL] = {0, "debug.overrun", {"op 0 mine.small", "wrote outside the step-scoped memory"}},
      [NOT_FINITE] = {1, "debug.nonfinite", {"op 1 mine.large", "value[7]"}},
  };
  rfr_trace *t = record();
  for (int device = 0; device < 2; device++) {
    if (device) rft_backend = &rft_fault_backend;
    for (k.wrong = NOTHING; k.wrong < WRONGS; k.wrong++) {
      float y[N];
      rfr_tensor out;
      rfr_programs *p = debugged(t);
      k.call = 0, k.at = expected[k.wrong].at;
      const rfr_status s = run_from_zeros(p);
      if (k.wrong == NOTHING) {
        OK(s);
        OK(rfr_program_output(p, 0, "y", &out));
        OK(rfr_programs_read(p, &out, y));
        for (int i = 0; i < N; i++) assert_true(y[i] == OPS);
      } else {
        assert_int_not_equal(s, RFR_OK);
        assert_string_equal(rfr_last_error()->slug, expected[k.wrong].slug);
        for (int i = 0; i < 2; i++)
          if (!strstr(rfr_last_error()->message, expected[k.wrong].says[i]))
            fail_msg("no \"%s\" in: %s", expected[k.wrong].says[i], rfr_last_error()->message);
      }
      rfr_programs_destroy(p);
    }
    rft_backend = NULL;
  }
  rfr_trace_destroy(t);
}

/* An error of the device names the op that ran, whichever call returned it, because debug mode waits for each op. */
static void test_names(void **state) {
  (void)state;
  static const rft_entry entries[] = {RFT_ENTRY_run, RFT_ENTRY_copy, RFT_ENTRY_inspect};
  rfr_trace *t = record();
  rfr_programs *p;
  rfr_op_time times[OPS];
  int n;
  rft_backend = &rft_fault_backend;
  for (int i = 0; i < 3; i++) {
    rft_faults = (rft_fault){0};
    p = debugged(t);
    /* the first copy belongs to x */
    rft_faults = (rft_fault){.entry = entries[i], .k = i == 1 ? 4 : 3, .sticky = true};
    assert_int_equal(run_from_zeros(p), RFR_IO);
    assert_string_equal(rfr_last_error()->slug, "backend.dead");
    if (!strstr(rfr_last_error()->message, "op 2 mine.small in layer7 (program): "))
      fail_msg("%s: %s", rft_entry_name(entries[i]), rfr_last_error()->message);
    rft_faults = (rft_fault){0};
    rfr_programs_destroy(p);
  }
  p = rft_compile(t, NULL);
  rft_faults = (rft_fault){.entry = RFT_ENTRY_run_timed, .k = 2};
  assert_int_not_equal(rfr_program_profile(p, 0, times, OPS, &n), RFR_OK);
  if (!strstr(rfr_last_error()->message, "op 1 mine.large (program): "))
    fail_msg("profile: %s", rfr_last_error()->message);
  rft_faults = (rft_fault){0};
  rft_backend = NULL;
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
}

/* Debug mode allocates nothing while it runs. */
static void test_no_allocation(void **state) {
  (void)state;
  rfr_trace *t = record();
  rft_backend = &rft_fault_backend;
  rfr_programs *p = debugged(t);
  const int64_t calls = rfr_ctx_get_stats(ctx).alloc_calls;
  for (int i = 0; i < 3; i++) OK(run_from_zeros(p));
  assert_int_equal(rfr_ctx_get_stats(ctx).alloc_calls, calls);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  rft_backend = NULL;
}

/* The budget applies to the program without guards. Workspaces share one range, so a large workspace counts once. */
static void test_memory(void **state) {
  (void)state;
  rfr_trace *t = record();
  rfr_plan_summary plain, debug;
  rfr_programs *p = rft_compile(t, NULL);
  OK(rfr_program_plan(p, 0, &plain));
  rfr_programs_destroy(p);
  p = debugged(t);
  OK(rfr_program_plan(p, 0, &debug));
  rfr_programs_destroy(p);
  const int64_t value = rfi_align(N * sizeof(float)) + RFI_GUARD;
  const int64_t workspaces = RFI_GUARD + rfi_align(LARGE) + RFI_GUARD;
  assert_int_equal(debug.planned_bytes - debug.persistent_bytes, workspaces + OPS * value);
  rfr_compile_options o = rfr_compile_options_default();
  o.debug = 1;
  o.budget = plain.planned_bytes;
  rfr_programs_destroy(rft_compile(t, &o));
  o.budget--;
  assert_int_equal(rfr_compile(ctx, 1, (const rfr_trace *const *)&t, NULL, &o, &p), RFR_NO_FIT);
  rfr_trace_destroy(t);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      debug_test(test_violations),
      debug_test(test_names),
      debug_test(test_no_allocation),
      debug_test(test_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
