/* SPDX-License-Identifier: Apache-2.0
 *
 * Recording calls, one per op that models are written with. Each appends one op
 * to the trace and returns its (first) result; a wrong operand latches an error
 * with the place of the call and returns RFR_NONE, which later calls pass on.
 * Shapes are written (rows, columns); T is the number of tokens of all documents
 * of a microbatch, packed one after the other. None of these may fail at replay.
 *
 * Sources: attention: Dao 2023, arXiv 2307.08691. rotary embedding: Su et al.,
 * arXiv 2104.09864 (halves form, as in Llama). AdamW: Loshchilov and Hutter,
 * arXiv 1711.05101. SwiGLU: Shazeer, arXiv 2002.05202. RMSNorm: Zhang and
 * Sennrich, arXiv 1910.07467.
 */
#ifndef REFRAIN_OPS_H
#define REFRAIN_OPS_H

#include "refrain/trace.h"

#ifdef __cplusplus
extern "C" {
#endif

/* y (M,N) = op(a) op(b) [+ bias (N)], a (M,K), or (K,M) if ta; b (K,N), or (N,K) if
 * tb. With rank 3, dimension 0 is a batch, the same in both. `to` is the type of y;
 * sums are f32. */
RFR_API rfr_value rfr_matmul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value bias, int ta, int tb,
                                rfr_dtype to);
/* y (T,N) = x (T,K) wT + b, w (N,K), b (N) or RFR_NONE; y has x's type. */
RFR_API rfr_value rfr_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b);
/* x (M,N) in E4M3 with one scale for the whole tensor, 448 / max |x|: (M,N); *col (N,M) is
 * the transposed copy, *scale_inv f32 (1) the factor back (either may be NULL). What nobody
 * reads is not made. */
RFR_API rfr_value rfr_quantize_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value *col, rfr_value *scale_inv);
/* y (M,N) = (a bT) scale_a scale_b [+ bias (N)], a (M,K) and b (N,K) E4M3, scales f32 (1),
 * sums f32. Has a gradient where a and b are results of rfr_quantize. */
RFR_API rfr_value rfr_matmul_scaled_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b, rfr_value scale_a,
                                       rfr_value scale_b, rfr_value bias, rfr_dtype to);
/* rfr_linear with x and w quantized to E4M3; in the backward dy too. */
RFR_API rfr_value rfr_linear_e4m3_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b);
/* A grouped product multiplies each row by the weight of its group. Rows are sorted by group; how many each has is a
 * value on the device, so that one program serves every split. */
/* Offsets i32 (G+1) of `splits`, i32 or i64 (G), over `rows` rows, for all grouped ops of one routing. A split below
 * 0 counts as 0, and what would go past `rows` is cut off; then *bad i32 (1), unless NULL, is 1 + the first such
 * group, else 0. */
RFR_API rfr_value rfr_splits_to_offsets_at(rfr_trace *t, rfr_source at, rfr_value splits, int64_t rows, rfr_value *bad);
/* y (R,N): rows offsets[g] up to offsets[g+1] are x wT[g] + bias[g], x (R,K), w (G,N,K), bias (G,N) or RFR_NONE; with
 * scale (R), a float, the bias of a row is multiplied by it. Rows behind the last group are not read and give zeros.
 * y has x's type. */
RFR_API rfr_value rfr_grouped_linear_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value offsets,
                                        rfr_value bias, rfr_value scale);
/* The same with a weight (N,K) for each group by itself, all of one type. Gradients are made of those that are wanted,
 * and of no others. */
RFR_API rfr_value rfr_grouped_linear_separate_at(rfr_trace *t, rfr_source at, rfr_value x, int groups,
                                                 const rfr_value *weights, rfr_value offsets, rfr_value bias,
                                                 rfr_value scale);
/* How a router's logits become scores: their softmax; themselves, and the softmax of the chosen ones as weights; the
 * logistic function of each. */
typedef enum rfr_moe_score { RFR_MOE_SOFTMAX, RFR_MOE_SOFTMAX_CHOSEN, RFR_MOE_SIGMOID } rfr_moe_score;
typedef struct rfr_moe_options {
  size_t size;
  int64_t k; /* experts that a token goes to */
  rfr_moe_score score;
  int norm;                /* the weights of a token are its chosen scores over their sum */
  int64_t groups, group_k; /* experts come from the group_k best of so many groups of neighbours; 1, 1: from all */
  double scale;            /* of all weights */
} rfr_moe_options;
RFR_API rfr_moe_options rfr_moe_options_default(void); /* k 2, softmax, norm: Mixtral's */
/* The weights f32 (T,k) of the experts that each token goes to, and in *index i32 (T,k) which they are, best first; of
 * equals the smaller index is better. logits (T,E); bias f32 (E) or RFR_NONE is added to the scores where they are
 * compared, and nowhere else. Weights have a gradient, the choice has none. */
