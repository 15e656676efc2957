/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs: rows are sorted by group, and each group has its own weight. Shapes, gradients, recording.
 *
 * The number of rows in a group is a value on the device, never a shape: R is fixed and only the split varies, so one
 * trace, plan and capture serves every routing. Offsets are computed once per routing, and every op of a block, forward
 * and backward, reads them. Each gradient is a separate op with its own operands, so that pruning it frees the
 * activations it reads: the gradient of w reads x, that of x reads w.
 */
#include <string.h>

#include "ops/op_index.h"
#include "ops/rule.h"

/* ---- shapes ---- */

static bool is_operand(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

/* The quantization recipes of a type that grouped GEMMs do not support. */
static const char *recipes_of(rfr_dtype dtype) {
  return dtype == RFR_E4M3 ? "FP8 and MXFP8" : dtype == RFR_E5M2 ? "FP8 gradients" : dtype == RFR_E2M1 ? "NVFP4" : NULL;
}

/* Row counts, offsets and tile counts are 32-bit, so rows rounded up to a tile of 64 must fit. */
#define MOST_ROWS ((int64_t)INT32_MAX - 63)

/* Checks operand i as a factor or result of a GEMM: f32, bf16 or f16, of this rank. */
static rfr_status matrix(const rfi_infer *c, int i, int rank) {
  const rfr_dtype dtype = c->in[i].dtype;
  const int last = c->def->n_operands - 1;
  if (recipes_of(dtype))
    return rfi_fail(
        RFI_E_TRACE_SHAPE,
        "%s is %s, not f32, bf16 or f16: grouped GEMMs do not support %s; pass the tensor before quantization",
        c->def->operand[i < last ? i : last], rfr_dtype_name(dtype), recipes_of(dtype));
  RFI_TRY(rfi_rule_float(c, i));
  RFI_TRY(rfi_rule_rank(c, i, rank, rank));
  for (int d = 0; d < rank; d++)
    if (c->in[i].shape[d] > MOST_ROWS)
      return rfi_fail(RFI_E_TRACE_SHAPE, "%s has %lld rows or columns; grouped GEMMs support at most %lld",
                      c->def->operand[i < last ? i : last], (long long)c->in[i].shape[d], (long long)MOST_ROWS);
  return RFR_OK;
}

static rfr_status result_type(const rfi_infer *c, int64_t to) {
  if (to >= 0 && to < RFR_DTYPE_COUNT && is_operand((rfr_dtype)to)) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "%s must be f32, bf16 or f16", c->def->result[0]);
}

/* Checks operand i as offsets; *groups gets their number of groups. */
static rfr_status offsets_of(const rfi_infer *c, int i, int64_t *groups) {
  RFI_TRY(rfi_rule_dtype(c, i, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, i, 1, 1));
  *groups = c->in[i].shape[0] - 1;
  return *groups >= 0
             ? RFR_OK
             : rfi_fail(RFI_E_TRACE_SHAPE, "offsets are empty; they need one element more than there are groups");
}

static rfr_status matrix_of(const rfi_infer *c, int i, int64_t rows, int64_t cols) {
  RFI_TRY(matrix(c, i, 2));
  const rfr_type want = {.dtype = c->in[i].dtype, .rank = 2, .shape = {rows, cols}};
  return rfi_rule_type(c, i, &want);
}

static rfr_status vector_of(const rfi_infer *c, int i, int64_t n) {
  RFI_TRY(rfi_rule_float(c, i));
  return rfi_rule_vector(c, i, n);
}

rfr_status rfi_infer_splits_to_offsets(const rfi_infer *c) {
  const int64_t rows = c->attr[0].i;
  RFI_TRY(rfi_rule_rank(c, 0, 1, 1));
  if (c->in[0].dtype != RFR_I32 && c->in[0].dtype != RFR_I64)
    return rfi_fail(RFI_E_TRACE_SHAPE, "splits is %s, not i32 or i64", rfr_dtype_name(c->in[0].dtype));
  if (rows < 0 || rows > MOST_ROWS)
    return rfi_fail(RFI_E_TRACE_SHAPE, "rows is %lld; it must be 0 to %lld", (long long)rows, (long long)MOST_ROWS);
  c->out[0] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {c->in[0].shape[0] + 1}};
  c->out[1] = (rfr_type){.dtype = RFR_I32, .rank = 1, .shape = {1}};
  return RFR_OK;
}

enum { X, W, OFFSETS, BIAS, SCALE, SEPARATE };

