/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped GEMMs on sm_90: tensor cores fed by TMA, over group sizes on the device.
 *
 *   scheduler  a unit is two tiles; units are numbered group after group. A cluster of two blocks takes the next free
 *              unit, because groups take different times if the reduction runs along their rows. One warp computes the
 *              position of the unit, without a table, and publishes it to the other warps one tile ahead
 *   producer   one warp copies the operands of the next 64 elements of the reduction into a ring of STAGES
 *   consumer   two warpgroups, 64 rows of the tile each, multiply and write
 *
 * The assignment of units to blocks changes from run to run. Results do not, because one block computes the sums of a
 * tile in one order.
 *
 * The two tiles of a unit are vertically adjacent and share b: each block copies half of it for both. If a group has an
 * odd number of tile rows, the tiles of its last row form horizontally adjacent pairs that share a. A warpgroup whose
 * rows are after the group's end does not multiply, so a group costs its rows rounded up to 64.
 *
 * At a group's end a tile contains rows of other groups. In TN and NN these are rows of the result, and they are not
 * written. In NT these are rows of the reduction; both operands are zeroed in shared memory first, because 0 x NaN is
 * NaN. Rows after the last group form one more group, without a reduction.
 *
 * Each warp writes its 16 rows through its own shared memory, without waiting for another warp. TMA does this during
 * the next tile's GEMM, also for results that are added to f32 over long reductions. At a group's end, and when adding
 * in other cases, the warp itself writes full cache lines. Where SwiGLU follows, swiglu_sm90.cuh does this instead.
 *
 * The LoRA kinds are a GEMM of one group whose reduction continues over a second pair of operands: the producer takes
 * the last steps from their tensor maps, and TMA fills the rest of a step with zeros.
 */
#include "ops/grouped/swiglu_sm90.cuh"
#include "ops/grouped/tile_sm90.cuh"

enum {
  STEP = 64, /* elements of the reduction per step */
  STAGES = 4,
  MOST_WS = 240, /* tensor maps of 128 bytes in the launch arguments */
  /* with at least so many rows per group on average, TMA adds to f32 memory; shorter reductions do not hide the
   * addition */
  LONG = 512,
  /* the prefetch of the rows that are added to starts so many steps before the end of a tile; earlier, it slows down
   * the copies */
  EARLY = 3
};
enum {
  BARRIERS = 2 * STAGES + 2 * SLOTS + 2,
  SHARED = STAGES * PANELS * RFI_PANEL + CONSUMERS * 4 * 2 * RFI_SLAB + BARRIERS * 8 + SLOTS * TILE_BYTES + 16 + 1024
};

/* WS: number of tensor maps of w: one for all groups, or one per group. */
template <int WS> struct problem {
  CUtensorMap a, y, b[WS];
  rfi_groups groups;
  const void *bias, *scale;
  void *out;
  int64_t bias_group;
  rfr_dtype bias_dtype, scale_dtype;
  /* columns of the result, of h for RFI_GROUPED_SWIGLU; length of the reduction, unused for NT */
  int columns, reduction;
  bool accumulate, engine_adds; /* add to y; let TMA do the addition */
  int32_t *taken;               /* number of units assigned so far */
  CUtensorMap a2, b2;           /* LoRA kinds: operands of the second GEMM */
  int more_steps;               /* steps of the second GEMM */
  CUtensorMap h;                /* tensor map of act */
  void *act;                    /* RFI_GROUPED_SWIGLU */
  const void *weight;
  rfr_dtype weight_dtype;
};

