/* SPDX-License-Identifier: Apache-2.0
 *
 * Recording calls, one per op that models use. Each appends one op to the trace and returns its first result. A wrong
 * operand latches an error, with the source line of the call, in the trace (rfr_trace_finish returns it); the call then
 * returns RFR_NONE, which later calls accept and pass on. Further results are written through pointers, which may be
 * NULL. Optional operands may be RFR_NONE. The values belong to the trace. Recording executes nothing, so it may happen
 * at any time; a trace must not be used by two threads at once.
 *
 *   rfr_value h = rfr_linear(t, x, w1, RFR_NONE);
 *   rfr_value y = rfr_linear(t, rfr_silu(t, h), w2, b2);
 *
 * rfr_NAME(t, ...) is a macro for rfr_NAME_at(t, RFR_HERE, ...): `at` is the source line that an error names. The
 * functions are documented here; the macros are at the end of the file.
 *
 * Shapes are written (rows, columns). T is the number of tokens of all documents of a microbatch, which are packed one
 * after the other. Float operands are f32, bf16 or f16 unless stated; sums are f32. Errors, unless stated: trace.shape
 * for operands whose shapes or types do not match, trace.value or argument for other misuse. No op fails at replay
 * because of its values.
 *
 * Sources: attention: Dao 2023, arXiv 2307.08691. Rotary embedding: Su et al., arXiv 2104.09864 (halves form, as in
 * Llama). AdamW: Loshchilov and Hutter, arXiv 1711.05101. SwiGLU: Shazeer, arXiv 2002.05202. RMSNorm: Zhang and
 * Sennrich, arXiv 1910.07467. GELU: Hendrycks and Gimpel, arXiv 1606.08415. LayerNorm: Ba et al., arXiv 1607.06450.
 */
#ifndef REFRAIN_OPS_H
#define REFRAIN_OPS_H

#include "refrain/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- GEMMs ---- */

/* y (M,N) = op(a) op(b) [+ bias (N)]; a (M,K), or (K,M) if ta; b (K,N), or (N,K) if tb. With rank 3, dimension 0 is a
 * batch, equal in both. `to` is the type of y. */
RFR_API rfr_value rfr_matmul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value bias, int ta, int tb,
                                rfr_dtype to);
/* y (T,N) = x (T,K) wT + b, w (N,K), b (N) or RFR_NONE; y has x's type. */
RFR_API rfr_value rfr_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b);
/* ---- scaled GEMMs ----
 *
 * A scaled operand is a tensor in 8 or 4 bits with scales: an element's value is q * scale (* global). Both operands
 * of a scaled GEMM are dense along the sum, so a tensor may be needed twice: as `row` and as its transposed copy `col`,
 * each with scales along its own rows. Formulas and sources: docs/quantizers.md. */

/*  X(enumerator, name, elements of a scale along a row (0: all), rows of a scale, type of a scale) */
#define RFR_SCALINGS(X)                                  \
  X(RFR_SCALING_TENSOR, "tensor", 0, 0, RFR_F32)         \
  X(RFR_SCALING_ROW128, "row128", 128, 1, RFR_F32)       \
  X(RFR_SCALING_BLOCK128, "block128", 128, 128, RFR_F32) \
  X(RFR_SCALING_MX32, "mx32", 32, 1, RFR_E8M0)           \
  X(RFR_SCALING_MX32X32, "mx32x32", 32, 32, RFR_E8M0)    \
  X(RFR_SCALING_NV16, "nv16", 16, 1, RFR_E4M3)           \
  X(RFR_SCALING_NV16X16, "nv16x16", 16, 16, RFR_E4M3)

typedef enum rfr_scaling {
#define RFR_SCALING_ENUM(e, name, block, rows, scale) e,
  RFR_SCALINGS(RFR_SCALING_ENUM)
#undef RFR_SCALING_ENUM
      RFR_SCALING_COUNT
} rfr_scaling;

typedef enum rfr_quantize_bits {
  RFR_QUANTIZE_POW2 = 1,       /* tensor, row128, block128: scales are rounded down to powers of two */
  RFR_QUANTIZE_STOCHASTIC = 2, /* nv16, nv16x16: rounded at random, with the value as the mean; needs `step` */
  RFR_QUANTIZE_HADAMARD = 4    /* nv16: col is of x after a Hadamard transform of 16 rows, for wgrad */
} rfr_quantize_bits;

typedef struct rfr_quantize_options {
  size_t size;
  rfr_dtype format; /* e4m3 or e5m2; nv16, nv16x16: e2m1 */
  rfr_scaling scaling;
  int bits;        /* of rfr_quantize_bits */
  rfr_value scale; /* tensor: f32 (slices), multiplied by instead of a scale computed from x; RFR_NONE: none */
  rfr_value step;  /* the step block of random numbers, or RFR_NONE */
  int stream;
} rfr_quantize_options;
RFR_API rfr_quantize_options rfr_quantize_options_default(void); /* e4m3, one scale from the tensor itself */

typedef struct rfr_quantized {
  rfr_value row, col, row_scale, col_scale, row_global, col_global;
  rfr_value amax; /* f32 (slices): max |x| */
} rfr_quantized;

/* Quantizes x (M,K), or each slice of x (G,M,K). Returns row; *out has all results. Unused ones are not computed. There
 * is no gradient: the pass that quantizes runs after autodiff. */
RFR_API rfr_value rfr_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, const rfr_quantize_options *options,
                                  rfr_quantized *out);
/* The same for the rows of groups: x (R,K), offsets i32 (G+1); each group is a slice. */
RFR_API rfr_value rfr_grouped_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value offsets,
                                          const rfr_quantize_options *options, rfr_quantized *out);
/* One operand of a scaled GEMM: row or col of a quantized tensor with its scales. global may be RFR_NONE except with
 * nv16. */