/* The type of the weights; separate ones as if they were packed. */
static rfr_status weights_of(const rfi_infer *c, rfr_type *w) {
  const int n = c->n_in > SEPARATE ? c->n_in - SEPARATE : 0;
  if (rfi_present(c, W) == (n > 0)) return rfi_fail(RFI_E_TRACE_SHAPE, "pass one packed w or one weight per group");
  if (n == 0) RFI_TRY(matrix(c, W, 3));
  if (n == 0) *w = c->in[W];
  for (int i = 0; i < n; i++) {
    RFI_TRY(matrix(c, SEPARATE + i, 2));
    RFI_TRY(rfi_rule_same(c, SEPARATE + i, SEPARATE, true));
  }
  const rfr_type *first = &c->in[SEPARATE];
  if (n > 0) *w = (rfr_type){.dtype = first->dtype, .rank = 3, .shape = {n, first->shape[0], first->shape[1]}};
  return RFR_OK;
}

rfr_status rfi_infer_grouped_matmul(const rfi_infer *c) {
  const rfr_type *x = &c->in[X];
  const int tb = c->attr[0].i != 0;
  rfr_type w = {.rank = 0};
  int64_t groups;
  RFI_TRY(matrix(c, X, 2));
  RFI_TRY(weights_of(c, &w));
  RFI_TRY(offsets_of(c, OFFSETS, &groups));
  RFI_TRY(result_type(c, c->attr[1].i));
  if (w.shape[0] != groups)
    return rfi_fail(RFI_E_TRACE_SHAPE, "w has %lld groups, offsets have %lld", (long long)w.shape[0],
                    (long long)groups);
  const int64_t N = w.shape[tb ? 1 : 2], K = w.shape[tb ? 2 : 1];
  if (x->shape[1] != K)
    return rfi_fail(RFI_E_TRACE_SHAPE, "inner dimensions differ: x gives %lld, w gives %lld", (long long)x->shape[1],
                    (long long)K);
  if (rfi_present(c, BIAS)) RFI_TRY(matrix_of(c, BIAS, groups, N));
  if (rfi_present(c, SCALE)) RFI_TRY(vector_of(c, SCALE, x->shape[0]));
  if (rfi_present(c, SCALE) && !rfi_present(c, BIAS))
    return rfi_fail(RFI_E_TRACE_SHAPE, "scale is given without a bias");
  c->out[0] = (rfr_type){.dtype = (rfr_dtype)c->attr[1].i, .rank = 2, .shape = {x->shape[0], N}};
  return RFR_OK;
}

