/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantize: the labelled GEMMs of linear layers become quantize ops and scaled GEMMs.
 *
 * Tensor cores multiply FP8 in one layout, y = a bT with both operands contiguous along the reduction. A quantize op
 * has both layouts as results: `row`, and `col`, the transposed copy. With y = x wT:
 *
 *   forward  y  = x.row  w.rowT
 *   dgrad    dx = dy.row w.colT
 *   wgrad    dw = dy.col x.colT
 *
 * A tensor is quantized once, before its first reader, and all GEMMs read that op; it has phase setup if several
 * microbatches share the tensor. Prune drops the results that have no reader and moves what depends only on frozen
 * inputs to phase load, so frozen weights and inputs need no special case here.
 *
 * A weight that is stored in quantized form is the result of a dequantize op. If it is stored in FP8, its codes and its
 * scale are operands of the GEMM, without a conversion; a GEMM that reads the other layout gets transposed codes.
 * Weights in other formats are dequantized and quantized for each GEMM (split_dequantize.c). Even in fp8_delayed the
 * scale of such a weight is computed from the weight, because the weight does not change.
 */
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "ops/op_index.h"
#include "ops/quant/formats.h"
#include "pass/quantize.h"
#include "pass/recipe_rules.h"

/* Operands of grouped_matmul; grouped_wgrad has its offsets at the same place. */
enum {
  W = RFI_IN_grouped_matmul_w,
  OFFSETS = RFI_IN_grouped_matmul_offsets,
  BIAS = RFI_IN_grouped_matmul_bias,
  SCALE = RFI_IN_grouped_matmul_scale,
  SEPARATE = RFI_IN_grouped_matmul_ws
};

/* Whether op is a grouped GEMM with one weight per group. */
static bool is_separate(const rfi_opr *op) { return op->def->code == RFI_OP_grouped_matmul && op->in[W] < 0; }

typedef struct linear {
  int32_t number;
  int forward; /* op of the old trace: the first op with this number */
  int ordinal; /* index among the linears of its microbatch */
} linear;

/* A quantized copy of a tensor, made by an op of the new trace. */
typedef struct copy {
  rfi_quantizer how;
  rfr_value offsets; /* offsets of groups; RFR_NONE: not grouped */
  int microbatch;
  int op;   /* index in the new trace */
  int next; /* the next copy of the same tensor; -1: none */
} copy;

typedef struct pass {
  rfi_rewrite r;
  rfi_report *report;
  rfi_arena *arena;
  linear *linears; /* indexed by number */
  int n_linears;
  int *first; /* per old value: its newest copy; -1: none */
  copy *copies;
  int n_copies, cap_copies;
  rfi_delayed delayed;
  rfr_value step, microbatch; /* of the new trace: the step block and the microbatch number; RFR_NONE: absent */
  int first_slot;
  int64_t first_linear; /* number of linears recorded in earlier callables, for the addresses of random draws */
  bool several;         /* there are several microbatches */
  int gemms, quantized, stored;
} pass;

/* ---- linears ---- */

static int by_number(const void *a, const void *b) {
  const linear *x = a, *y = b;
  if (x->number != y->number) return x->number < y->number ? -1 : 1;
  return x->forward - y->forward;
}

static const linear *linear_of(const pass *p, const rfi_opr *op) {
  const linear key = {.number = op->label.linear};
  int low = 0, high = p->n_linears;
  while (low < high) { /* the first linear whose number is not smaller */
    const int middle = (low + high) / 2;
    if (p->linears[middle].number < key.number) low = middle + 1;
    else high = middle;
  }
  return &p->linears[low];
}

/* Microbatches are recorded one after the other, so ordinals restart when the label changes. */
static rfr_status find_linears(pass *p, const rfr_trace *t) {
  int n = 0, next = 0, once = 0, current = -1;
  RFI_TRY(RFI_ALLOC(t->ctx, sizeof *p->linears * (size_t)(t->n_ops + 1), &p->linears));
  for (int i = 0; i < t->n_ops; i++)
    if (t->ops[i].label.recipe) p->linears[n++] = (linear){t->ops[i].label.linear, i, 0};
  qsort(p->linears, (size_t)n, sizeof *p->linears, by_number);
  for (int i = 0; i < n; i++)
    if (i == 0 || p->linears[i].number != p->linears[i - 1].number) p->linears[p->n_linears++] = p->linears[i];
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    linear *l = op->label.recipe ? (linear *)linear_of(p, op) : NULL;
    if (!l || l->forward != i) continue;
    if (op->microbatch != current) next = once;
    current = op->microbatch;
    l->ordinal = next++;
    if (current < 0) once = next;
  }
  return RFR_OK;
}

