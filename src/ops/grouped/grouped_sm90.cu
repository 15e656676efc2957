/* SPDX-License-Identifier: Apache-2.0
 *
 * Grouped products on sm_90: tensor cores fed by the copy engine, over group sizes that lie on the device.
 *
 *   walk      tiles are counted in units of two, group after group; a cluster of two blocks takes every so many-th
 *             unit, and each of its warps finds by itself where that is: no table, no atomics, a grid from shapes
 *   producer  one warp copies what the next 64 of the reduction need into a ring of STAGES
 *   consumer  two warpgroups, 64 rows of the tile each, multiply and write
 *
 * The two tiles of a unit lie one below the other and share b, of which each block copies half for both; where a
 * group's number of tiles is odd, its last ones lie side by side and share a. A warpgroup whose rows are behind the
 * group's end multiplies nothing, so a group costs its rows rounded up to 64.
 *
 * Rows of other groups get into a tile at a group's end. In TN and NN they are rows of the result that are not
 * written. In NT they are of the reduction: both operands' are set to zero in shared memory first, since
 * 0 x NaN is NaN. Rows behind the last group are one more group without a reduction.
 *
 * Whole tiles of 16-bit results leave through shared memory by the copy engine, under the next tile's products;
 * others, sums onto what is there, and f32 from the registers.
 */
#include "ops/grouped/tma_sm90.cuh"
#include "ops/grouped/walk.cuh"

enum {
  ROWS = 128,
  COLUMNS = 256,
  STEP = 64, /* of a block's tile; of the reduction at once */
  STAGES = 4,
  PANELS = 6, /* two of a, four of b */
  CONSUMERS = 2,
  MOST_WS = 240, /* maps of 128 bytes that travel with a launch */
  THREADS = 128 * (1 + CONSUMERS),
  BAND = 8 /* units below each other before the next columns: what they share stays in L2 */
};
enum { SHARED = STAGES * PANELS * RFI_PANEL + CONSUMERS * 2 * RFI_PANEL + 2 * STAGES * 8 + 1024 };

