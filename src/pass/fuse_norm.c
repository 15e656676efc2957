/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of norms.
 *
 * Backward (fuse): dx, dw and db of a norm, and the add of dx to the residual gradient, become one op that reads dy and
 * x once. Autodiff records them as separate ops, so that a frozen scale has no dw; the fused op then has no dw either.
 * A norm with only one of these ops is not changed. Exact: dx is rounded before the add, and the sums over rows have
 * the same terms in the same order (src/ops/norm/norm_bwd.h).
 *
 * If the backend prefers it (dx_sum), layernorm_bwd also sums the columns of dx; the sum is the bias gradient of the
 * layer before it. A device adds the terms in another order than `sum`, so bits change. If the sum is in a separate W,
 * it becomes layernorm_db, which adds in the order of the fused op, so that split phases do not change bits.
 *
 * Forward (lower): an add and the norm that is the next op become one op that reads the sum while it computes it.
 * Exact. It runs after recompute, because a recomputed norm needs only the sum; fused, it would keep both addends.
 */
#include "ops/op_index.h"
#include "pass/pass.h"

typedef struct norm_ops {
  int dx, dw, db, add, sum; /* op indices; -1: absent */
  rfr_value other;          /* the other operand of the add */
} norm_ops;

static bool reads_same(const rfi_opr *dx, const rfi_opr *dw, int statistics) {
  bool same = dx->in[0] == dw->in[0] && dx->in[1] == dw->in[1] && dw->in[2 + statistics] < 0;
  for (int k = 0; k < statistics; k++) same = same && dx->in[3 + k] == dw->in[2 + k];
  return same;
}

/* The add of op i's dx to the residual gradient *other; -1: none that can be fused. */
static int residual_add(const rfi_rewriter *w, int i, rfr_value *other) {
  const rfr_trace *t = w->to.from;
  const rfr_value dx = t->ops[i].out[0];
  const int add = w->uses[dx].count == 1 && !w->uses[dx].output ? w->uses[dx].last : -1;
  if (add < 0 || t->ops[add].def->code != RFI_OP_add) return -1;
  *other = t->ops[add].in[t->ops[add].in[0] == dx];
  return t->values[*other].op < i && rfi_is_dense(&t->values[*other]) ? add : -1;
}

/* The dx of the op that layernorm_dx i is fused into; RFR_NONE if the fusion depends on frozen weights. */
static rfr_value total_of(const rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  const rfr_value dx = t->ops[i].out[0];
  rfr_value other;
  const int add = residual_add(w, i, &other);
  return add < 0 ? dx : t->values[dx].if_trained & RFI_READ_MORE ? RFR_NONE : t->ops[add].out[0];
}

/* Whether op k sums the rows of dx, as the gradient of a bias does. */
static bool sums_rows(const rfr_trace *t, int k, rfr_value dx) {
  const rfi_opr *op = &t->ops[k];
  return op->def->code == RFI_OP_sum && op->in[RFI_IN_sum_x] == dx && op->attr[RFI_AT_sum_axis].i == 0 &&
         op->attr[RFI_AT_sum_to].i == RFR_F32 && t->values[dx].type.rank == 2 &&
         (op->n_in <= RFI_IN_sum_acc || op->in[RFI_IN_sum_acc] < 0);
}

/* The sum over the rows of op i's total dx; -1: none that can be fused. */
static int column_sum(const rfi_rewriter *w, int i) {
  const rfr_trace *t = w->to.from;
  const rfr_value dx = w->o->dx_sum && !w->o->split_phases ? total_of(w, i) : RFR_NONE;
  for (int k = dx < 0 ? t->n_ops : i + 1; k < t->n_ops && k <= w->uses[dx].last; k++)
    if (!w->skip[k] && t->ops[k].microbatch == t->ops[i].microbatch && sums_rows(t, k, dx)) return k;
  return -1;
}

