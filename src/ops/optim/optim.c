/* SPDX-License-Identifier: Apache-2.0
 *
 * The optimizer's ops and the step block: shapes, options, recording calls.
 *
 * Everything that changes from step to step is a device value: the step block (i64: attempted, applied, seed, skipped),
 * and values computed from it. So a captured step has no argument. A skipped step does not change `applied`, and so
 * neither the learning rate nor Adam's bias correction.
 */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "core/rng.h"
#include "trace/trace.h"

static bool is_scalar(const rfr_type *t, rfr_dtype dtype) {
  return t->dtype == dtype && t->rank == 1 && t->shape[0] == 1;
}
static rfr_type scalar(rfr_dtype dtype) { return (rfr_type){.dtype = dtype, .rank = 1, .shape = {1}}; }
static bool is_step_block(const rfr_type *t) { return t->dtype == RFR_I64 && t->rank == 1 && t->shape[0] == 4; }
static bool is_narrow(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16 || d == RFR_F16; }
static bool is_state(rfr_dtype d) { return d == RFR_F32 || d == RFR_BF16; }
static bool absent(const rfr_type *t) { return t->rank < 0; }
static bool same_shape(const rfr_type *a, const rfr_type *b) {
  if (a->rank != b->rank) return false;
  for (int d = 0; d < a->rank; d++)
    if (a->shape[d] != b->shape[d]) return false;
  return true;
}

/* ---- shapes ---- */

