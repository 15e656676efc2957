/* SPDX-License-Identifier: Apache-2.0
 *
 * AdamW and SGD on the CPU, in place, one pass over memory.
 *
 *   g = clip g
 *   adamw: m = beta1 m + (1 - beta1) g,  v = beta2 v + (1 - beta2) g^2,  t = applied + 1
 *          w -= lr ( m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w )
 *   sgd:   b = momentum b + g            w -= lr ( b + decay w )
 *
 * with lr the schedule's rate times the group's lr_scale, and decay decoupled from the gradient. With a master weight,
 * the update is computed on it and w is its rounding. Constants of the tensor are computed in double first; elements
 * are f32. Strips are widened to f32 in the L1 cache, so one loop serves every mixture of types. 8-bit moments are
 * widened block by block, and the update reads the new moments before they are rounded. If skip is set nothing is
 * written. With draws the weights are rounded stochastically (rounding.h). The op is memory-bound, so the next strips
 * are prefetched, and bf16 weights are written with non-temporal stores.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/optim/rounding.h"
#include "ops/quant/dynamic8.h"
#include "ops/stream.h"

enum { STRIP = 64, AHEAD = 512 }; /* elements per strip; prefetch distance */

typedef struct factors {
  float beta1, rest1, beta2, rest2, step, inv_sqrt2, eps, decay, clip;
} factors;

static void adamw_block(const factors *f, float *restrict w, const float *restrict g, float *restrict m,
                        float *restrict v, int64_t n) {
  const factors k = *f;
  for (int64_t i = 0; i < n; i++) {
    float x = g[i] * k.clip;
    float mi = k.beta1 * m[i] + k.rest1 * x, vi = k.beta2 * v[i] + k.rest2 * (x * x);
    m[i] = mi;
    v[i] = vi;
    w[i] -= k.step * mi / (sqrtf(vi) * k.inv_sqrt2 + k.eps) + k.decay * w[i];
  }
}

static void momentum_block(const factors *f, float *restrict w, const float *restrict g, float *restrict b, int64_t n) {
  const factors k = *f;
  for (int64_t i = 0; i < n; i++) {
    float bi = k.beta1 * b[i] + g[i] * k.clip;
    b[i] = bi;
    w[i] -= k.step * bi + k.decay * w[i];
  }
}

static void sgd_block(const factors *f, float *restrict w, const float *restrict g, int64_t n) {
  const factors k = *f;
  for (int64_t i = 0; i < n; i++) w[i] -= k.step * (g[i] * k.clip) + k.decay * w[i];
}

/* The call as rfi_parallel passes it to its parts; it must be the first field. */
typedef struct update {
  rfi_call call;
  factors f;
  const rfi_arg *w, *g, *m, *v, *master;
  bool stochastic; /* w is bf16 without a master weight */
  rfi_weight_draws draws;
  int64_t first; /* the element of the full weight at which w begins */
} update;

enum { M, V, BLOCK = RFI_DYNAMIC_BLOCK };

/* A block that is changed in place: the state's own memory, or a widened copy. */
static float *open_block(float *buffer, const rfi_arg *a, int64_t i, int64_t n) {
  return (float *)rfi_read(buffer, a, i, 1, n);
}

/* Rounds n <= BLOCK weights from element i with their draws. */
static void round_block(const update *u, uint16_t *restrict to, const float *restrict w, int64_t i, int64_t n) {
  enum { EACH = RFI_DRAWS_PER_BLOCK };
  uint32_t word[(BLOCK / EACH + 1) * 4], bits[BLOCK];
  const uint64_t at = (uint64_t)(u->first + i), skip = at % EACH, blocks = (skip + (uint64_t)n + EACH - 1) / EACH;
  for (uint64_t b = 0; b < blocks; b++) {
    const rfi_u32x4 draw = rfi_weight_draw8(&u->draws, at / EACH + b);
    for (int k = 0; k < 4; k++) word[4 * b + (uint64_t)k] = draw.v[k];
  }
  memcpy(bits, w, (size_t)n * sizeof *bits);
  for (int64_t j = 0; j < n; j++) {
    const uint64_t k = skip + (uint64_t)j;
    to[j] = rfi_round_bf16(bits[j], word[k / 2] >> 16 * (k % 2) & 0xFFFFu);
  }
}