RFR_API rfr_value rfr_moe_route_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value bias,
                                   const rfr_moe_options *options, rfr_value *index);
/* Slots of index (T,k) by expert, in their order: returns how many each of `experts` has, i32 (experts), for
 * rfr_splits_to_offsets; *order i32 (T*k) is the slot t*k+j of each sorted row, *place i32 (T,k) the row of each
 * slot. */
RFR_API rfr_value rfr_moe_sort_at(rfr_trace *t, rfr_source at, rfr_value index, int64_t experts, rfr_value *order,
                                  rfr_value *place);
/* (T*k,C): the rows of x (T,C) for each slot, sorted by expert, times weight (T,k) unless it is RFR_NONE. */
RFR_API rfr_value rfr_moe_permute_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value order, rfr_value place,
                                     rfr_value weight);
/* (T*k): the weight, of weight (T,k), of each sorted row, 0 of a row of no slot. What rfr_swiglu_weighted multiplies
 * rows by; and where the product behind it has a bias, the scale that rfr_grouped_linear takes for that. */
RFR_API rfr_value rfr_moe_row_weight_at(rfr_trace *t, rfr_source at, rfr_value weight, rfr_value order,
                                        rfr_value place);
/* (T,C): each token's rows of y (T*k,C) added up, times weight (T,k) unless it is RFR_NONE. */
RFR_API rfr_value rfr_moe_unpermute_at(rfr_trace *t, rfr_source at, rfr_value y, rfr_value order, rfr_value place,
                                       rfr_value weight);
/* f32 (1), of the N tokens whose target, i32 (T), is not `ignore`: balance E / N^2 sum over experts of n P +
 * z / N sum of lse^2, where n is how often an expert is in index, P the sum of its probabilities (softmax, or sigmoids
 * over their sum), lse the log of a token's sum of exp(logits). Sources: Fedus et al., arXiv 2101.03961; Zoph et al.,
 * arXiv 2202.08906. */
RFR_API rfr_value rfr_moe_loss_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value index, rfr_value targets,
                                  int sigmoid, double balance, double z, int ignore);
/* Over n routings' splits, i32 (E): the most rows of one expert over its routing's mean, and in *least the fewest,
 * f32 (1). */
RFR_API rfr_value rfr_moe_load_at(rfr_trace *t, rfr_source at, int n, const rfr_value *splits, rfr_value *least);
/* y (T,C) = table (V,C) [ids i32 (T)]; an id outside the table reads as zeros. */
RFR_API rfr_value rfr_embedding_at(rfr_trace *t, rfr_source at, rfr_value table, rfr_value ids);
/* Position of each of `tokens` rows in its own document, i32 (tokens), from the
 * documents' offsets i32 (documents+1), ascending, first 0, last `tokens`. */
RFR_API rfr_value rfr_positions_at(rfr_trace *t, rfr_source at, rfr_value offsets, int64_t tokens);
/* Frequencies of a rotary embedding for longer documents: divided by `factor`. With
 * `original` > 0 only the slow ones: those that turn at least `high` times within that many
 * positions stay, those that turn at most `low` times are divided, between them mixed. */
typedef struct rfr_rope_scaling {
  double factor; /* 1: none */
  double low, high;
  int64_t original; /* positions; 0: all frequencies are divided */
} rfr_rope_scaling;
/* Rotary embedding of x (T,H,D), D even: pairs (d, d + D/2). scaling: NULL for none. */
RFR_API rfr_value rfr_rope_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value positions, double theta,
                              const rfr_rope_scaling *scaling);
RFR_API rfr_value rfr_layernorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, rfr_value b, double eps);
RFR_API rfr_value rfr_rmsnorm_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value w, double eps);
typedef struct rfr_attention_options {
  double scale;    /* of the products q k; 0: 1/sqrt(D) */
  int causal;      /* row t sees rows s <= t of its document */
  int64_t window;  /* with causal, the last `window` of them, itself included; 0: all */
  double cap;      /* scores x become cap tanh(x / cap); 0: they stay */
  int64_t longest; /* a promise: no document has more rows; 0: none given. What work is counted by */
} rfr_attention_options;
/* o (T,H,D) of q (T,H,D), k and v (T,Hk,D), Hk a divisor of H, within the documents
 * of `offsets` i32 (documents+1); a device value. options: NULL for neither mask nor cap. */