rfr_status rfi_infer_lr_schedule(const rfi_infer *c) {
  const rfr_type *steps = &c->in[1];
  if (!is_step_block(&c->in[0])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  if (!absent(steps) && (steps->dtype != RFR_I64 || steps->rank != 1 || steps->shape[0] != 3))
    return rfi_fail(RFI_E_TRACE_SHAPE, "steps must be i64 (3): warmup, start of the decay, end");
  if (c->attr[0].i < RFR_LR_CONSTANT || c->attr[0].i > RFR_LR_WSD)
    return rfi_fail(RFI_E_TRACE_SHAPE, "kind is %lld, which is not an rfr_lr_kind", (long long)c->attr[0].i);
  c->out[0] = scalar(RFR_F32);
  return RFR_OK;
}

rfr_status rfi_infer_grad_norm(const rfi_infer *c) {
  const rfr_type *zeros = &c->in[0];
  for (int i = 1; i < c->n_in; i++)
    if (!is_narrow(c->in[i].dtype)) return rfi_fail(RFI_E_TRACE_SHAPE, "gradient %d is not f32, bf16 or f16", i - 1);
  if (!absent(zeros) && (zeros->dtype != RFR_I32 || zeros->rank != 1 || zeros->shape[0] != c->n_in - 1))
    return rfi_fail(RFI_E_TRACE_SHAPE, "zeros must be i32 (%d), one per gradient", c->n_in - 1);
  c->out[0] = scalar(RFR_F32);
  c->out[1] = scalar(RFR_I32);
  c->out[2] = *zeros;
  return RFR_OK;
}

rfr_status rfi_infer_grad_squares(const rfi_infer *c) {
  for (int i = 0; i < c->n_in; i++)
    if (!is_narrow(c->in[i].dtype)) return rfi_fail(RFI_E_TRACE_SHAPE, "gradient %d is not f32, bf16 or f16", i);
  c->out[0] = (rfr_type){.dtype = RFR_F64, .rank = 1, .shape = {c->n_in}};
  return RFR_OK;
}

rfr_status rfi_infer_norm_of_squares(const rfi_infer *c) {
  const rfr_type *zeros = &c->in[0], *squares = &c->in[1];
  const int64_t ranks = c->attr[0].i;
  if (squares->dtype != RFR_F64 || squares->rank != 1 || ranks < 1 || squares->shape[0] % ranks != 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "squares must be f64 (%lld gradients)", (long long)ranks);
  if (!absent(zeros) && (zeros->dtype != RFR_I32 || zeros->rank != 1 || zeros->shape[0] != squares->shape[0] / ranks))
    return rfi_fail(RFI_E_TRACE_SHAPE, "zeros must be i32 (%lld), one per gradient",
                    (long long)(squares->shape[0] / ranks));
  c->out[0] = scalar(RFR_F32);
  c->out[1] = scalar(RFR_I32);
  c->out[2] = *zeros;
  return RFR_OK;
}

rfr_status rfi_infer_clip_scale(const rfi_infer *c) {
  if (!is_scalar(&c->in[0], RFR_F32)) return rfi_fail(RFI_E_TRACE_SHAPE, "norm must be f32 (1)");
  c->out[0] = scalar(RFR_F32);
  return RFR_OK;
}

/* Checks the operands that adamw and sgd share: a weight with its gradient, n states and an optional master weight. */
static rfr_status check_update(const rfr_type *w, const rfr_type *g, int n, const rfr_type *states,
                               const rfr_type *master, const rfr_type *lr, const rfr_type *clip, const rfr_type *skip) {
  if (!is_narrow(w->dtype))
    return rfi_fail(RFI_E_TRACE_SHAPE, "w is %s; it must be f32, bf16 or f16", rfr_dtype_name(w->dtype));
  if (!is_narrow(g->dtype) || !same_shape(w, g))
    return rfi_fail(RFI_E_TRACE_SHAPE, "g must have w's shape, in f32, bf16 or f16");
  for (int i = 0; i < n; i++)
    if (!absent(&states[i]) && (!is_state(states[i].dtype) || !same_shape(w, &states[i])))
      return rfi_fail(RFI_E_TRACE_SHAPE, "moments must have w's shape, in f32 or bf16%s",
                      n == 2 ? "; or both must be u8, dynamic8 and dynamic8u of w's shape" : "");
  if (!absent(master) && (master->dtype != RFR_F32 || !same_shape(w, master)))
    return rfi_fail(RFI_E_TRACE_SHAPE, "master must have w's shape, in f32");
  if (!is_scalar(lr, RFR_F32) || (!absent(clip) && !is_scalar(clip, RFR_F32)))
    return rfi_fail(RFI_E_TRACE_SHAPE, "lr and clip must be f32 (1)");
  if (!absent(skip) && !is_scalar(skip, RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  return RFR_OK;
}

/* Stochastic rounding requires bf16 weights without a master weight. */
static rfr_status check_draws(const rfr_type *w, const rfr_type *master, bool has_step, const rfi_attr *draws) {
  if (draws[0].i < 0 || draws[0].i >= 1 << 24 || draws[1].i < 0)
    return rfi_fail(RFI_E_TRACE_SHAPE, "draws must be a number below 2^24, and first at least 0");
  if (draws[0].i == 0) return RFR_OK;
  if (w->dtype != RFR_BF16 || !absent(master))
    return rfi_fail(RFI_E_TRACE_SHAPE, "w is %s%s; stochastic rounding is for bf16 without a master weight",
                    rfr_dtype_name(w->dtype), absent(master) ? "" : " with a master weight");
  return has_step ? RFR_OK : rfi_fail(RFI_E_TRACE_SHAPE, "stochastic rounding needs the operand step");
}

/* Whether x is an 8-bit moment; both formats have the same size. */
static bool is_8bit(const rfr_type *x, const rfr_type *w) {
  return x->dtype == RFR_U8 && x->rank == 1 && x->shape[0] == rfr_quant_bytes(RFR_QUANT_DYNAMIC8, w->rank, w->shape);
}

rfr_status rfi_infer_adamw(const rfi_infer *c) {
  const rfr_type *in = c->in;
  /* number of moments to check as full-size tensors */
  const int moments = is_8bit(&in[2], &in[0]) && is_8bit(&in[3], &in[0]) ? 0 : 2;
  RFI_TRY(check_update(&in[0], &in[1], moments, &in[2], &in[4], &in[5], &in[6], &in[7]));
  if (!is_step_block(&in[8])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  RFI_TRY(check_draws(&in[0], &in[4], true, &c->attr[5]));
  c->out[0] = in[0];
  c->out[1] = in[2];
  c->out[2] = in[3];
  c->out[3] = in[4];
  return RFR_OK;
}

rfr_status rfi_infer_sgd(const rfi_infer *c) {
  const rfr_type *in = c->in;
  RFI_TRY(check_update(&in[0], &in[1], 1, &in[2], &in[3], &in[4], &in[5], &in[6]));
  const bool has_step = c->n_in > 7 && !absent(&in[7]);
  if (has_step && !is_step_block(&in[7])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  RFI_TRY(check_draws(&in[0], &in[3], has_step, &c->attr[3]));
  c->out[0] = in[0];
  c->out[1] = in[2];
  c->out[2] = in[3];
  return RFR_OK;
}

rfr_status rfi_infer_muon_momentum(const rfi_infer *c) {
  const rfr_type *g = &c->in[0], *b = &c->in[1], *clip = &c->in[2], *skip = &c->in[3];
  const rfr_dtype to = (rfr_dtype)c->attr[1].i;
  if (!is_narrow(g->dtype) || !is_state(b->dtype) || !same_shape(g, b))
    return rfi_fail(RFI_E_TRACE_SHAPE, "g must be f32, bf16 or f16, and b must have its shape, in f32 or bf16");
  if (!is_state(to)) return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32 or bf16");
  if (!absent(clip) && !is_scalar(clip, RFR_F32)) return rfi_fail(RFI_E_TRACE_SHAPE, "clip must be f32 (1)");
  if (!absent(skip) && !is_scalar(skip, RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  c->out[0] = *g;
  c->out[0].dtype = to;
  c->out[1] = *b;
  return RFR_OK;
}

rfr_status rfi_infer_muon_polynomial(const rfi_infer *c) {
  const rfr_type *g = &c->in[0], *p = &c->in[1];
  const int r = g->rank;
  /* f16 is refused: it cannot hold the scale of a matrix of zeros, and infinity times zero is NaN. */
  if (!is_state(g->dtype) || p->dtype != g->dtype || !same_shape(g, p))
    return rfi_fail(RFI_E_TRACE_SHAPE, "g and p must have the same type: f32 or bf16");
  if ((r != 2 && r != 3) || g->shape[r - 1] != g->shape[r - 2])
    return rfi_fail(RFI_E_TRACE_SHAPE, "g must be a square matrix, or have rank 3 and square matrices");
  c->out[0] = *g;
  return RFR_OK;
}

rfr_status rfi_infer_ema(const rfi_infer *c) {
  const rfr_type *average = &c->in[0], *w = &c->in[1], *skip = &c->in[2];
  if (average->dtype != RFR_F32 || !is_narrow(w->dtype) || !same_shape(average, w))
    return rfi_fail(RFI_E_TRACE_SHAPE, "w must be f32, bf16 or f16, and average must have its shape, in f32");
  if (!absent(skip) && !is_scalar(skip, RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  if (!is_step_block(&c->in[3])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  c->out[0] = *average;
  return RFR_OK;
}

rfr_status rfi_infer_ema_weight(const rfi_infer *c) {
  if (c->in[0].dtype != RFR_F32) return rfi_fail(RFI_E_TRACE_SHAPE, "average must be f32");
  if (!is_narrow((rfr_dtype)c->attr[0].i)) return rfi_fail(RFI_E_TRACE_SHAPE, "to must be f32, bf16 or f16");
  c->out[0] = c->in[0];
  c->out[0].dtype = (rfr_dtype)c->attr[0].i;
  return RFR_OK;
}

static bool is_loss_scale(const rfr_type *t) { return t->dtype == RFR_I32 && t->rank == 1 && t->shape[0] == 2; }

rfr_status rfi_infer_loss_scale(const rfi_infer *c) {
  if (!is_loss_scale(&c->in[0])) return rfi_fail(RFI_E_TRACE_SHAPE, "the state of the loss scale must be i32 (2)");
  c->out[0] = c->out[1] = scalar(RFR_F32);
  return RFR_OK;
}

rfr_status rfi_infer_loss_scale_end(const rfi_infer *c) {
  if (!is_loss_scale(&c->in[0])) return rfi_fail(RFI_E_TRACE_SHAPE, "the state of the loss scale must be i32 (2)");
  if (!is_scalar(&c->in[1], RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  if (c->attr[0].i < 1)
    return rfi_fail(RFI_E_TRACE_SHAPE, "every is %lld; it must be at least 1", (long long)c->attr[0].i);
  c->out[0] = c->in[0];
  return RFR_OK;
}

rfr_status rfi_infer_skip_bad(const rfi_infer *c) {
  if (!is_scalar(&c->in[0], RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  for (int i = 1; i < c->n_in; i++)
    if (c->in[i].dtype != RFR_I32 || c->in[i].rank != 1) return rfi_fail(RFI_E_TRACE_SHAPE, "flags must be i32 (n)");
  for (int j = 0; j < 3; j++) c->out[j] = scalar(RFR_I32);
  return RFR_OK;
}

rfr_status rfi_infer_step_end(const rfi_infer *c) {
  if (!is_step_block(&c->in[0])) return rfi_fail(RFI_E_TRACE_SHAPE, "step must be the step block, i64 (4)");
  if (!is_scalar(&c->in[1], RFR_I32)) return rfi_fail(RFI_E_TRACE_SHAPE, "skip must be i32 (1)");
  c->out[0] = c->in[0];
  return RFR_OK;
}

/* ---- options ---- */

rfr_lr_options rfr_lr_options_default(void) {
  return (rfr_lr_options){.size = sizeof(rfr_lr_options), .kind = RFR_LR_CONSTANT, .base = 1e-3};
}

rfr_adamw_options rfr_adamw_options_default(void) {
  return (rfr_adamw_options){
      .size = sizeof(rfr_adamw_options), .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .decay = 0.1, .lr_scale = 1.0};
}

/* Options smaller than the known struct are refused; larger ones, of a newer program, must be zero beyond it. */
static bool size_fits(const void *options, size_t size, size_t known) {
  if (size < known || size > 4096) return false;
  for (size_t i = known; i < size; i++)
    if (((const unsigned char *)options)[i]) return false;
  return true;
}

static const char *wrong_lr(const rfr_lr_options *o) {
  if (!size_fits(o, o->size, sizeof *o))
    return "options.size does not match this library; start from the default options";
  if ((unsigned)o->kind > RFR_LR_WSD) return "kind is not an rfr_lr_kind";
  if (!(o->base >= 0 && o->min >= 0 && isfinite(o->base) && isfinite(o->min))) return "base and min must be at least 0";
  if (o->warmup < 0 || o->decay < 0 || o->total < 0) return "warmup, total and decay must be at least 0";
  if (o->kind != RFR_LR_CONSTANT && o->total <= o->warmup) return "total must be more than warmup";
  if (o->kind == RFR_LR_WSD && o->decay > o->total - o->warmup) return "decay must fit between warmup and total";
  return NULL;
}

static const char *wrong_adamw(const rfr_adamw_options *o) {
  if (!size_fits(o, o->size, sizeof *o))
    return "options.size does not match this library; start from the default options";
  if (!(o->beta1 >= 0 && o->beta1 < 1 && o->beta2 >= 0 && o->beta2 < 1)) return "beta1 and beta2 must be in [0, 1)";
  if (!(o->eps >= 0 && isfinite(o->eps))) return "eps must be at least 0";
  if (!(o->decay >= 0 && isfinite(o->decay) && isfinite(o->lr_scale)))
    return "decay must be at least 0, lr_scale finite";
  return NULL;
}

/* ---- recording ---- */

rfr_value rfr_step_block_at(rfr_trace *t, rfr_source at) {
  return rfr_input_at(t, at, "step", RFR_ROLE_STATE, RFR_I64, 1, (int64_t[]){4});
}

rfr_value rfr_rng_stream_at(rfr_trace *t, rfr_source at, const char *name) {
  char full[sizeof RFI_STREAM_PREFIX + RFI_STREAM_NAME];
  const size_t n = name ? strlen(name) : 0;
  if (n < 1 || n > RFI_STREAM_NAME)
    return rfi_trace_fail(t, at, "rng_stream", RFI_E_ARGUMENT, "a stream's name has 1 to %d characters, not %zu",
                          RFI_STREAM_NAME, n);
  rfi_snprintf(full, sizeof full, "%s%s", RFI_STREAM_PREFIX, name);
  return rfr_input_at(t, at, full, RFR_ROLE_STATE, RFR_I64, 1, (int64_t[]){4});
}

rfr_value rfr_lr_schedule_steps_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value steps,
                                   const rfr_lr_options *options) {
  rfr_lr_options o = rfr_lr_options_default();
  if (options) {
    const char *wrong = wrong_lr(options);
    if (wrong) return rfi_trace_fail(t, at, "lr_schedule", RFI_E_ARGUMENT, "%s", wrong);
    o = *options;
  }
  rfi_attr attr[] = {rfi_i(o.kind), rfi_f(o.base), rfi_f(o.min), rfi_i(o.warmup), rfi_i(o.total), rfi_i(o.decay)};
  const rfr_value in[2] = {step, steps};
  return rfi_record(t, at, RFI_OP_lr_schedule, 2, in, attr, NULL);
}

rfr_value rfr_lr_schedule_at(rfr_trace *t, rfr_source at, rfr_value step, const rfr_lr_options *options) {
  return rfr_lr_schedule_steps_at(t, at, step, RFR_NONE, options);
}

rfr_value rfr_grad_norm_zeros_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value zeros,
                                 rfr_value *skip) {
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE};
  rfr_value *in = NULL;
  bool given = n >= 0 && (n == 0 || grads);
  if (given && rfi_trace_records(t)) in = rfi_arena_alloc(t->arena, sizeof *in * ((size_t)n + 1));
  if (in) {
    in[0] = zeros;
    if (n > 0) memcpy(in + 1, grads, sizeof *in * (size_t)n);
    rfi_record(t, at, RFI_OP_grad_norm, n + 1, in, NULL, out);
  } else {
    rfi_trace_fail(t, at, "grad_norm", given ? RFI_E_NO_MEMORY : RFI_E_ARGUMENT, "n is %d, or grads is NULL", n);
  }
  if (skip) *skip = out[1];
  return out[0];
}

rfr_value rfr_grad_norm_at(rfr_trace *t, rfr_source at, int n, const rfr_value *grads, rfr_value *skip) {
  return rfr_grad_norm_zeros_at(t, at, n, grads, RFR_NONE, skip);
}

rfr_value rfr_clip_scale_at(rfr_trace *t, rfr_source at, rfr_value norm, double max) {
  if (!(max >= 0)) return rfi_trace_fail(t, at, "clip_scale", RFI_E_ARGUMENT, "max must be at least 0");
  return rfi_record(t, at, RFI_OP_clip_scale, 1, &norm, (rfi_attr[]){rfi_f(max)}, NULL);
}

rfr_value rfr_adamw_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value m, rfr_value v,
                       rfr_value master, rfr_value lr, rfr_value clip, rfr_value skip, rfr_value step,
                       const rfr_adamw_options *options) {
  rfr_adamw_options o = rfr_adamw_options_default();
  if (options) {
    const char *wrong = wrong_adamw(options);
    if (wrong) return rfi_trace_fail(t, at, "adamw", RFI_E_ARGUMENT, "%s", wrong);
    o = *options;
  }
  rfr_value in[] = {w, g, m, v, master, lr, clip, skip, step};
  rfi_attr attr[] = {rfi_f(o.beta1),    rfi_f(o.beta2), rfi_f(o.eps), rfi_f(o.decay),
                     rfi_f(o.lr_scale), rfi_i(o.draws), rfi_i(0)};
  return rfi_record(t, at, RFI_OP_adamw, 9, in, attr, NULL);
}

/* `step` RFR_NONE: an op without this operand. */
static rfr_value record_sgd(rfr_trace *t, rfr_source at, const rfr_value in[8], double momentum_factor, double decay,
                            double lr_scale, int64_t draws) {
  if (!(momentum_factor >= 0 && momentum_factor < 1 && decay >= 0 && isfinite(decay) && isfinite(lr_scale)))
    return rfi_trace_fail(t, at, "sgd", RFI_E_ARGUMENT,
                          "the momentum factor must be in [0, 1), decay at least 0, lr_scale finite");
  const rfi_attr attr[] = {rfi_f(momentum_factor), rfi_f(decay), rfi_f(lr_scale), rfi_i(draws), rfi_i(0)};
  return rfi_record(t, at, RFI_OP_sgd, in[7] == RFR_NONE ? 7 : 8, in, attr, NULL);
}

rfr_value rfr_sgd_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value momentum, rfr_value master,
                     rfr_value lr, rfr_value clip, rfr_value skip, double momentum_factor, double decay,
                     double lr_scale) {
  const rfr_value in[8] = {w, g, momentum, master, lr, clip, skip, RFR_NONE};
  return record_sgd(t, at, in, momentum_factor, decay, lr_scale, 0);
}

rfr_value rfr_sgd_stochastic_at(rfr_trace *t, rfr_source at, rfr_value w, rfr_value g, rfr_value momentum, rfr_value lr,
                                rfr_value clip, rfr_value skip, rfr_value step, double momentum_factor, double decay,
                                double lr_scale, int64_t draws) {
  const rfr_value in[8] = {w, g, momentum, RFR_NONE, lr, clip, skip, step};
  return record_sgd(t, at, in, momentum_factor, decay, lr_scale, draws);
}

rfr_value rfr_ema_at(rfr_trace *t, rfr_source at, rfr_value average, rfr_value w, rfr_value skip, rfr_value step,
                     double decay, int64_t start, int warmup) {
  if (!(decay >= 0 && decay < 1 && start >= 0))
    return rfi_trace_fail(t, at, "ema", RFI_E_ARGUMENT, "decay must be in [0, 1), start at least 0");
  const rfr_value in[4] = {average, w, skip, step};
  const rfi_attr attr[3] = {rfi_f(decay), rfi_i(start), rfi_i(warmup != 0)};
  return rfi_record(t, at, RFI_OP_ema, 4, in, attr, NULL);
}

rfr_value rfr_loss_scale_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value *inverse) {
  rfr_value out[2];
  rfi_record(t, at, RFI_OP_loss_scale, 1, &state, NULL, out);
  if (inverse) *inverse = out[1];
  return out[0];
}

rfr_value rfr_loss_scale_end_at(rfr_trace *t, rfr_source at, rfr_value state, rfr_value skip, int64_t every) {
  return rfi_record(t, at, RFI_OP_loss_scale_end, 2, (rfr_value[]){state, skip}, (rfi_attr[]){rfi_i(every)}, NULL);
}

rfr_value rfr_skip_bad_at(rfr_trace *t, rfr_source at, rfr_value skip, int n, const rfr_value *flags, rfr_value *which,
                          rfr_value *group) {
  rfr_value out[3] = {RFR_NONE, RFR_NONE, RFR_NONE}, *in = NULL;
  const bool given = n >= 0 && (n == 0 || flags);
  if (given && rfi_trace_records(t)) in = rfi_arena_alloc(t->arena, sizeof *in * ((size_t)n + 1));
  if (in) {
    in[0] = skip;
    if (n > 0) memcpy(in + 1, flags, sizeof *in * (size_t)n);
    rfi_record(t, at, RFI_OP_skip_bad, n + 1, in, NULL, out);
  } else {
    rfi_trace_fail(t, at, "skip_bad", given ? RFI_E_NO_MEMORY : RFI_E_ARGUMENT, "n is %d, or flags is NULL", n);
  }
  if (which) *which = out[1];
  if (group) *group = out[2];
  return out[0];
}

rfr_value rfr_step_end_at(rfr_trace *t, rfr_source at, rfr_value step, rfr_value skip) {
  return rfi_record(t, at, RFI_OP_step_end, 2, (rfr_value[]){step, skip}, NULL, NULL);
}
