/* SPDX-License-Identifier: Apache-2.0
 *
 * Tiles over groups whose sizes are on the device, counted in units, group after group: a block that works on units 0,
 * 7, 14 ... finds each by itself in one pass over the groups. No table, no atomics; the grid depends on shapes only.
 */
#ifndef RFI_GROUPED_WALK_CUH
#define RFI_GROUPED_WALK_CUH

#include "backend/cuda/kernels.cuh"
#include "ops/grouped/grouped.h"
#include "ops/grouped/grouped_cuda.h"

/* Marks x as equal in all lanes; otherwise the compiler waits for each MMA. */
static __device__ __forceinline__ int rfi_same(int x) { return __shfl_sync(0xffffffffu, x, 0); }

typedef struct rfi_groups {
  const int32_t *offset; /* NULL: all rows form one group */
  int n, rows; /* rows of the tensor */
  int high;    /* NT: rows of each group's result; else 0 */
  int last;    /* n: the rows after the last group are one more group; n - 1: they are not written */
} rfi_groups;

static inline rfi_groups rfi_groups_of(const rfi_grouped *g) {
  const int n = (int)g->groups, nt = g->kind == RFI_GROUPED_NT;
  return rfi_groups{g->offsets, n, (int)g->rows, nt ? (int)g->N : 0, nt || g->more ? n - 1 : n};
}

/* Iterates over units. A unit is UNIT tiles: 1, or 2 in one column; with an odd number of tile rows, the units of the
 * last row are 2 tiles in one row. A tile has `deep` rows; there are `wide` tiles per row. */
template <int UNIT> struct rfi_unit_walk {
  int group = -1, before = 0, count = 0; /* units before the group, units in it */
  int first = 0, size = 0, tall = 0;     /* rows of the group; number of tile rows */

  /* Finds a unit; false: there is none. Units must be requested in ascending order, by all lanes of a warp together. */
  __device__ __forceinline__ bool find(const rfi_groups &g, int unit, int deep, int wide) {
    while (unit >= before + count) {
      if (group == g.last) return false;
      before += count;
      group++;
      first = g.offset ? rfi_same((int)rfi_group_begin(g.offset, group, g.rows)) : 0;
      size = (g.offset && group < g.n ? rfi_same((int)rfi_group_end(g.offset, group, g.rows)) : g.rows) - first;
      tall = ((g.high > 0 ? g.high : size) + deep - 1) / deep;
      count = UNIT == 1 ? tall * wide : tall / 2 * wide + (tall & 1) * ((wide + 1) / 2);
    }
    return true;
  }
};

#endif