static constexpr bool is_tn(rfi_grouped_kind kind) {
  return kind == RFI_GROUPED_TN || kind == RFI_GROUPED_SWIGLU || kind == RFI_GROUPED_LORA_TN;
}
static constexpr bool is_lora(rfi_grouped_kind kind) {
  return kind == RFI_GROUPED_LORA_TN || kind == RFI_GROUPED_LORA_NN;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- position of a unit ---- */

/* Distance of adjacent tiles in columns. In RFI_GROUPED_SWIGLU half of a tile is gate, the other half up. */
static constexpr int width_of(rfi_grouped_kind kind) { return kind == RFI_GROUPED_SWIGLU ? COLUMNS / 2 : COLUMNS; }

template <rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ tile tile_of(const problem<WS> &p, rfi_unit_walk<2> &w, int unit, int rank) {
  constexpr int WIDTH = width_of(KIND);
  const int wide = (p.columns + WIDTH - 1) / WIDTH;
  if (!w.find(p.groups, unit, ROWS, wide)) return {-1, 0, 0, 0, 0, 0, 0};
  tile t = tile_at(w, unit - w.before, wide, WIDTH, rank);
  if (t.group < p.groups.n) t.steps = ((KIND == RFI_GROUPED_NT ? t.size : p.reduction) + STEP - 1) / STEP;
  if (is_lora(KIND)) t.steps += p.more_steps;
  return t;
}

template <rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void schedule(const problem<WS> &p, const places &at, int rank) {
  rfi_unit_walk<2> w;
  ring<SLOTS> slot;
  ring<1> turn;
  tile t;
  do {
    t = tile_of<KIND>(p, w, take(p.taken, at, turn, rank), rank);
    publish(at, slot, t);
  } while (t.group >= 0);
}

/* ---- producer ---- */

/* Loads the steps of one tile, by one thread. The loop must be short, because it feeds the tensor cores. */
template <rfi_grouped_kind KIND, bool BESIDE, int WS>
static __device__ __forceinline__ void copy_tile(const problem<WS> &p, const tile &t, ring<STAGES> &at,
                                                 const places &in, int rank) {
  constexpr bool NT = KIND == RFI_GROUPED_NT, TN = is_tn(KIND), HALVES = KIND == RFI_GROUPED_SWIGLU;
  const CUtensorMap *const map = &p.b[WS > 1 ? t.group : 0];
  const int first = is_lora(KIND) ? t.steps - p.more_steps : t.steps; /* steps of the first GEMM */
  const int z = NT || WS > 1 ? 0 : t.group;
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL,
                   barrier = in.full + at.stage * 8;
    const bool second = is_lora(KIND) && k >= first;
    const CUtensorMap *const of_a = second ? &p.a2 : &p.a, *const of_b = second ? &p.b2 : map;
    const int r = (NT ? t.first : 0) + (second ? k - first : k) * STEP; /* index in the reduction */
    rfi_barrier_wait(in.empty + at.stage * 8, at.phase ^ 1);
    rfi_barrier_expect(barrier, PANELS * RFI_PANEL);
#pragma unroll
    for (int q = 0; q < (BESIDE ? 1 : 2); q++) {
      const int panel = BESIDE ? rank : q, row = t.row + 64 * panel, x = NT ? row : r, y = NT ? r : t.first + row;
      if (BESIDE) rfi_tma_load_both(a + panel * RFI_PANEL, of_a, barrier, x, y, 0);
      else rfi_tma_load(a + panel * RFI_PANEL, of_a, barrier, x, y, 0);
    }
#pragma unroll
    for (int q = 0; q < (BESIDE ? 4 : 2); q++) {
      const int panel = BESIDE ? q : 2 * rank + q;
      const int column = t.column + (HALVES ? panel % 2 * 64 + panel / 2 * p.columns : panel * 64);
      const int x = TN ? r : column, y = TN ? column : r;
      if (BESIDE) rfi_tma_load(b + panel * RFI_PANEL, of_b, barrier, x, y, z);
      else rfi_tma_load_both(b + panel * RFI_PANEL, of_b, barrier, x, y, z);
    }
  }
}

template <rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void produce(const problem<WS> &p, const places &in, int rank) {
  ring<SLOTS> slot;
  ring<STAGES> at;
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    if (threadIdx.x != 0) continue;
    if (t.beside) copy_tile<KIND, true>(p, t, at, in, rank);
    else copy_tile<KIND, false>(p, t, at, in, rank);
  }
}

/* ---- MMAs ---- */

/* Zeroes rows `from` ... of a warpgroup's operands: of its panel of a and of two of the four panels of b. */
static __device__ __forceinline__ void clear_rows(uint32_t a, uint32_t b, int consumer, int from) {
  const int bytes = (STEP - from) * 128;
  const uint32_t mine[3] = {a + consumer * RFI_PANEL, b + 2 * consumer * RFI_PANEL, b + (2 * consumer + 1) * RFI_PANEL};
#pragma unroll
  for (int k = 0; k < 3; k++)
    for (int i = (int)(threadIdx.x % 128) * 16; i < bytes; i += 128 * 16)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(mine[k] + from * 128 + i), "r"(0) : "memory");
}