/* Stores n updated weights from element i, rounded to their type. */
static void store_weights(const update *u, const float *w, int64_t i, int64_t n) {
  if (u->stochastic) round_block(u, (uint16_t *)u->w->data + i, w, i, n);
  else rfi_flush(w, u->w, i, n);
}

/* Stores a rounded strip with non-temporal stores, because it is not read again before the next step. */
static void stream_bf16(const update *u, const float *w, int64_t i) {
  uint16_t rounded[STRIP] __attribute__((aligned(RFI_LINE))), *to = (uint16_t *)u->w->data + i;
  if (u->stochastic) round_block(u, rounded, w, i, STRIP);
  else rfi_narrow_bf16(rounded, w, STRIP);
  if ((uintptr_t)to % RFI_LINE == 0) rfi_stream(to, rounded, sizeof rounded);
  else memcpy(to, rounded, sizeof rounded);
}

static void update_part(const rfi_call *call, int64_t begin, int64_t end, int part) {
  (void)part;
  const update *u = (const update *)call;
  const rfi_arg *target = u->master->data ? u->master : u->w;
  const bool streams = u->w->type.dtype == RFR_BF16 && rfi_count(&u->w->type) * 2 >= RFI_STREAM_BYTES;
  float wb[STRIP], gb[STRIP], mb[STRIP], vb[STRIP];
  for (int64_t i = begin; i < end; i += STRIP) {
    int64_t n = end - i < STRIP ? end - i : STRIP;
    rfi_fetch(target, i + AHEAD, n);
    rfi_fetch(u->g, i + AHEAD, n);
    if (u->m->data) rfi_fetch(u->m, i + AHEAD, n);
    if (u->v) rfi_fetch(u->v, i + AHEAD, n);
    float *w = open_block(wb, target, i, n), *m = u->m->data ? open_block(mb, u->m, i, n) : NULL;
    float *v = u->v ? open_block(vb, u->v, i, n) : NULL;
    const float *g = rfi_read(gb, u->g, i, 1, n);
    if (v) adamw_block(&u->f, w, g, m, v, n);
    else if (m) momentum_block(&u->f, w, g, m, n);
    else sgd_block(&u->f, w, g, n);
    if (v) rfi_flush(v, u->v, i, n);
    if (m) rfi_flush(m, u->m, i, n);
    if (streams && n == STRIP) stream_bf16(u, w, i);
    else store_weights(u, w, i, n);
    if (target != u->w && u->w->type.dtype == RFR_F32) memcpy((float *)u->w->data + i, w, (size_t)n * sizeof *w);
  }
  if (streams) rfi_stream_end();
}

/* ---- 8-bit moments ---- */

static const float numbers[2][256] = {{
#include "ops/quant/dynamic_signed.def"
                                      },
                                      {
#include "ops/quant/dynamic_unsigned.def"
                                      }};

static void decode_block(float *restrict x, const float *restrict map, const uint8_t *restrict codes, float scale,
                         int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = map[codes[i]] * scale;
}

