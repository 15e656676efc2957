/* SPDX-License-Identifier: Apache-2.0
 *
 * The ops of a trace in the order of their phases, for what is run a phase at a time. An op that two phases read, as
 * CSE leaves them, belongs to the earlier one, so that nothing reads what a later phase makes.
 */
#include "pass/pass.h"

static void move_makers(const rfr_trace *t, uint8_t *phase) {
  for (int i = t->n_ops - 1; i >= 0; i--)
    for (int k = 0; k < t->ops[i].n_in; k++) {
      const int maker = t->ops[i].in[k] < 0 ? -1 : t->values[t->ops[i].in[k]].op;
      if (maker >= 0 && phase[maker] > phase[i]) phase[maker] = phase[i];
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
  move_makers(in, phase);
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