/* Whether a GEMM sums over rows: its first operand is transposed. */
static bool is_wgrad(const rfi_opr *op) {
  return op->def->code == RFI_OP_grouped_wgrad || (op->def->code == RFI_OP_matmul && op->attr[0].i);
}

/* ---- decisions ---- */

static bool is_forward(const linear *l, int i) { return l->forward == i; }

/* Why a GEMM is not quantized, as a clause in buf; NULL: it is quantized. */
static const char *left_because(const rfr_trace *t, const linear *l, int i, char *buf, size_t size) {
  const rfi_opr *op = &t->ops[i], *forward = &t->ops[l->forward];
  if (op->label.recipe == RFI_RECIPE_KEEP) {
    const rfi_value *w = rfi_input_of(t, forward->in[is_separate(forward) ? SEPARATE : W]);
    rfi_snprintf(buf, size, "%s is kept by name", w ? w->name : "its weight");
    return buf;
  }
  const rfr_recipe *recipe = &t->recipes[op->label.recipe - 1];
  if (recipe->high_backward && !is_forward(l, i)) return "the recipe does not quantize the backward";
  const bool grouped = forward->def->code == RFI_OP_grouped_matmul;
  if (!grouped && (forward->def->code != RFI_OP_matmul || forward->attr[0].i)) return "its forward is not in the trace";
  const int64_t unit = rfi_recipe_unit(recipe);
  const rfr_type *x = &t->values[forward->in[0]].type;
  const rfr_type *w = &t->values[forward->in[is_separate(forward) ? SEPARATE : W]].type;
  const int64_t N = w->shape[w->rank - (forward->attr[grouped ? 0 : 1].i ? 2 : 1)], K = x->shape[1];
  const int64_t M = grouped ? unit : x->shape[0]; /* the sizes of groups are run-time values; the ops pad them */
  if (M % unit == 0 && N % unit == 0 && K % unit == 0) return NULL;
  rfi_snprintf(buf, size, "%lld x %lld x %lld are not multiples of %lld", (long long)x->shape[0], (long long)N,
               (long long)K, (long long)unit);
  return buf;
}

/* ---- quantized copies ---- */

static bool quantizers_equal(const rfi_quantizer *a, const rfi_quantizer *b) {
  return a->format == b->format && a->scaling == b->scaling && a->options == b->options;
}

static bool is_dequantized(const rfr_trace *t, rfr_value v) {
  return t->values[v].op >= 0 && t->ops[t->values[v].op].def->flags & RFI_LOCAL;
}

/* An op with the labels of op i of the old trace. */
static rfi_opr proto_of(const pass *p, int i, rfi_opcode code, int n_in, rfr_value *in, const rfi_attr *attr) {
  rfi_opr op = p->r.from->ops[i];
  op.def = rfi_op_def_get(code);
  op.n_in = n_in, op.in = in, op.attr = attr;
  op.clone_of = -1;
  op.reason = "quantized";
  return op;
}