template <typename T, rfi_grouped_kind KIND>
static __device__ __forceinline__ void begin_step(float (&sum)[32][4], uint32_t a, uint32_t b, int consumer) {
  constexpr bool A_COLUMNS = KIND == RFI_GROUPED_NT, B_COLUMNS = !is_tn(KIND);
  constexpr int A_STEP = A_COLUMNS ? 2048 : 32, B_STEP = B_COLUMNS ? 2048 : 32;
  rfi_wgmma_begin();
#pragma unroll
  for (int i = 0; i < STEP / 16; i++)
    rfi_wgmma256<T, A_COLUMNS, B_COLUMNS>(sum, rfi_panels(a + consumer * RFI_PANEL + i * A_STEP, RFI_PANEL),
                                          rfi_panels(b + i * B_STEP, RFI_PANEL));
  rfi_wgmma_commit();
}

/* ANY: there are rows to multiply. Otherwise this only signals the barriers on which the other warpgroups and the other
 * block wait. Shortly before the last MMA one thread of each warp calls `soon`. */
template <typename T, rfi_grouped_kind KIND, bool ANY, class SOON>
static __device__ __forceinline__ void multiply(float (&sum)[32][4], const tile &t, ring<STAGES> &at, const places &in,
                                                int consumer, const SOON &soon) {
  const int lane = threadIdx.x % 32;
  uint32_t before = 0; /* the stage that the MMAs in flight still read */
  if (ANY) clear(sum);
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL;
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    if (KIND == RFI_GROUPED_NT && t.size - k * STEP < STEP) {
      clear_rows(a, b, consumer, t.size - k * STEP);
      rfi_shared_written();
      rfi_named_sync(3, 128 * CONSUMERS);
    }
    if (ANY) {
      begin_step<T, KIND>(sum, a, b, consumer);
      rfi_wgmma_wait<1>();
      if (k == max(0, t.steps - EARLY) && lane == 0) soon();
    }
    if (k > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
    before = in.empty + at.stage * 8;
  }
  if (ANY) rfi_wgmma_wait<0>();
  if (t.steps > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
}

/* Like multiply; the first steps also run the remaining SwiGLU parts of the previous tile. */
template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void multiply_over(float (&sum)[32][4], const tile &t, ring<STAGES> &at,
                                                     const places &in, int consumer, rfi_swiglu_rest &rest,
                                                     const problem<WS> &p, uint32_t staging) {
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  const auto step = [&](int k, int part) {
    const uint32_t a = in.panels + at.stage * PANELS * RFI_PANEL;
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    begin_step<T, KIND>(sum, a, a + 2 * RFI_PANEL, consumer);
    if (part >= 0) rfi_swiglu_part<O>(rest, p, staging, part);
    rfi_wgmma_wait<1>();
    if (k > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
    before = in.empty + at.stage * 8;
    at.next();
  };
  clear(sum);
  rfi_wgmma_tie(sum);
  const bool long_enough = t.steps >= rest.PARTS;
#pragma unroll
  for (int k = 0; k < rest.PARTS; k++)
    if (!long_enough) rfi_swiglu_part<O>(rest, p, staging, k);
  if (long_enough) {
#pragma unroll
    for (int k = 0; k < rest.PARTS; k++) step(k, k);
  }
  for (int k = long_enough ? rest.PARTS : 0; k < t.steps; k++) step(k, -1);
  rfi_wgmma_wait<0>();
  if (t.steps > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
}

/* ---- epilogue ---- */

/* Prefetches the rows of y to which the epilogue adds. */
template <typename O, int WS>
static __device__ __forceinline__ void fetch(const problem<WS> &p, const O *y, int column, int left) {
  constexpr int EACH = 128 / sizeof(O), LINES = COLUMNS / EACH;
  for (int i = threadIdx.x % 128; i < 64 * LINES; i += 128) {
    const int r = i / LINES, c = column + i % LINES * EACH;
    if (r < left && c < p.columns)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(y + (int64_t)r * p.columns + c) : "memory");
  }
}

/* Writes a warp's 16 rows of a tile, of which `left` are valid; `row` is the index of the first one in y. */
template <typename O, rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void write(const float (&sum)[32][4], const problem<WS> &p, uint32_t staging,
                                             const tile &t, int row, int left) {
  constexpr bool NT = KIND == RFI_GROUPED_NT;
  O *const y = (O *)p.out + ((NT ? (int64_t)t.group * p.groups.high : 0) + row) * p.columns;
  if (!p.accumulate && (NT || left >= 16)) {
    store_warp<O, false>(sum, p, staging, t.column, row, NT ? t.group : 0);
    return;
  }
  if constexpr (NT && sizeof(O) == 4) {
    if (p.engine_adds) {
      store_warp<O, true>(sum, p, staging, t.column, row, t.group);
      return;
    }
  }
  if (threadIdx.x % 32 == 0) rfi_tma_wait_read<0>();
  __syncwarp();
  if constexpr (is_lora(KIND))
    if (p.accumulate) {
      write_warp<O, float, true>(sum, p, staging, y, t.column, left);
      return;
    }
  if constexpr (NT) write_warp<O, float, true>(sum, p, staging, y, t.column, left);
  else write_warp<O, O, false>(sum, p, staging, y, t.column, left);
}

template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void consume(const problem<WS> &p, const places &in, int consumer) {
  constexpr bool NT = KIND == RFI_GROUPED_NT;
  const int warp = (int)(threadIdx.x % 128) / 32;
  const uint32_t staging = in.staging + (consumer * 4 + warp) * 2 * RFI_SLAB;
  ring<SLOTS> slot;
  ring<STAGES> at;
  float sum[32][4];
  rfi_swiglu_rest rest = {};
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    const int row = t.row + consumer * 64, left = (NT ? p.groups.high : t.size) - row;
    if (left <= 0 || t.column >= p.columns) {
      multiply<T, KIND, false>(sum, t, at, in, consumer, []() {});
      continue;
    }
    if constexpr (KIND == RFI_GROUPED_SWIGLU) {
      multiply_over<T, O, KIND>(sum, t, at, in, consumer, rest, p, staging);
      rfi_wgmma_tie(sum);
      rfi_swiglu_begin<O>(rest, sum, p, staging, t.column, t.first + row + warp * 16, left - warp * 16);
      continue;
    }
    if (NT && p.accumulate) {
      if (t.steps == 0) continue;
      if (!p.engine_adds)
        fetch(p, (const O *)p.out + ((int64_t)t.group * p.groups.high + row) * p.columns, t.column, left);
    }
    if (is_lora(KIND) && p.accumulate)
      fetch(p, (const O *)p.out + (int64_t)(t.first + row) * p.columns, t.column, left);
    multiply<T, KIND, true>(sum, t, at, in, consumer, [&]() {
      if constexpr (NT && sizeof(O) == 4)
        if (p.engine_adds) fetch_warp(p, t.column, row + warp * 16, t.group);
    });
    if (!NT && p.bias && t.group < p.groups.n) add_bias(sum, p, t.group, t.first + row, t.column, left);
    write<O, KIND>(sum, p, staging, t, (NT ? row : t.first + row) + warp * 16, left - warp * 16);
  }
  if constexpr (KIND == RFI_GROUPED_SWIGLU) {
#pragma unroll
    for (int k = 0; k < rest.PARTS; k++) rfi_swiglu_part<O>(rest, p, staging, k);
  }
  if (threadIdx.x % 32 == 0) rfi_tma_wait_all();
}

#endif

template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static __global__ void __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ problem<WS> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  places at;
  at.panels = (rfi_shared_address(memory) + 1023) / 1024 * 1024;
  at.staging = at.panels + STAGES * PANELS * RFI_PANEL, at.tile = at.staging + CONSUMERS * 4 * 2 * RFI_SLAB;
  const int rank = (int)rfi_cluster_rank();
  set_up<STAGES>(at);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<KIND>(p, at, rank);
    else if (threadIdx.x < 64) schedule<KIND>(p, at, rank);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T, O, KIND>(p, at, rfi_same((int)threadIdx.x / 128) - 1);
  }
  rfi_cluster_sync(); /* the other block may still write to this block's shared memory */
