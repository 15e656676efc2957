/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the grouped GEMMs of sm_90 in 16 and in 8 bits: a cluster of two blocks takes units of two tiles, and a
 * warp writes its 16 rows. grouped_sm90.cu explains both. p is the kernel's argument; the functions that write use its
 * members columns, y, out, bias and scale. N is a tile's width in blocks of 8 columns.
 */
#ifndef RFI_GROUPED_TILE_SM90_CUH
#define RFI_GROUPED_TILE_SM90_CUH

#include "backend/cuda/tma_sm90.cuh"
#include "ops/grouped/walk.cuh"

enum {
  ROWS = 128, /* rows of a block's tile */
  COLUMNS = 256,
  PANELS = 6, /* panels per stage: two of a, four of b */
  CONSUMERS = 2,
  THREADS = 128 * (1 + CONSUMERS),
  BAND = 8,  /* rows of units before the next column, so that shared operands stay in L2 */
  SLOTS = 2, /* number of tiles that are published in advance */
  TILE_BYTES = 32,
  RFI_SLAB = 16 * 128 /* bytes of a slab for a warp's rows; a warp has two */
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* The offset of chunk c (16 bytes) of row r in TMA's swizzled layout. */
static __device__ __forceinline__ int rfi_swizzled(int r, int c) { return r * 128 + (c ^ r % 8) * 16; }

template <typename O> static __device__ __forceinline__ uint32_t rfi_narrow_two(float x, float y) {
  const rfi_pack<O, 2> p = {{rfi_narrow<O>(x), rfi_narrow<O>(y)}};
  uint32_t bits;
  __builtin_memcpy(&bits, &p, 4);
  return bits;
}

/* This block's tile of a unit: row and column in the group. */
struct tile {
  int group, first, size; /* the group's rows; group < 0: end of the work */
  int row, column, steps;
  int beside; /* the unit's tiles are horizontally adjacent and share a */
};

/* The position of unit i of w's current group; there are `wide` tiles of `width` columns. */
static __device__ __forceinline__ tile tile_at(const rfi_unit_walk<2> &w, int i, int wide, int width, int rank) {
  const int pairs = w.tall / 2, below = pairs * wide;
  tile t = {w.group, w.first, w.size, 0, 0, 0, i >= below};
  if (t.beside) {
    t.row = (w.tall - 1) * ROWS;
    t.column = (2 * (i - below) + rank) * width;
  } else {
    const int band = i / (BAND * wide), deep = min(BAND, pairs - band * BAND);
    i -= band * BAND * wide;
    t.row = (2 * (band * BAND + i % deep) + rank) * ROWS;
    t.column = i / deep * width;
  }
  return t;
}

template <int N> struct ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == N) stage = 0, phase ^= 1;
  }
};

/* Offsets in shared memory. */
struct places {
  uint32_t panels, staging, full, empty, known, read, given, free, tile, number;
};

/* ---- scheduling: one warp, ahead of the others ---- */

/* The next unit of this cluster. The first block fetches it and sends it to the second, which then releases the slot;
 * its load is ordered after the consumers' loads and stores. */
static __device__ __forceinline__ int take(int32_t *taken, const places &at, ring<1> &turn, int rank) {
  int unit = 0;
  if (threadIdx.x % 32 == 0) {
    if (rank == 0) {
      unit = atomicAdd(taken, 1);
      rfi_barrier_wait(at.free, turn.phase ^ 1);
      rfi_send(at.number, at.given, 1, unit);
    } else {
      rfi_barrier_expect(at.given, 4);
      rfi_barrier_wait(at.given, turn.phase);
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(unit) : "r"(at.number) : "memory");
      rfi_barrier_release_at(at.free, 0);
    }
  }
  turn.next();
  return rfi_same(unit);
}

static __device__ __forceinline__ void publish(const places &at, ring<SLOTS> &slot, const tile &t) {
  const uint32_t to = at.tile + slot.stage * TILE_BYTES;
  if (threadIdx.x % 32 == 0) {
    rfi_barrier_wait(at.read + slot.stage * 8, slot.phase ^ 1);
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(t.group), "r"(t.first), "r"(t.size),
                 "r"(t.row)
                 : "memory");
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(to + 16), "r"(t.column), "r"(t.steps), "r"(t.beside)
                 : "memory");
    rfi_barrier_arrive(at.known + slot.stage * 8);
  }
  __syncwarp();
  slot.next();
}