/* Appends the op that quantizes x, a value of the new trace, for op i. `offsets`: the rows of x are grouped. */
static rfr_status quantize(pass *p, int i, rfr_value x, rfi_operand operand, rfr_value offsets,
                           const rfi_quantizer *how, int microbatch, int *index) {
  const rfi_opr *op = &p->r.from->ops[i];
  const bool grouped = offsets >= 0, draws = how->options & RFR_QUANTIZE_STOCHASTIC;
  rfr_value in[5] = {x, offsets, RFR_NONE, RFR_NONE, RFR_NONE}, *more = in + 1 + grouped;
  const int ordinal = linear_of(p, op)->ordinal, slot = p->first_slot + RFI_OPERANDS * ordinal + (int)operand;
  const rfi_attr attr[5] = {rfi_i(how->format), rfi_i(how->scaling), rfi_i(how->options),
                            rfi_i(draws ? p->first_linear + ordinal : 0),
                            rfi_i(draws ? (int64_t)rfi_stream_id("quantize") : 0)};
  if (draws && p->step < 0)
    return rfi_fail_at(RFI_E_RECIPE, op->at.file ? op->at.file : "", op->at.line,
                       "nvfp4 rounds gradients at random and needs the step block (rfr_step_block) in the trace");
  if (draws) more[1] = p->step, more[2] = p->microbatch;
  more[0] = RFR_NONE;
  const bool delays =
      p->r.from->recipes[op->label.recipe - 1].kind == RFR_RECIPE_FP8_DELAYED && !is_dequantized(p->r.to, x);
  const rfr_type type = rfr_value_type(p->r.to, x);
  const int64_t slices = grouped ? rfr_value_type(p->r.to, offsets).shape[0] - 1 : type.rank == 3 ? type.shape[0] : 1;
  rfi_opr made = proto_of(p, i, grouped ? RFI_OP_grouped_quantize : RFI_OP_quantize, 4 + grouped, in, attr);
  made.label = (rfi_label){0, 0};
  made.microbatch = microbatch;
  if (microbatch < 0 && op->microbatch >= 0 && p->several) made.phase = RFR_PHASE_SETUP;
  if (delays) RFI_TRY(rfi_delayed_scale(&p->delayed, &p->r, &made, slot, slices, &more[0]));
  rfr_value out[RFI_MAX_NAMES];
  RFI_TRY(rfi_rewrite_new(&p->r, &made, NULL, out));
  *index = p->r.to->n_ops - 1;
  const rfi_amax amax = {out[RFI_OUT_quantize_amax], slot, how->format, made.phase};
  return delays ? rfi_delayed_note(&p->delayed, amax) : RFR_OK;
}

/* The microbatch of the quantized copy of x that op reads. A tensor that all microbatches share is quantized once. */
static int microbatch_of(const rfr_trace *t, const rfi_opr *op, rfr_value x) {
  const rfi_value *v = &t->values[x];
  const bool shared =
      v->op < 0 ? v->role != RFR_ROLE_INPUT && v->role != RFR_ROLE_INPUT_GRAD : t->ops[v->op].microbatch < 0;
  return shared ? -1 : op->microbatch;
}

/* The op that quantizes x, a value of the old trace, for op i; later ops share it. */
static rfr_status copy_of(pass *p, int i, rfr_value x, rfi_operand operand, rfr_value offsets, const rfi_opr **out) {
  const rfr_trace *t = p->r.from;
  const rfi_opr *op = &t->ops[i];
  const int microbatch = microbatch_of(t, op, x);
  const rfi_quantizer how = rfi_recipe_quantizer(&t->recipes[op->label.recipe - 1], operand);
  int k = p->first[x];
  while (k >= 0 && !(quantizers_equal(&p->copies[k].how, &how) && p->copies[k].offsets == offsets &&
                     p->copies[k].microbatch == microbatch))
    k = p->copies[k].next;
  if (k < 0) {
    int made;
    RFI_TRY(quantize(p, i, p->r.map[x], operand, offsets < 0 ? RFR_NONE : p->r.map[offsets], &how, microbatch, &made));
    if (!rfi_arena_grow(p->arena, (void **)&p->copies, &p->cap_copies, p->n_copies + 1, sizeof *p->copies))
      return RFR_NO_MEMORY;
    p->copies[p->n_copies] = (copy){how, offsets, microbatch, made, p->first[x]};
    p->first[x] = k = p->n_copies++;
  }
  *out = &p->r.to->ops[p->copies[k].op];
  return RFR_OK;
}

/* ---- scaled GEMMs ---- */

/* One operand of a GEMM y = a bT. */
typedef struct factor {
  rfi_operand operand;
  bool transposed; /* reads the result `col` of the quantized copy */
  bool grouped;    /* its rows are grouped */
} factor;

