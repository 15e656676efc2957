/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs of any types and strides, with the tiles of tile_any.cuh.
 */
#include "backend/cuda/any_type.cuh"
#include "ops/grouped/walk.cuh"
#include "ops/matmul/tile_any.cuh"

enum { MOST_WS = 3072 }; /* addresses of 8 bytes in the launch arguments */

template <int WS> struct problem {
  rfi_grouped g;
  rfi_groups groups;
  const void *w[WS]; /* WS = 1: packed weights */
};

/* Writes element (row, column) of the result's part that belongs to the unit's group. */
static __device__ __forceinline__ void write(const rfi_grouped &g, const rfi_unit_walk<1> &u, int64_t row,
                                             int64_t column, int64_t columns, float sum) {
  const int64_t at = ((g.kind == RFI_GROUPED_NT ? u.group * g.N : u.first) + row) * columns + column;
  if (g.bias && u.group < g.groups) {
    const float by = g.scale ? rfi_load(g.scale, g.scale_dtype, u.first + row) : 1.0f;
    sum += rfi_load(g.bias, g.bias_dtype, u.group * g.bias_group + column) * by;
  }
  if (g.accumulate) sum += rfi_load(g.y, g.y_dtype, at);
  rfi_store(g.y, g.y_dtype, at, sum);
}

template <int WS>
static __global__ void __launch_bounds__(RFI_TILE_THREADS) grouped_any(const __grid_constant__ problem<WS> p) {
  const rfi_grouped &g = p.g;
  const bool nt = g.kind == RFI_GROUPED_NT, tn = g.kind == RFI_GROUPED_TN;
  const int64_t columns = tn ? g.N : g.K;
  const int wide = (int)((columns + RFI_TILE - 1) / RFI_TILE);
  rfi_unit_walk<1> u;
  for (int unit = blockIdx.x; u.find(p.groups, unit, RFI_TILE, wide); unit += gridDim.x) {
    const int64_t i0 = (int64_t)((unit - u.before) / wide) * RFI_TILE;
    const int64_t j0 = (int64_t)((unit - u.before) % wide) * RFI_TILE;
    const int64_t high = nt ? g.N : u.size, depth = u.group == g.groups ? 0 : nt ? u.size : tn ? g.K : g.N;
    const void *b = nt ? g.b : p.w[WS > 1 ? min(u.group, WS - 1) : 0];
    const int64_t a0 = u.first * g.a_row, b0 = nt ? u.first * g.b_row : WS > 1 ? 0 : u.group * g.b_group;
    rfi_tile(
        i0, high, j0, columns, depth,
        [&](int64_t i, int64_t k) { return rfi_load(g.a, g.a_dtype, a0 + (nt ? k * g.a_row + i : i * g.a_row + k)); },
        !nt,
        [&](int64_t j, int64_t k) { return rfi_load(b, g.b_dtype, b0 + (tn ? j * g.b_row + k : k * g.b_row + j)); }, tn,
        [&](int64_t i, int64_t j, float sum) { write(g, u, i, j, columns, sum); });
  }
}

template <int WS> static void launch(const rfi_grouped *g, int64_t tiles, int sms, cudaStream_t stream) {
  const int64_t most = (int64_t)sms * 8;
  problem<WS> p = {*g, rfi_groups_of(g), {}};
  p.w[0] = g->b;
  for (int64_t i = 0; WS > 1 && i < g->groups; i++) p.w[i] = g->ws[i].data;
  grouped_any<WS><<<(unsigned)(tiles < most ? tiles : most), RFI_TILE_THREADS, 0, stream>>>(p);
}

extern "C" rfr_status rfi_grouped_any(const rfi_grouped *g, int sms, cudaStream_t stream) {
  const bool nt = g->kind == RFI_GROUPED_NT;
  const int64_t columns = g->kind == RFI_GROUPED_TN ? g->N : g->K, wide = rfi_blocks(columns, RFI_TILE);
  const int64_t tall = nt ? g->groups * rfi_blocks(g->N, RFI_TILE) : g->rows / RFI_TILE + g->groups + 2;
  if (columns == 0 || (nt ? g->N == 0 || g->groups == 0 : g->rows == 0)) return RFR_OK;
  if (!g->ws) launch<1>(g, tall * wide, sms, stream);
  for (int64_t first = 0; g->ws && first < g->groups; first += MOST_WS) {
    const rfi_grouped part = rfi_grouped_part(g, first, MOST_WS);
    launch<MOST_WS>(&part, tall * wide, sms, stream);
  }
  return rfi_cuda_launched("grouped_any");
}