typedef struct rfr_scaled {
  rfr_value q, scale, global;
} rfr_scaled;
/* y (M,N) = a bT [+ bias (N)], a (M,K), b (N,K). The scalings may differ. */
RFR_API rfr_value rfr_matmul_scaled_at(rfr_trace *t, rfr_source at, const rfr_scaled *a, const rfr_scaled *b,
                                       rfr_value bias, rfr_dtype to);

/* ---- quantized storage ----
 *
 * A quantized tensor is one u8 tensor (bytes): codes, then scales. nf4, int8 and fp8 are for frozen weights. nf4 has
 * blocks of 64 with quantized scales (double quantization); int8 has one scale per row, its largest magnitude; fp8 is
 * E4M3 with one scale per matrix, the codes and scales of rfr_quantize. dynamic8 (signed) and dynamic8u (unsigned) are
 * for optimizer states. Codes and scales of the other formats are those of bitsandbytes.
 * Sources: Dettmers et al., arXiv 2305.14314 (NF4), 2208.07339 (int8), 2110.02861 (dynamic maps). */

/*  X(enumerator, name, bits of a code, elements of a block (0: a row, -1: a matrix), type of a scale) */
#define RFR_QUANTS(X)                                \
  X(RFR_QUANT_NONE, "model", 0, 0, RFR_F32)          \
  X(RFR_QUANT_NF4, "nf4", 4, 64, RFR_U8)             \
  X(RFR_QUANT_INT8, "int8", 8, 0, RFR_F32)           \
  X(RFR_QUANT_FP8, "fp8", 8, -1, RFR_F32)            \
  X(RFR_QUANT_DYNAMIC8, "dynamic8", 8, 256, RFR_F32) \
  X(RFR_QUANT_DYNAMIC8U, "dynamic8u", 8, 256, RFR_F32)

typedef enum rfr_quant {
#define RFR_QUANT_ENUM(e, name, bits, block, scale) e,
  RFR_QUANTS(RFR_QUANT_ENUM)
#undef RFR_QUANT_ENUM
      RFR_QUANT_COUNT
} rfr_quant;

RFR_API const char *rfr_quant_name(rfr_quant format); /* "nf4" */
/* Bytes of a tensor of this shape; 0 for RFR_QUANT_NONE. */
RFR_API int64_t rfr_quant_bytes(rfr_quant format, int rank, const int64_t *shape);
/* Quantizes `data` (dense; f32, bf16 or f16) into `out`, which has rfr_quant_bytes bytes at a multiple of 4. The bits
 * do not depend on the number of threads (1 to 4096). Errors: argument for another dtype, format or number of
 * threads. */
RFR_API rfr_status rfr_quant_encode(rfr_ctx *ctx, rfr_quant format, int rank, const int64_t *shape, rfr_dtype dtype,
                                    const void *data, int threads, void *out);
/* y (shape) of type `to` = the values of x, u8 (rfr_quant_bytes). Each value is an f32 product, rounded to `to`, and is
 * bitwise equal on every device. Each op that reads y gets a separate dequantize op just before it, so the values are
 * never kept for the backward or for another step. */
RFR_API rfr_value rfr_dequantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_quant format, int rank,
                                    const int64_t *shape, rfr_dtype to);

/* ---- grouped GEMMs and mixture of experts ----
 *
 * A grouped GEMM multiplies each row by the weight of its group. Rows are sorted by group. The number of rows in a
 * group is a value on the device, so one captured program serves every split. */

/* Offsets i32 (G+1) from `splits`, i32 or i64 (G), over `rows` rows, for all grouped ops of one routing. A negative
 * split counts as 0, and splits are cut off at `rows` in total; then *bad i32 (1) is 1 + the first such group, else
 * 0. */
RFR_API rfr_value rfr_splits_to_offsets_at(rfr_trace *t, rfr_source at, rfr_value splits, int64_t rows, rfr_value *bad);
/* y (R,N): rows offsets[g] ... offsets[g+1] - 1 are x wT[g] + bias[g]; x (R,K), w (G,N,K), bias (G,N) or RFR_NONE. With
 * scale (R), a float, a row's bias is multiplied by it. Rows after the last group are not read and give zeros. y has
 * x's type. */
RFR_API rfr_value rfr_grouped_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value offsets,
                                        rfr_value bias, rfr_value scale);
/* The same with a separate weight (N,K) per group, all of one type. Only the requested gradients are computed. */
RFR_API rfr_value rfr_grouped_linear_separate_at(rfr_trace *t, rfr_source at, rfr_value x, int groups,
                                                 const rfr_value *weights, rfr_value offsets, rfr_value bias,
                                                 rfr_value scale);
/* How a router's logits become scores: the softmax of all; the logits themselves, with the softmax of the chosen ones
 * as weights; the logistic function of each. */
typedef enum rfr_moe_score { RFR_MOE_SOFTMAX, RFR_MOE_SOFTMAX_CHOSEN, RFR_MOE_SIGMOID } rfr_moe_score;
typedef struct rfr_moe_options {
  size_t size;
  int64_t k; /* experts per token */
  rfr_moe_score score;
  int norm; /* divide a token's weights by their sum */
  /* choose only from the group_k best of `groups` groups of adjacent experts; 1, 1: from all */
  int64_t groups, group_k;
  double scale; /* factor of all weights */
} rfr_moe_options;
RFR_API rfr_moe_options rfr_moe_options_default(void); /* k 2, softmax, norm: Mixtral's */
/* Chooses k experts for each token: returns their weights f32 (T,k); *index i32 (T,k) has the experts, best first; of
 * equal scores the smaller index is better. logits (T,E). bias f32 (E) or RFR_NONE is added to the scores only for the
 * comparison. The weights have a gradient, the choice has none. */
RFR_API rfr_value rfr_moe_route_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value bias,
                                   const rfr_moe_options *options, rfr_value *index);
/* Sorts the slots t*k+j of index (T,k) by expert, stably. Returns the number of slots of each expert, i32 (experts),
 * for rfr_splits_to_offsets; *order i32 (T*k) is the slot of each sorted row, *place i32 (T,k) the row of each slot. */