/* Finds the two operands of op i, a GEMM of linear l. */
static void factors_of(const rfr_trace *t, const linear *l, int i, factor f[2]) {
  const rfi_opr *op = &t->ops[i], *forward = &t->ops[l->forward];
  const bool grouped = forward->def->code == RFI_OP_grouped_matmul, wgrad = is_wgrad(op);
  const bool tb = op->attr[grouped ? 0 : 1].i, forward_tb = forward->attr[grouped ? 0 : 1].i;
  f[0] = (factor){i == l->forward ? RFI_OPERAND_X : RFI_OPERAND_DY, wgrad, grouped};
  f[1] = (factor){RFI_OPERAND_W, wgrad || !tb, false};
  if (!wgrad) return;
  f[0].operand = forward_tb ? RFI_OPERAND_DY : RFI_OPERAND_X;
  f[1] = (factor){forward_tb ? RFI_OPERAND_X : RFI_OPERAND_DY, true, grouped};
}

/* A quantized operand of a scaled GEMM. */
typedef struct scaled {
  rfr_value q, scale, global; /* global: RFR_NONE except in nvfp4 */
} scaled;

/* The dequantize op of v, a weight that is stored as `how` would quantize it; NULL: it is not stored so. */
static const rfi_opr *stored_of(const rfr_trace *t, rfr_value v, const rfi_quantizer *how) {
  const rfi_opr *op = t->values[v].op < 0 ? NULL : &t->ops[t->values[v].op];
  const bool stored = op && op->def->code == RFI_OP_dequantize &&
                      op->attr[RFI_AT_dequantize_format].i == RFR_QUANT_FP8 && how->format == RFR_E4M3 &&
                      how->scaling == RFR_SCALING_TENSOR;
  return stored ? op : NULL;
}

/* Appends an op with the code `code` that converts a stored weight, for op i. */
static rfr_status stored_form(pass *p, int i, rfi_opcode code, rfr_value x, const rfi_attr *attr, rfr_value *out) {
  rfi_opr op = proto_of(p, i, code, 1, &x, attr);
  op.label = (rfi_label){0, 0};
  op.reason = "stored in fp8";
  return rfi_rewrite_new(&p->r, &op, NULL, out);
}

/* The codes and the scale of a stored weight, for op i. */
static rfr_status stored(pass *p, int i, const rfi_opr *dequantize, bool transposed, scaled *out) {
  const rfr_value x = p->r.map[dequantize->in[RFI_IN_dequantize_x]];
  const rfi_shape *shape = &dequantize->attr[RFI_AT_dequantize_shape].s;
  const rfi_quant_layout l = rfi_quant_layout_for(RFR_QUANT_FP8, shape->rank, shape->dim);
  rfi_attr codes[3] = {rfi_i(RFR_E4M3), rfi_i(0), rfi_i(0)}, scales[3] = {rfi_i(RFR_F32), rfi_i(l.scales_at), rfi_i(0)};
  codes[RFI_AT_bytes_as_shape].s = *shape;
  scales[RFI_AT_bytes_as_shape].s = (rfi_shape){.rank = 1, .dim = {l.scales}};
  out->global = RFR_NONE;
  p->stored++;
  RFI_TRY(stored_form(p, i, RFI_OP_bytes_as, x, scales, &out->scale));
  RFI_TRY(stored_form(p, i, RFI_OP_bytes_as, x, codes, &out->q));
  return transposed ? stored_form(p, i, RFI_OP_transposed, out->q, NULL, &out->q) : RFR_OK;
}

static scaled results_of(const pass *p, int i, const rfi_opr *copy, bool transposed) {
  const rfi_opr *op = &p->r.from->ops[i];
  const bool nv = p->r.from->recipes[op->label.recipe - 1].kind == RFR_RECIPE_NVFP4;
  return (scaled){copy->out[transposed ? RFI_OUT_quantize_col : RFI_OUT_quantize_row],
                  copy->out[transposed ? RFI_OUT_quantize_col_scale : RFI_OUT_quantize_row_scale],
                  nv ? copy->out[transposed ? RFI_OUT_quantize_col_global : RFI_OUT_quantize_row_global] : RFR_NONE};
}

/* Appends an op for op i with the phase and microbatch of `like`, a copy in the new trace. */
static rfr_status append(pass *p, int i, const rfi_opr *like, rfi_opcode code, int n_in, rfr_value *in, rfi_attr attr,
                         rfr_value *out) {
  rfi_opr op = proto_of(p, i, code, n_in, in, &attr);
  op.label = (rfi_label){0, 0};
  op.phase = like->phase, op.microbatch = like->microbatch;
  return rfi_rewrite_new(&p->r, &op, NULL, out);
}

