/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled operands: their shapes, and the calls that record quantizers and scaled GEMMs.
 *
 * Tensor cores multiply FP8 in one layout only, y = a bT with both operands contiguous along K. So dx = dy w needs wT,
 * and dw = dyT x needs dyT and xT: each is the result `col` of the quantize op whose `row` another GEMM reads. Unused
 * results are dropped one by one, so frozen weights need no special case: without dw, xT and dyT are not computed, and
 * without dx, wT is not. The format and the scaling of an operand follow from its type and shape and those of its
 * scales. So a GEMM supports any pair of operands.
 */
#include "ops/quant/scaled.h"

#include "ops/rule.h"

static bool is_wide(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }

/* ---- quantize ---- */

typedef struct geometry {
  int64_t slices, M, K; /* M: rows of all groups */
  int64_t col;          /* elements of a row of the result col */
  bool grouped;
} geometry;

static rfr_status check_options(const rfi_infer *c, const geometry *g, int scale) {
  const rfr_dtype format = (rfr_dtype)c->attr[RFI_AT_quantize_format].i;
  const int64_t scaling = c->attr[RFI_AT_quantize_scaling].i, bits = c->attr[RFI_AT_quantize_options].i;
  if (scaling < 0 || scaling >= RFR_SCALING_COUNT)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%lld is not an rfr_scaling", (long long)scaling);
  const rfi_scaling_info info = rfi_scaling_info_of(scaling);
  const bool four = info.scale == RFR_E4M3;
  if (four ? format != RFR_E2M1 : format != RFR_E4M3 && format != RFR_E5M2)
    return rfi_fail(RFI_E_TRACE_SHAPE, "format must be %s with this scaling", four ? "e2m1" : "e4m3 or e5m2");
  if (bits & ~(int64_t)(RFR_QUANTIZE_POW2 | RFR_QUANTIZE_STOCHASTIC | RFR_QUANTIZE_HADAMARD))
    return rfi_fail(RFI_E_TRACE_SHAPE, "options has unknown bits: %lld", (long long)bits);
  if ((bits & RFR_QUANTIZE_POW2) && info.scale != RFR_F32)
    return rfi_fail(RFI_E_TRACE_SHAPE, "options has POW2, but only f32 scales are rounded to powers of two");
  if ((bits & RFR_QUANTIZE_STOCHASTIC) && !four)
    return rfi_fail(RFI_E_TRACE_SHAPE, "options has STOCHASTIC, but only e2m1 is rounded stochastically");
  if (!(bits & RFR_QUANTIZE_STOCHASTIC) == rfi_present(c, scale + 1))
    return rfi_fail(RFI_E_TRACE_SHAPE, "stochastic rounding and the operand step must be given together");
  if ((bits & RFR_QUANTIZE_HADAMARD) && scaling != RFR_SCALING_NV16)
    return rfi_fail(RFI_E_TRACE_SHAPE, "the Hadamard transform needs the scaling nv16");
  if ((bits & RFR_QUANTIZE_HADAMARD) && !g->grouped && g->M % RFI_HADAMARD != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "the Hadamard transform needs a multiple of 16 rows, not %lld", (long long)g->M);
  if (four && (g->K % 2 != 0 || g->col % 2 != 0))
    return rfi_fail(RFI_E_TRACE_SHAPE, "e2m1 has two elements in a byte: %lld x %lld has an odd side", (long long)g->M,
                    (long long)g->K);
  if (g->grouped && info.rows > 1)
    return rfi_fail(RFI_E_TRACE_SHAPE, "blocks of %d rows can contain rows of two groups", info.rows);
  if (rfi_present(c, scale) && (scaling != RFR_SCALING_TENSOR || (bits & RFR_QUANTIZE_POW2)))
    return rfi_fail(RFI_E_TRACE_SHAPE, "a given scale needs scaling %d without POW2", RFR_SCALING_TENSOR);
  return RFR_OK;
}

/* The type of (..., rows, n) in the format, and that of its scales. */
static rfr_type data_type(rfr_dtype format, int rank, int64_t slices, int64_t rows, int64_t n) {
  const bool four = format == RFR_E2M1;
  rfr_type t = {.dtype = four ? RFR_U8 : format, .rank = rank, .shape = {slices}};
  t.shape[rank - 2] = rows;
  t.shape[rank - 1] = four ? n / 2 : n;
  return t;
}

