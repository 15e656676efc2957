/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of a bias gradient with the layernorm_bwd whose dx it sums; the backend decides whether to fuse. On the CPU
 * the fused and the separate sum have the same order. So programs with and without the fusion must be bitwise equal,
 * with and without the residual add, and if only the bias is trained. With two microbatches the fused op adds the
 * first sum before it rounds, so the last bit of the bias gradient may differ. With split phases the sum becomes
 * layernorm_db.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "pass/pass.h"
#include "support/backend.h"
#include "support/rewrite.h"

enum { T = 74, C = 19 };

typedef struct cell {
  rfr_dtype type;
  bool stream, only_bias; /* stream: a residual connection skips the norm */
  int microbatches;
} cell;

enum { PROJ, BIAS, SCALE, SHIFT, TRAINED };
static const char *const trained[TRAINED] = {"proj", "bias", "scale", "shift"};

static rfr_value block(rfr_trace *t, const cell *c, int i, const rfr_value w[TRAINED]) {
  char name[16];
  snprintf(name, sizeof name, "x%d", i);
  const rfr_value x = rfr_cast(t, rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C})), c->type);
  const rfr_value h = rfr_matmul(t, x, rfr_cast(t, w[PROJ], c->type), rfr_cast(t, w[BIAS], c->type), 0, 0, c->type);
  const rfr_value y = rfr_layernorm(t, h, w[SCALE], w[SHIFT], 1e-5);
  snprintf(name, sizeof name, "r%d", i);
  const rfr_value r = rfr_input(t, name, RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  return rfr_sum(t, rfr_mul(t, rfr_cast(t, c->stream ? rfr_add(t, h, y) : y, RFR_F32), r), -1);
}

static rfr_trace *record(const cell *c) {
  static const int64_t shape[TRAINED][2] = {{C, C}, {C}, {C}, {C}};
  rfr_trace *t;
  rfr_value w[TRAINED], loss[2];
  OK(rfr_trace_create(ctx, &t));
  for (int k = 0; k < TRAINED; k++)
    w[k] = rfr_input(t, trained[k], c->only_bias && k != BIAS ? RFR_ROLE_FROZEN : RFR_ROLE_TRAINABLE, RFR_F32,
                     shape[k][1] ? 2 : 1, shape[k]);
  for (int i = 0; i < c->microbatches; i++) {
    rfr_microbatch(t, i);
    loss[i] = block(t, c, i, w);
  }
  rfr_microbatch(t, -1);
  const rfr_value all = c->microbatches > 1 ? rfr_add(t, loss[0], loss[1]) : loss[0];
  rfr_output(t, "loss", all);
  for (int k = 0; k < TRAINED; k++)
    if (!c->only_bias || k == BIAS) rfr_output(t, trained[k], rfr_gradient(t, all, w[k], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *run(const rfr_trace *t, bool wanted) {
  rft_change_backend()->dx_sum = wanted;
  return rft_run_filled(t, NULL);
}

/* How many ops sum the rows of a gradient: all sums but those of the loss. */
static int sums(const rfr_programs *p, const cell *c) { return rft_count_lowered(p, RFI_OP_sum) - c->microbatches; }

static void check(const cell *c) {
  rfr_trace *t = record(c);
  rfr_programs *p = run(t, true), *q = run(t, false);
  assert_int_equal(sums(p, c), 0);
  assert_int_equal(sums(q, c), c->microbatches);
  for (int k = 0; k < TRAINED; k++) {
    if (c->only_bias && k != BIAS) continue;
    if (k == BIAS && c->microbatches > 1) {
      rfr_tensor a, b;
      OK(rfr_program_output(p, 0, trained[k], &a));
      OK(rfr_program_output(q, 0, trained[k], &b));
      const float *x = a.data, *y = b.data;
      for (int i = 0; i < C; i++)
        if (fabsf(x[i] - y[i]) > 1e-6f * (1 + fabsf(y[i]))) fail_msg("bias[%d] is %.9g, want %.9g", i, x[i], y[i]);
    } else if (!rft_same_output(p, q, trained[k]))
      fail_msg("%s%s%s, %d microbatches: %s has other bits", rfr_dtype_name(c->type), c->stream ? ", stream" : "",
               c->only_bias ? ", only the bias" : "", c->microbatches, trained[k]);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(t);
}

static void bits(void **state) {
  (void)state;
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 8; k++)
      check(&(cell){types[i], .stream = k & 1, .only_bias = k & 2, .microbatches = k & 4 ? 2 : 1});
}

static void split(void **state) {
  (void)state;
  for (int stream = 0; stream < 2; stream++) {
    rfr_trace *t = record(&(cell){RFR_BF16, .stream = stream, .microbatches = 1});
    for (int wanted = 0; wanted < 2; wanted++) {
      const rfi_pass_options o = {.prune = true, .fuse = true, .split_phases = true, .dx_sum = wanted};
      rfi_pipeline p;
      OK(rfi_pipeline_run(t, &o, &p));
      const rfr_trace *last = p.stage[p.n - 1].trace;
      assert_int_equal(rft_count_ops(last, RFI_OP_layernorm_db, -1), 1 + wanted); /* the norm's own is in W too */
      assert_int_equal(rft_count_ops(last, RFI_OP_sum, -1), 2 - wanted);
      rfi_pipeline_deinit(&p);
    }
    rfr_trace_destroy(t);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(bits), rft_context_test(split)};
  return cmocka_run_group_tests_name("fuse_dx_sum", tests, NULL, NULL);
}