/* WS: maps of w, one for all groups or one each. */
template <int WS> struct problem {
  CUtensorMap a, y, b[WS];
  rfi_groups groups;
  const void *bias, *scale;
  void *out;
  int64_t bias_group;
  rfr_dtype bias_dtype, scale_dtype;
  int columns, reduction; /* of the result; what a product sums over, but for NT */
  bool accumulate;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- where a unit is ---- */

template <rfi_grouped_kind KIND, int WS> struct tiles : rfi_unit_walk<2> {
  int row, column; /* of this block's tile in the group */
  bool beside;     /* the unit's tiles share a */

  __device__ __forceinline__ bool next(const problem<WS> &p, int unit, int rank) {
    const int wide = (p.columns + COLUMNS - 1) / COLUMNS;
    if (!find(p.groups, unit, ROWS, wide)) return false;
    const int pairs = tall / 2, below = pairs * wide;
    int i = unit - before;
    beside = i >= below;
    if (beside) {
      row = (tall - 1) * ROWS;
      column = (2 * (i - below) + rank) * COLUMNS;
    } else {
      const int band = i / (BAND * wide), deep = min(BAND, pairs - band * BAND);
      i -= band * BAND * wide;
      row = (2 * (band * BAND + i % deep) + rank) * ROWS;
      column = i / deep * COLUMNS;
    }
    return true;
  }
  __device__ __forceinline__ int steps(const problem<WS> &p) const {
    if (group == p.groups.n) return 0;
    return ((KIND == RFI_GROUPED_NT ? size : p.reduction) + STEP - 1) / STEP;
  }
};

struct ring {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

/* ---- copying ---- */

/* Steps of one tile, by one thread: short, since all that the tensor cores eat is asked for here. */
template <rfi_grouped_kind KIND, int WS, bool BESIDE>
static __device__ __forceinline__ void copy_tile(const problem<WS> &p, const tiles<KIND, WS> &w, ring &at,
                                                 uint32_t panels, uint32_t full, uint32_t empty, int rank) {
  constexpr bool NT = KIND == RFI_GROUPED_NT, TN = KIND == RFI_GROUPED_TN;
  const CUtensorMap *const map = &p.b[WS > 1 ? w.group : 0];
  const int steps = w.steps(p), z = NT || WS > 1 ? 0 : w.group;
  for (int k = 0; k < steps; k++, at.next()) {
    const uint32_t a = panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL, told = full + at.stage * 8;
    const int r = (NT ? w.first : 0) + k * STEP; /* of the reduction */
    rfi_barrier_wait(empty + at.stage * 8, at.phase ^ 1);
    rfi_barrier_expect(told, PANELS * RFI_PANEL);
#pragma unroll
    for (int q = 0; q < (BESIDE ? 1 : 2); q++) {
      const int panel = BESIDE ? rank : q, row = w.row + 64 * panel, x = NT ? row : r, y = NT ? r : w.first + row;
      if (BESIDE) rfi_tma_load_both(a + panel * RFI_PANEL, &p.a, told, x, y, 0);
      else rfi_tma_load(a + panel * RFI_PANEL, &p.a, told, x, y, 0);
    }
#pragma unroll
    for (int q = 0; q < (BESIDE ? 4 : 2); q++) {
      const int panel = BESIDE ? q : 2 * rank + q, column = w.column + 64 * panel, x = TN ? r : column,
                y = TN ? column : r;
      if (BESIDE) rfi_tma_load(b + panel * RFI_PANEL, map, told, x, y, z);
      else rfi_tma_load_both(b + panel * RFI_PANEL, map, told, x, y, z);
    }
  }
}

template <rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void produce(const problem<WS> &p, uint32_t panels, uint32_t full, uint32_t empty,
                                               int unit, int units, int rank) {
  tiles<KIND, WS> w;
  ring at;
  for (; w.next(p, unit, rank); unit += units) {
    if (threadIdx.x != 0) continue;
    if (w.beside) copy_tile<KIND, WS, true>(p, w, at, panels, full, empty, rank);
    else copy_tile<KIND, WS, false>(p, w, at, panels, full, empty, rank);
  }
}

/* ---- multiplying ---- */

/* Rows `from` on of what a warpgroup looks after: its panel of a and two of b's four. */
static __device__ __forceinline__ void clear_rows(uint32_t a, uint32_t b, int consumer, int from) {
  const int bytes = (STEP - from) * 128;
  const uint32_t mine[3] = {a + consumer * RFI_PANEL, b + 2 * consumer * RFI_PANEL, b + (2 * consumer + 1) * RFI_PANEL};
#pragma unroll
  for (int k = 0; k < 3; k++)
    for (int i = (int)(threadIdx.x % 128) * 16; i < bytes; i += 128 * 16)
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(mine[k] + from * 128 + i), "r"(0) : "memory");
}

/* ANY: there are rows to multiply; else the other warpgroups and the other block are kept going. */
template <typename T, rfi_grouped_kind KIND, bool ANY, int WS>
static __device__ __forceinline__ void multiply(float (&sum)[32][4], const problem<WS> &p, const tiles<KIND, WS> &w,
                                                ring &at, uint32_t panels, uint32_t full, uint32_t empty,
                                                int consumer) {
  constexpr bool A_COLUMNS = KIND == RFI_GROUPED_NT, B_COLUMNS = KIND != RFI_GROUPED_TN;
  constexpr int A_STEP = A_COLUMNS ? 2048 : 32, B_STEP = B_COLUMNS ? 2048 : 32;
  const int lane = threadIdx.x % 32, steps = w.steps(p);
  uint32_t before = 0; /* the stage that the products under way still read */
  if (ANY) {
#pragma unroll
    for (int n = 0; n < 32; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0;
  }
  for (int k = 0; k < steps; k++, at.next()) {
    const uint32_t a = panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL;
    rfi_barrier_wait(full + at.stage * 8, at.phase);
    if (KIND == RFI_GROUPED_NT && w.size - k * STEP < STEP) {
      clear_rows(a, b, consumer, w.size - k * STEP);
      rfi_shared_written();
      rfi_named_sync(3, 128 * CONSUMERS);
    }
    if (ANY) {
      rfi_wgmma_begin();
#pragma unroll
      for (int i = 0; i < STEP / 16; i++)
        rfi_wgmma256<T, A_COLUMNS, B_COLUMNS>(sum, rfi_panels(a + consumer * RFI_PANEL + i * A_STEP, RFI_PANEL),
                                              rfi_panels(b + i * B_STEP, RFI_PANEL));
      rfi_wgmma_commit();
      rfi_wgmma_wait<1>();
    }
    if (k > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
    before = empty + at.stage * 8;
  }
  if (ANY) rfi_wgmma_wait<0>();
  if (steps > 0 && lane < 2) rfi_barrier_arrive_at(before, lane);
}

/* ---- writing ---- */

static __device__ __forceinline__ float number(const void *x, rfr_dtype dtype, int64_t i) {
  return dtype == RFR_F32    ? ((const float *)x)[i]
         : dtype == RFR_BF16 ? rfi_widen(((const rfi_bf16 *)x)[i])
                             : rfi_widen(((const rfi_f16 *)x)[i]);
}

template <typename O> static __device__ __forceinline__ uint32_t two(float x, float y) {
  const rfi_pack<O, 2> p = {{rfi_narrow<O>(x), rfi_narrow<O>(y)}};
  uint32_t bits;
  __builtin_memcpy(&bits, &p, 4);
  return bits;
}

/* 64 rows by 256 columns by way of two panels; the copy engine leaves out what is behind y's edges. */
template <typename O, int WS>
static __device__ __forceinline__ void write_panels(const float (&sum)[32][4], const problem<WS> &p, uint32_t staging,
                                                    int consumer, int column, int row, int z) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int r = warp * 16 + lane % 16; /* which row's address this lane gives to stmatrix */
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const uint32_t panel = staging + (q & 1) * RFI_PANEL;
    if (thread == 0) rfi_tma_wait_read<1>();
    rfi_named_sync(1 + consumer, 128);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      const float *c = sum[q * 8 + n], *d = sum[q * 8 + n + 1];
      const uint32_t chunk = n + lane / 16;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(panel + r * 128 +
                                                                                            ((chunk ^ (r % 8)) * 16)),
                   "r"(two<O>(c[0], c[1])), "r"(two<O>(c[2], c[3])), "r"(two<O>(d[0], d[1])), "r"(two<O>(d[2], d[3]))
                   : "memory");
    }
    rfi_shared_written();
    rfi_named_sync(1 + consumer, 128);
    if (thread == 0) {
      if (column + 64 * q < p.columns) rfi_tma_store(&p.y, panel, column + 64 * q, row, z);
      rfi_tma_commit();
    }
  }
}

