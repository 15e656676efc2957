/* SPDX-License-Identifier: Apache-2.0
 *
 * Text generation token by token, on the CPU.
 *
 * The draw at a position of the full text (dropped tokens included) is a pure function of the seed and that position,
 * computed in double with the candidates in a fixed order: all of them by id, or the most probable first (ties by id)
 * when top_k or top_p exclude some. min_p sets weights to 0. The most probable ones are popped from a heap
 * until there are enough: no full sort, no allocation.
 */
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/decode/cursor.h"
#include "ops/decode/sequences.h"
#include "ops/walk.h"

/* ---- text, cursor, caches ---- */

static void read_text(const rfi_call *c, int64_t before) {
  const int64_t rows = c->attr[0].i;
  const int32_t *text = c->in[0].data;
  const rfi_take take = rfi_take_next(&c->in[1], rows, c->in[0].type.shape[0] - 1);
  int32_t *tokens = c->out[0].data, *positions = c->out[1].data, *last = c->out[2].data;
  for (int64_t i = 0; i < rows; i++) {
    if (tokens) tokens[i] = i < take.count ? text[take.first + i] : 0;
    if (positions) positions[i] = (int32_t)(take.first + i);
  }
  if (last) *last = (int32_t)(before + (take.count > 0 ? take.count - 1 : 0));
}

static rfr_status read_run(const rfi_call *c) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&c->in[1].type); b++) {
    const rfi_call one = rfi_call_of_text(c, &rfi_split_text_read, b, &of);
    read_text(&one, b * c->attr[0].i);
  }
  return RFR_OK;
}

static void write_cache(const rfi_call *c) {
  const rfi_arg *cache = &c->out[0], *x = &c->in[1];
  const rfi_take take = rfi_take_next(&c->in[2], x->type.shape[0], cache->type.shape[0]);
  rfi_arg rows = *x, to = *cache;
  rows.type.shape[0] = to.type.shape[0] = take.count;
  to.data = (char *)cache->data + take.first * cache->stride[0] * (rfr_dtype_bits(cache->type.dtype) / 8);
  if (rfi_arg_count(&rows)) rfi_copy_part(&to, &rows, 0, rfi_arg_count(&rows));
}

static rfr_status write_run(const rfi_call *c) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&c->in[2].type); b++) {
    const rfi_call one = rfi_call_of_text(c, &rfi_split_cache_write, b, &of);
    write_cache(&one);
  }
  return RFR_OK;
}

static void end_text(const rfi_call *c) {
  int64_t *cursor = c->out[0].data;
  const rfi_take take = rfi_take_next(&c->in[0], c->attr[0].i, c->in[1].type.shape[0] - 1);
  cursor[RFI_CURSOR_CACHED] = take.first + take.count;
  cursor[RFI_CURSOR_KNOWN] += take.all;
}

static rfr_status end_run(const rfi_call *c) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&c->in[0].type); b++) {
    const rfi_call one = rfi_call_of_text(c, &rfi_split_text_end, b, &of);
    end_text(&one);
  }
  return RFR_OK;
}

/* ---- the draw ---- */

typedef struct candidate {
  double p;
  int32_t id;
} candidate;

static bool is_more_probable(const candidate *a, const candidate *b) {
  return a->p != b->p ? a->p > b->p : a->id < b->id;
}

static void sift_down(candidate *c, int64_t i, int64_t n) {
  const candidate x = c[i];
  for (int64_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && is_more_probable(&c[child + 1], &c[child])) child++;
    if (!is_more_probable(&c[child], &x)) break;
    c[i] = c[child];
  }
  c[i] = x;
}

/* Pops the most probable candidates until there are `most` or their sum reaches `enough`. They end up at the end of c
 * in reverse order. Returns their number; *sum gets their sum. */
