/* SPDX-License-Identifier: Apache-2.0
 *
 * SwiGLU between grouped products, of lower: the product that makes gate and up side by side makes h too. Exact: what
 * is stored is rounded before it is read.
 *
 * Only after recompute: h alone is cheap to make again, and of one op with the product it would be as dear as that.
 * Of one packed weight without a bias: that is what the kernels take.
 */
#include "pass/pass.h"

enum { SOON = 16 }; /* ops: the rows' weights, and views */

/* A grouped product of one packed weight, and nothing else. */
static bool is_plain(const rfi_opr *op) {
  if (op->def->code != RFI_OP_grouped_matmul || op->out[0] < 0) return false;
  for (int k = 0; k < op->n_in; k++)
    if ((op->in[k] < 0) == (k < 3)) return false;
  return true;
}

/* What v is columns of, from column `first` on; -1: of nothing. */
static rfr_value columns_of(const rfr_trace *t, rfr_value v, int64_t first) {
  const rfi_opr *slice = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
  if (!slice || slice->def->code != RFI_OP_slice || t->values[v].type.rank != 2) return RFR_NONE;
  return slice->attr[0].i == 1 && slice->attr[1].i == first ? slice->in[0] : RFR_NONE;
}

/* The matrix whose halves gate and up are; -1: of none. */
static rfr_value packed_of(const rfr_trace *t, rfr_value gate, rfr_value up) {
  const rfr_value all = columns_of(t, gate, 0);
  const int64_t columns = t->values[gate].type.shape[1];
  const bool halves = all >= 0 && t->values[up].type.rank == 2 && t->values[up].type.shape[1] == columns &&
                      t->values[all].type.shape[1] == 2 * columns && columns_of(t, up, columns) == all;
  return halves ? all : RFR_NONE;
}

/* They run at one time, and are made again or not at all together. */
static bool belong_together(const rfi_opr *a, const rfi_opr *b) {
  return a->phase == b->phase && a->microbatch == b->microbatch && (a->clone_of < 0) == (b->clone_of < 0);
}

static bool reads(const rfr_trace *t, const rfi_opr *op, rfr_value v) {
  for (int n = 0; n < op->n_in; n++)
    if (op->in[n] >= 0 && t->values[op->in[n]].base == t->values[v].base) return true;
  return false;
}

/* Whether op k may change places with what v is the result of: it is a view of v, or has nothing to do with it. */
static bool is_apart(const rfr_trace *t, int k, rfr_value v) {
  const rfi_opr *op = &t->ops[k];
  if (op->def->flags & RFI_VIEW) return true;
  return !reads(t, op, v) && !(op->def->flags & (RFI_STATE | RFI_HOST | RFI_COLLECTIVE));
}

/* The swiglu_weighted of halves of what the product at i makes, soon after it; -1: there is none. */
static int match(const rfr_trace *t, int i) {
  const rfi_opr *product = &t->ops[i];
  if (!is_plain(product)) return -1;
  int k = i + 1;
  while (k < t->n_ops && k < i + SOON && t->ops[k].def->code != RFI_OP_swiglu_weighted &&
         is_apart(t, k, product->out[0]))
    k++;
  const rfi_opr *act = &t->ops[k];
  if (k == t->n_ops || act->def->code != RFI_OP_swiglu_weighted || act->out[0] < 0) return -1;
  const bool weighed_by_itself = t->values[act->in[2]].base == t->values[product->out[0]].base;
  const bool halves = packed_of(t, act->in[0], act->in[1]) == product->out[0];
  return halves && !weighed_by_itself && belong_together(product, act) ? k : -1;
}

/* Of the ops between the two, those that read y, or do not. */
static rfr_status move_between(rfi_rewriter *w, int i, int k, rfr_value y, bool read) {
  const rfr_trace *t = w->to.from;
  for (int j = i + 1; j < k; j++) {
    if (w->skip[j] || reads(t, &t->ops[j], y) != read) continue;
    RFI_TRY(rfi_rewrite_op(&w->to, j, NULL));
    w->skip[j] = true;
  }
  return RFR_OK;
}

/* The product at i and the activation at k as one op. What stands between the two comes before it, views of the
 * product's result behind it. */
static rfr_status emit(rfi_rewriter *w, int i, int k) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *product = &t->ops[i], *act = &t->ops[k];
  const rfr_value y = product->out[0];
  RFI_TRY(move_between(w, i, k, y, false));
  rfr_value in[4] = {0}, out[RFI_MAX_NAMES];
  rfi_opr op = *product;
  for (int n = 0; n < 3; n++) in[n] = w->to.map[product->in[n]];
  in[3] = w->to.map[act->in[2]];
  op.def = rfi_op_def_get(RFI_OP_grouped_swiglu);
  op.n_in = 4;
  op.in = in;
  op.clone_of = product->clone_of < 0 ? -1 : w->to.op_map[product->clone_of];
  op.reason = "lowered: a product and its SwiGLU";
  RFI_TRY(rfi_rewrite_new(&w->to, &op, NULL, out));
  w->to.op_map[i] = w->to.op_map[k] = w->to.to->n_ops - 1;
  rfi_stand_for(&w->to, y, out[0]);
  rfi_stand_for(&w->to, act->out[0], out[1]);
  w->skip[k] = true;
  RFI_TRY(move_between(w, i, k, y, true));
  RFI_TRY(rfr_trace_status(w->to.to));
  return rfi_report_line(w->report,
                         "fused: op %d grouped_matmul with the swiglu_weighted%s%s that reads it: -%lld bytes "
                         "read; exact",
                         i, product->scope[0] ? " in " : "", product->scope, (long long)rfi_bytes(&t->values[y].type));
}

static rfr_status visit(rfi_rewriter *w, int i) {
  const int k = match(w->to.from, i);
  return k < 0 ? rfi_rewrite_op(&w->to, i, NULL) : emit(w, i, k);
}

rfr_status rfi_fuse_swiglu(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, NULL, report, NULL, visit, out);
}
