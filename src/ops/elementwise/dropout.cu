/* SPDX-License-Identifier: Apache-2.0
 *
 * dropout on a GPU, with the CPU's draws: element e uses word e mod 4 of the draw at block e / 4, for any strides of x;
 * e counts in the order of the dense result.
 */
#include <math.h>

#include "core/rng.h"
#include "ops/elementwise/map.cuh"

struct dropout_op : rfi_map_op {
  const int64_t *step;
  const int32_t *given; /* read at run time; NULL: use `microbatch` */
  uint64_t stream;
  uint32_t site, microbatch, least; /* an element is kept if its draw is at least this */
  float by;
  uint64_t key, attempted;
  __device__ void begin() {
    key = rfi_stream_key((uint64_t)step[2], stream);
    attempted = (uint64_t)step[0];
    if (given) microbatch = *given > 0 ? (uint32_t)*given : 0;
  }
  template <int V> __device__ void operator()(int64_t i, const float (&x)[1][V], float (&y)[1][V]) const {
    static_assert(V == 1 || V % 4 == 0, "a group uses all words of its draws");
#pragma unroll
    for (int v = 0; v < V; v += 4) {
      const rfi_u32x4 draw = rfi_draw4(key, (uint64_t)(i + v) / 4, site, microbatch, attempted);
      if (V == 1) {
        const int k = (int)(i % 4);
        const uint32_t word = k == 0 ? draw.v[0] : k == 1 ? draw.v[1] : k == 2 ? draw.v[2] : draw.v[3];
        y[0][0] = word >= least ? x[0][0] * by : 0.0f;
      } else {
#pragma unroll
        for (int k = 0; k < 4; k++) y[0][(v + k) % V] = draw.v[k] >= least ? x[0][(v + k) % V] * by : 0.0f;
      }
    }
  }
};

static rfr_status run(const rfr_call *call) {
  rfr_status s = RFR_OK;
  const double p = call->attr[0].f, edge = ceil(p * 0x1p32);
  dropout_op op;
  op.step = (const int64_t *)call->in[1].data;
  op.given = call->n_in > 2 ? (const int32_t *)call->in[2].data : NULL;
  op.stream = (uint64_t)call->attr[2].i;
  op.site = (uint32_t)call->attr[1].i;
  op.microbatch = call->microbatch > 0 ? (uint32_t)call->microbatch : 0;
  op.least = edge < 0x1p32 ? (uint32_t)edge : UINT32_MAX;
  op.by = (float)(1 / (1 - p));
  op.key = op.attempted = 0;
  RFI_WITH_FLOAT(call->out[0].type.dtype, T, s = rfi_map<T, T, 1, 1>(call, "dropout", op));
  return s;
}

extern "C" const rfi_cuda_kernel RFI_CUDA(dropout) = {run, NULL, rfi_takes_floats};