/* Returns the scale. */
static float encode_block(uint8_t *restrict codes, const float *restrict middle, const float *restrict x, int64_t n) {
  float most = 0;
  for (int64_t i = 0; i < n; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
  const float inverse = rfi_dynamic8_inverse(most);
  for (int64_t i = 0; i < n; i++) codes[i] = (uint8_t)rfi_dynamic8_nearest(middle, x[i] * inverse);
  return most;
}

static void update_blocks(const rfi_call *call, int64_t begin, int64_t end, int part) {
  (void)part;
  const update *u = (const update *)call;
  const rfi_arg *target = u->master->data ? u->master : u->w, *moments[2] = {u->m, u->v};
  const int64_t all = rfi_count(&u->w->type);
  float wb[BLOCK], gb[BLOCK], x[2][BLOCK], middle[2][255];
  for (int k = 0; k < 255; k++)
    for (int s = M; s <= V; s++) middle[s][k] = rfi_dynamic8_middle(numbers[s], k);
  for (int64_t b = begin; b < end; b++) {
    const int64_t i = b * BLOCK, n = all - i < BLOCK ? all - i : BLOCK;
    float *w = open_block(wb, target, i, n), *scale[2];
    uint8_t *codes[2];
    for (int s = M; s <= V; s++) {
      codes[s] = (uint8_t *)moments[s]->data + i;
      scale[s] = (float *)(void *)((char *)moments[s]->data + rfi_dynamic8_scales(all)) + b;
      decode_block(x[s], numbers[s], codes[s], *scale[s], n);
    }
    adamw_block(&u->f, w, rfi_read(gb, u->g, i, 1, n), x[M], x[V], n);
    for (int s = M; s <= V; s++) *scale[s] = encode_block(codes[s], middle[s], x[s], n);
    store_weights(u, w, i, n);
    if (target != u->w && u->w->type.dtype == RFR_F32) memcpy((float *)u->w->data + i, w, (size_t)n * sizeof *w);
  }
}

static void set_draws(update *u, const int64_t *step, const rfi_attr *draws) {
  u->stochastic = draws[0].i > 0;
  u->first = draws[1].i;
  if (u->stochastic) u->draws = rfi_weight_draws_of(step, draws[0].i);
}

static rfr_status adamw_run(const rfi_call *c) {
  if (c->in[7].data && *(const int32_t *)c->in[7].data) return RFR_OK;
  double beta1 = c->attr[0].f, beta2 = c->attr[1].f, lr = *(const float *)c->in[5].data * c->attr[4].f;
  double t = (double)(((const int64_t *)c->in[8].data)[1] + 1);
  update u = {.call = *c, .w = &c->in[0], .g = &c->in[1], .m = &c->in[2], .v = &c->in[3], .master = &c->in[4]};
  u.f = (factors){.beta1 = (float)beta1,
                  .rest1 = (float)(1 - beta1),
                  .beta2 = (float)beta2,
                  .rest2 = (float)(1 - beta2),
                  .step = (float)(lr / (1 - pow(beta1, t))),
                  .inv_sqrt2 = (float)(1 / sqrt(1 - pow(beta2, t))),
                  .eps = (float)c->attr[2].f,
                  .decay = (float)(lr * c->attr[3].f),
                  .clip = c->in[6].data ? *(const float *)c->in[6].data : 1.0f};
  set_draws(&u, c->in[8].data, &c->attr[5]);
  const int64_t n = rfi_count(&c->in[0].type);
  if (u.m->type.dtype == RFR_U8) rfi_parallel(&u.call, (n + BLOCK - 1) / BLOCK, 16 * BLOCK, update_blocks);
  else rfi_parallel(&u.call, n, 4, update_part);
  return RFR_OK;
}

static rfr_status sgd_run(const rfi_call *c) {
  if (c->in[6].data && *(const int32_t *)c->in[6].data) return RFR_OK;
  double lr = *(const float *)c->in[4].data * c->attr[2].f;
  update u = {.call = *c, .w = &c->in[0], .g = &c->in[1], .m = &c->in[2], .master = &c->in[3]};
  u.f = (factors){.beta1 = (float)c->attr[0].f,
                  .step = (float)lr,
                  .decay = (float)(lr * c->attr[1].f),
                  .clip = c->in[5].data ? *(const float *)c->in[5].data : 1.0f};
  set_draws(&u, c->n_in > 7 ? c->in[7].data : NULL, &c->attr[3]);
  rfi_parallel(&u.call, rfi_count(&c->in[0].type), 3, update_part);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(adamw) = {adamw_run, NULL};
const rfi_kernel RFI_CPU(sgd) = {sgd_run, NULL};
