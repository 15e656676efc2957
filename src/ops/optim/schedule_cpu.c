/* SPDX-License-Identifier: Apache-2.0
 *
 * The step's scalars on the CPU: learning rate, gradient norm, clip factor, step block.
 *
 * Learning rate of the update that increments `applied`, with n = applied:
 *   n < warmup             base (n + 1) / warmup         the last warmup step has the full rate
 *   linear, cosine         from base at warmup to min at total
 *   wsd                    base, then linearly down to min over the last `decay` steps (linear and
 *                          not 1 - sqrt: most published schedules end so, and a run can resume
 *                          from the beginning of the decay and extend it)
 *   n >= total             min
 * With the operand `steps`, n = attempted, and warmup, total - decay and total are its three elements. (If the last two
 * are INT64_MAX, both become 2^63 in double, which is more than n.)
 *
 * The squares of the norm are summed in double over chunks of fixed size, and the chunks in order: results do not
 * depend on the split between threads or on their number. The op is memory-bound: chunks are prefetched.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/optim/loss_scale.h"
#include "ops/stream.h"

enum { ATTEMPTED, APPLIED, SEED, SKIPPED };

static double rate(const rfi_attr *a, const int64_t *step, const int64_t *steps) {
  double n = (double)step[steps ? ATTEMPTED : APPLIED];
  double base = a[1].f, min = a[2].f, warmup = (double)a[3].i, total = (double)a[4].i, decay = (double)a[5].i;
  if (steps) warmup = (double)steps[0], total = (double)steps[2], decay = total - (double)steps[1];
  if (n < warmup) return base * (n + 1) / warmup;
  if (a[0].i == RFR_LR_CONSTANT) return base;
  if (n >= total) return min;
  double done = (n - warmup) / (total - warmup);
  switch (a[0].i) {
    case RFR_LR_LINEAR: return base + (min - base) * done;
    case RFR_LR_COSINE: return min + (base - min) * 0.5 * (1 + cos(3.14159265358979323846 * done));
    default: return n < total - decay ? base : base + (min - base) * (n - (total - decay)) / decay;
  }
}

static rfr_status lr_run(const rfi_call *c) {
  if (c->out[0].data) *(float *)c->out[0].data = (float)rate(c->attr, c->in[0].data, c->in[1].data);
  return RFR_OK;
}

enum { LANES = 16, AHEAD = 2 * RFI_BLOCK /* distance of the prefetch */ };

static double sum_of_squares(const float *x, int64_t n) {
  double lane[LANES] = {0}, sum = 0;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES)
    for (int j = 0; j < LANES; j++) lane[j] += (double)x[i + j] * x[i + j];
  for (int j = 0; i < n; i++, j++) lane[j] += (double)x[i] * x[i];
  for (int j = 0; j < LANES; j++) sum += lane[j];
  return sum;
}

static int64_t chunks_of(const rfi_arg *g) { return (rfi_count(&g->type) + RFI_BLOCK - 1) / RFI_BLOCK; }
/* The first gradient among the operands: grad_norm has `zeros` before it, grad_squares nothing. */
static int first_gradient(const rfi_call *c) { return c->n_out > 1; }
static int64_t all_chunks(const rfi_call *c) {
  int64_t chunks = 0;
  for (int i = first_gradient(c); i < c->n_in; i++) chunks += chunks_of(&c->in[i]);
  return chunks;
}

static void norm_chunks(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  double *sums = c->workspace;
  int64_t first = 0;
  for (int k = first_gradient(c); k < c->n_in && first < end; k++) {
    const rfi_arg *g = &c->in[k];
    int64_t chunks = chunks_of(g), n = rfi_count(&g->type);
    for (int64_t j = begin > first ? begin - first : 0; j < chunks && first + j < end; j++) {
      float buffer[RFI_BLOCK];
      int64_t i = j * RFI_BLOCK, m = n - i < RFI_BLOCK ? n - i : RFI_BLOCK;
      rfi_fetch(g, i + AHEAD, m);
      sums[first + j] = sum_of_squares(rfi_read(buffer, g, i, 1, m), m);
    }
    first += chunks;
  }
}

/* The f64 square of a nonzero f32 is not zero, so a sum is zero only if all elements are zero. */
static void count_zero(int32_t *steps, bool zero) {
  if (*steps >= 0 && *steps < INT32_MAX) *steps = zero ? *steps + 1 : -1;
}

static void count_zeros(const rfi_call *c) {
  const double *sums = c->workspace;
  int32_t *zeros = c->out[2].data;
  for (int k = 1; k < c->n_in; k++) {
    bool zero = true;
    for (int64_t chunks = chunks_of(&c->in[k]); chunks > 0; chunks--) zero = *sums++ == 0 && zero;
    count_zero(&zeros[k - 1], zero);
  }
}

