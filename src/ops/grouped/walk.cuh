/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles over groups whose sizes lie on the device, counted in units, group after group: whoever works on unit 0, 7,
 * 14 ... finds each by itself, going through the groups once. No table, no atomics, grids from shapes alone.
 */
#ifndef RFI_GROUPED_WALK_CUH
#define RFI_GROUPED_WALK_CUH

#include "backend/cuda/kernels.cuh"
#include "ops/grouped/grouped.h"
#include "ops/grouped/grouped_cuda.h"

/* What is the same for all lanes, said so that the compiler knows: where it does not, it waits for each product. */
static __device__ __forceinline__ int rfi_same(int x) { return __shfl_sync(0xffffffffu, x, 0); }

typedef struct rfi_groups {
  const int32_t *offset;
  int n, rows; /* rows: of the buffer */
  int high;    /* NT: rows of every group's result; else 0 */
  int last;    /* n: rows behind the last group are one more group; n - 1: they are not written */
} rfi_groups;

static inline rfi_groups rfi_groups_of(const rfi_grouped *g) {
  const int n = (int)g->groups, nt = g->kind == RFI_GROUPED_NT;
  return rfi_groups{g->offsets, n, (int)g->rows, nt ? (int)g->N : 0, nt || g->more ? n - 1 : n};
}

/* UNIT tiles are a unit: 1, or 2, which are below each other, where their number is odd the last ones beside each other.
 * A tile has `deep` rows; `wide` of them are beside each other. */
template <int UNIT> struct rfi_unit_walk {
  int group = -1, before = 0, count = 0; /* units before the group's, and its own */
  int first = 0, size = 0, tall = 0;     /* rows of the group; tiles below each other */

  /* False: there are no more. Units are asked for in ascending order, by all lanes of a warp together. */
  __device__ __forceinline__ bool find(const rfi_groups &g, int unit, int deep, int wide) {
    while (unit >= before + count) {
      if (group == g.last) return false;
      before += count;
      group++;
      first = rfi_same((int)rfi_group_begin(g.offset, group, g.rows));
      size = (group < g.n ? rfi_same((int)rfi_group_end(g.offset, group, g.rows)) : g.rows) - first;
      tall = ((g.high > 0 ? g.high : size) + deep - 1) / deep;
      count = UNIT == 1 ? tall * wide : tall / 2 * wide + (tall & 1) * ((wide + 1) / 2);
    }
    return true;
  }
};

#endif