/* Stacks the experts' values along a new first dimension, scales of tensors along their only one. */
static rfr_status stack(pass *p, int i, const rfi_opr *like, int n, rfr_value *x, rfr_value *out) {
  for (int e = 0; e < n; e++) {
    const rfr_type type = rfr_value_type(p->r.to, x[e]);
    if (type.rank == 1) continue;
    const rfi_attr one = {.s = {.rank = 3, .dim = {1, type.shape[0], type.shape[1]}}};
    RFI_TRY(append(p, i, like, RFI_OP_reshape, 1, &x[e], one, &x[e]));
  }
  return append(p, i, like, RFI_OP_concat, n, x, rfi_i(0), out);
}

/* The separate weights of op i. Each is quantized by itself, so that a frozen one is quantized once at load; then the
 * copies are stacked as the scaled GEMM reads them. */
static rfr_status stacked(pass *p, int i, const factor *f, scaled *out) {
  const rfi_opr *op = &p->r.from->ops[i];
  const int n = op->n_in - SEPARATE;
  rfi_opr like = {0};
  rfr_value *x = rfi_arena_alloc(p->arena, sizeof *x * 3 * (size_t)n);
  if (!x) return RFR_NO_MEMORY;
  for (int e = 0; e < n; e++) {
    const rfi_opr *c;
    RFI_TRY(copy_of(p, i, op->in[SEPARATE + e], f->operand, RFR_NONE, &c));
    const scaled one = results_of(p, i, c, f->transposed);
    x[e] = one.q, x[n + e] = one.scale, x[2 * n + e] = one.global;
    like = *c;
  }
  RFI_TRY(stack(p, i, &like, n, x, &out->q));
  RFI_TRY(stack(p, i, &like, n, x + n, &out->scale));
  out->global = RFR_NONE;
  return x[2 * n] < 0 ? RFR_OK : stack(p, i, &like, n, x + 2 * n, &out->global);
}

/* The quantized operand k of op i. Grouped rows are quantized with the offsets of the forward, which cover all groups,
 * because those of a wgrad may cover only some. */
static rfr_status quantized(pass *p, int i, int k, const factor *f, scaled *out) {
  const rfi_opr *op = &p->r.from->ops[i], *forward = &p->r.from->ops[linear_of(p, op)->forward], *c;
  if (k == W && is_separate(op)) return stacked(p, i, f, out);
  const rfi_quantizer how = rfi_recipe_quantizer(&p->r.from->recipes[op->label.recipe - 1], f->operand);
  const rfi_opr *dequantize = stored_of(p->r.from, op->in[k], &how);
  if (dequantize) return stored(p, i, dequantize, f->transposed, out);
  RFI_TRY(copy_of(p, i, op->in[k], f->operand, f->grouped ? forward->in[OFFSETS] : RFR_NONE, &c));
  *out = results_of(p, i, c, f->transposed);
  return RFR_OK;
}

/* ---- the groups of a wgrad ---- */

/* The first group whose weight gradient op i, a grouped wgrad, computes: of separate weights, only some may be
 * trained. */
static int64_t first_group(const rfr_trace *t, const rfi_opr *op) {
  const rfi_value *offsets = &t->values[op->in[OFFSETS]];
  const rfi_opr *from = offsets->op < 0 ? NULL : &t->ops[offsets->op];
  return from && from->def->code == RFI_OP_slice ? from->attr[RFI_AT_slice_start].i : 0;
}

/* Slices the scales to those of n groups. Block scales belong to rows, so they are not sliced. */
static rfr_status part_of(pass *p, int i, int64_t first, int64_t n, rfr_value *scale) {
  if (*scale < 0 || rfr_value_type(p->r.to, *scale).rank != 1) return RFR_OK;
  const rfi_attr part[3] = {rfi_i(0), rfi_i(first), rfi_i(n)};
  rfi_opr op = proto_of(p, i, RFI_OP_slice, 1, scale, part);
  op.label = (rfi_label){0, 0};
  return rfi_rewrite_new(&p->r, &op, NULL, scale);
}

static rfr_value mapped(const pass *p, const rfi_opr *op, int k) {
  return k < op->n_in && op->in[k] >= 0 ? p->r.map[op->in[k]] : RFR_NONE;
}