static rfr_type scale_type(int64_t scaling, int rank, int64_t slices, int64_t rows, int64_t n) {
  const rfi_scaling_info info = rfi_scaling_info_of(scaling);
  if (scaling == RFR_SCALING_TENSOR) return (rfr_type){.dtype = RFR_F32, .rank = 1, .shape = {slices}};
  rfr_type t = {.dtype = info.scale, .rank = rank, .shape = {slices}};
  t.shape[rank - 2] = scaling == RFR_SCALING_BLOCK128 ? rfi_blocks_of(rows, info.rows) : rows;
  t.shape[rank - 1] = rfi_blocks_of(n, info.block);
  return t;
}

static rfr_status infer(const rfi_infer *c, const geometry *g, int scale) {
  const int rank = g->grouped ? 2 : c->in[0].rank;
  if (!is_wide(c->in[0].dtype))
    return rfi_fail(RFI_E_TRACE_SHAPE, "x is %s, not f32, bf16 or f16", rfr_dtype_name(c->in[0].dtype));
  RFI_TRY(check_options(c, g, scale));
  if (rfi_present(c, scale)) {
    RFI_TRY(rfi_rule_dtype(c, scale, RFR_F32));
    RFI_TRY(rfi_rule_vector(c, scale, g->slices));
  }
  if (rfi_present(c, scale + 1)) {
    RFI_TRY(rfi_rule_dtype(c, scale + 1, RFR_I64));
    RFI_TRY(rfi_rule_vector(c, scale + 1, 4));
  }
  if (rfi_present(c, scale + 2)) {
    RFI_TRY(rfi_rule_dtype(c, scale + 2, RFR_I32));
    RFI_TRY(rfi_rule_vector(c, scale + 2, 1));
  }
  const rfr_dtype format = (rfr_dtype)c->attr[RFI_AT_quantize_format].i;
  const int64_t scaling = c->attr[RFI_AT_quantize_scaling].i;
  const rfr_type each = {.dtype = RFR_F32, .rank = 1, .shape = {g->slices}};
  c->out[RFI_OUT_quantize_row] = data_type(format, rank, g->slices, g->M, g->K);
  c->out[RFI_OUT_quantize_col] = data_type(format, rank, g->slices, g->K, g->col);
  c->out[RFI_OUT_quantize_row_scale] = scale_type(scaling, rank, g->slices, g->M, g->K);
  c->out[RFI_OUT_quantize_col_scale] = scale_type(scaling, rank, g->slices, g->K, g->col);
  c->out[RFI_OUT_quantize_row_global] = c->out[RFI_OUT_quantize_col_global] = c->out[RFI_OUT_quantize_amax] = each;
  return RFR_OK;
}

rfr_status rfi_infer_quantize(const rfi_infer *c) {
  const rfr_type *x = &c->in[0];
  RFI_TRY(rfi_rule_rank(c, 0, 2, 3));
  const geometry g = {.slices = x->rank == 3 ? x->shape[0] : 1,
                      .M = x->shape[x->rank - 2],
                      .K = x->shape[x->rank - 1],
                      .col = x->shape[x->rank - 2]};
  return infer(c, &g, 1);
}

static rfr_status groups_of(const rfi_infer *c, int offsets, int64_t *groups) {
  RFI_TRY(rfi_rule_dtype(c, offsets, RFR_I32));
  RFI_TRY(rfi_rule_rank(c, offsets, 1, 1));
  *groups = c->in[offsets].shape[0] - 1;
  return *groups >= 0
             ? RFR_OK
             : rfi_fail(RFI_E_TRACE_SHAPE, "offsets are empty; they need one element more than there are groups");
}

rfr_status rfi_infer_grouped_quantize(const rfi_infer *c) {
  const rfr_type *x = &c->in[0];
  int64_t groups;
  RFI_TRY(rfi_rule_rank(c, 0, 2, 2));
  RFI_TRY(groups_of(c, 1, &groups));
  const geometry g = {.slices = groups,
                      .M = x->shape[0],
                      .K = x->shape[1],
                      .col = rfi_group_columns(c->attr[RFI_AT_quantize_scaling].i, x->shape[0], groups),
                      .grouped = true};
  return infer(c, &g, 2);
}

