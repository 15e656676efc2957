/* SPDX-License-Identifier: Apache-2.0
 *
 * quantize on the CPU: one pass for the largest magnitude, one that converts.
 *
 * Magnitudes are compared as bit patterns, which have the order of the numbers, with NaN above all, so NaN needs no
 * special case and the maximum no branch. The second pass reads a block of rows once and writes both copies from it.
 * Neither the maximum nor the conversion depends on how the rows are split.
 */
#include <float.h>
#include <math.h>

#include "backend/cpu/cpu.h"
#include "ops/walk.h"

enum { ROWS = 32, E4M3_INFINITE = 0x7F800000 };
static const float LARGEST = 448.0f;

typedef struct convert {
  rfi_call call; /* first field: the parts get a pointer to it */
  float scale;
} convert;

static uint32_t amax_block(const float *x, int64_t n) {
  uint32_t m = 0;
  for (int64_t j = 0; j < n; j++) {
    uint32_t u = rfi_bits_of(x[j]) & 0x7FFFFFFFu;
    m = u > m ? u : m;
  }
  return m;
}

static void amax_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  const rfi_arg *x = &c->in[0];
  float buffer[RFI_BLOCK];
  int64_t N = x->type.shape[1];
  uint32_t m = 0;
  for (int64_t r = begin; r < end; r++)
    for (int64_t j = 0; j < N; j += RFI_BLOCK) {
      int64_t n = N - j < RFI_BLOCK ? N - j : RFI_BLOCK;
      uint32_t block = amax_block(rfi_read(buffer, x, r * x->stride[0] + j * x->stride[1], x->stride[1], n), n);
      m = block > m ? block : m;
    }
  ((uint32_t *)c->workspace)[part] = m;
}

static void convert_block(uint8_t *restrict q, const float *restrict x, float scale, int64_t n) {
  for (int64_t j = 0; j < n; j++) q[j] = rfi_f32_to_e4m3(x[j] * scale);
}

static void convert_part(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfi_arg *x = &c->in[0];
  float scale = ((const convert *)c)->scale, buffer[RFI_BLOCK];
  uint8_t *row = c->out[0].data, *col = c->out[1].data, block[ROWS][RFI_BLOCK];
  int64_t M = x->type.shape[0], N = x->type.shape[1];
  for (int64_t r = begin; r < end; r += ROWS) {
    int64_t m = end - r < ROWS ? end - r : ROWS;
    for (int64_t j = 0; j < N; j += RFI_BLOCK) {
      int64_t n = N - j < RFI_BLOCK ? N - j : RFI_BLOCK;
      for (int64_t i = 0; i < m; i++) {
        int64_t offset = (r + i) * x->stride[0] + j * x->stride[1];
        convert_block(block[i], rfi_read(buffer, x, offset, x->stride[1], n), scale, n);
        if (row) memcpy(row + (r + i) * N + j, block[i], (size_t)n);
      }
      for (int64_t k = 0; k < n && col; k++)
        for (int64_t i = 0; i < m; i++) col[(j + k) * M + r + i] = block[i][k];
    }
  }
}

static rfr_status run(const rfi_call *call) {
  convert c = {.call = *call};
  const rfr_type *x = &call->in[0].type;
  const uint32_t *found = call->workspace;
  uint32_t m = 0;
  rfi_parallel(call, x->shape[0], x->shape[1], amax_part);
  for (int p = 0; p < rfi_parts(call, x->shape[0], x->shape[1]); p++) m = found[p] > m ? found[p] : m;
  c.scale = m == 0 || m >= E4M3_INFINITE ? 1.0f : LARGEST / rfi_float_of(m);
  if (isinf(c.scale)) c.scale = FLT_MAX;
  if (call->out[2].data) *(float *)call->out[2].data = 1.0f / c.scale;
  if (call->out[0].data || call->out[1].data) rfi_parallel(&c.call, x->shape[0], x->shape[1], convert_part);
  return RFR_OK;
}

static size_t workspace(const rfi_call *c) {
  return (size_t)rfi_parts(c, c->in[0].type.shape[0], c->in[0].type.shape[1]) * sizeof(uint32_t);
}

const rfi_kernel RFI_CPU(quantize) = {run, workspace};