RFR_API rfr_value rfr_moe_sort_at(rfr_trace *t, rfr_source at, rfr_value index, int64_t experts, rfr_value *order,
                                  rfr_value *place);
/* Expert parallelism: the experts are distributed over ranks in rank order, and the send buffer has one part of
 * `capacity` rows per rank. From the results of rfr_moe_sort over all experts: returns i32 (ranks capacity), the slot
 * of each row of the send buffer, -1 for none; *part_place i32 (T,k) the row of each slot, -1 if its part is full;
 * *need i32 (1) the rows that the largest part needs if they exceed capacity, else 0. Both maps are for rfr_moe_permute
 * and rfr_moe_unpermute. */
RFR_API rfr_value rfr_moe_parts_at(rfr_trace *t, rfr_source at, rfr_value splits, rfr_value order, rfr_value place,
                                   int ranks, int64_t capacity, rfr_value *part_place, rfr_value *need);
/* The expert of each row of the receive buffer, i32 (ranks capacity,1), -1 for none, for rfr_moe_sort. counts i32
 * (ranks experts): rows of each expert of this rank in each part, the all_to_all of the splits. */
RFR_API rfr_value rfr_moe_part_experts_at(rfr_trace *t, rfr_source at, rfr_value counts, int ranks, int64_t capacity);
/* (T*k,C), or (ranks capacity,C): the row of x (T,C) of each slot, sorted by expert, times weight (T,k) unless that is
 * RFR_NONE. */
RFR_API rfr_value rfr_moe_permute_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value order, rfr_value place,
                                     rfr_value weight);
/* (T*k): for each sorted row its element of weight (T,k); 0 for a row without a slot. rfr_swiglu_weighted multiplies
 * rows by it; if the second GEMM has a bias, pass it to rfr_grouped_linear as the scale of that bias. */
RFR_API rfr_value rfr_moe_row_weight_at(rfr_trace *t, rfr_source at, rfr_value weight, rfr_value order,
                                        rfr_value place);
/* (T,C): the sum of each token's rows of y (T*k,C), times weight (T,k) unless that is RFR_NONE. */
RFR_API rfr_value rfr_moe_unpermute_at(rfr_trace *t, rfr_source at, rfr_value y, rfr_value order, rfr_value place,
                                       rfr_value weight);
/* The aux loss f32 (1) over the N tokens whose target, i32 (T), is not `ignore`:
 *
 *   balance E / N^2 (sum over experts of n P) + z / N (sum over tokens of lse^2)
 *
 * n: how often the expert is in index; P: the sum of its probabilities over the tokens (softmax; with `sigmoid` the
 * logistic functions divided by their sum); lse: the logarithm of the token's sum of exp(logits). Sources: Fedus et
 * al., arXiv 2101.03961; Zoph et al., arXiv 2202.08906. */
RFR_API rfr_value rfr_moe_loss_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value index, rfr_value targets,
                                  int sigmoid, double balance, double z, int ignore);
/* The load of experts, from the splits of routings: n values, i32 (E) or (routings,E). The load of an expert is its
 * number of rows divided by the mean over the experts of its routing. Returns the largest load, f32 (1). *least f32 (1)
 * is the smallest load; *by_layer f32 (layers) is the largest load of each layer, where the routings are those of layer
 * 0, 1, ..., layers - 1, 0, ... `least` and `by_layer` may be NULL. */
RFR_API rfr_value rfr_moe_load_at(rfr_trace *t, rfr_source at, int n, const rfr_value *splits, int64_t layers,
                                  rfr_value *least, rfr_value *by_layer);

/* ---- embeddings, norms, attention ---- */

/* y (T,C) = table (V,C) [ids i32 (T)]; an id out of range reads zeros and gets no gradient. */
RFR_API rfr_value rfr_embedding_at(rfr_trace *t, rfr_source at, rfr_value table, rfr_value ids);
/* The position of each of `tokens` rows in its document, i32 (tokens), from the documents' offsets i32 (documents+1),
 * ascending, first 0, last `tokens`. */
RFR_API rfr_value rfr_positions_at(rfr_trace *t, rfr_source at, rfr_value offsets, int64_t tokens);
/* Scaling of a rotary embedding for longer documents: frequencies are divided by `factor`. With `original` > 0 only low
 * ones are: frequencies with at least `high` turns within `original` positions stay, those with at most `low` turns are
 * divided, and between them both are mixed (Llama 3.1). */
typedef struct rfr_rope_scaling {
  double factor; /* 1: no scaling */
  double low, high;
  int64_t original; /* positions; 0: all frequencies are divided */
} rfr_rope_scaling;
/* Rotary embedding of x (T,H,D), D even: pairs (d, d + D/2). positions i32 (T). scaling: NULL for none. */
RFR_API rfr_value rfr_rope_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value positions, double theta,
                              const rfr_rope_scaling *scaling);
/* Rotary embedding with n given frequencies, in radians per position, n from 1 to D/2: pairs (d, d + n) of the first 2n
 * columns of x (T,H,D) are rotated and multiplied by `scale`; the other columns are copied. `frequency` is borrowed
 * until the call returns. */
RFR_API rfr_value rfr_rope_table_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value positions,
                                    const double *frequency, int n, double scale);
/* y = (x - mean) / sqrt(var + eps) * w + b over the last dimension, C; w (C), b (C) or RFR_NONE. */
RFR_API rfr_value rfr_layernorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b, double eps);
/* y = x / sqrt(mean(x^2) + eps) * w over the last dimension, C; w (C). */
RFR_API rfr_value rfr_rmsnorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, double eps);
typedef struct rfr_attention_options {
  double scale;   /* factor of q k; 0: 1/sqrt(D) */
  int causal;     /* row t attends to rows s <= t of its document */
  int64_t window; /* with causal: row t attends only to the last `window` of them, itself included; 0: all */
  double cap;     /* scores x become cap tanh(x / cap); 0: no cap */
  /* upper bound of the rows of a document, only to count work; 0: unknown. A wrong bound does not change results */
  int64_t longest;
} rfr_attention_options;
/* o (T,H,D) = softmax(scale q kT) v within documents; q (T,H,D), k and v (T,Hk,D), Hk a divisor of H; offsets i32
 * (documents+1), a device value. options: NULL for no mask and no cap. */