/* ---- scaled GEMMs ---- */

/* Checks operand q with its scales; `slices` tensors have a scale each. *length gets the elements of a row. */
static rfr_status scaled(const rfi_infer *c, int q, int scale, int global, int rank, int64_t slices, int64_t *length) {
  RFI_TRY(rfi_rule_rank(c, q, rank, rank));
  RFI_TRY(rfi_rule_rank(c, scale, 1, rank));
  const bool has_global = rfi_present(c, global);
  const rfr_type *x = &c->in[q];
  if (x->dtype != RFR_E4M3 && x->dtype != RFR_E5M2 && x->dtype != RFR_U8)
    return rfi_fail(RFI_E_TRACE_SHAPE, "%s is %s, not e4m3, e5m2 or u8 (two e2m1)", c->def->operand[q],
                    rfr_dtype_name(x->dtype));
  const int64_t scaling = rfi_scaling_of(x, &c->in[scale]), rows = x->shape[rank - 2];
  *length = x->shape[rank - 1] * (x->dtype == RFR_U8 ? 2 : 1);
  if (scaling < 0 || (x->dtype == RFR_U8) != (scaling == RFR_SCALING_NV16))
    return rfi_fail(RFI_E_TRACE_SHAPE, "%s in %s cannot have scales in %s of rank %d", c->def->operand[q],
                    rfr_dtype_name(x->dtype), rfr_dtype_name(c->in[scale].dtype), c->in[scale].rank);
  const rfr_type want = scale_type(scaling, rank, rank == 3 ? x->shape[0] : slices, rows, *length);
  RFI_TRY(rfi_rule_type(c, scale, &want));
  if (has_global) {
    RFI_TRY(rfi_rule_dtype(c, global, RFR_F32));
    return rfi_rule_vector(c, global, slices);
  }
  return scaling != RFR_SCALING_NV16
             ? RFR_OK
             : rfi_fail(RFI_E_TRACE_SHAPE, "%s in e2m1 needs %s", c->def->operand[q], c->def->operand[global]);
}

static rfr_status same_length(const rfi_infer *c, int64_t a, int64_t b) {
  if (a == b) return RFR_OK;
  return rfi_fail(RFI_E_TRACE_SHAPE, "inner dimensions differ: %s gives %lld, %s gives %lld", c->def->operand[0],
                  (long long)a, c->def->operand[1], (long long)b);
}

static rfr_status result(const rfi_infer *c, rfr_type type, int acc) {
  if (!is_wide(type.dtype)) return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  c->out[0] = type;
  return acc >= 0 && rfi_present(c, acc) ? rfi_rule_type(c, acc, &c->out[0]) : RFR_OK;
}

rfr_status rfi_infer_matmul_scaled(const rfi_infer *c) {
  int64_t K, other;
  RFI_TRY(scaled(c, RFI_IN_matmul_scaled_a, RFI_IN_matmul_scaled_scale_a, RFI_IN_matmul_scaled_global_a, 2, 1, &K));
  RFI_TRY(scaled(c, RFI_IN_matmul_scaled_b, RFI_IN_matmul_scaled_scale_b, RFI_IN_matmul_scaled_global_b, 2, 1, &other));
  RFI_TRY(same_length(c, K, other));
  const int64_t M = c->in[RFI_IN_matmul_scaled_a].shape[0], N = c->in[RFI_IN_matmul_scaled_b].shape[0];
  if (rfi_present(c, RFI_IN_matmul_scaled_bias)) {
    RFI_TRY(rfi_rule_vector(c, RFI_IN_matmul_scaled_bias, N));
    if (!is_wide(c->in[RFI_IN_matmul_scaled_bias].dtype))
      return rfi_fail(RFI_E_TRACE_SHAPE, "bias must be f32, bf16 or f16");
  }
  return result(c, (rfr_type){.dtype = (rfr_dtype)c->attr[0].i, .rank = 2, .shape = {M, N}}, RFI_IN_matmul_scaled_acc);
}