/* With split phases, whether op k is a sum that would otherwise be fused: it needs the same order of terms. */
static bool is_split_sum(const rfi_rewriter *w, int k) {
  const rfr_trace *t = w->to.from;
  if (!w->o->dx_sum || !w->o->split_phases || t->ops[k].def->code != RFI_OP_sum) return false;
  const rfr_value x = t->ops[k].in[RFI_IN_sum_x];
  const int from = t->values[x].op;
  if (from < 0 || !sums_rows(t, k, x)) return false;
  if (t->ops[from].def->code == RFI_OP_layernorm_dx) return total_of(w, from) == x;
  for (int j = 0; j < 2 && t->ops[from].def->code == RFI_OP_add; j++) {
    const int dx = t->values[t->ops[from].in[j]].op;
    if (dx >= 0 && t->ops[dx].def->code == RFI_OP_layernorm_dx && total_of(w, dx) == x) return true;
  }
  return false;
}

static bool match_norm(const rfi_rewriter *w, int i, norm_ops *p) {
  const rfr_trace *t = w->to.from;
  const rfi_uses *uses = w->uses;
  const rfi_opr *op = &t->ops[i];
  bool layernorm = op->def->code == RFI_OP_layernorm_dx;
  *p = (norm_ops){i, -1, -1, -1, -1, RFR_NONE};
  if (!layernorm && op->def->code != RFI_OP_rmsnorm_dx) return false;
  rfi_opcode dw = layernorm ? RFI_OP_layernorm_dw : RFI_OP_rmsnorm_dw;
  rfr_value dy = op->in[0];
  for (int k = i + 1; k <= uses[dy].last && k < t->n_ops; k++) {
    const rfi_opr *other = &t->ops[k];
    if (w->skip[k] || (w->o->split_phases && other->phase != op->phase)) continue;
    if (p->dw < 0 && other->def->code == dw && reads_same(op, other, layernorm ? 2 : 1)) p->dw = k;
    if (p->db < 0 && layernorm && other->def->code == RFI_OP_layernorm_db && other->in[0] == dy && other->in[1] < 0)
      p->db = k;
  }
  p->add = residual_add(w, i, &p->other);
  if (p->add < 0) p->other = RFR_NONE;
  if (layernorm) p->sum = column_sum(w, i);
  return p->dw >= 0 || p->db >= 0 || p->add >= 0 || p->sum >= 0;
}

static rfr_status emit_norm(rfi_rewrite *r, const norm_ops *p, rfi_report *report) {
  const rfr_trace *t = r->from;
  const rfi_opr *dx = &t->ops[p->dx];
  bool layernorm = dx->def->code == RFI_OP_layernorm_dx, dead[4] = {false, p->dw < 0, p->db < 0, p->sum < 0};
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
  if (p->sum >= 0) rfi_replace_value(r, t->ops[p->sum].out[0], out[3]);
  RFI_TRY(rfr_trace_status(r->to));
  return rfi_report_line(report, "fused: op %d %s%s%s with%s%s%s%s: -%lld bytes; %s", p->dx, dx->def->name,
                         dx->scope[0] ? " in " : "", dx->scope, p->dw >= 0 ? " dw" : "", p->db >= 0 ? " db" : "",
                         p->add >= 0 ? " and the residual add" : "", p->sum >= 0 ? " and the column sums of dx" : "",
                         (long long)rfi_bytes(&t->values[dx->out[0]].type) * ((p->add >= 0) + (p->sum >= 0)),
                         p->sum >= 0 ? "changes bits" : "exact");
}

static rfr_status emit_split_sum(rfi_rewriter *w, int k) {
  const rfi_opr *sum = &w->to.from->ops[k];
  rfr_value in[] = {w->to.map[sum->in[RFI_IN_sum_x]], RFR_NONE};
  rfi_opr op = *sum;
  op.def = rfi_op_def_get(RFI_OP_layernorm_db);
  op.n_in = 2, op.in = in, op.attr = NULL;
  op.reason = "fused: adds in the order of layernorm_bwd";
  return rfi_rewrite_as(&w->to, k, &op, NULL);
}

static rfr_status visit_norm(rfi_rewriter *w, int i) {
  norm_ops p;
  if (is_split_sum(w, i)) return emit_split_sum(w, i);
  if (!match_norm(w, i, &p)) return rfi_rewrite_op(&w->to, i, NULL);
  if (p.dw >= 0) w->skip[p.dw] = true;
  if (p.db >= 0) w->skip[p.db] = true;
  if (p.add >= 0) w->skip[p.add] = true;
  if (p.sum >= 0) w->skip[p.sum] = true;
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