RFR_API rfr_value rfr_attention_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v,
                                   rfr_value offsets, const rfr_attention_options *options);
/* o (rows,H,D): attention of the next rows of a text (see below) to the cached k and v (capacity,Hk,D) up to each row's
 * own position. options as above, with causal; NULL: only causal. No gradient. */
RFR_API rfr_value rfr_attention_cached_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v,
                                          rfr_value cursor, const rfr_attention_options *options);

/* ---- elementwise ---- */

/* y = a + b, y = a * b: one type; b has a's shape, or is (1), or is a vector along a's last dimension. */
RFR_API rfr_value rfr_add_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b);
RFR_API rfr_value rfr_mul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b);
/* y = x * by * s; s is an f32 scalar (1) or RFR_NONE, and has no gradient. */
RFR_API rfr_value rfr_scale_at(rfr_trace *t, rfr_source at, rfr_value x, double by, rfr_value s);
/* x in type `to`. Floats round to nearest even; a float becomes an integer by truncation, saturates, and NaN gives
 * 0. */
RFR_API rfr_value rfr_cast_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_dtype to);
/* A dense copy of a view. */
RFR_API rfr_value rfr_copy_at(rfr_trace *t, rfr_source at, rfr_value x);
/* A tensor of `rank` dimensions with every element `value`. */
RFR_API rfr_value rfr_fill_at(rfr_trace *t, rfr_source at, double value, rfr_dtype dtype, int rank,
                              const int64_t *shape);
/* x P(x) with the normal distribution function P or, if tanh_form, its tanh approximation. */
RFR_API rfr_value rfr_gelu_at(rfr_trace *t, rfr_source at, rfr_value x, int tanh_form);
/* x / (1 + exp(-x)) */
RFR_API rfr_value rfr_silu_at(rfr_trace *t, rfr_source at, rfr_value x);
/* silu(gate) * up; one shape and type. */
RFR_API rfr_value rfr_swiglu_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up);
/* silu(gate) * up * the row's weight, rounded once; gate and up (R,I), weight (R), a float. With the weights from
 * rfr_moe_row_weight it applies routing weights between the two expert GEMMs, so that their gradient does not read the
 * result of the second one. */
RFR_API rfr_value rfr_swiglu_weighted_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up, rfr_value weight);
/* cap tanh(x / cap), cap > 0. Between a GEMM without bias and a cross-entropy it becomes part of the fused LM head. */
RFR_API rfr_value rfr_softcap_at(rfr_trace *t, rfr_source at, rfr_value x, double cap);
/* x / (1 - p) where the element is kept, else 0; 0 <= p < 1. The mask is not stored: it is a function of (seed and
 * attempted count of `step`, stream; element, site, microbatch). Recording numbers the site. `step`: the step block, or
 * the state of a named stream (rfr_rng_stream), whose name is then part of the function. */
RFR_API rfr_value rfr_dropout_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value step, double p, int stream);

/* ---- reductions and layout ---- */

/* Sum, mean or maximum over an axis, which is removed, or over everything to shape (1) with axis -1. The result has x's
 * type. An empty axis has no maximum. */
RFR_API rfr_value rfr_sum_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
RFR_API rfr_value rfr_mean_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
RFR_API rfr_value rfr_max_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
/* x with another shape of as many elements. A view; if strides cannot express it, a copy is recorded first. */
RFR_API rfr_value rfr_reshape_at(rfr_trace *t, rfr_source at, rfr_value x, int rank, const int64_t *shape);
/* A view with dimensions a and b exchanged. */
RFR_API rfr_value rfr_transpose_at(rfr_trace *t, rfr_source at, rfr_value x, int a, int b);
/* A view of elements start ... start + count - 1 of an axis. */
RFR_API rfr_value rfr_slice_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t start, int64_t count);
/* A view that repeats an axis of size 1 `count` times; its gradient is a sum. */
RFR_API rfr_value rfr_expand_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t count);
/* The n tensors xs one after the other along an axis; their other dimensions and types are equal. */
RFR_API rfr_value rfr_concat_at(rfr_trace *t, rfr_source at, int n, const rfr_value *xs, int axis);
/* x, without a gradient. */
RFR_API rfr_value rfr_detach_at(rfr_trace *t, rfr_source at, rfr_value x);

/* ---- losses ---- */

/* 1 / number of targets that are not `ignore`, over n arrays of targets, f32 (1); 0 if there are none. *count is the
 * number as f32 (1). */
RFR_API rfr_value rfr_token_count_at(rfr_trace *t, rfr_source at, int n, const rfr_value *targets, int ignore,
                                     rfr_value *count);
/* Softmax cross-entropy: f32 (1) = sum over valid rows of -log p[target] * inv_valid. logits (T,V), targets i32 (T),
 * inv_valid f32 (1) as from rfr_token_count. If the loss is fused with the GEMM before it, the logits keep
 * their recorded type, or have f32 if they are softcapped. */
RFR_API rfr_value rfr_cross_entropy_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value targets,
                                       rfr_value inv_valid, int ignore);

/* Without the sum: f32 (T) = -log p[target] of each row, 0 for a row whose target is `ignore` or outside the
 * vocabulary. */
RFR_API rfr_value rfr_token_loss_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value targets, int ignore);
/* f32 (S): element s = the sum of x[offsets[s]] ... x[offsets[s+1] - 1]. x (T), offsets i32 (S+1), ascending, from 0
 * to T. */
