/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of dgrad and the gradient of GELU, which a backend may support or not. On the CPU the fused op is bitwise
 * equal to the two ops, so programs with and without the fusion must be bitwise equal: with recompute and without, with
 * one microbatch and with two. The erf form and f32 are not fused.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "exec/exec.h"
#include "support/backend.h"
#include "support/rewrite.h"

enum { T = 24, C = 16, H = 40 };

typedef struct cell {
  rfr_dtype type;
  bool erf, transposed, shown; /* transposed: weights are (out, in); shown: GELU's input is an output too */
  int microbatches;
  rfr_recompute recompute;
} cell;

enum { FC, FC_BIAS, PROJ, PROJ_BIAS, TRAINED };
static const char *const trained[TRAINED] = {"fc", "fc_bias", "proj", "proj_bias"};

static rfr_value mlp(rfr_trace *t, const cell *c, int i, const rfr_value w[TRAINED]) {
  char name[16];
  rfr_value cast[TRAINED];
  snprintf(name, sizeof name, "x%d", i);
  const rfr_value x = rfr_input(t, name, RFR_ROLE_INPUT_GRAD, RFR_F32, 2, ((int64_t[]){T, C}));
  for (int k = 0; k < TRAINED; k++) cast[k] = rfr_cast(t, w[k], c->type);
  const rfr_value h = rfr_matmul(t, rfr_cast(t, x, c->type), cast[FC], cast[FC_BIAS], 0, c->transposed, c->type);
  if (c->shown && i == 0) rfr_output(t, "h", h);
  const rfr_value y = rfr_matmul(t, rfr_gelu(t, h, !c->erf), cast[PROJ], cast[PROJ_BIAS], 0, c->transposed, c->type);
  const rfr_value r = rfr_input(t, i ? "r1" : "r0", RFR_ROLE_INPUT, RFR_F32, 2, ((int64_t[]){T, C}));
  return rfr_sum(t, rfr_mul(t, rfr_cast(t, y, RFR_F32), r), -1);
}

static rfr_trace *record(const cell *c) {
  static const int64_t shape[TRAINED][2] = {{C, H}, {H}, {H, C}, {C}};
  rfr_trace *t;
  rfr_value w[TRAINED], loss[2];
  OK(rfr_trace_create(ctx, &t));
  for (int k = 0; k < TRAINED; k++) {
    const int64_t dims[2] = {shape[k][c->transposed && shape[k][1]], shape[k][!c->transposed]};
    w[k] = rfr_input(t, trained[k], RFR_ROLE_TRAINABLE, RFR_F32, shape[k][1] ? 2 : 1, dims);
  }
  for (int i = 0; i < c->microbatches; i++) {
    rfr_microbatch(t, i);
    loss[i] = mlp(t, c, i, w);
  }
  rfr_microbatch(t, -1);
  const rfr_value all = c->microbatches > 1 ? rfr_add(t, loss[0], loss[1]) : loss[0];
  rfr_output(t, "loss", all);
  for (int k = 0; k < TRAINED; k++) rfr_output(t, trained[k], rfr_gradient(t, all, w[k], RFR_F32));
  OK(rfr_trace_finish(t));
  return t;
}

static rfr_programs *run(const cell *c, const rfr_trace *t, bool wanted) {
  rfr_compile_options o = rfr_compile_options_default();
  o.recompute = c->recompute;
  rft_change_backend()->gelu_bwd = wanted;
  return rft_run_filled(t, &o);
}

static void check_ops(const cell *c, const rfr_programs *p, bool wanted) {
  const int fused = wanted && c->type != RFR_F32 && !c->erf ? c->microbatches : 0;
  assert_int_equal(rft_count_lowered(p, RFI_OP_matmul_gelu_bwd), fused);
  assert_int_equal(rft_count_lowered(p, RFI_OP_gelu_bwd), c->microbatches - fused);
}

static void check(const cell *c) {
  static const char *const outputs[] = {"loss", "fc", "fc_bias", "proj", "proj_bias", "h"};
  rfr_trace *t = record(c);
  rfr_programs *p = run(c, t, true), *q = run(c, t, false);
  check_ops(c, p, true);
  check_ops(c, q, false);
  for (int i = 0; i < 6; i++) {
    if (i == 5 && !c->shown) continue;
    if (!rft_same_output(p, q, outputs[i]))
      fail_msg("%s%s%s%s, %d microbatches: %s has other bits", rfr_dtype_name(c->type), c->erf ? ", erf" : "",
               c->transposed ? ", transposed" : "", c->shown ? ", shown" : "", c->microbatches, outputs[i]);
  }
  rfr_programs_destroy(p);
  rfr_programs_destroy(q);
  rfr_trace_destroy(t);
}

static void bits(void **state) {
  (void)state;
  static const rfr_dtype types[] = {RFR_F32, RFR_BF16, RFR_F16};
  for (int i = 0; i < 3; i++)
    for (int k = 0; k < 32; k++)
      check(&(cell){.type = types[i],
                    .erf = k & 1,
                    .transposed = k & 2,
                    .shown = k & 4,
                    .microbatches = k & 8 ? 2 : 1,
                    .recompute = k & 16 ? RFR_RECOMPUTE_ALL : RFR_RECOMPUTE_KEEP});
}

int main(void) {
  setenv("REFRAIN_ONEDNN", "0", 1); /* it runs GEMMs without fusion, which round differently */
  const struct CMUnitTest tests[] = {rft_context_test(bits)};
  return cmocka_run_group_tests_name("fuse_gelu", tests, NULL, NULL);
}
