/* SPDX-License-Identifier: Apache-2.0
 *
 * transposed on the CPU: bands of SIDE result rows, in blocks of SIDE x SIDE bytes that fit into the L1 cache.
 */
#include "backend/cpu/cpu.h"
#include "ops/walk.h"

enum { SIDE = 64 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static void transpose_bands(const rfi_call *c, int64_t begin, int64_t end, int part) {
  (void)part;
  const rfr_type *x = &c->in[0].type;
  const int64_t N = x->shape[x->rank - 2], K = x->shape[x->rank - 1], bands = (K + SIDE - 1) / SIDE;
  for (int64_t band = begin; band < end; band++) {
    const uint8_t *from = (const uint8_t *)c->in[0].data + band / bands * N * K;
    uint8_t *to = (uint8_t *)c->out[0].data + band / bands * N * K;
    const int64_t first = band % bands * SIDE, last = least(first + SIDE, K);
    for (int64_t n = 0; n < N; n += SIDE)
      for (int64_t k = first; k < last; k++)
        for (int64_t i = n; i < least(n + SIDE, N); i++) to[k * N + i] = from[i * K + k];
  }
}

static rfr_status run(const rfi_call *call) {
  const rfr_type *x = &call->in[0].type;
  const int64_t slices = x->rank == 3 ? x->shape[0] : 1;
  const int64_t bands = slices * ((x->shape[x->rank - 1] + SIDE - 1) / SIDE);
  rfi_parallel(call, bands, SIDE * x->shape[x->rank - 2], transpose_bands);
  return RFR_OK;
}

const rfi_kernel RFI_CPU(transposed) = {run, NULL};