rfr_status rfi_infer_grouped_matmul_scaled(const rfi_infer *c) {
  int64_t K, other, groups;
  RFI_TRY(groups_of(c, RFI_IN_grouped_matmul_scaled_offsets, &groups));
  RFI_TRY(scaled(c, RFI_IN_grouped_matmul_scaled_a, RFI_IN_grouped_matmul_scaled_scale_a,
                 RFI_IN_grouped_matmul_scaled_global_a, 2, groups, &K));
  RFI_TRY(scaled(c, RFI_IN_grouped_matmul_scaled_w, RFI_IN_grouped_matmul_scaled_scale_w,
                 RFI_IN_grouped_matmul_scaled_global_w, 3, groups, &other));
  RFI_TRY(same_length(c, K, other));
  if (rfi_scaling_of(&c->in[RFI_IN_grouped_matmul_scaled_a], &c->in[RFI_IN_grouped_matmul_scaled_scale_a]) ==
      RFR_SCALING_BLOCK128)
    return rfi_fail(RFI_E_TRACE_SHAPE, "a scale for 128 rows can contain rows of two groups");
  const int64_t R = c->in[RFI_IN_grouped_matmul_scaled_a].shape[0], N = c->in[RFI_IN_grouped_matmul_scaled_w].shape[1];
  if (c->in[RFI_IN_grouped_matmul_scaled_w].shape[0] != groups)
    return rfi_fail(RFI_E_TRACE_SHAPE, "w has %lld groups, offsets have %lld",
                    (long long)c->in[RFI_IN_grouped_matmul_scaled_w].shape[0], (long long)groups);
  if (rfi_present(c, RFI_IN_grouped_matmul_scaled_bias)) {
    const rfr_type want = {.dtype = c->in[RFI_IN_grouped_matmul_scaled_bias].dtype, .rank = 2, .shape = {groups, N}};
    RFI_TRY(rfi_rule_float(c, RFI_IN_grouped_matmul_scaled_bias));
    RFI_TRY(rfi_rule_type(c, RFI_IN_grouped_matmul_scaled_bias, &want));
  }
  if (rfi_present(c, RFI_IN_grouped_matmul_scaled_scale)) {
    if (!rfi_present(c, RFI_IN_grouped_matmul_scaled_bias))
      return rfi_fail(RFI_E_TRACE_SHAPE, "scale is given without a bias");
    RFI_TRY(rfi_rule_float(c, RFI_IN_grouped_matmul_scaled_scale));
    RFI_TRY(rfi_rule_vector(c, RFI_IN_grouped_matmul_scaled_scale, R));
  }
  return result(c, (rfr_type){.dtype = (rfr_dtype)c->attr[0].i, .rank = 2, .shape = {R, N}}, -1);
}

rfr_status rfi_infer_grouped_wgrad_scaled(const rfi_infer *c) {
  const int64_t of = c->attr[1].i, first = c->attr[2].i;
  int64_t R, other, groups;
  RFI_TRY(groups_of(c, RFI_IN_grouped_wgrad_scaled_offsets, &groups));
  RFI_TRY(scaled(c, RFI_IN_grouped_wgrad_scaled_dy, RFI_IN_grouped_wgrad_scaled_scale_dy,
                 RFI_IN_grouped_wgrad_scaled_global_dy, 2, groups, &R));
  RFI_TRY(scaled(c, RFI_IN_grouped_wgrad_scaled_x, RFI_IN_grouped_wgrad_scaled_scale_x,
                 RFI_IN_grouped_wgrad_scaled_global_x, 2, groups, &other));
  RFI_TRY(same_length(c, R, other));
  if (first < 0 || of < 0 || first + groups > of)
    return rfi_fail(RFI_E_TRACE_SHAPE, "groups %lld to %lld are not among the %lld that share the rows",
                    (long long)first, (long long)(first + groups - 1), (long long)of);
  const int64_t a =
      rfi_scaling_of(&c->in[RFI_IN_grouped_wgrad_scaled_dy], &c->in[RFI_IN_grouped_wgrad_scaled_scale_dy]);
  if (a != rfi_scaling_of(&c->in[RFI_IN_grouped_wgrad_scaled_x], &c->in[RFI_IN_grouped_wgrad_scaled_scale_x]) ||
      a == RFR_SCALING_BLOCK128)
    return rfi_fail(RFI_E_TRACE_SHAPE, "dy and x must have the same scaling, with scales along the rows");
  const rfr_type dw = {
      .dtype = (rfr_dtype)c->attr[0].i,
      .rank = 3,
      .shape = {groups, c->in[RFI_IN_grouped_wgrad_scaled_dy].shape[0], c->in[RFI_IN_grouped_wgrad_scaled_x].shape[0]}};
  return result(c, dw, RFI_IN_grouped_wgrad_scaled_acc);
}