#endif
}

/* ---- host code ---- */

/* Makes the tensor map of a matrix, or of several, by panels; strides in elements. */
static rfr_status describe(CUtensorMap *map, const void *data, rfr_dtype dtype, int64_t wide, int64_t high,
                           int64_t depth, int64_t row, int64_t group, int rows = 64) {
  return rfi_tma_describe(map, data, dtype, wide, high, depth, row, group, rows);
}

template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static rfr_status launch(const problem<WS> &p, int sms, cudaStream_t stream) {
  const rfr_status s = rfi_cuda_check(
      cudaFuncSetAttribute(grouped<T, O, KIND, WS>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED), "grouped");
  if (s != RFR_OK) return s;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = (unsigned)(sms / 2 * 2), config.blockDim = THREADS;
  config.dynamicSmemBytes = SHARED, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return rfi_cuda_check(cudaLaunchKernelEx(&config, grouped<T, O, KIND, WS>, p), "grouped");
}

template <typename T, typename O, int WS>
static rfr_status launch_kind(const rfi_grouped *g, const problem<WS> &p, int sms, cudaStream_t stream) {
  if constexpr (WS == 1 && sizeof(O) == 2) {
    if (g->kind == RFI_GROUPED_SWIGLU) return launch<T, O, RFI_GROUPED_SWIGLU, WS>(p, sms, stream);
    if (g->kind == RFI_GROUPED_LORA_TN) return launch<T, O, RFI_GROUPED_LORA_TN, WS>(p, sms, stream);
    if (g->kind == RFI_GROUPED_LORA_NN) return launch<T, O, RFI_GROUPED_LORA_NN, WS>(p, sms, stream);
  }
  if (g->kind == RFI_GROUPED_TN) return launch<T, O, RFI_GROUPED_TN, WS>(p, sms, stream);
  if (g->kind == RFI_GROUPED_NN) return launch<T, O, RFI_GROUPED_NN, WS>(p, sms, stream);
  if constexpr (WS == 1) return launch<T, O, RFI_GROUPED_NT, WS>(p, sms, stream);
  return RFR_UNSUPPORTED; /* NT has no w, and SwiGLU requires packed weights */
}