/* Called by all lanes of a warp. */
static __device__ __forceinline__ tile next_tile(const places &at, ring<SLOTS> &slot) {
  const uint32_t from = at.tile + slot.stage * TILE_BYTES;
  tile t;
  rfi_barrier_wait(at.known + slot.stage * 8, slot.phase);
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(t.group), "=r"(t.first), "=r"(t.size), "=r"(t.row)
               : "r"(from)
               : "memory");
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%3];\nld.shared.b32 %2, [%3 + 8];"
               : "=r"(t.column), "=r"(t.steps), "=r"(t.beside)
               : "r"(from + 16)
               : "memory");
  t.group = rfi_same(t.group), t.size = rfi_same(t.size), t.row = rfi_same(t.row), t.column = rfi_same(t.column);
  t.steps = rfi_same(t.steps), t.beside = rfi_same(t.beside), t.first = rfi_same(t.first);
  if (threadIdx.x % 32 == 0) rfi_barrier_arrive(at.read + slot.stage * 8);
  slot.next();
  return t;
}

template <int N> static __device__ __forceinline__ void clear(float (&sum)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
}

/* ---- epilogue ---- */

static __device__ __forceinline__ float number(const void *x, rfr_dtype dtype, int64_t i) {
  return dtype == RFR_F32    ? ((const float *)x)[i]
         : dtype == RFR_BF16 ? rfi_widen(((const rfi_bf16 *)x)[i])
                             : rfi_widen(((const rfi_f16 *)x)[i]);
}

/* Stores columns of a warp's accumulators into a slab: the q-th 128 bytes of S. */
template <typename S, int N>
static __device__ __forceinline__ void stage(const float (&sum)[N][4], int q, uint32_t to) {
  const int lane = threadIdx.x % 32;
  if constexpr (sizeof(S) == 2) {
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const float *c = sum[q * 8 + n], *d = sum[q * 8 + n + 1];
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                       to + rfi_swizzled(lane % 16, n + lane / 16)),
                   "r"(rfi_narrow_two<S>(c[0], c[1])), "r"(rfi_narrow_two<S>(c[2], c[3])),
                   "r"(rfi_narrow_two<S>(d[0], d[1])), "r"(rfi_narrow_two<S>(d[2], d[3]))
                   : "memory");
    }
  } else {
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const float *c = sum[q * 4 + n];
      const int chunk = 2 * n + lane % 4 / 2, in = lane % 2 * 8;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + rfi_swizzled(lane / 4, chunk) + in), "f"(c[0]),
                   "f"(c[1])
                   : "memory");
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + rfi_swizzled(lane / 4 + 8, chunk) + in), "f"(c[2]),
                   "f"(c[3])
                   : "memory");
    }
  }
}

/* Writes the first `left` of a warp's 16 rows through its slabs, in full cache lines. y points to the first row. S: the
 * staged type, f32 when adding to y. */
template <typename O, typename S, bool ONTO, class P, int N>
static __device__ __forceinline__ void write_warp(const float (&sum)[N][4], const P &p, uint32_t staging, O *y,
                                                  int column, int left) {
  constexpr int WIDE = 128 / sizeof(S), EACH = 16 / sizeof(S), COUNT = N * 8 / WIDE, AHEAD = 2;
  const int lane = threadIdx.x % 32, c = lane % 8, row = lane / 8;
  O *const mine = y + (int64_t)row * p.columns + column + c * EACH;
  const int64_t four = 4 * (int64_t)p.columns;
  rfi_pack<O, EACH> old[AHEAD + 1][4];
  if constexpr (ONTO) {
#pragma unroll
    for (int q = 0; q < AHEAD; q++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (column + q * WIDE + c * EACH < p.columns && row + 4 * i < left)
          old[q][i] = *(const rfi_pack<O, EACH> *)(mine + i * four + q * WIDE);
  }
#pragma unroll
  for (int q = 0; q < COUNT; q++) {
    const uint32_t slab = staging + q % 2 * RFI_SLAB;
    if constexpr (ONTO)
      if (q + AHEAD < COUNT) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (column + (q + AHEAD) * WIDE + c * EACH < p.columns && row + 4 * i < left)
            old[(q + AHEAD) % (AHEAD + 1)][i] = *(const rfi_pack<O, EACH> *)(mine + i * four + (q + AHEAD) * WIDE);
      }
    stage<S>(sum, q, slab);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int r = row + 4 * i;
      uint32_t got[4];
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(got[0]), "=r"(got[1]), "=r"(got[2]), "=r"(got[3])
                   : "r"(slab + rfi_swizzled(r, c))
                   : "memory");
      rfi_pack<O, EACH> out;
      if constexpr (ONTO) {
#pragma unroll
        for (int e = 0; e < EACH; e++)
          out.x[e] = rfi_narrow<O>(__uint_as_float(got[e]) + rfi_widen(old[q % (AHEAD + 1)][i].x[e]));
      } else {
        __builtin_memcpy(&out, got, 16);
      }
      if (column + q * WIDE + c * EACH < p.columns && r < left)
        rfi_put((rfi_pack<O, EACH> *)(mine + i * four + q * WIDE), out);
    }
  }
  __syncwarp();
}