/* ---- costs ---- */

static double length_of(const rfr_type *x) { return (double)x->shape[x->rank - 1] * (x->dtype == RFR_U8 ? 2 : 1); }

void rfi_gemm_matmul_scaled(const rfi_infer *c, rfi_gemm_desc *d) {
  const rfr_type *a = &c->in[RFI_IN_matmul_scaled_a], *b = &c->in[RFI_IN_matmul_scaled_b];
  d->tb = true;
  d->M = a->shape[0];
  d->K = (int64_t)length_of(a);
  d->N = b->shape[0];
  if (rfi_present(c, RFI_IN_matmul_scaled_bias)) d->bias = RFI_IN_matmul_scaled_bias;
  if (rfi_present(c, RFI_IN_matmul_scaled_acc)) d->acc = RFI_IN_matmul_scaled_acc;
}

/* No rfi_gemm_desc describes them, because kernels of grouped GEMMs support only 16 and 32 bits. */
double rfi_flops_grouped_matmul_scaled(const rfi_infer *c) {
  const rfr_type *a = &c->in[RFI_IN_grouped_matmul_scaled_a];
  return 2 * length_of(a) * (double)a->shape[0] * (double)c->in[RFI_IN_grouped_matmul_scaled_w].shape[1];
}

double rfi_flops_grouped_wgrad_scaled(const rfi_infer *c) {
  const rfr_type *dy = &c->in[RFI_IN_grouped_wgrad_scaled_dy];
  return 2 * length_of(dy) * (double)dy->shape[0] * (double)c->in[RFI_IN_grouped_wgrad_scaled_x].shape[0];
}

/* ---- amax history ---- */

rfr_status rfi_infer_collect_amax(const rfi_infer *c) {
  enum { ONTO = RFI_IN_collect_amax_onto, AMAX = RFI_IN_collect_amax_amax };
  const int64_t slots = c->attr[RFI_AT_collect_amax_slots].i;
  const rfr_list at = c->attr[RFI_AT_collect_amax_at].l;
  const int n = c->n_in > AMAX ? c->n_in - AMAX : 0;
  const rfr_type type = {.dtype = RFR_F32, .rank = 2, .shape = {2, slots}};
  if (slots < 0 || slots > INT32_MAX)
    return rfi_fail(RFI_E_TRACE_SHAPE, "slots is %lld; it must be 0 to %d", (long long)slots, INT32_MAX);
  if (at.n != n)
    return rfi_fail(RFI_E_TRACE_SHAPE, "at has %lld numbers, but there are %d operands amax", (long long)at.n, n);
  for (int i = 0; i < n; i++) {
    RFI_TRY(rfi_rule_dtype(c, AMAX + i, RFR_F32));
    RFI_TRY(rfi_rule_rank(c, AMAX + i, 1, 1));
    if (!(at.x[i] >= 0 && at.x[i] < 2 * (double)slots) || at.x[i] != (double)(int64_t)at.x[i])
      return rfi_fail(RFI_E_TRACE_SHAPE, "at: number %d is not the number of one of 2 x %lld slots", i,
                      (long long)slots);
  }
  c->out[0] = type;
  return rfi_present(c, ONTO) ? rfi_rule_type(c, ONTO, &type) : RFR_OK;
}

