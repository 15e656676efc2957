/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of norms.
 *
 * Backward (fuse): dx, dw and db of a norm, and the add of dx to the residual gradient, become one op that reads dy and
 * x once. Autodiff records them as separate ops, so that a frozen scale has no dw; the fused op then has no dw either.
 * A norm with only one of these ops is not changed. Exact: dx is rounded before the add, and the sums over rows have
 * the same terms in the same order (src/ops/norm/norm_bwd.h).
 *
 * Forward (lower): an add and the norm that is the next op become one op that reads the sum while it computes it.
 * Exact. It runs after recompute, because a recomputed norm needs only the sum; fused, it would keep both addends.
 */
#include "pass/pass.h"

typedef struct norm_ops {
  int dx, dw, db, add; /* op indices; -1: absent */
  rfr_value other;     /* the other operand of the add */
} norm_ops;

static bool reads_same(const rfi_opr *dx, const rfi_opr *dw, int statistics) {
  bool same = dx->in[0] == dw->in[0] && dx->in[1] == dw->in[1] && dw->in[2 + statistics] < 0;
  for (int k = 0; k < statistics; k++) same = same && dx->in[3 + k] == dw->in[2 + k];
  return same;
}

static bool match_norm(const rfi_rewriter *w, int i, norm_ops *p) {
  const rfr_trace *t = w->to.from;
  const rfi_uses *uses = w->uses;
  const rfi_opr *op = &t->ops[i];
  bool layernorm = op->def->code == RFI_OP_layernorm_dx;
  *p = (norm_ops){i, -1, -1, -1, RFR_NONE};
  if (!layernorm && op->def->code != RFI_OP_rmsnorm_dx) return false;
  rfi_opcode dw = layernorm ? RFI_OP_layernorm_dw : RFI_OP_rmsnorm_dw;
  rfr_value dy = op->in[0], dx = op->out[0];
  for (int k = i + 1; k <= uses[dy].last && k < t->n_ops; k++) {
    const rfi_opr *other = &t->ops[k];
    if (w->skip[k] || (w->o->split_phases && other->phase != op->phase)) continue;
    if (p->dw < 0 && other->def->code == dw && reads_same(op, other, layernorm ? 2 : 1)) p->dw = k;
    if (p->db < 0 && layernorm && other->def->code == RFI_OP_layernorm_db && other->in[0] == dy && other->in[1] < 0)
      p->db = k;
  }
  const rfi_opr *reader = uses[dx].count == 1 && !uses[dx].output ? &t->ops[uses[dx].last] : NULL;
  if (reader && reader->def->code == RFI_OP_add) {
    rfr_value other = reader->in[reader->in[0] == dx];
    if (t->values[other].op < i && rfi_is_dense(&t->values[other])) {
      p->add = uses[dx].last;
      p->other = other;
    }
  }
  return p->dw >= 0 || p->db >= 0 || p->add >= 0;
}

static rfr_status emit_norm(rfi_rewrite *r, const norm_ops *p, rfi_report *report) {
  const rfr_trace *t = r->from;
  const rfi_opr *dx = &t->ops[p->dx];
  bool layernorm = dx->def->code == RFI_OP_layernorm_dx, dead[3] = {false, p->dw < 0, p->db < 0};
  rfr_value in[RFI_MAX_NAMES], out[RFI_MAX_NAMES];
  rfi_opr op = *dx;
  for (int k = 0; k < dx->n_in; k++) in[k] = r->map[dx->in[k]];
  in[dx->n_in] = p->other < 0 ? RFR_NONE : r->map[p->other];
  op.def = rfi_op_def_get(layernorm ? RFI_OP_layernorm_bwd : RFI_OP_rmsnorm_bwd);
  op.n_in = dx->n_in + 1;
  op.in = in;
  op.reason = "fused: gradients of a norm";
  RFI_TRY(rfi_rewrite_new(r, &op, dead, out));
  rfi_replace_value(r, t->ops[p->add >= 0 ? p->add : p->dx].out[0], out[0]);
  if (p->dw >= 0) rfi_replace_value(r, t->ops[p->dw].out[0], out[1]);
  if (p->db >= 0) rfi_replace_value(r, t->ops[p->db].out[0], out[2]);
  RFI_TRY(rfr_trace_status(r->to));
  return rfi_report_line(report, "fused: op %d %s%s%s with%s%s%s: -%lld bytes; exact", p->dx, dx->def->name,
                         dx->scope[0] ? " in " : "", dx->scope, p->dw >= 0 ? " dw" : "", p->db >= 0 ? " db" : "",
                         p->add >= 0 ? " and the residual add" : "",
                         p->add >= 0 ? (long long)rfi_bytes(&t->values[dx->out[0]].type) : 0);
}