template <typename O> static __device__ __forceinline__ void write_two(O *to, float x, float y, bool accumulate) {
  rfi_pack<O, 2> *const at = (rfi_pack<O, 2> *)to;
  if (accumulate) {
    const rfi_pack<O, 2> old = *at;
    x += rfi_widen(old.x[0]);
    y += rfi_widen(old.x[1]);
  }
  const rfi_pack<O, 2> both = {{rfi_narrow<O>(x), rfi_narrow<O>(y)}};
  rfi_put(at, both);
}

/* The first `left` of 64 rows from the registers; y is the first one's beginning. */
template <typename O, int WS>
static __device__ __forceinline__ void write_rows(const float (&sum)[32][4], const problem<WS> &p, O *y, int column,
                                                  int left) {
  const int lane = threadIdx.x % 32, r = (int)(threadIdx.x % 128) / 32 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 32; n++) {
    const int c = column + n * 8 + lane % 4 * 2;
    if (c >= p.columns) continue;
    if (r < left) write_two<O>(y + (int64_t)r * p.columns + c, sum[n][0], sum[n][1], p.accumulate);
    if (r + 8 < left) write_two<O>(y + (int64_t)(r + 8) * p.columns + c, sum[n][2], sum[n][3], p.accumulate);
  }
}

/* Bias before the one rounding; `first` is the buffer's row of the warpgroup's first. */
template <int WS>
static __device__ __forceinline__ void add_bias(float (&sum)[32][4], const problem<WS> &p, int group, int first,
                                                int column, int left) {
  const int lane = threadIdx.x % 32, r = (int)(threadIdx.x % 128) / 32 * 16 + lane / 4;
  float s0 = 1, s1 = 1;
  if (p.scale) {
    if (r < left) s0 = number(p.scale, p.scale_dtype, first + r);
    if (r + 8 < left) s1 = number(p.scale, p.scale_dtype, first + r + 8);
  }
#pragma unroll
  for (int n = 0; n < 32; n++) {
    const int c = column + n * 8 + lane % 4 * 2;
    if (c >= p.columns) continue;
    const float x = number(p.bias, p.bias_dtype, group * p.bias_group + c);
    const float y = number(p.bias, p.bias_dtype, group * p.bias_group + c + 1);
    sum[n][0] += x * s0, sum[n][1] += y * s0, sum[n][2] += x * s1, sum[n][3] += y * s1;
  }
}

