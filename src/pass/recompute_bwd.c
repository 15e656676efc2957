/* SPDX-License-Identifier: Apache-2.0
 *
 * Results of the forward that an op of the backward recomputes, as swiglu_bwd does for swiglu. The op of the backward
 * reads the operands of the forward op anyway, so recomputing costs only a write. It has an optional last result, which
 * is bitwise equal to that of the forward op, and an optional last operand, in whose storage this result is. The pass
 * gives dy as this operand, so no further memory is needed; no later op may read dy.
 *
 * Ops of the backward that read the result before this op, such as the wgrad of the next linear layer, move directly
 * after it and keep their order. They must not conflict with the ops that they pass.
 *
 * The op of the backward does not recompute the result:
 * - with split phases: the op is in I, the readers are in W, and the result would have to be kept between the two;
 * - if its gradients are quantized: lower fuses the op with quantize, which saves more.
 */
#include "ops/quant/fused.h"
#include "pass/branch.h"
#include "pass/recompute_model.h"

/* Operand 0 of bwd is dy. Operand k + 1 is operand k of op, and its last result is result 0 of op. */
static const struct {
  rfi_opcode op, bwd;
} pairs[] = {
    {RFI_OP_swiglu, RFI_OP_swiglu_bwd},
    {RFI_OP_swiglu, RFI_OP_swiglu_bwd_packed},
    {RFI_OP_swiglu_weighted, RFI_OP_swiglu_weighted_bwd},
    {RFI_OP_swiglu_weighted, RFI_OP_swiglu_weighted_bwd_packed},
};

/* last[v]: the last op that touches the storage of value v; n_ops: it is an output. */
static void find_last_uses(const rfr_trace *t, int *last) {
  for (rfr_value v = 0; v < t->n_values; v++) last[v] = -1;
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    for (int k = 0; k < op->n_in; k++)
      if (op->in[k] >= 0) last[t->values[op->in[k]].base] = i;
    for (int j = 0; j < op->n_out; j++)
      if (op->out[j] >= 0) last[t->values[op->out[j]].base] = i;
  }
  for (int i = 0; i < t->n_outputs; i++) last[t->values[t->outputs[i].value].base] = t->n_ops;
}

/* Whether op b is the gradient of op i and reads the same values. */
static bool is_gradient(const rfr_trace *t, int i, int b) {
  const rfi_opr *op = &t->ops[i], *bwd = &t->ops[b];
  bool found = false;
  for (size_t p = 0; p < sizeof pairs / sizeof *pairs; p++)
    found = found || (op->def->code == pairs[p].op && bwd->def->code == pairs[p].bwd);
  if (!found || op->microbatch != bwd->microbatch) return false;
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] != bwd->in[k + 1]) return false;
  return true;
}

/* Whether op b may overwrite its dy. */
static bool is_dy_free(const rfi_recompute_model *m, int b, const int *last) {
  const rfr_trace *t = m->t;
  const rfi_opr *op = &t->ops[b];
  const rfi_value *dy = &t->values[op->in[0]], *owner = &t->values[dy->base];
  if (!rfi_is_dense(dy) || owner->op < 0 || m->bytes[dy->base] == 0 || last[dy->base] != b) return false;
  if (m->late[owner->op] == RFI_EARLY || t->ops[owner->op].microbatch != op->microbatch) return false;
  for (int k = 1; k < op->n_in; k++)
    if (op->in[k] >= 0 && t->values[op->in[k]].base == dy->base) return false;
  return true;
}

/* Whether quantize reads a result of op b, and lower can fuse the two. */
static bool is_quantized(const rfr_trace *t, int b) {
  rfi_fused_form form;
  if (!rfi_fused_find(t->ops[b].def->code, false, &form)) return false;
  for (int i = b + 1; i < t->n_ops; i++)
    for (int k = 0; k < t->ops[i].n_in && t->ops[i].def->code == RFI_OP_quantize; k++)
      if (t->ops[i].in[k] >= 0 && t->values[t->ops[i].in[k]].op == b) return true;
  return false;
}

static bool reads(const rfi_recompute_model *m, int i, int source) {
  const rfi_opr *op = &m->t->ops[i];
  for (int k = 0; k < op->n_in; k++)
    if (op->in[k] >= 0 && m->t->values[m->root[op->in[k]]].op == source) return true;
  return false;
}

static bool touches_dy(const rfr_trace *t, const rfi_opr *op, int bwd) {
  const rfr_value dy = t->values[t->ops[bwd].in[0]].base;
  bool found = false;
  for (int k = 0; k < op->n_in; k++) found = found || (op->in[k] >= 0 && t->values[op->in[k]].base == dy);
  for (int j = 0; j < op->n_out; j++) found = found || (op->out[j] >= 0 && t->values[op->out[j]].base == dy);
  return found;
}

/* Whether reader i of op `source` may move directly after op b. Op b, and ops on the way that recompute another result,
 * overwrite their dy. */
static bool can_move(const rfi_recompute_model *m, int i, int source, int b) {
  const rfr_trace *t = m->t;
  const rfi_opr *op = &t->ops[i];
  if (op->def->flags & (RFI_STATE | RFI_HOST | RFI_COLLECTIVE) || m->by[i].after >= 0 || m->by[i].source >= 0)
    return false;
  for (int k = i + 1; k <= b; k++) {
    if (rfi_ops_conflict(t, op, &t->ops[k]) && !reads(m, k, source)) return false;
    if ((k == b || m->by[k].source >= 0) && touches_dy(t, op, k)) return false;
  }
  return true;
}

static bool can_move_readers(const rfi_recompute_model *m, int source, int b, int *first) {
  *first = b;
  for (int i = b - 1; i > source; i--) {
    if (!m->late[i] || (m->t->ops[i].def->flags & RFI_VIEW) || !reads(m, i, source)) continue;
    if (!can_move(m, i, source, b)) return false;
    *first = i;
  }
  return true;
}

void rfi_find_by_bwd(rfi_recompute_model *m) {
  const rfr_trace *t = m->t;
  int *last = m->last; /* unused until the first evaluation */
  for (int i = 0; i < t->n_ops; i++) m->by[i] = (rfi_by_bwd){-1, -1, -1, -1};
  if (m->lates > 1) return;
  find_last_uses(t, last);
  for (int b = 0; b < t->n_ops; b++) {
    const rfi_op_def *def = t->ops[b].def;
    if (!m->late[b] || def->n_results == 0 || !def->only_onto[def->n_results - 1]) continue;
    for (int i = 0, first; i < b; i++) {
      if (!m->can[i] || !m->read_late[i] || m->by[i].bwd >= 0 || !is_gradient(t, i, b)) continue;
      if (!is_dy_free(m, b, last) || is_quantized(t, b) || !can_move_readers(m, i, b, &first)) continue;
      m->by[i].bwd = b;
      m->by[b].source = i;
      m->by[b].first = first;
      for (int k = first; k < b; k++)
        if (m->late[k] && !(t->ops[k].def->flags & RFI_VIEW) && reads(m, k, i)) m->by[k].after = i;
      break;
    }
  }
}