rfr_status rfi_infer_scale_update(const rfi_infer *c) {
  enum {
    HISTORY = RFI_IN_scale_update_history,
    SCALE = RFI_IN_scale_update_scale,
    SKIP = RFI_IN_scale_update_skip,
    AMAX = RFI_IN_scale_update_amax
  };
  const int64_t margin = c->attr[RFI_AT_scale_update_margin].i;
  RFI_TRY(rfi_rule_dtype(c, HISTORY, RFR_F32));
  RFI_TRY(rfi_rule_rank(c, HISTORY, 2, 2));
  RFI_TRY(rfi_rule_dtype(c, SCALE, RFR_F32));
  RFI_TRY(rfi_rule_vector(c, SCALE, c->in[HISTORY].shape[1]));
  if (c->in[HISTORY].shape[0] < 1) return rfi_fail(RFI_E_TRACE_SHAPE, "history has no rows");
  if (margin < 0 || margin > 32) return rfi_fail(RFI_E_TRACE_SHAPE, "margin must be 0 to 32");
  if (rfi_present(c, SKIP)) {
    RFI_TRY(rfi_rule_dtype(c, SKIP, RFR_I32));
    RFI_TRY(rfi_rule_vector(c, SKIP, 1));
  }
  RFI_TRY(rfi_rule_dtype(c, AMAX, RFR_F32));
  RFI_TRY(rfi_rule_rank(c, AMAX, 2, 2));
  if (c->in[AMAX].shape[0] % 2 != 0 || c->in[AMAX].shape[1] != c->in[HISTORY].shape[1])
    return rfi_fail(RFI_E_TRACE_SHAPE,
                    "amax is (%lld,%lld); it must have an even number of rows, and a column for each of %lld slots",
                    (long long)c->in[AMAX].shape[0], (long long)c->in[AMAX].shape[1],
                    (long long)c->in[HISTORY].shape[1]);
  c->out[0] = c->in[HISTORY];
  c->out[1] = c->in[SCALE];
  return RFR_OK;
}

/* ---- recording ---- */

rfr_quantize_options rfr_quantize_options_default(void) {
  return (rfr_quantize_options){.size = sizeof(rfr_quantize_options),
                                .format = RFR_E4M3,
                                .scaling = RFR_SCALING_TENSOR,
                                .scale = RFR_NONE,
                                .step = RFR_NONE};
}

static rfr_value record(rfr_trace *t, rfr_source at, rfi_opcode code, rfr_value x, rfr_value offsets,
                        const rfr_quantize_options *options, rfr_quantized *out) {
  rfr_value y[RFI_Q_RESULTS];
  for (int j = 0; j < RFI_Q_RESULTS; j++) y[j] = RFR_NONE;
  if (rfi_trace_records(t)) {
    const rfr_quantize_options o = options ? *options : rfr_quantize_options_default();
    const bool random = o.step != RFR_NONE;
    const bool grouped = code == RFI_OP_grouped_quantize;
    rfr_value in[4] = {x, offsets};
    rfi_attr attr[5] = {rfi_i(o.format), rfi_i(o.scaling), rfi_i(o.bits), rfi_i(0), rfi_i(0)};
    in[1 + grouped] = o.scale;
    in[2 + grouped] = o.step;
    if (random) attr[3].i = t->next_site++, attr[4].i = rfi_stream_number(t, o.step, o.stream);
    rfi_record(t, at, code, 3 + grouped, in, attr, y);
  }
  if (out)
    *out = (rfr_quantized){.row = y[RFI_OUT_quantize_row],
                           .col = y[RFI_OUT_quantize_col],
                           .row_scale = y[RFI_OUT_quantize_row_scale],
                           .col_scale = y[RFI_OUT_quantize_col_scale],
                           .row_global = y[RFI_OUT_quantize_row_global],
                           .col_global = y[RFI_OUT_quantize_col_global],
                           .amax = y[RFI_OUT_quantize_amax]};
  return y[RFI_OUT_quantize_row];
}

rfr_value rfr_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, const rfr_quantize_options *options,
                          rfr_quantized *out) {
  return record(t, at, RFI_OP_quantize, x, RFR_NONE, options, out);
}

rfr_value rfr_grouped_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value offsets,
                                  const rfr_quantize_options *options, rfr_quantized *out) {
  return record(t, at, RFI_OP_grouped_quantize, x, offsets, options, out);
}

rfr_value rfr_matmul_scaled_at(rfr_trace *t, rfr_source at, const rfr_scaled *a, const rfr_scaled *b, rfr_value bias,
                               rfr_dtype to) {
  if (!rfi_trace_records(t)) return RFR_NONE;
  if (!a || !b) return rfi_trace_fail(t, at, "matmul_scaled", RFI_E_ARGUMENT, "a or b is NULL");
  const rfr_value in[] = {a->q, b->q, a->scale, b->scale, a->global, b->global, bias};
  const rfi_attr attr = rfi_i(to);
  return rfi_record(t, at, RFI_OP_matmul_scaled, 7, in, &attr, NULL);
}