template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static __device__ __forceinline__ void consume(const problem<WS> &p, uint32_t panels, uint32_t staging, uint32_t full,
                                               uint32_t empty, int unit, int units, int rank, int consumer) {
  tiles<KIND, WS> w;
  ring at;
  float sum[32][4];
  for (; w.next(p, unit, rank); unit += units) {
    const int row = w.row + consumer * 64, left = (KIND == RFI_GROUPED_NT ? p.groups.high : w.size) - row;
    const bool any = left > 0 && w.column < p.columns;
    if (!any) {
      multiply<T, KIND, false, WS>(sum, p, w, at, panels, full, empty, consumer);
      continue;
    }
    multiply<T, KIND, true, WS>(sum, p, w, at, panels, full, empty, consumer);
    if (p.accumulate && w.steps(p) == 0) continue;
    if (KIND != RFI_GROUPED_NT && p.bias && w.group < p.groups.n)
      add_bias(sum, p, w.group, w.first + row, w.column, left);
    if constexpr (sizeof(O) == 2) {
      if (!p.accumulate && (KIND == RFI_GROUPED_NT || left >= 64)) {
        write_panels<O>(sum, p, staging + consumer * 2 * RFI_PANEL, consumer, w.column,
                        KIND == RFI_GROUPED_NT ? row : w.first + row, KIND == RFI_GROUPED_NT ? w.group : 0);
        continue;
      }
    }
    const int64_t first = KIND == RFI_GROUPED_NT ? (int64_t)w.group * p.groups.high + row : (int64_t)w.first + row;
    write_rows<O>(sum, p, (O *)p.out + first * p.columns, w.column, left);
  }
  if (threadIdx.x % 128 == 0) rfi_tma_wait_all();
}

#endif

template <typename T, typename O, rfi_grouped_kind KIND, int WS>
static __global__ void __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ problem<WS> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ char memory[];
  const uint32_t panels = (rfi_shared_address(memory) + 1023) / 1024 * 1024;
  const uint32_t staging = panels + STAGES * PANELS * RFI_PANEL, full = staging + CONSUMERS * 2 * RFI_PANEL;
  const uint32_t empty = full + STAGES * 8;
  const int rank = (int)rfi_cluster_rank(), unit = blockIdx.x / 2, units = gridDim.x / 2;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      rfi_barrier_init(full + s * 8, 1);
      rfi_barrier_init(empty + s * 8, 2 * CONSUMERS * 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  rfi_cluster_sync();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<KIND, WS>(p, panels, full, empty, unit, units, rank);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<T, O, KIND, WS>(p, panels, staging, full, empty, unit, units, rank, rfi_same((int)threadIdx.x / 128) - 1);
  }
  rfi_cluster_sync(); /* the other block may still write to this one's shared memory */
#endif
}

/* ---- on the host ---- */

/* A matrix, or several, by panels; strides in elements. */
static rfr_status describe(CUtensorMap *map, const void *data, rfr_dtype dtype, int64_t wide, int64_t high,
                           int64_t depth, int64_t row, int64_t group) {
  return rfi_tma_describe(map, data, dtype, wide, high, depth, row, group, 64);
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
  if (g->kind == RFI_GROUPED_TN) return launch<T, O, RFI_GROUPED_TN, WS>(p, sms, stream);
  if (g->kind == RFI_GROUPED_NN) return launch<T, O, RFI_GROUPED_NN, WS>(p, sms, stream);
  if constexpr (WS == 1) return launch<T, O, RFI_GROUPED_NT, WS>(p, sms, stream);
  return RFR_UNSUPPORTED; /* NT has no w */
}