RFR_API rfr_value rfr_attention_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v,
                                   rfr_value offsets, const rfr_attention_options *options);
/* o (rows,H,D) of the next rows of a text (see below) and the cached k and v (capacity,Hk,D)
 * up to each row's own position. options: as above, causal; NULL for that alone. No gradient. */
RFR_API rfr_value rfr_attention_cached_at(rfr_trace *t, rfr_source at, rfr_value q, rfr_value k, rfr_value v,
                                          rfr_value cursor, const rfr_attention_options *options);
RFR_API rfr_value rfr_add_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b);
RFR_API rfr_value rfr_mul_at(rfr_trace *t, rfr_source at, rfr_value a, rfr_value b);
/* y = x * by * s; s is an f32 scalar (1) or RFR_NONE, never differentiated. */
RFR_API rfr_value rfr_scale_at(rfr_trace *t, rfr_source at, rfr_value x, double by, rfr_value s);
RFR_API rfr_value rfr_cast_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_dtype to);
/* A dense copy of a view. */
RFR_API rfr_value rfr_copy_at(rfr_trace *t, rfr_source at, rfr_value x);
RFR_API rfr_value rfr_fill_at(rfr_trace *t, rfr_source at, double value, rfr_dtype dtype, int rank,
                              const int64_t *shape);
RFR_API rfr_value rfr_gelu_at(rfr_trace *t, rfr_source at, rfr_value x, int tanh_form);
RFR_API rfr_value rfr_silu_at(rfr_trace *t, rfr_source at, rfr_value x);
RFR_API rfr_value rfr_swiglu_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up);
/* silu(gate) * up * weight of the row, rounded once; gate and up (R,I), weight (R), a float. Between the products of
 * experts with the weights that rfr_moe_row_weight gives: their gradient then reads nothing behind the second one. */
RFR_API rfr_value rfr_swiglu_weighted_at(rfr_trace *t, rfr_source at, rfr_value gate, rfr_value up, rfr_value weight);
/* cap tanh(x / cap), cap > 0. Between a product without bias and a cross-entropy it becomes part of the fused head. */
RFR_API rfr_value rfr_softcap_at(rfr_trace *t, rfr_source at, rfr_value x, double cap);
/* Masks are addressed, never stored: (seed of `step`, stream; element, site,
 * microbatch, attempted). The site is numbered by the call. 0 <= p < 1. `step`: the step block, or the state of a named
 * stream, whose name is a part of the address. */
RFR_API rfr_value rfr_dropout_at(rfr_trace *t, rfr_source at, rfr_value x, rfr_value step, double p, int stream);
/* Sum over an axis, or over everything to shape (1) with axis -1. f32 sums. */
RFR_API rfr_value rfr_sum_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
RFR_API rfr_value rfr_mean_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
RFR_API rfr_value rfr_max_at(rfr_trace *t, rfr_source at, rfr_value x, int axis);
RFR_API rfr_value rfr_reshape_at(rfr_trace *t, rfr_source at, rfr_value x, int rank, const int64_t *shape);
RFR_API rfr_value rfr_transpose_at(rfr_trace *t, rfr_source at, rfr_value x, int a, int b);
RFR_API rfr_value rfr_slice_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t start, int64_t count);
RFR_API rfr_value rfr_expand_at(rfr_trace *t, rfr_source at, rfr_value x, int axis, int64_t count);
RFR_API rfr_value rfr_concat_at(rfr_trace *t, rfr_source at, int n, const rfr_value *xs, int axis);
RFR_API rfr_value rfr_detach_at(rfr_trace *t, rfr_source at, rfr_value x);
/* 1 / number of targets that are not `ignore`, over all the arrays given, f32 (1).
 * `count`, unless NULL, receives the count as f32 (1). */
RFR_API rfr_value rfr_token_count_at(rfr_trace *t, rfr_source at, int n, const rfr_value *targets, int ignore,
                                     rfr_value *count);
/* Softmax cross-entropy: f32 (1) = sum over valid rows of -log p[target] * inv_valid.
 * logits (T,V), targets i32 (T). */