/* Replaces op i by a scaled wgrad for the groups of its offsets. */
static rfr_status grouped_wgrad(pass *p, int i, scaled m[2]) {
  const rfi_opr *old = &p->r.from->ops[i];
  const int64_t groups = p->r.from->values[old->in[OFFSETS]].type.shape[0] - 1, of = old->attr[1].i;
  const int64_t first = groups == of ? 0 : first_group(p->r.from, old);
  for (int k = 0; groups != of && k < 2; k++) {
    RFI_TRY(part_of(p, i, first, groups, &m[k].scale));
    RFI_TRY(part_of(p, i, first, groups, &m[k].global));
  }
  rfr_value in[] = {m[0].q, m[1].q, mapped(p, old, OFFSETS), m[0].scale, m[1].scale, m[0].global, m[1].global};
  const rfi_attr attr[3] = {old->attr[0], old->attr[1], rfi_i(first)};
  const rfi_opr op = proto_of(p, i, RFI_OP_grouped_wgrad_scaled, 7, in, attr);
  return rfi_rewrite_as(&p->r, i, &op, NULL);
}

/* Replaces op i by a scaled GEMM. */
static rfr_status scale_gemm(pass *p, int i) {
  const rfi_opr *old = &p->r.from->ops[i];
  scaled m[2];
  factor f[2];
  factors_of(p->r.from, linear_of(p, old), i, f);
  for (int k = 0; k < 2; k++) RFI_TRY(quantized(p, i, k, &f[k], &m[k]));
  if (old->def->code == RFI_OP_grouped_wgrad) return grouped_wgrad(p, i, m);
  if (old->def->code == RFI_OP_matmul) {
    rfr_value in[] = {m[0].q, m[1].q, m[0].scale, m[1].scale, m[0].global, m[1].global, mapped(p, old, 2)};
    const rfi_opr op = proto_of(p, i, RFI_OP_matmul_scaled, 7, in, &old->attr[2]);
    return rfi_rewrite_as(&p->r, i, &op, NULL);
  }
  rfr_value in[] = {m[0].q,      m[1].q,      mapped(p, old, OFFSETS), m[0].scale,           m[1].scale,
                    m[0].global, m[1].global, mapped(p, old, BIAS),    mapped(p, old, SCALE)};
  const rfi_opr op = proto_of(p, i, RFI_OP_grouped_matmul_scaled, 9, in, &old->attr[1]);
  return rfi_rewrite_as(&p->r, i, &op, NULL);
}

static rfr_status visit(pass *p, int i) {
  const rfr_trace *t = p->r.from;
  const rfi_opr *op = &t->ops[i];
  char buf[200];
  if (!op->label.recipe) return rfi_rewrite_op(&p->r, i, NULL);
  p->gemms++;
  const char *because = left_because(t, linear_of(p, op), i, buf, sizeof buf);
  if (!because) {
    p->quantized++;
    return scale_gemm(p, i);
  }
  RFI_TRY(rfi_report_line(p->report, "not quantized: op %d %s%s%s: %s", i, op->def->name, op->scope[0] ? " in " : "",
                          op->scope, because));
  return rfi_rewrite_op(&p->r, i, NULL);
}

/* ---- the pass ---- */

/* Collects the needs of the linears under recipes; one that is not quantized is only counted. */
static rfr_status find_use(const pass *p, const rfr_trace *t, rfi_recipe_use *use) {
  char buf[200];
  *use = (rfi_recipe_use){.linears = p->n_linears};
  for (int i = 0; i < t->n_ops; i++) {
    const rfi_opr *op = &t->ops[i];
    if (!op->label.recipe || left_because(t, linear_of(p, op), i, buf, sizeof buf)) continue;
    const rfr_recipe *recipe = &t->recipes[op->label.recipe - 1];
    const int after = RFI_OPERANDS * (linear_of(p, op)->ordinal + 1);
    use->draws = use->draws || recipe->kind == RFR_RECIPE_NVFP4;
    if (recipe->kind != RFR_RECIPE_FP8_DELAYED) continue;
    if (after > use->slots) use->slots = after;
    if (use->delayed) RFI_TRY(rfi_recipes_agree(use->delayed, recipe));
    use->delayed = recipe;
  }
  return RFR_OK;
}