int rfi_grouped_sm90_takes(const rfi_grouped *g) {
  const bool nt = g->kind == RFI_GROUPED_NT, types = g->a_dtype == RFR_BF16 || g->a_dtype == RFR_F16;
  const bool pitches = g->a_row % 8 == 0 && g->b_row % 8 == 0 && (nt || g->ws || g->b_group % 8 == 0);
  bool places = ((uintptr_t)g->a | (uintptr_t)g->b | (uintptr_t)g->y) % 16 == 0 && (!g->ws || g->groups <= MOST_WS);
  for (int64_t i = 0; places && g->ws && i < g->groups; i++) places = (uintptr_t)g->ws[i] % 16 == 0;
  const int64_t most = 1 << 30, units = (g->rows / 128 + (nt ? g->N / 128 + 2 : 2) * (g->groups + 1));
  return types && g->b_dtype == g->a_dtype && (g->y_dtype == g->a_dtype || g->y_dtype == RFR_F32) && places &&
         pitches && g->N % 8 == 0 && g->K % 8 == 0 && g->N > 0 && g->K > 0 && g->rows > 0 && g->groups > 0 &&
         g->rows < most && g->N < most && g->K < most && units < most / (g->N / 256 + g->K / 256 + 2);
}

template <int WS> static rfr_status launch_types(const rfi_grouped *g, int sms, cudaStream_t stream) {
  problem<WS> p = {};
  const bool nt = g->kind == RFI_GROUPED_NT, tn = g->kind == RFI_GROUPED_TN;
  const int64_t columns = tn ? g->N : g->K;
  rfr_status s = describe(&p.a, g->a, g->a_dtype, tn ? g->K : g->N, g->rows, 1, g->a_row, g->a_row * g->rows);
  if (nt && s == RFR_OK) s = describe(&p.b[0], g->b, g->b_dtype, g->K, g->rows, 1, g->b_row, g->b_row * g->rows);
  if (!nt && !g->ws && s == RFR_OK)
    s = describe(&p.b[0], g->b, g->b_dtype, g->K, g->N, g->groups, g->b_row, g->b_group);
  for (int64_t i = 0; g->ws && i < g->groups && s == RFR_OK; i++)
    s = describe(&p.b[i], g->ws[i], g->b_dtype, g->K, g->N, 1, g->b_row, g->b_row * g->N);
  if (s == RFR_OK && g->y_dtype != RFR_F32)
    s = nt ? describe(&p.y, g->y, g->y_dtype, columns, g->N, g->groups, columns, columns * g->N)
           : describe(&p.y, g->y, g->y_dtype, columns, g->rows, 1, columns, columns * g->rows);
  if (s != RFR_OK) return s;
  p.groups = {g->offsets, (int)g->groups, (int)g->rows, nt ? (int)g->N : 0};
  p.bias = g->bias, p.scale = g->scale, p.out = g->y, p.bias_group = g->bias_group;
  p.bias_dtype = g->bias_dtype, p.scale_dtype = g->scale_dtype;
  p.columns = (int)columns, p.reduction = (int)(tn ? g->K : g->N);
  p.accumulate = g->accumulate != 0;
  if (g->a_dtype == RFR_BF16)
    return g->y_dtype == RFR_F32 ? launch_kind<rfi_bf16, float>(g, p, sms, stream)
                                 : launch_kind<rfi_bf16, rfi_bf16>(g, p, sms, stream);
  return g->y_dtype == RFR_F32 ? launch_kind<rfi_f16, float>(g, p, sms, stream)
                               : launch_kind<rfi_f16, rfi_f16>(g, p, sms, stream);
}

rfr_status rfi_grouped_sm90(const rfi_grouped *g, int sms, cudaStream_t stream) {
  return g->ws ? launch_types<MOST_WS>(g, sms, stream) : launch_types<1>(g, sms, stream);
}
