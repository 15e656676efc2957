/* SPDX-License-Identifier: Apache-2.0
 *
 * The shape rule of X_quantize: those of X and of quantize.
 */
#include "ops/quant/fused.h"

#include "ops/rule.h"

static rfr_status infer(const rfi_infer *c, rfi_opcode code) {
  rfi_fused_form form;
  rfr_type none = {.rank = -1}, in[4] = {none, none, none, none}, made[RFI_Q_RESULTS] = {{0}};
  rfi_fused_find(code, true, &form);
  const rfi_op_def *quantize = rfi_op_def_get(RFI_OP_quantize);
  const rfi_attr attr[5] = {c->attr[form.n_attrs], rfi_i(RFR_SCALING_TENSOR), c->attr[form.n_attrs + 1], rfi_i(0),
                            rfi_i(0)};
  const rfi_infer op = {
      .def = c->def, .n_in = c->n_in < form.n_in ? c->n_in : form.n_in, .in = c->in, .attr = c->attr, .out = c->out};
  RFI_TRY(rfi_op_def_get(form.op)->infer(&op));
  for (int p = 0; p < form.parts; p++) {
    const rfr_type *x = &c->out[form.first + p];
    if (x->rank != 2)
      return rfi_fail(RFI_E_TRACE_SHAPE, "%s has rank %d, not 2", c->def->result[form.first + p], x->rank);
    in[RFI_IN_quantize_x] = *x;
    in[RFI_IN_quantize_scale] = rfi_present(c, form.n_in + p) ? c->in[form.n_in + p] : none;
    RFI_TRY(quantize->infer(&(rfi_infer){.def = quantize, .n_in = 4, .in = in, .attr = attr, .out = made}));
    for (int k = 0; k < RFI_FUSED_RESULTS; k++)
      c->out[form.n_out + p * RFI_FUSED_RESULTS + k] = made[rfi_fused_result(k)];
  }
  return RFR_OK;
}

#define RULE(name, n_in, n_out, n_attrs, first, parts) \
  rfr_status rfi_infer_##name##_quantize(const rfi_infer *c) { return infer(c, RFI_OP_##name##_quantize); }
RFI_FUSED_OPS(RULE)