RFR_API rfr_value rfr_segment_sum_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value offsets);
/* Direct preference optimization (Rafailov et al., arXiv 2305.18290), f32 (1):
 *
 *   inv_pairs sum over pairs p of -(1 - smoothing) log sigmoid(beta h) - smoothing log sigmoid(-beta h)
 *   h = sums[2p+1] - sums[2p] - reference[p]
 *
 *   sums (2P)         for pair p the loss in nats of the chosen and of the rejected answer, as from rfr_segment_sum
 *   reference f32 (P) sums[2p+1] - sums[2p] of the reference model
 *   pairs i32 (P)     negative where there is no pair
 *   inv_pairs f32 (1) 1 / number of pairs, as from rfr_token_count of `pairs`
 *
 * *margin and *accuracy, f32 (1), are inv_pairs times the sums of beta h and of h > 0, without a gradient. Both may be
 * NULL. */
RFR_API rfr_value rfr_dpo_loss_at(rfr_trace *t, rfr_source at, rfr_value sums, rfr_value reference, rfr_value pairs,
                                  rfr_value inv_pairs, double beta, double smoothing, rfr_value *margin,
                                  rfr_value *accuracy);

/* ---- collectives ----
 *
 * They use the program's communicator (rfr_compile_options.comm, refrain/dist.h), which must have `ranks` ranks; with
 * one rank each is a copy and needs no communicator. All ranks run the same program, and a gradient is that of the sum
 * of their losses. */

/* (ranks D0, ...) = every rank's x (D0, ...), rank 0's first. */
RFR_API rfr_value rfr_all_gather_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* (D0 / ranks, ...) = this rank's rows of the sum of every rank's x (D0, ...), f32, bf16 or f16. */
RFR_API rfr_value rfr_reduce_scatter_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* The sum of every rank's x. */
RFR_API rfr_value rfr_all_reduce_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* x's rows are one part per rank: part r of the result is this rank's part of rank r's x. Any type of whole bytes. */
RFR_API rfr_value rfr_all_to_all_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* The same for x (ranks D0,C), whose parts are zero-padded. sent and received, i32 (ranks groups), are on the device:
 * the groups of a rank sum to the rows in its part of x, or of the result. Threads and MPI send only these rows, NCCL
 * the whole parts. */
RFR_API rfr_value rfr_all_to_all_rows_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value sent, rfr_value received,
                                         int ranks);

/* ---- gradients ---- */

/* d loss / d w as a value of type `to`; loss is f32 (1), w an input with the role trainable or input_grad, else the
 * error is grad.role. Autodiff reports, by name, a w that cannot reach the loss. A weight's gradient is accumulated
 * over its uses and microbatches in f32 or, if `to` is bf16 or f16, in that type, rounded after each addition, for half
 * the memory. The gradients of an embedding table, and of an LM head fused with its loss, are computed in f32 first:
 * where these are most of a model, a 16-bit `to` needs more memory than f32. */
RFR_API rfr_value rfr_gradient_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_dtype to);
/* The gradient added in place to `onto`, a state of w's shape: microbatches that run one after the other accumulate
 * there as they do within one trace. Returns the state's next version. With a bf16 or f16 state, GEMMs compute each sum
 * in f32 and round it once. */
RFR_API rfr_value rfr_gradient_onto_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_value onto);

/* ---- the step: all scalars are on the device ---- */

/* The step block, a state input i64 (4): attempted, applied, seed, skipped. */
RFR_API rfr_value rfr_step_block_at(rfr_trace *t, rfr_source at);
/* The state of a named stream of random numbers, for rfr_dropout: a state input "rng.NAME" in the form of a step block;
 * draws read its seed and attempted count. rfr_step_end advances it like the step block. Without rfr_step_end the
 * caller sets it (rfr_programs_set_rng); for callables the library counts the steps (rfr_graphs_begin_step). Errors:
 * argument, if the name has no or more than 100 characters. */
RFR_API rfr_value rfr_rng_stream_at(rfr_trace *t, rfr_source at, const char *name);
typedef enum rfr_lr_kind { RFR_LR_CONSTANT, RFR_LR_LINEAR, RFR_LR_COSINE, RFR_LR_WSD } rfr_lr_kind;
typedef struct rfr_lr_options {
  size_t size;
  rfr_lr_kind kind;
  double base, min;             /* peak and final rate */
  int64_t warmup, total, decay; /* in applied steps; decay: length of wsd's last part */
} rfr_lr_options;
RFR_API rfr_lr_options rfr_lr_options_default(void); /* constant 1e-3, no warmup */
/* The learning rate of this step, f32 (1), from the applied count of `step`. Errors: argument, for options that do not
 * fit together. */
RFR_API rfr_value rfr_lr_schedule_at(rfr_trace *t, rfr_source at, rfr_value step, const rfr_lr_options *o);
/* The same for a schedule that the host may change between steps, as a run limited by time does. `steps` is a state i64
 * (3): end of the warmup, start of wsd's decay, end, in attempted steps; INT64_MAX: not decided yet. It replaces
 * warmup, decay and total of the options. RFR_NONE: rfr_lr_schedule. */
RFR_API rfr_value rfr_lr_schedule_steps_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value steps,
                                           const rfr_lr_options *o);
/* The global L2 norm of n gradients, f32 (1); *skip i32 (1) is 1 if it is not finite. */
RFR_API rfr_value rfr_grad_norm_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value *skip);
/* The same; also detects gradients that are always zero, which hint at a weight without effect. `zeros` is a state i32
 * (n), initially 0. After each step it has, for each gradient, the number of steps so far if the gradient was exactly
 * zero in all of them, else -1. */
RFR_API rfr_value rfr_grad_norm_zeros_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value zeros,
                                         rfr_value *skip);
