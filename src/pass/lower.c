/* SPDX-License-Identifier: Apache-2.0
 *
 * Lower: the last pass before planning. Where an op's kernels want denser operands than
 * a view gives (ops.def: ROWS, ANY, or dense), a named copy is put before it and
 * reported with its bytes. Then whatever nobody needs any more goes.
 */
#include "pass/pass.h"

static bool accepts(const rfi_op_def *def, const rfi_value *x) {
  if (def->flags & (RFI_ANY | RFI_VIEW) || rfi_is_dense(x)) return true;
  int last = x->type.rank - 1;
  return (def->flags & RFI_ROWS) && (x->type.shape[last] == 1 || x->stride[last] == 1);
}

static rfr_status lower_op(rfi_rewrite *r, int i, rfi_report *report) {
  const rfi_opr *op = &r->from->ops[i];
  for (int k = 0; k < op->n_in; k++) {
    if (op->in[k] < 0) continue;
    rfr_value x = r->map[op->in[k]];
    if (accepts(op->def, &r->to->values[x])) continue;
    rfr_value dense;
    rfi_opr copy = {.def = rfi_op_def_get(RFI_OP_copy),
                    .n_in = 1,
                    .in = &x,
                    .phase = op->phase,
                    .microbatch = op->microbatch,
                    .clone_of = -1,
                    .scope = op->scope,
                    .at = op->at,
                    .reason = "lowered: the next op wants a dense operand"};
    RFI_TRY(rfi_append(r->to, &copy, NULL, &dense));
    RFI_TRY(rfi_report_line(report, "copied: operand %s of op %d %s%s%s, which wants it dense: +%lld bytes",
                            op->def->operand[k < op->def->n_operands ? k : op->def->n_operands - 1], i, op->def->name,
                            op->scope[0] ? " in " : "", op->scope, (long long)rfi_bytes(&r->to->values[x].type)));
    r->map[op->in[k]] = dense; /* later readers take the dense one too */
  }
  return rfi_rewrite_op(r, i, NULL);
}

rfr_status rfi_pass_lower(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  rfi_rewrite r;
  rfr_trace *lowered;
  *out = NULL;
  RFI_TRY(rfi_rewrite_begin(in, &r));
  for (int i = 0; i < in->n_ops; i++) {
    rfr_status s = lower_op(&r, i, report);
    if (s != RFR_OK) {
      rfi_rewrite_abort(&r);
      return s;
    }
  }
  RFI_TRY(rfi_rewrite_end(&r, &lowered));
  if (!o->prune) {
    *out = lowered;
    return RFR_OK;
  }
  rfr_status s = rfi_dce(lowered, report, out);
  rfr_trace_destroy(lowered);
  return s;
}