static int64_t take_best(candidate *c, int64_t n, int64_t most, double enough, double *sum) {
  int64_t taken = 0;
  *sum = 0.0;
  for (int64_t i = n / 2 - 1; i >= 0; i--) sift_down(c, i, n);
  while (taken < most && (taken == 0 || *sum < enough)) {
    const candidate best = c[0];
    c[0] = c[n - 1 - taken];
    c[n - 1 - taken] = best;
    taken++;
    *sum += best.p;
    sift_down(c, 0, n - taken);
  }
  return taken;
}

/* The logits as f32, with the penalty for tokens in the text. */
static void read_logits(const rfi_call *c, const double *sampling, float *x) {
  const rfi_arg *logits = &c->in[1];
  const int32_t *text = c->out[0].data;
  const int64_t V = logits->type.shape[1], known = rfi_cursor_get(&c->in[2], RFI_CURSOR_KNOWN);
  for (int64_t i = 0; i < V; i++) x[i] = rfi_read1(logits, i);
  if (!rfi_sampling_penalizes(sampling)) return;
  for (int64_t i = 0; i < known; i++) /* reads the original logit, because a token may occur several times */
    if (text[i] >= 0 && text[i] < V) x[text[i]] = rfi_sampling_penalize(sampling, rfi_read1(logits, text[i]));
}

static int32_t draw(const rfi_call *c) {
  const int64_t V = c->in[1].type.shape[1];
  const double *sampling = c->in[3].data;
  const double temperature = sampling[RFI_SAMPLING_TEMPERATURE], top_p = sampling[RFI_SAMPLING_TOP_P];
  const int64_t top_k = rfi_sampling_top_k(sampling, V);
  candidate *p = c->workspace;
  float *x = (float *)(p + V);
  read_logits(c, sampling, x);
  int32_t best = 0;
  for (int64_t i = 1; i < V; i++)
    if (x[i] > x[best]) best = (int32_t)i;
  if (!(temperature > 0.0)) return best;
  double total = 0.0, kept = 0.0;
  for (int64_t i = 0; i < V; i++) {
    const double weight = exp(((double)x[i] - (double)x[best]) / temperature);
    total += weight;
    p[i] = (candidate){weight < sampling[RFI_SAMPLING_MIN_P] ? 0.0 : weight, (int32_t)i};
    kept += p[i].p;
  }
  int64_t n = V, step = 1, first = 0;
  if (top_k < V || top_p < 1.0) {
    n = take_best(p, V, top_k, top_p * total < kept ? top_p * total : kept, &kept);
    first = V - 1;
    step = -1;
  }
  double u = rfi_cursor_draw(&c->in[2]) * kept;
  for (int64_t i = 0; i < n; i++) {
    u -= p[first + i * step].p;
    if (u < 0.0) return p[first + i * step].id;
  }
  /* u is 0 up to rounding: returns the last candidate that is kept */
  while (n > 1 && !(p[first + (n - 1) * step].p > 0.0)) n--;
  return p[first + (n - 1) * step].id;
}

static size_t append_workspace(const rfi_call *c) {
  return (size_t)c->in[1].type.shape[1] * (sizeof(candidate) + sizeof(float));
}

static rfr_status append_run(const rfi_call *c) {
  rfi_text_call of;
  for (int64_t b = 0; b < rfi_texts(&c->in[2].type); b++) {
    const rfi_call one = rfi_call_of_text(c, &rfi_split_text_append, b, &of);
    const rfi_take take = rfi_take_next(&one.in[2], one.attr[0].i, one.out[0].type.shape[0] - 1);
    if (take.all) ((int32_t *)one.out[0].data)[take.first + take.count] = draw(&one);
  }
  return RFR_OK;
}

const rfi_kernel RFI_CPU(text_read) = {read_run, NULL};
const rfi_kernel RFI_CPU(cache_write) = {write_run, NULL};
const rfi_kernel RFI_CPU(text_append) = {append_run, append_workspace};
const rfi_kernel RFI_CPU(text_end) = {end_run, NULL};