/* The clip factor f32 (1): min(1, max / norm); 1 if max is 0. */
RFR_API rfr_value rfr_clip_scale_at(rfr_trace *t, rfr_source at, rfr_value norm, double max);
typedef struct rfr_adamw_options {
  size_t size;
  double beta1, beta2, eps, decay; /* decoupled decay */
  double lr_scale;                 /* of this parameter's group */
  /* 0: w is rounded to nearest. 1 to 2^24 - 1, for bf16 without a master weight: w is rounded stochastically to one of
   * the two nearest numbers, so that the expected value is exact. Give each weight its own number: the random bits are
   * a function of the number, the element, and the seed and attempted count of the step block. */
  int64_t draws;
} rfr_adamw_options;
RFR_API rfr_adamw_options rfr_adamw_options_default(void); /* 0.9, 0.95, 1e-8, decay 0.1, lr_scale 1 */
/* AdamW with t = applied + 1:
 *
 *   m = beta1 m + (1 - beta1) clip g,  v = beta2 v + (1 - beta2) (clip g)^2
 *   w -= lr lr_scale (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w)
 *
 * Updates w, m, v (and master, f32, if w is narrower) in place unless skip is 1; clip and skip may be RFR_NONE. With a
 * master weight the update is computed on it, and w is its rounding. m and v are f32 or bf16 in w's shape, or both u8
 * and initially zeros: m as RFR_QUANT_DYNAMIC8, v as RFR_QUANT_DYNAMIC8U. Each must be an input, not a view of one: w
 * with the role trainable or input, the others state. Returns the next version of w. */
RFR_API rfr_value rfr_adamw_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value m, rfr_value v,
                               rfr_value master, rfr_value lr, rfr_value clip, rfr_value skip, rfr_value step,
                               const rfr_adamw_options *o);
/* SGD, operands as above: b = momentum_factor b + clip g, w -= lr lr_scale (b + decay w). If momentum is RFR_NONE, b =
 * clip g. */
RFR_API rfr_value rfr_sgd_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value momentum,
                             rfr_value master, rfr_value lr, rfr_value clip, rfr_value skip, double momentum_factor,
                             double decay, double lr_scale);
/* The same for bf16 w without a master weight, rounded stochastically: see rfr_adamw_options.draws. */
RFR_API rfr_value rfr_sgd_stochastic_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value momentum,
                                        rfr_value lr, rfr_value clip, rfr_value skip, rfr_value step,
                                        double momentum_factor, double decay, double lr_scale, int64_t draws);
/* The exponential moving average of a weight, after the update of w, with n = applied + 1 - start:
 *
 *   average = w                             while n < 1
 *   average += (1 - d) (w - average)        then, with d = decay, or with `warmup` min(decay, (1 + n) / (10 + n))
 *
 * If skip is 1 the average does not change; skip may be RFR_NONE. `average` is an input, f32, initially a copy of w. w
 * is the updated weight or its master weight. decay is in [0, 1). Returns the next version of average. */
RFR_API rfr_value rfr_ema_at(rfr_trace *t, rfr_source at, rfr_value average, rfr_value w, rfr_value skip,
                             rfr_value step, double decay, int64_t start, int warmup);
/* The dynamic loss scale of f16 training: f32 (1), a power of two from 2^0 to 2^24, initially 2^16; *inverse f32 (1) is
 * its reciprocal. `state` is a state i32 (2), initially zeros. Multiply inv_valid of the loss by the scale. Multiply
 * the gradient norm, and the clip factor of the updates, by the inverse. */
RFR_API rfr_value rfr_loss_scale_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value *inverse);
/* The next version of the state: a skipped step halves the scale, `every` good steps in a row double it. */
RFR_API rfr_value rfr_loss_scale_end_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value skip, int64_t every);
/* Skips the update of a step with bad splits: returns 1 if `skip` or any flag (*bad of rfr_splits_to_offsets) of n
 * values i32 (flags) is not 0. For the first such flag *which i32 (1) is its number from 1 and *group i32 (1) the
 * group; both 0 if there is none. Pass them to rfr_metrics_write to report them to the host. */
RFR_API rfr_value rfr_skip_bad_at(rfr_trace *t, rfr_source at, rfr_value skip, int n, const rfr_value *flags,
                                  rfr_value *which, rfr_value *group);
/* The next version of the step block: attempted + 1, and applied + 1 or, if skip is 1, skipped + 1. */
RFR_API rfr_value rfr_step_end_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value skip);
/* x = ring[attempted mod R], ring (R, ...) */
RFR_API rfr_value rfr_ring_read_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step);
/* Writes n scalars, f32, i32 or i64 (1), to entry attempted mod R of the ring f64 (R, 1+n), then attempted + 1 to
 * element 0 of the entry. The last value may be f32 (m), of a ring (R, n+m). */
RFR_API rfr_value rfr_metrics_write_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step, int n,
                                       const rfr_value *values);

/* ---- text generation token by token ----
 *
 * `text` is a state i32 (capacity+1), `cursor` a state i64 (4):
 *   cached   tokens whose keys and values are in the caches
 *   known    tokens in text
 *   dropped  tokens that were removed from the beginning of the text
 *   seed     of the draws
 * A program is recorded with a fixed number of `rows` and takes the next min(rows, known - cached) tokens, within the
 * capacity. The host writes text, known and seed before the first replay, and nothing between replays.
 * Several texts: text (B,capacity+1), cursor (B,4), caches (B,capacity,Hk,D), logits (B,V); rows are those of text 0,
 * then those of text 1, and so on, and `last` (B) counts among all of them. No text depends on another. */

/* The tokens taken, i32 (rows), followed by 0s; *positions i32 (rows) in the text; *last i32 (1): the row of the last
 * token taken (0 if there is none). */
RFR_API rfr_value rfr_text_read_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value cursor, int64_t rows,
                                   rfr_value *positions, rfr_value *last);
/* The next version of cache (capacity,Hk,D), with the rows of x (rows,Hk,D) that are taken at their positions. */
RFR_API rfr_value rfr_cache_write_at(rfr_trace *t, rfr_source at, rfr_value cache, rfr_value x, rfr_value cursor);
/* The next version of text. If the last known token is taken, the next one is drawn from logits (1,V): a function of
 * seed and position, dropped tokens included. sampling f64 (5):
 *   temperature         0: the most probable token
 *   top_k               only the k most probable tokens; 0: all
 *   top_p               only the most probable tokens until their probabilities add up to top_p; 1: all
 *   min_p               only tokens with at least min_p times the probability of the most probable one; 0: all
 *   repetition_penalty  applied first: positive logits of tokens in text are divided by it, negative ones multiplied
 *                       by it (Keskar et al., arXiv 1909.05858); 1 or 0: none */
