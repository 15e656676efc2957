/* SPDX-License-Identifier: Apache-2.0
 *
 * Reference kernels and cases of text generation token by token. The draw ranks every candidate against every other
 * one, without sorting.
 */
#include <math.h>
#include <stdlib.h>

#include "core/rng.h"
#include "support/op_case.h"

/* Whether row i of a program with `rows` is valid: position cached + i is known and fits into the cache. */
static bool taken(const int64_t *cursor, int64_t i, int64_t capacity) {
  return cursor[0] >= 0 && cursor[0] + i < cursor[1] && cursor[0] + i < capacity;
}
static int64_t count_of(const int64_t *cursor, int64_t rows, int64_t capacity) {
  int64_t n = 0;
  while (n < rows && taken(cursor, n, capacity)) n++;
  return n;
}
/* A cursor out of range counts as the end of the text: no row is valid. */
static int64_t first_of(const int64_t *cursor, int64_t capacity) {
  return cursor[0] < 0 || cursor[0] > capacity ? capacity : cursor[0];
}

RFT_REF(text_read) {
  const int32_t *text = call->in[0].data;
  const int64_t *cursor = call->in[1].data;
  int64_t rows = call->attr[0].i, capacity = call->in[0].type.shape[0] - 1, n = count_of(cursor, rows, capacity);
  int32_t *tokens = call->out[0].data, *positions = call->out[1].data, *last = call->out[2].data;
  for (int64_t i = 0; i < rows; i++) {
    if (tokens) tokens[i] = i < n ? text[cursor[0] + i] : 0;
    if (positions) positions[i] = (int32_t)(first_of(cursor, capacity) + i);
  }
  if (last) *last = n > 0 ? (int32_t)n - 1 : 0;
}
RFT_CASES(text_read) = {
    "text_read(i[18]<256, I[4]=0,5,0,0) rows=7",
    "text_read(i[18]<256, I[4]=3,15,2,1) rows=5",
    "text_read(i[18]<256, I[4]=14,15,0,0) rows=1",
    "text_read(i[14]<99, I[4]=10,14,0,0) rows=8",
    "text_read(i[14]<99, I[4]=-3,5,0,0) rows=4",
    "text_read(i[14]<99, I[4]=77,80,0,0) rows=4",
    "text_read(i[6]<9, I[4]=4,2,0,0) rows=3",
    "text_read(i[1]<9, I[4]=0,1,0,0) rows=0",
    NULL,
};

RFT_REF(cache_write) {
  const rfr_type *cache = &call->out[0].type, *xt = &call->in[1].type;
  const double *x = call->in[1].data;
  double *y = call->out[0].data;
  const int64_t *cursor = call->in[2].data;
  int64_t width = cache->shape[1] * cache->shape[2], n = count_of(cursor, xt->shape[0], cache->shape[0]);
  for (int64_t i = 0; i < n * width; i++) y[cursor[0] * width + i] = x[i];
}
RFT_CASES(cache_write) = {
    "cache_write(f[31,3,5], f[1,3,5], I[4]=17,18,0,0)",    "cache_write(f[31,2,16], f[11,2,16]/2, I[4]=0,7,0,0)",
    "cache_write(f[31,2,16], f[11,2,16], I[4]=25,36,0,0)", "cache_write(f[13,1,33], f[4,1,33]^T, I[4]=3,99,0,0)",
    "cache_write(f[13,1,33], f[4,1,33], I[4]=-1,9,0,0)",   "cache_write(f[13,1,33], f[4,1,33], I[4]=13,14,0,0)",
    "cache_write(f[7,2,3], f[0,2,3], I[4]=2,3,0,0)",       NULL,
};

static double uniform_of(const int64_t *cursor) {
  rfi_u32x4 r = rfi_draw4(rfi_stream_key((uint64_t)cursor[3], 3), 0, 0, 0, (uint64_t)cursor[1] + (uint64_t)cursor[2]);
  return (double)(((uint64_t)r.v[0] << 32 | r.v[1]) >> 11) * 0x1p-53;
}

/* Logit i, with the penalty if token i is in the text. */
static double logit_of(const rfi_call *call, int64_t i) {
  const double x = ((double *)call->in[1].data)[i], penalty = ((double *)call->in[3].data)[4];
  const int64_t known = ((int64_t *)call->in[2].data)[1];
  bool seen = false;
  for (int64_t k = 0; k < known; k++) seen |= ((int32_t *)call->out[0].data)[k] == i;
  return !seen || penalty == 0 ? x : x > 0 ? x / penalty : x * penalty;
}

