/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantize before permute (lower): if grouped_quantize reads only what moe_permute moved, and its groups share one
 * given scale (fp8_delayed), the tokens are quantized first and their codes are moved: each token is quantized once,
 * not once for each of its experts, and codes are half as large. Exact: an element's code depends on the element and
 * the scale alone, and every token that moe_route routes has rows, so the largest magnitude is the same. (With an
 * infinity or a NaN among the tokens, collect_amax ignores all of them instead of some groups.) It runs before
 * fuse_quantize, which fuses the new quantize with a norm before it.
 */
#include "ops/op_index.h"
#include "pass/pass.h"

static const rfi_opr *op_of(const rfr_trace *t, rfr_value v, rfi_opcode code) {
  const int op = v < 0 ? -1 : t->values[v].op;
  return op >= 0 && t->ops[op].def->code == code ? &t->ops[op] : NULL;
}

/* Whether v has no reader, or only collect_amax. */
static bool is_for_amax(const rfi_rewriter *w, rfr_value v) {
  if (v < 0 || w->uses[v].count == 0) return true;
  return w->uses[v].count == 1 && !w->uses[v].output &&
         w->to.from->ops[w->uses[v].last].def->code == RFI_OP_collect_amax;
}

/* The moe_permute whose rows op k, a grouped_quantize, encodes, if tokens can be encoded before they are permuted; -1:
 * none. */
static int match(const rfi_rewriter *w, int k) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *q = &t->ops[k];
  if (q->def->code != RFI_OP_grouped_quantize || q->n_in <= RFI_IN_grouped_quantize_scale) return -1;
  const rfr_value y = q->in[RFI_IN_grouped_quantize_x], scale = q->in[RFI_IN_grouped_quantize_scale];
  const rfi_opr *permute = op_of(t, y, RFI_OP_moe_permute), *each = op_of(t, scale, RFI_OP_expand);
  if (!permute || !each || w->uses[y].count != 1 || w->uses[y].output || !rfi_run_together(permute, q)) return -1;
  if (permute->n_in > RFI_IN_moe_permute_weight && permute->in[RFI_IN_moe_permute_weight] >= 0) return -1;
  const rfi_opr *sort = op_of(t, permute->in[RFI_IN_moe_permute_order], RFI_OP_moe_sort);
  if (!sort || !op_of(t, sort->in[0], RFI_OP_moe_route) ||
      op_of(t, permute->in[RFI_IN_moe_permute_place], RFI_OP_moe_sort) != sort)
    return -1;
  const rfr_type *one = &t->values[each->in[0]].type;
  const bool is_one_scale = one->rank == 1 && one->shape[0] == 1 && one->dtype == RFR_F32;
  if (!is_one_scale || q->attr[RFI_AT_grouped_quantize_scaling].i != RFR_SCALING_TENSOR) return -1;
  if (!rfi_is_unread(w, q->out[RFI_OUT_grouped_quantize_row_global]) ||
      !rfi_is_unread(w, q->out[RFI_OUT_grouped_quantize_col_global]) ||
      !is_for_amax(w, q->out[RFI_OUT_grouped_quantize_amax]))
    return -1;
  return t->values[y].op;
}

static void mark(rfi_rewriter *w) {
  for (int k = 0; k < w->to.from->n_ops; k++) {
    const int i = match(w, k);
    if (i >= 0) w->skip[i] = true;
  }
}

static rfr_status visit(rfi_rewriter *w, int k) {
  const rfr_trace *t = w->to.from;
  const rfi_opr *q = &t->ops[k];
  const int i = match(w, k);
  if (i < 0) return rfi_rewrite_op(&w->to, k, NULL);
  const rfi_opr *permute = &t->ops[i], *each = op_of(t, q->in[RFI_IN_grouped_quantize_scale], RFI_OP_expand);
  const rfr_value tokens = permute->in[RFI_IN_moe_permute_x];
  rfr_value first[4] = {w->to.map[tokens], w->to.map[each->in[0]], RFR_NONE, RFR_NONE}, in[5], out[RFI_MAX_NAMES];
  bool dead[RFI_MAX_NAMES] = {false};
  rfi_opr op = *q;
  for (int j = RFI_OUT_quantize_row; j <= RFI_OUT_quantize_amax; j++)
    dead[j] = j != RFI_OUT_quantize_row && j != RFI_OUT_quantize_row_scale;
  dead[RFI_OUT_quantize_amax] = rfi_is_unread(w, q->out[RFI_OUT_grouped_quantize_amax]);
  op.def = rfi_op_def_get(RFI_OP_quantize); /* the attributes are copied from grouped_quantize */
  op.n_in = 4, op.in = first;
  op.clone_of = permute->clone_of < 0 ? -1 : w->to.op_map[permute->clone_of];
  op.reason = "before permute";
  RFI_TRY(rfi_rewrite_new(&w->to, &op, dead, out));
  w->to.op_map[i] = w->to.to->n_ops - 1;
  if (!dead[RFI_OUT_quantize_amax])
    rfi_replace_value(&w->to, q->out[RFI_OUT_grouped_quantize_amax], out[RFI_OUT_quantize_amax]);

  in[RFI_IN_permute_codes_q] = out[RFI_OUT_quantize_row];
  in[RFI_IN_permute_codes_scale] = out[RFI_OUT_quantize_row_scale];
  in[RFI_IN_permute_codes_order] = w->to.map[permute->in[RFI_IN_moe_permute_order]];
  in[RFI_IN_permute_codes_place] = w->to.map[permute->in[RFI_IN_moe_permute_place]];
  in[RFI_IN_permute_codes_offsets] = w->to.map[q->in[RFI_IN_grouped_quantize_offsets]];
  op = *q;
  op.def = rfi_op_def_get(RFI_OP_permute_codes);
  op.n_in = 5, op.in = in, op.attr = NULL;
  op.clone_of = q->clone_of < 0 ? -1 : w->to.op_map[q->clone_of];
  op.reason = "permute of codes";
  static const int result[] = {RFI_OUT_grouped_quantize_row, RFI_OUT_grouped_quantize_col,
                               RFI_OUT_grouped_quantize_row_scale, RFI_OUT_grouped_quantize_col_scale};
  for (int j = 0; j < 4; j++) dead[j] = rfi_is_unread(w, q->out[result[j]]);
  RFI_TRY(rfi_rewrite_new(&w->to, &op, dead, out));
  w->to.op_map[k] = w->to.to->n_ops - 1;
  for (int j = 0; j < 4; j++)
    if (!dead[j]) rfi_replace_value(&w->to, q->out[result[j]], out[j]);
  RFI_TRY(rfr_trace_status(w->to.to));
  return rfi_report_line(
      w->report, "fused: op %d grouped_quantize%s%s before moe_permute: -%lld bytes moved; exact", k,
      q->scope[0] ? " in " : "", q->scope,
      2 * (long long)(rfi_bytes(&t->values[permute->out[0]].type) - rfi_bytes(&t->values[tokens].type)));
}

rfr_status rfi_fuse_permute(const rfr_trace *in, rfi_report *report, rfr_trace **out) {
  return rfi_rewrite_walk(in, NULL, report, mark, visit, out);
}
