/* SPDX-License-Identifier: Apache-2.0
 *
 * Sorts the ops of a trace by phase, for programs that run one phase at a time. After CSE, ops of two phases may read
 * one result; its op moves to the earlier phase, so that no op reads a result of a later one.
 */
#include "pass/pass.h"

static void move_producers(const rfr_trace *t, uint8_t *phase) {
  for (int i = t->n_ops - 1; i >= 0; i--)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const int producer = t->ops[i].in[k] < 0 ? -1 : t->values[t->ops[i].in[k]].op;
      if (producer >= 0 && phase[producer] > phase[i]) phase[producer] = phase[i];
    }
}

static rfr_status emit(rfi_rewrite *r, int i, uint8_t phase) {
  const rfr_trace *in = r->from;
  rfi_opr op = in->ops[i];
  rfr_value *own;
  bool dead[RFI_MAX_NAMES];
  RFI_TRY(RFI_ALLOC(in->ctx, sizeof *own * (size_t)(op.n_in + 1), &own));
  for (int k = 0; k < op.n_in; k++) own[k] = op.in[k] < 0 ? RFR_NONE : r->map[op.in[k]];
  for (int j = 0; j < op.n_out; j++) dead[j] = op.out[j] < 0;
  op.in = own;
  op.phase = phase;
  const rfr_status s = rfi_rewrite_as(r, i, &op, dead);
  rfi_free(in->ctx, own);
  return s;
}

rfr_status rfi_order_phases(const rfr_trace *in, uint8_t *phase, rfr_trace **out) {
  rfi_rewrite r;
  *out = NULL;
  move_producers(in, phase);
  RFI_TRY(rfi_rewrite_begin(in, &r));
  for (int p = 0; p <= RFR_PHASE_OPTIM; p++)
    for (int i = 0; i < in->n_ops; i++) {
      const rfr_status s = phase[i] == p ? emit(&r, i, (uint8_t)p) : RFR_OK;
      if (s != RFR_OK) {
        rfi_rewrite_abort(&r);
        return s;
      }
    }
  return rfi_rewrite_end(&r, out);
}