RFR_API rfr_value rfr_text_append_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value logits, rfr_value cursor,
                                     rfr_value sampling, int64_t rows);
/* The next version of the cursor: the tokens taken are cached, and a drawn token is known. */
RFR_API rfr_value rfr_text_end_at(rfr_trace *t, rfr_source at, rfr_value cursor, rfr_value text, int64_t rows);

#define rfr_matmul(t, a, b, bias, ta, tb, to) rfr_matmul_at(t, RFR_HERE, a, b, bias, ta, tb, to)
#define rfr_linear(t, x, w, b) rfr_linear_at(t, RFR_HERE, x, w, b)
#define rfr_quantize(t, x, options, out) rfr_quantize_at(t, RFR_HERE, x, options, out)
#define rfr_grouped_quantize(t, x, offsets, options, out) rfr_grouped_quantize_at(t, RFR_HERE, x, offsets, options, out)
#define rfr_matmul_scaled(t, a, b, bias, to) rfr_matmul_scaled_at(t, RFR_HERE, a, b, bias, to)
#define rfr_dequantize(t, x, format, rank, shape, to) rfr_dequantize_at(t, RFR_HERE, x, format, rank, shape, to)
#define rfr_splits_to_offsets(t, splits, rows, bad) rfr_splits_to_offsets_at(t, RFR_HERE, splits, rows, bad)
#define rfr_grouped_linear(t, x, w, offsets, bias, scale) rfr_grouped_linear_at(t, RFR_HERE, x, w, offsets, bias, scale)
#define rfr_grouped_linear_separate(t, x, groups, weights, offsets, bias, scale) \
  rfr_grouped_linear_separate_at(t, RFR_HERE, x, groups, weights, offsets, bias, scale)
#define rfr_moe_route(t, logits, bias, options, index) rfr_moe_route_at(t, RFR_HERE, logits, bias, options, index)
#define rfr_moe_sort(t, index, experts, order, place) rfr_moe_sort_at(t, RFR_HERE, index, experts, order, place)
#define rfr_moe_parts(t, splits, order, place, ranks, capacity, part_place, need) \
  rfr_moe_parts_at(t, RFR_HERE, splits, order, place, ranks, capacity, part_place, need)
#define rfr_moe_part_experts(t, counts, ranks, capacity) rfr_moe_part_experts_at(t, RFR_HERE, counts, ranks, capacity)
#define rfr_moe_permute(t, x, order, place, weight) rfr_moe_permute_at(t, RFR_HERE, x, order, place, weight)
#define rfr_moe_row_weight(t, weight, order, place) rfr_moe_row_weight_at(t, RFR_HERE, weight, order, place)
#define rfr_moe_unpermute(t, y, order, place, weight) rfr_moe_unpermute_at(t, RFR_HERE, y, order, place, weight)
#define rfr_moe_loss(t, logits, index, targets, sigmoid, balance, z, ignore) \
  rfr_moe_loss_at(t, RFR_HERE, logits, index, targets, sigmoid, balance, z, ignore)
#define rfr_moe_load(t, n, splits, layers, least, by_layer) \
  rfr_moe_load_at(t, RFR_HERE, n, splits, layers, least, by_layer)
#define rfr_embedding(t, table, ids) rfr_embedding_at(t, RFR_HERE, table, ids)
#define rfr_positions(t, offsets, tokens) rfr_positions_at(t, RFR_HERE, offsets, tokens)
#define rfr_rope(t, x, positions, theta, scaling) rfr_rope_at(t, RFR_HERE, x, positions, theta, scaling)
#define rfr_rope_table(t, x, positions, frequency, n, scale) \
  rfr_rope_table_at(t, RFR_HERE, x, positions, frequency, n, scale)
#define rfr_layernorm(t, x, w, b, eps) rfr_layernorm_at(t, RFR_HERE, x, w, b, eps)
#define rfr_rmsnorm(t, x, w, eps) rfr_rmsnorm_at(t, RFR_HERE, x, w, eps)
#define rfr_attention(t, q, k, v, offsets, options) rfr_attention_at(t, RFR_HERE, q, k, v, offsets, options)
#define rfr_attention_cached(t, q, k, v, cursor, options) rfr_attention_cached_at(t, RFR_HERE, q, k, v, cursor, options)
#define rfr_add(t, a, b) rfr_add_at(t, RFR_HERE, a, b)
#define rfr_mul(t, a, b) rfr_mul_at(t, RFR_HERE, a, b)
#define rfr_scale(t, x, by, s) rfr_scale_at(t, RFR_HERE, x, by, s)
#define rfr_cast(t, x, to) rfr_cast_at(t, RFR_HERE, x, to)
#define rfr_copy(t, x) rfr_copy_at(t, RFR_HERE, x)
#define rfr_fill(t, value, dtype, rank, ...) rfr_fill_at(t, RFR_HERE, value, dtype, rank, __VA_ARGS__)
#define rfr_gelu(t, x, tanh_form) rfr_gelu_at(t, RFR_HERE, x, tanh_form)
#define rfr_silu(t, x) rfr_silu_at(t, RFR_HERE, x)
#define rfr_swiglu(t, gate, up) rfr_swiglu_at(t, RFR_HERE, gate, up)
#define rfr_swiglu_weighted(t, gate, up, weight) rfr_swiglu_weighted_at(t, RFR_HERE, gate, up, weight)
#define rfr_softcap(t, x, cap) rfr_softcap_at(t, RFR_HERE, x, cap)
#define rfr_dropout(t, x, step, p, stream) rfr_dropout_at(t, RFR_HERE, x, step, p, stream)
#define rfr_sum(t, x, axis) rfr_sum_at(t, RFR_HERE, x, axis)
#define rfr_mean(t, x, axis) rfr_mean_at(t, RFR_HERE, x, axis)
#define rfr_max(t, x, axis) rfr_max_at(t, RFR_HERE, x, axis)
#define rfr_reshape(t, x, rank, ...) rfr_reshape_at(t, RFR_HERE, x, rank, __VA_ARGS__)
#define rfr_transpose(t, x, a, b) rfr_transpose_at(t, RFR_HERE, x, a, b)
#define rfr_slice(t, x, axis, start, count) rfr_slice_at(t, RFR_HERE, x, axis, start, count)
#define rfr_expand(t, x, axis, count) rfr_expand_at(t, RFR_HERE, x, axis, count)
#define rfr_concat(t, n, xs, axis) rfr_concat_at(t, RFR_HERE, n, xs, axis)
#define rfr_detach(t, x) rfr_detach_at(t, RFR_HERE, x)
#define rfr_token_count(t, n, targets, ignore, count) rfr_token_count_at(t, RFR_HERE, n, targets, ignore, count)
#define rfr_cross_entropy(t, logits, targets, inv_valid, ignore) \
  rfr_cross_entropy_at(t, RFR_HERE, logits, targets, inv_valid, ignore)