/* Writes all of a warp's 16 rows with TMA, which skips elements outside y. ONTO: adds to y, f32. SLABS: slabs of a
 * warp; the tile is a multiple of their columns. It has no branches: with one, ptxas keeps the state of the main loop
 * in vector registers and copies each descriptor from there before an MMA. */
template <typename O, bool ONTO, int SLABS = 2, class P, int N>
static __device__ __forceinline__ void store_warp(const float (&sum)[N][4], const P &p, uint32_t staging, int column,
                                                  int row, int z) {
  constexpr int WIDE = 128 / sizeof(O), COUNT = N * 8 / WIDE;
  static_assert(COUNT % SLABS == 0, "slabs are used in turn, from one tile to the next");
#pragma unroll
  for (int q = 0; q < COUNT; q++) {
    const uint32_t slab = staging + q % SLABS * RFI_SLAB;
    const bool go = threadIdx.x % 32 == 0 && column + WIDE * q < p.columns;
    rfi_tma_wait_read<SLABS - 1>();
    __syncwarp();
    stage<O>(sum, q, slab);
    rfi_shared_written();
    __syncwarp();
    if constexpr (ONTO) rfi_tma_add(&p.y, slab, column + WIDE * q, row, z, go);
    else rfi_tma_store(&p.y, slab, column + WIDE * q, row, z, go);
    rfi_tma_commit();
  }
}

/* Places the barriers after the tiles' slots at `tile` and initializes them; waits until the cluster's blocks have done
 * so. READERS: warps that read a tile. */
template <int STAGES, int READERS = 1 + CONSUMERS * 4> static __device__ __forceinline__ void set_up(places &at) {
  at.full = at.tile + SLOTS * TILE_BYTES, at.empty = at.full + STAGES * 8, at.known = at.empty + STAGES * 8;
  at.read = at.known + SLOTS * 8, at.given = at.read + SLOTS * 8, at.free = at.given + 8, at.number = at.free + 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      rfi_barrier_init(at.full + s * 8, 1);
      rfi_barrier_init(at.empty + s * 8, 2 * CONSUMERS * 4);
    }
    for (int s = 0; s < SLOTS; s++) {
      rfi_barrier_init(at.known + s * 8, 1);
      rfi_barrier_init(at.read + s * 8, READERS);
    }
    rfi_barrier_init(at.given, 1);
    rfi_barrier_init(at.free, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  rfi_cluster_sync();
}

/* Adds the bias in f32, before the result is rounded once; `first` is the index of the warpgroup's first row. */
template <class P, int N>
static __device__ __forceinline__ void add_bias(float (&sum)[N][4], const P &p, int group, int first, int column,
                                                int left) {
  const int lane = threadIdx.x % 32, r = (int)(threadIdx.x % 128) / 32 * 16 + lane / 4;
  float s0 = 1, s1 = 1;
  if (p.scale) {
    if (r < left) s0 = number(p.scale, p.scale_dtype, first + r);
    if (r + 8 < left) s1 = number(p.scale, p.scale_dtype, first + r + 8);
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int c = column + n * 8 + lane % 4 * 2;
    if (c >= p.columns) continue;
    const float x = number(p.bias, p.bias_dtype, group * p.bias_group + c);
    const float y = number(p.bias, p.bias_dtype, group * p.bias_group + c + 1);
    sum[n][0] += x * s0, sum[n][1] += y * s0, sum[n][2] += x * s1, sum[n][3] += y * s1;
  }
}

/* Prefetches into L2 the 16 rows of a warp to which TMA will add: the addition is three times as fast for lines in L2.
 * Elements outside y are not fetched; an explicit condition for them makes ptxas 13.0 drop coordinates. */
template <int WIDE = COLUMNS, class P>
static __device__ __forceinline__ void fetch_warp(const P &p, int column, int row, int z) {
#pragma unroll
  for (int c = 0; c < WIDE; c += 32) rfi_tma_fetch(&p.y, column + c, row, z);
}

#endif
#endif