RFR_API rfr_value rfr_cross_entropy_at(rfr_trace *t, rfr_source at, rfr_value logits, rfr_value targets,
                                       rfr_value inv_valid, int ignore);
/* Collectives over the program's communicator (rfr_compile_options.comm, refrain/dist.h), which has `ranks` ranks; over
 * one rank each is a copy and needs none. All ranks run the same program, and a gradient is that of the sum of their
 * losses. all_gather: (ranks D0, ...) = every rank's x (D0, ...), rank 0's first. */
RFR_API rfr_value rfr_all_gather_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* (D0 / ranks, ...) = this rank's rows of the sum of every rank's x (D0, ...), f32, bf16 or f16. */
RFR_API rfr_value rfr_reduce_scatter_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* The sum of every rank's x. */
RFR_API rfr_value rfr_all_reduce_at(rfr_trace *t, rfr_source at, rfr_value x, int ranks);
/* d loss / d w as a value, in type `to`; loss is f32 (1). `w` is an input with the
 * role trainable or input_grad; one that cannot reach the loss is an error that
 * autodiff reports by name. A weight's adds up over its uses and microbatches in f32, or, where `to` is bf16 or f16, in
 * that, rounded after each, for half the memory; those of an embedding's table, and of a head that is one op with its
 * loss, are made in f32 first, which is more than f32 takes where they are most of a model. */
RFR_API rfr_value rfr_gradient_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_dtype to);
/* The same added onto `onto`, a state of w's shape, in its place: microbatches that run one after the other add up
 * there as they do within one trace. Returns its next version. A state in bf16 or f16: products make each sum in f32
 * and round it once. */
RFR_API rfr_value rfr_gradient_onto_at(rfr_trace *t, rfr_source at, rfr_value loss, rfr_value w, rfr_value onto);

/* ---- the step: all scalars live on the device ---- */

/* The step block, a state input i64 (4): attempted, applied, seed, skipped. */
RFR_API rfr_value rfr_step_block_at(rfr_trace *t, rfr_source at);
/* The state of a named stream of random numbers, for rfr_dropout: a state input "rng.NAME" like a step block, of which
 * draws read seed and attempted. rfr_step_end moves it on as it does the step block; without, it is the caller's to set
 * (rfr_programs_set_rng), but for callables, whose steps are counted (rfr_graphs_begin_step). Errors: argument, for a
 * name of no or more than 100 characters. */
RFR_API rfr_value rfr_rng_stream_at(rfr_trace *t, rfr_source at, const char *name);
typedef enum rfr_lr_kind { RFR_LR_CONSTANT, RFR_LR_LINEAR, RFR_LR_COSINE, RFR_LR_WSD } rfr_lr_kind;
typedef struct rfr_lr_options {
  size_t size;
  rfr_lr_kind kind;
  double base, min;             /* peak and final rate */
  int64_t warmup, total, decay; /* in applied steps; decay: length of wsd's last part */
} rfr_lr_options;
RFR_API rfr_lr_options rfr_lr_options_default(void);
/* Learning rate of this step, f32 (1), from the applied count. */
RFR_API rfr_value rfr_lr_schedule_at(rfr_trace *t, rfr_source at, rfr_value step, const rfr_lr_options *o);
/* The same where the host decides between steps when the rate falls, as a run that is given in time does: `steps` is a
 * state i64 (3): end of the warmup, start of wsd's decay, end. It replaces warmup, decay and total of the options, and
 * counts attempted steps. INT64_MAX: later. RFR_NONE: rfr_lr_schedule. */
RFR_API rfr_value rfr_lr_schedule_steps_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value steps,
                                           const rfr_lr_options *o);
/* Global L2 norm f32 (1) of the gradients; *skip i32 (1) is 1 if it is not finite. */
RFR_API rfr_value rfr_grad_norm_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value *skip);
/* The same, and looks for gradients that are always zero, as those of a weight that is
 * multiplied by nothing are: `zeros` is a state i32 (n) of zeros; after each step it holds
 * for each gradient the number of steps so far, all of which gave exactly zero, or -1. */
RFR_API rfr_value rfr_grad_norm_zeros_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value zeros,
                                         rfr_value *skip);