const char *rfi_grouped_sm90_lacks(const rfi_grouped *g) {
  const bool nt = g->kind == RFI_GROUPED_NT;
  /* for NT all groups count, so that a part makes the same choices as the full call */
  const int64_t most = 1 << 30, groups = nt ? g->of : g->groups;
  const int64_t tall = g->rows / ROWS + (nt ? g->N / ROWS + 2 : 2) * (groups + 1);
  if (g->a_dtype != RFR_BF16 && g->a_dtype != RFR_F16) return "operands are not 16-bit floats";
  if (g->b_dtype != g->a_dtype || (g->y_dtype != g->a_dtype && (g->act || g->y_dtype != RFR_F32)))
    return "types are mixed";
  if (g->N % 8 != 0 || g->K % 8 != 0) return "N or K is not a multiple of 8";
  if (g->kind == RFI_GROUPED_SWIGLU && g->N % 16 != 0) return "half of N is not a multiple of 8";
  if (g->a_row % 8 != 0 || g->b_row % 8 != 0 || (!nt && !g->ws && g->b_group % 8 != 0))
    return "row strides are not multiples of 16 bytes";
  if (((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->y | (uintptr_t)g->act) % 16 != 0)
    return "an operand is not aligned to 16 bytes";
  for (int64_t i = 0; g->ws && i < g->groups; i++)
    if ((uintptr_t)g->ws[i].data % 16 != 0) return "a weight is not aligned to 16 bytes";
  if (is_lora(g->kind)) {
    if (g->y_dtype != g->a_dtype) return "types are mixed";
    if (g->R % 8 != 0 || g->a2_row % 8 != 0 || g->b2_row % 8 != 0) return "the rank is not a multiple of 8";
    if (((uintptr_t)g->a2 | (uintptr_t)g->b2) % 16 != 0) return "an operand is not aligned to 16 bytes";
    if (g->R == 0) return "the GEMM is empty";
  }
  if (g->N == 0 || g->K == 0 || g->rows == 0 || g->groups == 0) return "the GEMM is empty";
  if (g->rows >= most || g->N >= most || g->K >= most || tall >= most / (g->N / COLUMNS + g->K / COLUMNS + 2))
    return "the GEMM is too large";
  return NULL;
}

template <int WS> static rfr_status launch_types(const rfi_grouped *g, int sms, cudaStream_t stream) {
  problem<WS> p = {};
  const bool nt = g->kind == RFI_GROUPED_NT, tn = is_tn(g->kind), halves = g->kind == RFI_GROUPED_SWIGLU;
  const bool lora = is_lora(g->kind);
  const int64_t columns = halves ? g->N / 2 : tn ? g->N : g->K;
  rfr_status s = describe(&p.a, g->a, g->a_dtype, tn ? g->K : g->N, g->rows, 1, g->a_row, g->a_row * g->rows);
  if (nt && s == RFR_OK) s = describe(&p.b[0], g->b, g->b_dtype, g->K, g->rows, 1, g->b_row, g->b_row * g->rows);
  if (!nt && !g->ws && s == RFR_OK)
    s = describe(&p.b[0], g->b, g->b_dtype, g->K, g->N, g->groups, g->b_row, g->b_group);
  for (int64_t i = 0; g->ws && i < g->groups && s == RFR_OK; i++)
    s = describe(&p.b[i], g->ws[i].data, g->b_dtype, g->K, g->N, 1, g->b_row, g->b_row * g->N);
  if (lora && s == RFR_OK) s = describe(&p.a2, g->a2, g->a_dtype, g->R, g->rows, 1, g->a2_row, g->a2_row * g->rows);
  if (lora && s == RFR_OK)
    s = tn ? describe(&p.b2, g->b2, g->b_dtype, g->R, g->N, 1, g->b2_row, g->b2_row * g->N)
           : describe(&p.b2, g->b2, g->b_dtype, g->K, g->R, 1, g->b2_row, g->b2_row * g->R);
  if (halves && s == RFR_OK)
    s = describe(&p.h, g->act, g->y_dtype, columns, g->rows, 1, columns, columns * g->rows, 16);
  if (halves && g->y && s == RFR_OK)
    s = describe(&p.y, g->y, g->y_dtype, columns, g->rows, 2, 2 * columns, columns, 16);
  if (!halves && s == RFR_OK)
    s = nt ? describe(&p.y, g->y, g->y_dtype, columns, g->N, g->groups, columns, columns * g->N, 16)
           : describe(&p.y, g->y, g->y_dtype, columns, g->rows, 1, columns, columns * g->rows, 16);
  if (s != RFR_OK) return s;
  p.groups = rfi_groups_of(g);
  p.bias = g->bias, p.scale = g->scale, p.out = g->y, p.bias_group = g->bias_group;
  p.bias_dtype = g->bias_dtype, p.scale_dtype = g->scale_dtype;
  p.columns = (int)columns, p.reduction = (int)(tn ? g->K : g->N);
  p.more_steps = lora ? (int)((g->R + STEP - 1) / STEP) : 0;
  p.accumulate = g->accumulate != 0;
  p.engine_adds = nt && p.accumulate && g->y_dtype == RFR_F32 && g->rows >= LONG * g->of;
  p.taken = g->taken;
  p.act = g->act, p.weight = g->weight, p.weight_dtype = g->weight_dtype;
  const rfr_status cleared = rfi_cuda_check(cudaMemsetAsync(p.taken, 0, sizeof *p.taken, stream), "grouped");
  if (cleared != RFR_OK) return cleared;
  if (g->a_dtype == RFR_BF16)
    return g->y_dtype == RFR_F32 ? launch_kind<rfi_bf16, float>(g, p, sms, stream)
                                 : launch_kind<rfi_bf16, rfi_bf16>(g, p, sms, stream);
  return g->y_dtype == RFR_F32 ? launch_kind<rfi_f16, float>(g, p, sms, stream)
                               : launch_kind<rfi_f16, rfi_f16>(g, p, sms, stream);
}

rfr_status rfi_grouped_sm90(const rfi_grouped *g, int sms, cudaStream_t stream) {
  rfr_status s = g->ws ? RFR_OK : launch_types<1>(g, sms, stream);
  for (int64_t first = 0; g->ws && first < g->groups && s == RFR_OK; first += MOST_WS) {
    const rfi_grouped part = rfi_grouped_part(g, first, MOST_WS);
    s = launch_types<MOST_WS>(&part, sms, stream);
  }
  return s;
}