static void store_norm(const rfi_call *c, double sum) {
  const float norm = (float)sqrt(sum);
  if (c->out[0].data) *(float *)c->out[0].data = norm;
  if (c->out[1].data) *(int32_t *)c->out[1].data = !isfinite(norm);
}

static rfr_status norm_run(const rfi_call *c) {
  int64_t chunks = all_chunks(c);
  rfi_parallel(c, chunks, RFI_BLOCK, norm_chunks);
  double sum = 0;
  for (int64_t k = 0; k < chunks; k++) sum += ((const double *)c->workspace)[k];
  store_norm(c, sum);
  if (c->out[2].data) count_zeros(c);
  return RFR_OK;
}

static size_t norm_workspace(const rfi_call *c) { return (size_t)all_chunks(c) * sizeof(double); }

static rfr_status squares_run(const rfi_call *c) {
  const double *sums = c->workspace;
  double *squares = c->out[0].data;
  rfi_parallel(c, all_chunks(c), RFI_BLOCK, norm_chunks);
  for (int k = 0; k < c->n_in; k++) {
    squares[k] = 0;
    for (int64_t chunks = chunks_of(&c->in[k]); chunks > 0; chunks--) squares[k] += *sums++;
  }
  return RFR_OK;
}

/* The parts of a gradient in rank order, the gradients in order. */
static rfr_status norm_of_squares_run(const rfi_call *c) {
  const double *squares = c->in[1].data;
  const int64_t ranks = c->attr[0].i, n = c->in[1].type.shape[0] / ranks;
  int32_t *zeros = c->out[2].data;
  double sum = 0;
  for (int64_t k = 0; k < n; k++) {
    double own = 0;
    for (int64_t r = 0; r < ranks; r++) own += squares[r * n + k];
    if (zeros) count_zero(&zeros[k], own == 0);
    sum += own;
  }
  store_norm(c, sum);
  return RFR_OK;
}

static rfr_status clip_run(const rfi_call *c) {
  double max = c->attr[0].f, norm = *(const float *)c->in[0].data;
  double scale = max / (norm + 1e-6);
  if (c->out[0].data) *(float *)c->out[0].data = max == 0 || !(scale < 1) ? 1.0f : (float)scale;
  return RFR_OK;
}

static rfr_status scale_run(const rfi_call *c) {
  const int exponent = rfi_scale_exponent(c->in[0].data);
  if (c->out[0].data) *(float *)c->out[0].data = ldexpf(1.0f, exponent);
  if (c->out[1].data) *(float *)c->out[1].data = ldexpf(1.0f, -exponent);
  return RFR_OK;
}

static rfr_status scale_end_run(const rfi_call *c) {
  rfi_scale_step(c->out[0].data, *(const int32_t *)c->in[1].data != 0, c->attr[0].i);
  return RFR_OK;
}

static rfr_status skip_bad_run(const rfi_call *c) {
  const int32_t skip = *(const int32_t *)c->in[0].data;
  int32_t which = 0, flag = 1, before = 0;
  for (int k = 1; k < c->n_in && !which; k++) {
    const int32_t *flags = c->in[k].data, n = (int32_t)c->in[k].type.shape[0];
    for (int32_t i = 0; i < n && !which; i++)
      if (flags[i]) which = before + i + 1, flag = flags[i];
    before += n;
  }
  if (c->out[0].data) *(int32_t *)c->out[0].data = which ? 1 : skip;
  if (c->out[1].data) *(int32_t *)c->out[1].data = which;
  if (c->out[2].data) *(int32_t *)c->out[2].data = flag - 1;
  return RFR_OK;
}

static rfr_status step_end_run(const rfi_call *c) {
  int64_t *step = c->in[0].data;
  int64_t skip = *(const int32_t *)c->in[1].data != 0;
  step[ATTEMPTED] += 1;
  step[APPLIED] += 1 - skip;
  step[SKIPPED] += skip;
  return RFR_OK;
}

const rfi_kernel RFI_CPU(lr_schedule) = {lr_run, NULL};
const rfi_kernel RFI_CPU(grad_norm) = {norm_run, norm_workspace};
const rfi_kernel RFI_CPU(grad_squares) = {squares_run, norm_workspace};
const rfi_kernel RFI_CPU(norm_of_squares) = {norm_of_squares_run, NULL};
const rfi_kernel RFI_CPU(clip_scale) = {clip_run, NULL};
const rfi_kernel RFI_CPU(loss_scale) = {scale_run, NULL};
const rfi_kernel RFI_CPU(loss_scale_end) = {scale_end_run, NULL};
const rfi_kernel RFI_CPU(skip_bad) = {skip_bad_run, NULL};
const rfi_kernel RFI_CPU(step_end) = {step_end_run, NULL};