RFR_API rfr_value rfr_clip_scale_at(rfr_trace *t, rfr_source at, rfr_value norm, double max);
typedef struct rfr_adamw_options {
  size_t size;
  double beta1, beta2, eps, decay; /* decoupled decay */
  double lr_scale;                 /* of this parameter's group */
} rfr_adamw_options;
RFR_API rfr_adamw_options rfr_adamw_options_default(void);
/* Updates w, m, v (and master, f32, when w is narrower) in place unless skip is 1; clip and
 * skip may be RFR_NONE.
 * m and v are f32 or bf16. Each is a whole input, w of role trainable (or input), the others
 * state; views cannot be updated. Returns the next version of w. */
RFR_API rfr_value rfr_adamw_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value m, rfr_value v,
                               rfr_value master, rfr_value lr, rfr_value clip, rfr_value skip, rfr_value step,
                               const rfr_adamw_options *o);
RFR_API rfr_value rfr_sgd_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value momentum,
                             rfr_value master, rfr_value lr, rfr_value clip, rfr_value skip, double momentum_factor,
                             double decay, double lr_scale);
/* The dynamic loss scale of f16 training: f32 (1), a power of two from 2^0 to 2^24 that begins at 2^16, and
 * *inverse, 1 / scale, f32 (1). `state` is a state i32 (2), zeros at first. Multiply the loss's inverse count by
 * the scale, the norm of the gradients and the factor that an update takes by the inverse. */
RFR_API rfr_value rfr_loss_scale_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value *inverse);
/* The next version of the state: a skipped step halves the scale, `every` others in a row double it. */
RFR_API rfr_value rfr_loss_scale_end_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value skip, int64_t every);
/* Skips the update of a step whose splits were bad, too: returns `skip`, or 1 if any of n flags is not 0, those that
 * rfr_splits_to_offsets gave. Of the first such, *which i32 (1) is its number from 1, *group i32 (1) the group; 0
 * where there is none. They are for rfr_metrics_write: the host learns of it as it does of the loss. */
RFR_API rfr_value rfr_skip_bad_at(rfr_trace *t, rfr_source at, rfr_value skip, int n, const rfr_value *flags,
                                  rfr_value *which, rfr_value *group);
RFR_API rfr_value rfr_step_end_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value skip);
/* x = ring[attempted mod R], ring (R, ...) */
RFR_API rfr_value rfr_ring_read_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step);
/* ring f64 (R, 1+n): slot attempted mod R receives n scalars (f32 or i32 or i64 (1)),
 * then attempted + 1 in element 0. */
RFR_API rfr_value rfr_metrics_write_at(rfr_trace *t, rfr_source at, rfr_value ring, rfr_value step, int n,
                                       const rfr_value *values);

/* ---- a text that is made token by token ---- */

/* `text` is a state i32 (capacity+1), `cursor` a state i64 (4):
 *   cached   tokens whose keys and values the caches hold
 *   known    tokens in text
 *   dropped  tokens that stood before text[0] and are no more
 *   seed     of the draws
 * A program records with a fixed number of `rows` and takes the next min(rows, known -
 * cached) tokens, as far as the capacity reaches. The host writes text, known and seed before
 * it starts, and nothing from one replay to the next. */

/* The tokens that are taken, i32 (rows), 0 behind them; their positions in the text, i32
 * (rows); *last i32 (1): the row of the last one (0 when there is none). */
RFR_API rfr_value rfr_text_read_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value cursor, int64_t rows,
                                   rfr_value *positions, rfr_value *last);
/* The next version of cache (capacity,Hk,D): those rows of x (rows,Hk,D) that are taken, at
 * their positions. */
RFR_API rfr_value rfr_cache_write_at(rfr_trace *t, rfr_source at, rfr_value cache, rfr_value x, rfr_value cursor);
/* The next version of text. If the last known token is among those that are taken, the one
 * behind it is drawn from logits (1,V): the draw is a function of seed and position in the
 * whole text. temperature f64 (1), 0: the most probable; top_k i64 (1), 0: all; top_p f64 (1). */
RFR_API rfr_value rfr_text_append_at(rfr_trace *t, rfr_source at, rfr_value text, rfr_value logits, rfr_value cursor,
                                     rfr_value temperature, rfr_value top_k, rfr_value top_p, int64_t rows);
/* The next version of the cursor: what was taken is cached, what was drawn is known. */
RFR_API rfr_value rfr_text_end_at(rfr_trace *t, rfr_source at, rfr_value cursor, rfr_value text, int64_t rows);