#define rfr_token_loss(t, logits, targets, ignore) rfr_token_loss_at(t, RFR_HERE, logits, targets, ignore)
#define rfr_segment_sum(t, x, offsets) rfr_segment_sum_at(t, RFR_HERE, x, offsets)
#define rfr_dpo_loss(t, sums, reference, pairs, inv_pairs, beta, smoothing, margin, accuracy) \
  rfr_dpo_loss_at(t, RFR_HERE, sums, reference, pairs, inv_pairs, beta, smoothing, margin, accuracy)
#define rfr_all_gather(t, x, ranks) rfr_all_gather_at(t, RFR_HERE, x, ranks)
#define rfr_reduce_scatter(t, x, ranks) rfr_reduce_scatter_at(t, RFR_HERE, x, ranks)
#define rfr_all_reduce(t, x, ranks) rfr_all_reduce_at(t, RFR_HERE, x, ranks)
#define rfr_all_to_all(t, x, ranks) rfr_all_to_all_at(t, RFR_HERE, x, ranks)
#define rfr_all_to_all_rows(t, x, sent, received, ranks) rfr_all_to_all_rows_at(t, RFR_HERE, x, sent, received, ranks)
#define rfr_gradient(t, loss, w, to) rfr_gradient_at(t, RFR_HERE, loss, w, to)
#define rfr_gradient_onto(t, loss, w, onto) rfr_gradient_onto_at(t, RFR_HERE, loss, w, onto)
#define rfr_step_block(t) rfr_step_block_at(t, RFR_HERE)
#define rfr_rng_stream(t, name) rfr_rng_stream_at(t, RFR_HERE, name)
#define rfr_lr_schedule(t, step, o) rfr_lr_schedule_at(t, RFR_HERE, step, o)
#define rfr_lr_schedule_steps(t, step, steps, o) rfr_lr_schedule_steps_at(t, RFR_HERE, step, steps, o)
#define rfr_grad_norm(t, n, grads, skip) rfr_grad_norm_at(t, RFR_HERE, n, grads, skip)
#define rfr_grad_norm_zeros(t, n, grads, zeros, skip) rfr_grad_norm_zeros_at(t, RFR_HERE, n, grads, zeros, skip)
#define rfr_clip_scale(t, norm, max) rfr_clip_scale_at(t, RFR_HERE, norm, max)
#define rfr_adamw(t, w, g, m, v, master, lr, clip, skip, step, o) \
  rfr_adamw_at(t, RFR_HERE, w, g, m, v, master, lr, clip, skip, step, o)
#define rfr_sgd(t, w, g, mom, master, lr, clip, skip, factor, decay, lr_scale) \
  rfr_sgd_at(t, RFR_HERE, w, g, mom, master, lr, clip, skip, factor, decay, lr_scale)
#define rfr_sgd_stochastic(t, w, g, mom, lr, clip, skip, step, factor, decay, lr_scale, draws) \
  rfr_sgd_stochastic_at(t, RFR_HERE, w, g, mom, lr, clip, skip, step, factor, decay, lr_scale, draws)
#define rfr_ema(t, average, w, skip, step, decay, start, warmup) \
  rfr_ema_at(t, RFR_HERE, average, w, skip, step, decay, start, warmup)
#define rfr_loss_scale(t, state, inverse) rfr_loss_scale_at(t, RFR_HERE, state, inverse)
#define rfr_loss_scale_end(t, state, skip, every) rfr_loss_scale_end_at(t, RFR_HERE, state, skip, every)
#define rfr_skip_bad(t, skip, n, flags, which, group) rfr_skip_bad_at(t, RFR_HERE, skip, n, flags, which, group)
#define rfr_step_end(t, step, skip) rfr_step_end_at(t, RFR_HERE, step, skip)
#define rfr_ring_read(t, ring, step) rfr_ring_read_at(t, RFR_HERE, ring, step)
#define rfr_metrics_write(t, ring, step, n, values) rfr_metrics_write_at(t, RFR_HERE, ring, step, n, values)
#define rfr_text_read(t, text, cursor, rows, positions, last) \
  rfr_text_read_at(t, RFR_HERE, text, cursor, rows, positions, last)
#define rfr_cache_write(t, cache, x, cursor) rfr_cache_write_at(t, RFR_HERE, cache, x, cursor)
#define rfr_text_append(t, text, logits, cursor, sampling, rows) \
  rfr_text_append_at(t, RFR_HERE, text, logits, cursor, sampling, rows)
#define rfr_text_end(t, cursor, text, rows) rfr_text_end_at(t, RFR_HERE, cursor, text, rows)

#ifdef __cplusplus
}
#endif
#endif