RFT_REF(text_append) {
  const double *sampling = call->in[3].data, temperature = sampling[0], top_k = sampling[1], top_p = sampling[2];
  const int64_t *cursor = call->in[2].data;
  int64_t V = call->in[1].type.shape[1], rows = call->attr[0].i;
  int64_t capacity = call->out[0].type.shape[0] - 1, n = count_of(cursor, rows, capacity), best = 0;
  int32_t *text = call->out[0].data;
  bool cut = top_k > 0 || top_p < 1;
  if (n == 0 || cursor[0] + n != cursor[1]) return;
  double *x = calloc((size_t)V, sizeof *x);
  for (int64_t i = 0; i < V; i++) x[i] = logit_of(call, i);
  for (int64_t i = 1; i < V; i++)
    if (x[i] > x[best]) best = i;
  text[cursor[1]] = (int32_t)best;
  double all = 0, kept = 0;
  for (int64_t i = 0; temperature > 0 && i < V; i++) all += exp((x[i] - x[best]) / temperature);
  /* pass 0 sums the kept candidates; pass 1 finds the candidate of the draw */
  for (int pass = 0; temperature > 0 && pass < 2; pass++)
    for (int64_t i = 0; i < V; i++) {
      double p = exp((x[i] - x[best]) / temperature), more_probable = 0, before = 0;
      int64_t rank = 0;
      for (int64_t j = 0; j < V; j++) {
        const double q = exp((x[j] - x[best]) / temperature);
        bool ahead = x[j] > x[i] || (x[j] == x[i] && j < i);
        rank += ahead;
        if (ahead) more_probable += q;
        if ((cut ? ahead : j < i) && q >= sampling[3]) before += q;
      }
      if ((top_k > 0 && rank >= top_k) || (top_p < 1 && rank > 0 && more_probable >= top_p * all)) continue;
      if (p < sampling[3]) continue;
      if (pass == 0) kept += p;
      double u = uniform_of(cursor) * kept;
      if (pass == 1 && before <= u && u < before + p) text[cursor[1]] = (int32_t)i;
    }
  free(x);
}
RFT_CASES(text_append) = {
    "text_append(i[20]<9, f[1,57], I[4]=7,8,0,3, D[5]=0,0,1,0,1) rows=1",
    "text_append(i[20]<9, f[1,57], I[4]=7,8,0,3, D[5]=1,0,1,0,1) rows=1",
    "text_append(i[20]<9, f[1,101], I[4]=0,8,1000,4, D[5]=0.7,5,1,0,1) rows=11",
    "text_append(i[20]<9, f[1,101], I[4]=5,8,31,5, D[5]=2,0,0.6,0,1) rows=3",
    "text_append(i[20]<9, f[1,101], I[4]=18,19,31,5, D[5]=3,40,0.9,0,1) rows=1",
    "text_append(i[20]<9, f[1,257], I[4]=3,4,0,77, D[5]=1.5,300,0.99,0,1) rows=1",
    "text_append(i[20]<9, F[1,33]=0.25, I[4]=3,4,0,6, D[5]=1.5,7,1,0,1) rows=1",
    "text_append(i[20]<9, F[1,33]=0.25, I[4]=3,4,0,6, D[5]=0,0,1,0,1) rows=1",
    "text_append(i[20]<9, f[1,1], I[4]=3,4,0,6, D[5]=1,0,1,0,1) rows=2",
    "text_append(i[20]<9, f[1,31], I[4]=2,8,0,3, D[5]=1,0,1,0,1) rows=5",
    "text_append(i[20]<9, f[1,31], I[4]=19,20,0,3, D[5]=1,0,1,0,1) rows=5",
    "text_append(i[20]<9, f[1,31], I[4]=8,8,0,3, D[5]=1,0,1,0,1) rows=2",
    "text_append(i[20]<9, f[1,101], I[4]=5,8,31,5, D[5]=2,0,1,0.4,1) rows=3",
    "text_append(i[20]<9, f[1,103], I[4]=5,8,31,6, D[5]=1.5,40,0.95,0.1,0) rows=3",
    "text_append(i[20]<9, f[1,11], I[4]=16,17,31,7, D[5]=1,0,1,0,1.8) rows=1",
    "text_append(i[20]<9, f[1,11], I[4]=16,17,31,7, D[5]=0,0,1,0,3) rows=1",
    "text_append(i[20]<9, f[1,23], I[4]=16,17,31,2, D[5]=2,9,0.8,0.05,0.5) rows=1",
    "text_append(i[20]<9, f[1,31], I[4]=-2,2,0,3, D[5]=1,0,1,0,1) rows=4",
    NULL,
};

RFT_REF(text_end) {
  int64_t *cursor = call->out[0].data, capacity = call->in[1].type.shape[0] - 1;
  int64_t n = count_of(cursor, call->attr[0].i, capacity);
  bool all = n > 0 && cursor[0] + n == cursor[1];
  cursor[0] = first_of(cursor, capacity) + n;
  cursor[1] += all;
}
RFT_CASES(text_end) = {
    "text_end(I[4]=7,8,0,3, i[20]<9) rows=1",   "text_end(I[4]=0,8,5,3, i[20]<9) rows=8",
    "text_end(I[4]=0,8,5,3, i[20]<9) rows=5",   "text_end(I[4]=18,19,5,3, i[20]<9) rows=4",
    "text_end(I[4]=19,20,5,3, i[20]<9) rows=4", "text_end(I[4]=-9,20,5,3, i[20]<9) rows=4",
    "text_end(I[4]=3,2,5,3, i[20]<9) rows=0",   NULL,
};