rfr_status rfi_recipe_use_of(const rfr_trace *t, rfi_recipe_use *out) {
  pass p = {0};
  *out = (rfi_recipe_use){0};
  rfr_status s = find_linears(&p, t);
  if (s == RFR_OK) s = find_use(&p, t, out);
  rfi_free(t->ctx, p.linears);
  return s;
}

/* The input with this name in the new trace; RFR_NONE: absent. */
static rfr_value input_named(const pass *p, const char *name) {
  const int i = rfi_names_find(&p->r.from->input_names, name);
  return i < 0 ? RFR_NONE : p->r.map[p->r.from->inputs[i]];
}

/* Finds the operands of random draws, and declares the states of fp8_delayed. */
static rfr_status prepare(pass *p, const rfi_pass_options *o) {
  const rfr_trace *t = p->r.from;
  rfi_recipe_use use;
  p->step = input_named(p, "step");
  p->microbatch = o->split_phases ? input_named(p, RFI_MICROBATCH_INPUT) : RFR_NONE;
  p->first_slot = o->first_slot;
  p->first_linear = o->first_linear;
  for (int i = 0, first = -1; i < t->n_ops; i++) {
    const int microbatch = t->ops[i].microbatch;
    if (first < 0) first = microbatch;
    p->several = p->several || (microbatch >= 0 && microbatch != first);
  }
  RFI_TRY(find_use(p, t, &use));
  if (!use.delayed) return RFR_OK;
  p->delayed.recipe = use.delayed;
  p->delayed.collects = o->split_phases && o->trains;
  return rfi_delayed_begin(&p->delayed, &p->r, p->arena, o->split_phases ? o->slots : use.slots);
}

/* Later passes do not need the labels. */
static void remove_labels(rfr_trace *t) {
  for (int i = 0; i < t->n_ops; i++) t->ops[i].label = (rfi_label){0, 0};
  t->n_recipes = 0;
}

static rfr_status report(const pass *p) {
  const rfr_trace *t = p->r.to;
  int64_t narrow = 0, wide = 0;
  for (int k = 0; k < p->n_copies; k++) {
    const rfi_opr *q = &t->ops[p->copies[k].op];
    wide += rfi_bytes(&t->values[q->in[0]].type);
    narrow += rfi_bytes(&t->values[q->out[RFI_OUT_quantize_row]].type) +
              rfi_bytes(&t->values[q->out[RFI_OUT_quantize_row_scale]].type);
  }
  if (p->stored > 0)
    RFI_TRY(rfi_report_line(p->report, "stored in fp8: %d operands are read without a copy in 16 bits", p->stored));
  return rfi_report_line(p->report, "quantized: %d of %d GEMMs; %d tensors of %lld bytes, %lld bytes per copy",
                         p->quantized, p->gemms, p->n_copies, (long long)wide, (long long)narrow);
}

rfr_status rfi_pass_quantize(const rfr_trace *in, const rfi_pass_options *o, rfi_report *to, rfr_trace **out) {
  rfr_status s;
  pass p = {.r = {.from = in}, .report = to};
  bool any = false;
  *out = NULL;
  for (int i = 0; i < in->n_ops; i++) any = any || in->ops[i].label.recipe;
  if (!any) return rfi_copy_trace(in, out);
  RFI_GOTO(rfi_arena_create(in->ctx, &p.arena));
  RFI_GOTO(RFI_ALLOC(in->ctx, sizeof *p.first * (size_t)(in->n_values + 1), &p.first));
  for (int v = 0; v < in->n_values; v++) p.first[v] = -1;
  RFI_GOTO(find_linears(&p, in));
  RFI_GOTO(rfi_rewrite_begin(in, &p.r));
  RFI_GOTO(prepare(&p, o));
  for (int i = 0; i < in->n_ops; i++) RFI_GOTO(visit(&p, i));
  RFI_GOTO(report(&p));
  RFI_GOTO(rfi_delayed_end(&p.delayed, &p.r));
  remove_labels(p.r.to);
  s = rfi_rewrite_end(&p.r, out);
  goto done;
fail:
  if (p.r.map) rfi_rewrite_abort(&p.r);
done:
  rfi_free(in->ctx, p.first);
  rfi_free(in->ctx, p.linears);
  rfi_arena_destroy(p.arena);
  return s;
}