#define rfr_matmul(t, a, b, bias, ta, tb, to) rfr_matmul_at(t, RFR_HERE, a, b, bias, ta, tb, to)
#define rfr_linear(t, x, w, b) rfr_linear_at(t, RFR_HERE, x, w, b)
#define rfr_quantize(t, x, col, scale_inv) rfr_quantize_at(t, RFR_HERE, x, col, scale_inv)
#define rfr_matmul_scaled(t, a, b, scale_a, scale_b, bias, to) \
  rfr_matmul_scaled_at(t, RFR_HERE, a, b, scale_a, scale_b, bias, to)
#define rfr_linear_e4m3(t, x, w, b) rfr_linear_e4m3_at(t, RFR_HERE, x, w, b)
#define rfr_splits_to_offsets(t, splits, rows, bad) rfr_splits_to_offsets_at(t, RFR_HERE, splits, rows, bad)
#define rfr_grouped_linear(t, x, w, offsets, bias, scale) rfr_grouped_linear_at(t, RFR_HERE, x, w, offsets, bias, scale)
#define rfr_grouped_linear_separate(t, x, groups, weights, offsets, bias, scale) \
  rfr_grouped_linear_separate_at(t, RFR_HERE, x, groups, weights, offsets, bias, scale)
#define rfr_moe_route(t, logits, bias, options, index) rfr_moe_route_at(t, RFR_HERE, logits, bias, options, index)
#define rfr_moe_sort(t, index, experts, order, place) rfr_moe_sort_at(t, RFR_HERE, index, experts, order, place)
#define rfr_moe_permute(t, x, order, place, weight) rfr_moe_permute_at(t, RFR_HERE, x, order, place, weight)
#define rfr_moe_row_weight(t, weight, order, place) rfr_moe_row_weight_at(t, RFR_HERE, weight, order, place)
#define rfr_moe_unpermute(t, y, order, place, weight) rfr_moe_unpermute_at(t, RFR_HERE, y, order, place, weight)
#define rfr_moe_loss(t, logits, index, targets, sigmoid, balance, z, ignore) \
  rfr_moe_loss_at(t, RFR_HERE, logits, index, targets, sigmoid, balance, z, ignore)
#define rfr_moe_load(t, n, splits, least) rfr_moe_load_at(t, RFR_HERE, n, splits, least)
#define rfr_embedding(t, table, ids) rfr_embedding_at(t, RFR_HERE, table, ids)
#define rfr_positions(t, offsets, tokens) rfr_positions_at(t, RFR_HERE, offsets, tokens)
#define rfr_rope(t, x, positions, theta, scaling) rfr_rope_at(t, RFR_HERE, x, positions, theta, scaling)
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
#define rfr_all_gather(t, x, ranks) rfr_all_gather_at(t, RFR_HERE, x, ranks)
#define rfr_reduce_scatter(t, x, ranks) rfr_reduce_scatter_at(t, RFR_HERE, x, ranks)
#define rfr_all_reduce(t, x, ranks) rfr_all_reduce_at(t, RFR_HERE, x, ranks)
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
#define rfr_loss_scale(t, state, inverse) rfr_loss_scale_at(t, RFR_HERE, state, inverse)
#define rfr_loss_scale_end(t, state, skip, every) rfr_loss_scale_end_at(t, RFR_HERE, state, skip, every)
#define rfr_skip_bad(t, skip, n, flags, which, group) rfr_skip_bad_at(t, RFR_HERE, skip, n, flags, which, group)
#define rfr_step_end(t, step, skip) rfr_step_end_at(t, RFR_HERE, step, skip)
#define rfr_ring_read(t, ring, step) rfr_ring_read_at(t, RFR_HERE, ring, step)
#define rfr_metrics_write(t, ring, step, n, values) rfr_metrics_write_at(t, RFR_HERE, ring, step, n, values)
#define rfr_text_read(t, text, cursor, rows, positions, last) \
  rfr_text_read_at(t, RFR_HERE, text, cursor, rows, positions, last)
#define rfr_cache_write(t, cache, x, cursor) rfr_cache_write_at(t, RFR_HERE, cache, x, cursor)
#define rfr_text_append(t, text, logits, cursor, temperature, top_k, top_p, rows) \
  rfr_text_append_at(t, RFR_HERE, text, logits, cursor, temperature, top_k, top_p, rows)
#define rfr_text_end(t, cursor, text, rows) rfr_text_end_at(t, RFR_HERE, cursor, text, rows)

#ifdef __cplusplus
}
#endif
#endif
