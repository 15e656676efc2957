/* SPDX-License-Identifier: Apache-2.0
 *
 * Fusion of a grouped GEMM with SwiGLU (lower): the GEMM that computes packed gate and up computes h as well. Exact:
 * gate and up are rounded before they are read. It runs after recompute, because h alone is cheap to recompute; fused
 * with the GEMM it would cost as much as the GEMM. Only for one packed weight without a bias, because the kernels
 * support nothing else.
 */
#include "pass/pass.h"

enum { WINDOW = 16 }; /* maximum number of ops between the two, such as routing weights and views */

/* A grouped GEMM with one packed weight, without bias and scale. */
static bool is_plain(const rfi_opr *op) {
  if (op->def->code != RFI_OP_grouped_matmul || op->out[0] < 0) return false;
  for (int k = 0; k < op->n_in; k++)
    if ((op->in[k] < 0) == (k < 3)) return false;
  return true;
}

/* The matrix of which v is the columns from `first` on; -1: none. */
static rfr_value columns_of(const rfr_trace *t, rfr_value v, int64_t first) {
  const rfi_opr *slice = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
  if (!slice || slice->def->code != RFI_OP_slice || t->values[v].type.rank != 2) return RFR_NONE;
  return slice->attr[0].i == 1 && slice->attr[1].i == first ? slice->in[0] : RFR_NONE;
}

/* The matrix whose halves are gate and up; -1: none. */
static rfr_value packed_of(const rfr_trace *t, rfr_value gate, rfr_value up) {
  const rfr_value all = columns_of(t, gate, 0);
  const int64_t columns = t->values[gate].type.shape[1];
  const bool halves = all >= 0 && t->values[up].type.rank == 2 && t->values[up].type.shape[1] == columns &&
                      t->values[all].type.shape[1] == 2 * columns && columns_of(t, up, columns) == all;
  return halves ? all : RFR_NONE;
}

static bool reads(const rfr_trace *t, const rfi_opr *op, rfr_value v) {
  for (int n = 0; n < op->n_in; n++)
    if (op->in[n] >= 0 && t->values[op->in[n]].base == t->values[v].base) return true;
  return false;
}

/* Whether op k may move before the producer of v: it is a view, or independent of v. */
static bool is_movable(const rfr_trace *t, int k, rfr_value v) {
  const rfi_opr *op = &t->ops[k];
  if (op->def->flags & RFI_VIEW) return true;
  return !reads(t, op, v) && !(op->def->flags & (RFI_STATE | RFI_HOST | RFI_COLLECTIVE));
}

/* The swiglu_weighted that reads both halves of the result of op i, within WINDOW ops; -1: none. */
static int match(const rfr_trace *t, int i) {
  const rfi_opr *gemm = &t->ops[i];
  if (!is_plain(gemm)) return -1;
  int k = i + 1;
  while (k < t->n_ops && k < i + WINDOW && t->ops[k].def->code != RFI_OP_swiglu_weighted &&
         is_movable(t, k, gemm->out[0]))
    k++;
  const rfi_opr *act = &t->ops[k];
  if (k == t->n_ops || act->def->code != RFI_OP_swiglu_weighted || act->out[0] < 0) return -1;
  const bool weighted_by_itself = t->values[act->in[2]].base == t->values[gemm->out[0]].base;
  const bool halves = packed_of(t, act->in[0], act->in[1]) == gemm->out[0];
  return halves && !weighted_by_itself && rfi_run_together(gemm, act) ? k : -1;
}

/* Copies the ops between the two: those that read y, or those that do not. */
static rfr_status move_between(rfi_rewriter *w, int i, int k, rfr_value y, bool read) {
  const rfr_trace *t = w->to.from;
  for (int j = i + 1; j < k; j++) {
    if (w->skip[j] || reads(t, &t->ops[j], y) != read) continue;
    RFI_TRY(rfi_rewrite_op(&w->to, j, NULL));
    w->skip[j] = true;
  }
  return RFR_OK;
}

/* Fuses the GEMM at op i and the activation at op k. Ops between the two move before the fused op; views of the GEMM's
 * result move after it. */
static rfr_status emit(rfi_rewriter *w, int i, int k) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *gemm = &t->ops[i], *act = &t->ops[k];
  const rfr_value y = gemm->out[0];
  RFI_TRY(move_between(w, i, k, y, false));
  rfr_value in[4] = {0}, out[RFI_MAX_NAMES];
  rfi_opr op = *gemm;
  for (int n = 0; n < 3; n++) in[n] = w->to.map[gemm->in[n]];
  in[3] = w->to.map[act->in[2]];
  op.def = rfi_op_def_get(RFI_OP_grouped_swiglu);
  op.n_in = 4;
  op.in = in;
  op.clone_of = gemm->clone_of < 0 ? -1 : w->to.op_map[gemm->clone_of];
  op.reason = "fused: grouped GEMM + SwiGLU";
  RFI_TRY(rfi_rewrite_new(&w->to, &op, NULL, out));
  w->to.op_map[i] = w->to.op_map[k] = w->to.to->n_ops - 1;
  rfi_replace_value(&w->to, y, out[0]);
  rfi_replace_value(&w->to, act->out[0], out[1]);
  w->skip[k] = true;
  RFI_TRY(move_between(w, i, k, y, true));
  RFI_TRY(rfr_trace_status(w->to.to));
  return rfi_report_line(w->report, "fused: op %d grouped_matmul + swiglu_weighted%s%s: -%lld bytes read; exact", i,
                         gemm->scope[0] ? " in " : "", gemm->scope, (long long)rfi_bytes(&t->values[y].type));
}

static rfr_status visit(rfi_rewriter *w, int i) {
  const int k = match(w->to.from, i);
  return k < 0 ? rfi_rewrite_op(&w->to, i, NULL) : emit(w, i, k);
}

rfr_status rfi_fuse_swiglu(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, NULL, report, NULL, visit, out);
}