static rfr_status visit_norm(rfi_rewriter *w, int i) {
  norm_ops p;
  if (!match_norm(w, i, &p)) return rfi_rewrite_op(&w->to, i, NULL);
  if (p.dw >= 0) w->skip[p.dw] = true;
  if (p.db >= 0) w->skip[p.db] = true;
  if (p.add >= 0) w->skip[p.add] = true;
  return emit_norm(&w->to, &p, w->report);
}

rfr_status rfi_fuse_norms(const rfr_trace *in, const rfi_pass_options *o, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, o, report, NULL, visit_norm, out);
}

/* ---- add + norm ---- */

static bool match_sum(const rfr_trace *t, const rfi_uses *uses, int i) {
  const rfi_opr *add = &t->ops[i], *norm = add + 1;
  if (i + 1 >= t->n_ops || add->def->code != RFI_OP_add || norm->in[0] != add->out[0]) return false;
  if (norm->def->code != RFI_OP_layernorm && norm->def->code != RFI_OP_rmsnorm) return false;
  return rfi_is_dense(&t->values[add->in[0]]) && rfi_is_dense(&t->values[add->in[1]]) && uses[add->out[0]].count > 1 &&
         add->phase == norm->phase && add->microbatch == norm->microbatch &&
         (add->clone_of < 0) == (norm->clone_of < 0);
}

static rfr_status emit_sum(rfi_rewrite *r, int i, rfi_report *report) {
  const rfi_opr *add = &r->from->ops[i], *norm = add + 1;
  const bool layernorm = norm->def->code == RFI_OP_layernorm;
  rfr_value in[RFI_MAX_NAMES], out[RFI_MAX_NAMES];
  bool dead[RFI_MAX_NAMES] = {false};
  rfi_opr op = *norm;
  for (int k = 0; k < 2; k++) in[k] = r->map[add->in[k]];
  for (int k = 1; k < norm->n_in; k++) in[k + 1] = norm->in[k] < 0 ? RFR_NONE : r->map[norm->in[k]];
  for (int j = 0; j < norm->n_out; j++) dead[j + 1] = norm->out[j] < 0;
  op.def = rfi_op_def_get(layernorm ? RFI_OP_add_layernorm : RFI_OP_add_rmsnorm);
  op.n_in = norm->n_in + 1;
  op.in = in;
  op.clone_of = norm->clone_of < 0 ? -1 : r->op_map[norm->clone_of];
  op.reason = layernorm ? "fused: add + layernorm" : "fused: add + rmsnorm";
  RFI_TRY(rfi_rewrite_new(r, &op, dead, out));
  r->op_map[i] = r->op_map[i + 1] = r->to->n_ops - 1;
  rfi_replace_value(r, add->out[0], out[0]);
  for (int j = 0; j < norm->n_out; j++)
    if (norm->out[j] >= 0) rfi_replace_value(r, norm->out[j], out[j + 1]);
  RFI_TRY(rfr_trace_status(r->to));
  return rfi_report_line(report, "fused: op %d add + %s%s%s: -%lld bytes read; exact", i, norm->def->name,
                         norm->scope[0] ? " in " : "", norm->scope,
                         (long long)rfi_bytes(&r->from->values[add->out[0]].type));
}

static rfr_status visit_sum(rfi_rewriter *w, int i) {
  if (!match_sum(w->to.from, w->uses, i)) return rfi_rewrite_op(&w->to, i, NULL);
  w->skip[i + 1] = true;
  return emit_sum(&w->to, i, w->report);
}

rfr_status rfi_fuse_sums(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, NULL, report, NULL, visit_sum, out);
}
