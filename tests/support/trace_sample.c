/* SPDX-License-Identifier: Apache-2.0 */
#include "support/trace_sample.h"

#include <string.h>

#include "refrain/ops.h"

void rft_trace_print(const rfr_trace *t, int flat, rft_text *out) {
  rfr_print_options o = rfr_print_options_default();
  o.flat = flat;
  out->n = 0;
  assert_int_equal(rfr_trace_print(t, &o, rft_text_add, out), RFR_OK);
}

rfr_trace *rft_trace_sample(void) {
  rfr_trace *t;
  assert_int_equal(rfr_trace_create(ctx, &t), RFR_OK);
  rfr_value ids = rfr_input(t, "ids", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){6}));
  rfr_value target = rfr_input(t, "target \"a\\b\"\n", RFR_ROLE_INPUT, RFR_I32, 1, ((int64_t[]){6}));
  rfr_value table = rfr_input(t, "table", RFR_ROLE_TRAINABLE, RFR_BF16, 2, ((int64_t[]){11, 8}));
  rfr_value master = rfr_input(t, "table.master", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value m = rfr_input(t, "m", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value v = rfr_input(t, "v", RFR_ROLE_STATE, RFR_F32, 2, ((int64_t[]){11, 8}));
  rfr_value ring = rfr_input(t, "metrics", RFR_ROLE_STATE, RFR_F64, 2, ((int64_t[]){4, 3}));
  rfr_value step = rfr_step_block(t);
  rfr_value inv = rfr_token_count(t, 1, &target, -100, NULL);
  rfr_value loss = RFR_NONE;
  for (int mb = 0; mb < 2; mb++) {
    rfr_microbatch(t, mb);
    rfr_scope(t, "layer0.embed");
    rfr_value half = rfr_slice(t, ids, 0, 3 * mb, 3), want = rfr_slice(t, target, 0, 3 * mb, 3);
    rfr_value h = rfr_embedding(t, table, half);
    rfr_scope(t, "head");
    rfr_value logits = rfr_linear(t, h, table, RFR_NONE);
    rfr_value part = rfr_cross_entropy(t, logits, want, inv, -100);
    loss = mb ? rfr_add(t, loss, part) : part;
  }
  rfr_microbatch(t, -1);
  rfr_scope(t, "");
  rfr_value g = rfr_gradient(t, loss, table, RFR_F32), skip;
  rfr_set_phase(t, RFR_PHASE_OPTIM);
  rfr_lr_options lr = rfr_lr_options_default();
  rfr_adamw_options adam = rfr_adamw_options_default();
  rfr_value rate = rfr_lr_schedule(t, step, &lr), norm = rfr_grad_norm(t, 1, &g, &skip);
  rfr_adamw(t, table, g, m, v, master, rate, rfr_clip_scale(t, norm, 1), skip, step, &adam);
  rfr_metrics_write(t, ring, step, 2, ((rfr_value[]){loss, norm}));
  rfr_step_end(t, step, skip);
  rfr_output(t, "loss", loss);
  assert_int_equal(rfr_trace_finish(t), RFR_OK);
  return t;
}