rfr_status rfi_infer_grouped_swiglu(const rfi_infer *c) {
  enum { WEIGHT = BIAS };
  rfi_infer gemm = *c;
  gemm.def = rfi_op_def_get(RFI_OP_grouped_matmul);
  gemm.n_in = WEIGHT;
  RFI_TRY(rfi_infer_grouped_matmul(&gemm));
  c->out[1] = c->out[0];
  if (c->out[0].shape[1] % 2 != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld columns cannot be halved into gate and up", (long long)c->out[0].shape[1]);
  c->out[1].shape[1] /= 2;
  return vector_of(c, WEIGHT, c->out[0].shape[0]);
}

rfr_status rfi_infer_grouped_wgrad(const rfi_infer *c) {
  int64_t groups;
  RFI_TRY(matrix(c, 0, 2));
  RFI_TRY(matrix(c, 1, 2));
  RFI_TRY(offsets_of(c, 2, &groups));
  RFI_TRY(result_type(c, c->attr[0].i));
  if (c->attr[1].i < groups)
    return rfi_fail(RFI_E_TRACE_SHAPE, "offsets have %lld groups, more than the %lld that share the rows",
                    (long long)groups, (long long)c->attr[1].i);
  if (c->in[0].shape[0] != c->in[1].shape[0])
    return rfi_fail(RFI_E_TRACE_SHAPE, "dy has %lld rows, x has %lld", (long long)c->in[0].shape[0],
                    (long long)c->in[1].shape[0]);
  c->out[0] =
      (rfr_type){.dtype = (rfr_dtype)c->attr[0].i, .rank = 3, .shape = {groups, c->in[0].shape[1], c->in[1].shape[1]}};
  return rfi_present(c, 3) ? rfi_rule_type(c, 3, &c->out[0]) : RFR_OK;
}

rfr_status rfi_infer_grouped_dbias(const rfi_infer *c) {
  int64_t groups;
  RFI_TRY(matrix(c, 0, 2));
  RFI_TRY(offsets_of(c, 1, &groups));
  RFI_TRY(result_type(c, c->attr[0].i));
  if (rfi_present(c, 2)) RFI_TRY(vector_of(c, 2, c->in[0].shape[0]));
  c->out[0] = (rfr_type){.dtype = (rfr_dtype)c->attr[0].i, .rank = 2, .shape = {groups, c->in[0].shape[1]}};
  return rfi_present(c, 3) ? rfi_rule_type(c, 3, &c->out[0]) : RFR_OK;
}

rfr_status rfi_infer_grouped_dscale(const rfi_infer *c) {
  int64_t groups;
  RFI_TRY(matrix(c, 0, 2));
  RFI_TRY(offsets_of(c, 2, &groups));
  RFI_TRY(matrix_of(c, 1, groups, c->in[0].shape[1]));
  RFI_TRY(result_type(c, c->attr[0].i));
  c->out[0] = (rfr_type){.dtype = (rfr_dtype)c->attr[0].i, .rank = 1, .shape = {c->in[0].shape[0]}};
  return RFR_OK;
}

/* ---- description as GEMMs ---- */

/* Counts every row as if it belonged to a group. */
void rfi_gemm_grouped_matmul(const rfi_infer *c, rfi_gemm_desc *d) {
  const bool packed = rfi_present(c, W);
  const rfr_type *x = &c->in[X], *w = &c->in[packed ? W : SEPARATE];
  d->tb = c->attr[RFI_AT_grouped_matmul_tb].i != 0;
  d->b = packed ? W : -1;
  d->separate = packed ? -1 : SEPARATE;
  d->offsets = OFFSETS;
  d->varies = RFI_GEMM_VARIES_M;
  d->M = x->shape[0];
  d->K = x->shape[1];
  d->N = w->shape[w->rank - (d->tb ? 2 : 1)];
  if (rfi_present(c, BIAS)) d->bias = BIAS;
}

void rfi_gemm_grouped_swiglu(const rfi_infer *c, rfi_gemm_desc *d) {
  rfi_infer gemm = *c;
  gemm.n_in = RFI_IN_grouped_swiglu_weight; /* the operands before it equal those of grouped_matmul */
  rfi_gemm_grouped_matmul(&gemm, d);
}

/* The op always computes y, so it has the FLOPs of the GEMM even if y is unused. */
double rfi_flops_grouped_swiglu(const rfi_infer *c) {
  rfi_gemm_desc d = rfi_gemm_desc_make();
  rfi_gemm_grouped_swiglu(c, &d);
  return rfi_gemm_flops(&d);
}

void rfi_gemm_grouped_wgrad(const rfi_infer *c, rfi_gemm_desc *d) {
  const rfr_type *dy = &c->in[RFI_IN_grouped_wgrad_dy], *x = &c->in[RFI_IN_grouped_wgrad_x];
  d->ta = true;
  d->offsets = RFI_IN_grouped_wgrad_offsets;
  d->varies = RFI_GEMM_VARIES_K;
  d->M = dy->shape[1];
  d->K = dy->shape[0];
  d->N = x->shape[1];
  if (rfi_present(c, RFI_IN_grouped_wgrad_acc)) d->acc = RFI_IN_grouped_wgrad_acc;
}

/* ---- gradients ---- */

static bool wants(const rfi_grad *g, int i) { return i < g->op->n_in && g->op->in[i] != RFR_NONE && g->need[i]; }

static int64_t groups_of(const rfi_grad *g) { return rfr_value_type(g->t, g->op->in[OFFSETS]).shape[0] - 1; }

static void emit(rfi_grad *g, int i, rfi_opcode code, int n_in, const rfr_value *in) {
  rfi_emit_begin(g, i);
  /* grouped_wgrad uses the second attribute */
  const rfi_attr attr[2] = {rfi_i(rfi_emit_dtype(g, i)), rfi_i(groups_of(g))};
  rfi_emit_end(g, i, rfi_emit(g, code, n_in, in, attr));
}

/* dy times the weights, packed or separate. */
static rfr_status grad_x(rfi_grad *g) {
  const int n_in = g->op->n_in > SEPARATE ? g->op->n_in : W + 2;
  const rfi_attr attr[2] = {rfi_i(!g->op->attr[0].i), rfi_i(rfi_emit_dtype(g, X))};
  rfr_value *in = rfi_arena_alloc(g->t->arena, sizeof *in * (size_t)n_in);
  if (!in) return RFR_NO_MEMORY;
  memcpy(in, g->op->in, sizeof *in * (size_t)n_in);
  in[X] = g->dy[0];
  if (n_in > SEPARATE) in[BIAS] = in[SCALE] = RFR_NONE;
  rfi_emit_begin(g, X);
  rfi_emit_end(g, X, rfi_emit(g, RFI_OP_grouped_matmul, n_in, in, attr));
  return RFR_OK;
}

/* The gradients of separate weights. Adjacent weights whose gradients are needed in the same type share one op. Its
 * offsets cover only their groups, so other groups cost nothing. The op has the number of groups that share the rows
 * (`of`), so that its results do not depend on which weights are trained. Each weight's gradient is a slice of its
 * result. */
static void grad_separate(rfi_grad *g) {
  const rfr_value *in = g->op->in;
  const bool tb = g->op->attr[0].i;
  for (int first = SEPARATE, end; first < g->op->n_in; first = end) {
    for (end = first + 1; end < g->op->n_in && g->need[end] == g->need[first] &&
                          g->is_weight[end] == g->is_weight[first] &&
                          rfi_emit_dtype(g, end) == rfi_emit_dtype(g, first);)
      end++;
    if (!g->need[first]) continue;
    rfi_emit_begin(g, first);
    const rfi_attr attr[2] = {rfi_i(rfi_emit_dtype(g, first)), rfi_i(groups_of(g))};
    const rfr_value own = rfr_slice_at(g->t, g->at, in[OFFSETS], 0, first - SEPARATE, end - first + 1);
    const rfr_value dw =
        rfi_emit(g, RFI_OP_grouped_wgrad, 3, (rfr_value[]){tb ? g->dy[0] : in[X], tb ? in[X] : g->dy[0], own}, attr);
    for (int i = first; i < end; i++) {
      rfi_emit_begin(g, i);
      const rfr_value part = rfr_slice_at(g->t, g->at, dw, 0, i - first, 1);
      rfi_emit_end(g, i, rfr_reshape_at(g->t, g->at, part, 2, rfr_value_type(g->t, in[i]).shape));
    }
  }
}

rfr_status rfi_grad_grouped_matmul(rfi_grad *g) {
  const rfr_value *in = g->op->in, dy = g->dy[0], offsets = in[OFFSETS];
  const int64_t tb = g->op->attr[0].i;
  const rfr_value scale = g->op->n_in > SCALE ? in[SCALE] : RFR_NONE;
  if (dy == RFR_NONE) return RFR_OK;
  if (wants(g, X)) RFI_TRY(grad_x(g));
  if (wants(g, W)) emit(g, W, RFI_OP_grouped_wgrad, 3, (rfr_value[]){tb ? dy : in[X], tb ? in[X] : dy, offsets});
  grad_separate(g);
  if (wants(g, BIAS)) emit(g, BIAS, RFI_OP_grouped_dbias, 3, (rfr_value[]){dy, offsets, scale});
  if (wants(g, SCALE)) emit(g, SCALE, RFI_OP_grouped_dscale, 3, (rfr_value[]){dy, in[BIAS], offsets});
  return g->t->status;
}

/* ---- recording ---- */

rfr_value rfr_splits_to_offsets_at(rfr_trace *t, rfr_source at, rfr_value splits, int64_t rows, rfr_value *bad) {
  rfr_value out[2] = {RFR_NONE, RFR_NONE};
  const rfi_attr attr = rfi_i(rows);
  rfi_record(t, at, RFI_OP_splits_to_offsets, 1, &splits, &attr, out);
  if (bad) *bad = out[1];
  return out[0];
}

rfr_value rfr_grouped_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value offsets,
                                rfr_value bias, rfr_value scale) {
  const rfi_attr attr[2] = {rfi_i(1), rfi_i(rfr_value_type(t, x).dtype)};
  return rfi_record(t, at, RFI_OP_grouped_matmul, 5, (rfr_value[]){x, w, offsets, bias, scale}, attr, NULL);
}

rfr_value rfr_grouped_linear_separate_at(rfr_trace *t, rfr_source at, rfr_value x, int groups, const rfr_value *weights,
                                         rfr_value offsets, rfr_value bias, rfr_value scale) {
  const rfi_attr attr[2] = {rfi_i(1), rfi_i(rfr_value_type(t, x).dtype)};
  const bool given = groups > 0 && weights;
  rfr_value *in = NULL;
  if (given && rfi_trace_records(t)) in = rfi_arena_alloc(t->arena, sizeof *in * ((size_t)groups + SEPARATE));
  if (!in)
    return rfi_trace_fail(t, at, "grouped_matmul", given ? RFI_E_NO_MEMORY : RFI_E_ARGUMENT,
                          "groups is %d, or weights is NULL", groups);
  memcpy(in, (rfr_value[]){x, RFR_NONE, offsets, bias, scale}, sizeof *in * SEPARATE);
  memcpy(in + SEPARATE, weights, sizeof *in * (size_t)groups);
  return rfi_record(t, at, RFI_OP_grouped_matmul, groups + SEPARATE, in, attr, NULL);
}
