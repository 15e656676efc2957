/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled FP8 GEMMs on sm_90, with and without groups: y = a bT, both operands contiguous along the sum.
 *
 * Scheduler, producer and consumers as in grouped_sm90.cu. A step is 128 elements of the reduction, the block of a
 * scale. The sums of the tensor core have about 14 bits, so there are two ways to sum:
 *
 *   narrow    the tensor core sums all steps. Only for forwards: one scale per tensor and E4M3 twice
 *   promoted  it sums one step, which is multiplied by the scales of its block and added in f32 registers. While one
 *             warpgroup does this, the other one multiplies. Tiles have 192 columns, because the sums and a partial
 *             result of 256 do not fit into a thread's registers
 *
 * Two more warps copy scales of blocks to shared memory, for CHUNK steps at a time: in memory a line's scales are
 * adjacent, in shared memory those of a step.
 *
 * Along the rows of a group (wgrad) the quantizer has filled the last block of each group with zeros, so no step
 * contains rows of another group.
 */
#include "ops/grouped/tile_sm90.cuh"
#include "ops/quant/scaled_gemm.cuh"

enum {
  STEP = 128,
  CHUNK = 4,   /* steps per copy of scales; there are two buffers */
  COPIERS = 64 /* threads that copy scales */
};

enum scales { NARROW, TENSOR, BLOCK, LINES }; /* of b; NARROW: one scale per tensor, without promotion */

/* The tile of a kernel, and its shared memory in bytes. */
template <scales S> struct form {
  static constexpr bool BLOCKS = S == BLOCK || S == LINES;
  static constexpr int WIDE = S == NARROW ? COLUMNS : 192, STAGES = 4, SLABS = S == NARROW ? 2 : 3;
  static constexpr int A_BYTES = ROWS * STEP, STAGE = A_BYTES + WIDE * STEP;
  static constexpr int STAGING = CONSUMERS * 4 * SLABS * RFI_SLAB;
  /* Scales of a step: those of a's lines, then b's. With 8 modulo 32 of them no two threads store to one bank. */
  static constexpr int SCALES = ROWS + (S == LINES ? WIDE : 0) + 8, SCALE_BYTES = BLOCKS ? CHUNK * SCALES * 4 : 0;
  static constexpr int READERS = 1 + CONSUMERS * 4 + (BLOCKS ? COPIERS / 32 : 0);
  static constexpr int SHARED =
      STAGES * (STAGE + 16) + STAGING + 2 * SCALE_BYTES + 2 * 16 + SLOTS * (TILE_BYTES + 16) + 2 * 16 + 1024;
  static_assert(SHARED <= 227 * 1024, "shared memory of a block");
};

struct scaled_problem {
  CUtensorMap a, b, y;
  rfi_groups groups;
  const float *a_scale, *b_scale;
  int a_scale_row, b_scale_row, a_rows, b_blocks; /* blocks of 128 rows of b in a slice */
  const void *bias, *scale;
  void *out;
  int64_t bias_group;
  rfr_dtype bias_dtype, scale_dtype;
  int columns, reduction, first;
  int32_t *taken;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

struct scaled_places : places {
  uint32_t scales, scales_full, scales_empty;
};

/* ALONG: the start of the group in the rows of a and b. */
static __device__ __forceinline__ int start_of(const scaled_problem &p, const tile &t) {
  return p.groups.offset ? (int)rfi_group_start(t.first, p.first + t.group, STEP) * STEP : 0;
}

template <bool ALONG, int WIDE>
static __device__ __forceinline__ void schedule(const scaled_problem &p, const places &at, int rank) {
  const int wide = (p.columns + WIDE - 1) / WIDE;
  rfi_unit_walk<2> w;
  ring<SLOTS> slot;
  ring<1> turn;
  tile t;
  do {
    const int unit = take(p.taken, at, turn, rank);
    t = {-1, 0, 0, 0, 0, 0, 0};
    if (w.find(p.groups, unit, ROWS, wide)) {
      t = tile_at(w, unit - w.before, wide, WIDE, rank);
      const int length = ALONG ? min(t.size, p.reduction - start_of(p, t)) : t.group < p.groups.n ? p.reduction : 0;
      t.steps = (max(length, 0) + STEP - 1) / STEP;
    }
    publish(at, slot, t);
  } while (t.group >= 0);
}

/* ---- producer ---- */

/* The blocks of the cluster each copy half of the operand that they share, to both. */
template <bool ALONG, scales S, bool BESIDE>
static __device__ __forceinline__ void copy_tile(const scaled_problem &p, const tile &t, ring<form<S>::STAGES> &at,
                                                 const places &in, int rank) {
  constexpr int A_HALF = ROWS / 2, B_HALF = form<S>::WIDE / 2;
  const int start = ALONG ? start_of(p, t) : 0, row = (ALONG ? 0 : t.first) + t.row, z = ALONG ? 0 : t.group;
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * form<S>::STAGE, b = a + form<S>::A_BYTES,
                   barrier = in.full + at.stage * 8;
    const int x = start + k * STEP;
    rfi_barrier_wait(in.empty + at.stage * 8, at.phase ^ 1);
    rfi_barrier_expect(barrier, form<S>::STAGE);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (!BESIDE) rfi_tma_load(a + h * A_HALF * STEP, &p.a, barrier, x, row + h * A_HALF, 0);
      else rfi_tma_load(b + h * B_HALF * STEP, &p.b, barrier, x, t.column + h * B_HALF, z);
    }
    if (BESIDE) rfi_tma_load_both(a + rank * A_HALF * STEP, &p.a, barrier, x, row + rank * A_HALF, 0);
    else rfi_tma_load_both(b + rank * B_HALF * STEP, &p.b, barrier, x, t.column + rank * B_HALF, z);
  }
}

template <bool ALONG, scales S>
static __device__ __forceinline__ void produce(const scaled_problem &p, const places &in, int rank) {
  ring<SLOTS> slot;
  ring<form<S>::STAGES> at;
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    if (threadIdx.x != 0) continue;
    if (t.beside) copy_tile<ALONG, S, true>(p, t, at, in, rank);
    else copy_tile<ALONG, S, false>(p, t, at, in, rank);
  }
}

/* ---- block scales ---- */

static __device__ __forceinline__ void copy_scale(uint32_t to, const float *from) {
  rfi_delay();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

/* Where the scale of column c lies: a thread reads those of its columns in two blocks of 8, four floats, at once. */
static __device__ __forceinline__ int place_of(int c) { return c / 16 * 16 + c % 8 / 2 * 4 + c % 16 / 8 * 2 + c % 2; }

/* Copies the scales of a tile's lines. BLOCK: b has one for each 64 columns, because a tile may begin within a block.
 * Indices after the last line or block are clamped; what they read is not used. */
template <bool ALONG, scales S>
static __device__ __forceinline__ void copy_scales(const scaled_problem &p, const scaled_places &in) {
  constexpr int LINES_EACH = COPIERS / CHUNK;
  const int step = threadIdx.x % CHUNK, line = threadIdx.x % COPIERS / CHUNK;
  const int last = min(p.a_scale_row, p.b_scale_row) - 1;
  ring<SLOTS> slot;
  ring<2> at;
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    const int start = (ALONG ? start_of(p, t) / STEP : 0) + step, row = (ALONG ? 0 : t.first) + t.row;
    for (int k = 0; k < t.steps; k += CHUNK, at.next()) {
      const uint32_t a = in.scales + at.stage * form<S>::SCALE_BYTES + step * form<S>::SCALES * 4, b = a + ROWS * 4;
      const int block = min(start + k, last);
      rfi_barrier_wait(in.scales_empty + at.stage * 8, at.phase ^ 1);
#pragma unroll 4
      for (int r = line; r < ROWS; r += LINES_EACH)
        copy_scale(a + r * 4, p.a_scale + min(row + r, p.a_rows - 1) * p.a_scale_row + block);
      if (S == BLOCK && line < form<S>::WIDE / 64) {
        const int of = (ALONG ? 0 : t.group * p.b_blocks) + min((t.column + 64 * line) / STEP, p.b_blocks - 1);
        copy_scale(b + line * 4, p.b_scale + of * p.b_scale_row + block);
      }
#pragma unroll 4
      for (int c = line; S == LINES && c < form<S>::WIDE; c += LINES_EACH)
        copy_scale(b + place_of(c) * 4, p.b_scale + min(t.column + c, p.columns - 1) * p.b_scale_row + block);
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(in.scales_full + at.stage * 8)
                   : "memory");
    }
  }
}

static __device__ __forceinline__ float load_scale(uint32_t from) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(from) : "memory");
  return x;
}
static __device__ __forceinline__ float4 load_scales(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

/* ---- MMAs ---- */

/* sum += part times the scales of rows r and r + 8 and of two columns. The product of powers of two is exact. */
static __device__ __forceinline__ void promote(float (&sum)[4], const float (&part)[4], float a0, float a1, float b0,
                                               float b1) {
  sum[0] = fmaf(part[0], a0 * b0, sum[0]), sum[1] = fmaf(part[1], a0 * b1, sum[1]);
  sum[2] = fmaf(part[2], a1 * b0, sum[2]), sum[3] = fmaf(part[3], a1 * b1, sum[3]);
  asm volatile("" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])::"memory");
}

static __device__ __forceinline__ void release(const places &in, int stage) {
  const int lane = threadIdx.x % 32;
  if (lane < 2) rfi_barrier_arrive_at(in.empty + stage * 8, lane);
}

/* Waits for the scales of step k if it is the first one of a chunk. */
static __device__ __forceinline__ void await_scales(const scaled_places &in, const ring<2> &chunk, int k) {
  if (k % CHUNK == 0) rfi_barrier_wait(in.scales_full + chunk.stage * 8, chunk.phase);
}
static __device__ __forceinline__ void release_scales(const scaled_places &in, ring<2> &chunk, int k, int steps) {
  if (k % CHUNK != CHUNK - 1 && k != steps - 1) return;
  __syncwarp();
  if (threadIdx.x % 32 == 0) rfi_barrier_arrive(in.scales_empty + chunk.stage * 8);
  chunk.next();
}

template <bool E5M2, scales S>
static __device__ __forceinline__ void multiply_promoted(float (&sum)[24][4], const tile &t, ring<form<S>::STAGES> &at,
                                                         ring<2> &chunk, const scaled_places &in, int consumer) {
  constexpr int AHEAD = 4; /* scales of b are read so many times 16 columns ahead */
  const int thread = threadIdx.x % 128;
  uint32_t row = (consumer * 64 + thread / 32 * 16 + thread % 32 / 4) * 4,
           column = ROWS * 4 + (S == LINES ? thread % 4 * 16 : 0);
  asm volatile("" : "+r"(row), "+r"(column)); /* otherwise computed in every step */
  clear(sum);
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * form<S>::STAGE + consumer * RFI_PANEL,
                   b = in.panels + at.stage * form<S>::STAGE + form<S>::A_BYTES,
                   here = in.scales + chunk.stage * form<S>::SCALE_BYTES + k % CHUNK * form<S>::SCALES * 4;
    float part[24][4], a0 = 1, a1 = 1, block[3];
    float4 lines[AHEAD];
    if (form<S>::BLOCKS) await_scales(in, chunk, k);
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    rfi_wgmma_new(part);
    rfi_wgmma_begin();
#pragma unroll
    for (int i = 0; i < STEP / 32; i++)
      rfi_wgmma192_fp8<E5M2>(part, rfi_wgmma_panel(a, i * 32), rfi_wgmma_panel(b, i * 32), i > 0);
    rfi_wgmma_commit();
    if (form<S>::BLOCKS) a0 = load_scale(here + row), a1 = load_scale(here + row + 32);
#pragma unroll
    for (int i = 0; i < 3 && S == BLOCK; i++) block[i] = load_scale(here + column + i * 4);
#pragma unroll
    for (int i = 0; i < AHEAD && S == LINES; i++) lines[i] = load_scales(here + column + i * 64);
    rfi_wgmma_wait<0>();
    rfi_wgmma_tie(part);
    release(in, at.stage);
#pragma unroll
    for (int i = 0; i < 12; i++) {
      float4 f = {1, 1, 1, 1};
      if (S == BLOCK) f.x = f.y = f.z = f.w = block[i / 4];
      if (S == LINES) f = lines[i % AHEAD];
      if (S == LINES && i + AHEAD < 12) lines[i % AHEAD] = load_scales(here + column + (i + AHEAD) * 64);
      promote(sum[2 * i], part[2 * i], a0, a1, f.x, f.y);
      promote(sum[2 * i + 1], part[2 * i + 1], a0, a1, f.z, f.w);
    }
    if (form<S>::BLOCKS) release_scales(in, chunk, k, t.steps);
  }
}

template <int STAGES>
static __device__ __forceinline__ void multiply_narrow(float (&sum)[32][4], const tile &t, ring<STAGES> &at,
                                                       const places &in, int consumer) {
  int before = 0; /* the stage that the MMAs in flight still read */
  clear(sum);
  rfi_wgmma_tie(sum);
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * form<NARROW>::STAGE, b = a + form<NARROW>::A_BYTES;
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    rfi_wgmma_begin();
#pragma unroll
    for (int i = 0; i < STEP / 32; i++)
      rfi_wgmma256_fp8<false>(sum, rfi_panels(a + consumer * RFI_PANEL + i * 32, RFI_PANEL),
                              rfi_panels(b + i * 32, RFI_PANEL));
    rfi_wgmma_commit();
    rfi_wgmma_wait<1>();
    if (k > 0) release(in, before);
    before = at.stage;
  }
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(sum);
  if (t.steps > 0) release(in, before);
}

/* Without rows to multiply, only signals the barriers on which the producers wait. */
template <scales S>
static __device__ __forceinline__ void skip(const tile &t, ring<form<S>::STAGES> &at, ring<2> &chunk,
                                            const scaled_places &in) {
  for (int k = 0; k < t.steps; k++, at.next()) {
    if (form<S>::BLOCKS) await_scales(in, chunk, k), release_scales(in, chunk, k, t.steps);
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    release(in, at.stage);
  }
}

/* ---- epilogue ---- */

/* Multiplies one scale after the other, because the product of the scales might underflow. */
template <int N> static __device__ __forceinline__ void scale_sums(float (&sum)[N][4], float a, float b) {
#pragma unroll
  for (int n = 0; n < N; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[n][i] = sum[n][i] * a * b;
}

/* Writes a warp's 16 rows of a tile, of which `left` are valid; `row` is the index of the first one in y. */
template <typename O, bool ALONG, bool ONTO, scales S, int N>
static __device__ __forceinline__ void write(const float (&sum)[N][4], const scaled_problem &p, uint32_t staging,
                                             const tile &t, int row, int left) {
  constexpr int SLABS = form<S>::SLABS;
  O *const y = (O *)p.out + ((ALONG ? (int64_t)t.group * p.groups.high : 0) + row) * p.columns;
  if (!ONTO && (ALONG || left >= 16)) {
    store_warp<O, false, SLABS>(sum, p, staging, t.column, row, ALONG ? t.group : 0);
    return;
  }
  if constexpr (ONTO && sizeof(O) == 4) {
    store_warp<O, true, SLABS>(sum, p, staging, t.column, row, t.group);
  } else if constexpr (ONTO || !ALONG) {
    if (threadIdx.x % 32 == 0) rfi_tma_wait_read<0>();
    __syncwarp();
    if constexpr (ONTO) write_warp<O, float, true>(sum, p, staging, y, t.column, left);
    else write_warp<O, O, false>(sum, p, staging, y, t.column, left);
  }
}

template <typename O, bool ALONG, bool ONTO, bool E5M2, scales S>
static __device__ __forceinline__ void consume(const scaled_problem &p, const scaled_places &in, int consumer) {
  const int warp = (int)(threadIdx.x % 128) / 32;
  const uint32_t staging = in.staging + (consumer * 4 + warp) * form<S>::SLABS * RFI_SLAB;
  ring<SLOTS> slot;
  ring<form<S>::STAGES> at;
  ring<2> chunk;
  float sum[form<S>::WIDE / 8][4];
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    const int row = t.row + consumer * 64, left = (ALONG ? p.groups.high : t.size) - row;
    if (left <= 0 || t.column >= p.columns) {
      skip<S>(t, at, chunk, in);
      continue;
    }
    if (ONTO && t.steps == 0) continue;
    if constexpr (S == NARROW) multiply_narrow(sum, t, at, in, consumer);
    else multiply_promoted<E5M2, S>(sum, t, at, chunk, in, consumer);
    if (t.group < p.groups.n) {
      if (!form<S>::BLOCKS) scale_sums(sum, p.a_scale[t.group], p.b_scale[t.group]);
      if (p.bias) add_bias(sum, p, t.group, (ALONG ? 0 : t.first) + row, t.column, left);
    }
    if constexpr (ONTO && sizeof(O) == 4)
      if (threadIdx.x % 32 == 0) fetch_warp<form<S>::WIDE>(p, t.column, row + warp * 16, t.group);
    write<O, ALONG, ONTO, S>(sum, p, staging, t, (ALONG ? row : t.first + row) + warp * 16, left - warp * 16);
  }
  if (threadIdx.x % 32 == 0) rfi_tma_wait_all();
}

#endif

/* ONTO: adds to y. It is a template argument because ptxas, with the code that loads y, places the three operands of
 * the FMAs of a promotion in one register bank. */
template <typename O, bool ALONG, bool ONTO, bool E5M2, scales S>
static __global__ void __launch_bounds__(THREADS, 1) scaled(const __grid_constant__ scaled_problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  typedef form<S> f;
  extern __shared__ char memory[];
  scaled_places at;
  at.panels = (rfi_shared_address(memory) + 1023) / 1024 * 1024;
  at.staging = at.panels + f::STAGES * f::STAGE;
  at.scales = at.staging + f::STAGING;
  at.scales_full = at.scales + 2 * f::SCALE_BYTES, at.scales_empty = at.scales_full + 2 * 8;
  at.tile = at.scales_empty + 2 * 8;
  if (f::BLOCKS && threadIdx.x == 0)
    for (int s = 0; s < 2; s++) {
      rfi_barrier_init(at.scales_full + s * 8, COPIERS);
      rfi_barrier_init(at.scales_empty + s * 8, CONSUMERS * 4);
    }
  const int rank = (int)rfi_cluster_rank();
  set_up<f::STAGES, f::READERS>(at);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<ALONG, S>(p, at, rank);
    else if (threadIdx.x < 64) schedule<ALONG, f::WIDE>(p, at, rank);
    else if constexpr (f::BLOCKS) copy_scales<ALONG, S>(p, at);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<O, ALONG, ONTO, E5M2, S>(p, at, rfi_same((int)threadIdx.x / 128) - 1);
  }
  rfi_cluster_sync(); /* the other block may still write to this block's shared memory */
#endif
}

/* ---- host code ---- */

template <typename O, bool ALONG, bool ONTO, bool E5M2, scales S>
static rfr_status launch(const rfi_scaled_gemm &g, scaled_problem &p, int sms, cudaStream_t stream) {
  const int64_t depth = g.along ? 1 : g.slices;
  rfr_status s = rfi_tma_describe(&p.a, g.a.q, g.a.dtype, g.a.row, g.a.rows, 1, g.a.row, g.a.row * g.a.rows, ROWS / 2);
  if (s == RFR_OK)
    s = rfi_tma_describe(&p.b, g.b.q, g.b.dtype, g.b.row, g.b.rows, depth, g.b.row, g.b.row * g.b.rows,
                         form<S>::WIDE / 2);
  if (s == RFR_OK)
    s = rfi_cuda_check(cudaFuncSetAttribute(scaled<O, ALONG, ONTO, E5M2, S>,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize, form<S>::SHARED),
                       "scaled GEMM");
  if (s != RFR_OK) return s;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = (unsigned)(sms / 2 * 2), config.blockDim = THREADS;
  config.dynamicSmemBytes = form<S>::SHARED, config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return rfi_cuda_check(cudaLaunchKernelEx(&config, scaled<O, ALONG, ONTO, E5M2, S>, p), "scaled GEMM");
}

template <typename O, bool ONTO, bool E5M2>
static rfr_status launch_along(const rfi_scaled_gemm &g, scaled_problem &p, int sms, cudaStream_t stream) {
  if (g.b.scaling == RFR_SCALING_ROW128) return launch<O, true, ONTO, E5M2, LINES>(g, p, sms, stream);
  if (g.b.scaling == RFR_SCALING_BLOCK128) return launch<O, true, ONTO, E5M2, BLOCK>(g, p, sms, stream);
  return launch<O, true, ONTO, E5M2, TENSOR>(g, p, sms, stream);
}

template <typename O, bool E5M2>
static rfr_status launch_scales(const rfi_scaled_gemm &g, scaled_problem &p, int sms, cudaStream_t stream) {
  if (g.along)
    return g.accumulate ? launch_along<O, true, E5M2>(g, p, sms, stream)
                        : launch_along<O, false, E5M2>(g, p, sms, stream);
  if (g.b.scaling == RFR_SCALING_BLOCK128) return launch<O, false, false, E5M2, BLOCK>(g, p, sms, stream);
  if constexpr (!E5M2)
    if (g.narrow) return launch<O, false, false, false, NARROW>(g, p, sms, stream);
  return launch<O, false, false, E5M2, TENSOR>(g, p, sms, stream);
}

const char *rfi_scaled_sm90_lacks(const rfi_scaled_gemm &g) {
  const int64_t most = 1 << 30, tall = (g.along ? g.slices * (g.a.rows / ROWS + 2) : g.a.rows / ROWS + g.slices + 2);
  const bool tensor = g.a.scaling == RFR_SCALING_TENSOR && g.b.scaling == RFR_SCALING_TENSOR;
  const bool block = g.a.scaling == RFR_SCALING_ROW128 &&
                     (g.b.scaling == RFR_SCALING_BLOCK128 || (g.along && g.b.scaling == RFR_SCALING_ROW128));
  if (!tensor && !block) return "its scaling has no tensor-core kernel";
  if ((g.a.dtype != RFR_E4M3 && g.a.dtype != RFR_E5M2) || g.b.dtype != RFR_E4M3)
    return "its formats have no tensor-core kernel";
  if (g.accumulate && !g.along) return "it adds to its result";
  if (g.a.global || g.b.global) return "global scales have no tensor-core kernel";
  if (g.y_type != RFR_F32 && g.y_type != RFR_BF16) return "the result is f16";
  if (g.a.row % 16 != 0) return "the sum's length is not a multiple of 16";
  if (g.b.rows % 8 != 0) return "the result's rows are not multiples of 16 bytes";
  if (((uintptr_t)g.a.q | (uintptr_t)g.b.q | (uintptr_t)g.y) % 16 != 0) return "an operand is not aligned to 16 bytes";
  if (g.a.rows == 0 || g.a.row == 0 || g.b.rows == 0 || g.slices == 0) return "the GEMM is empty";
  if (g.a.rows >= most || g.b.rows >= most || g.a.row >= most || tall >= most / (g.b.rows / COLUMNS + 2))
    return "the GEMM is too large";
  if (block && (g.a.rows * g.a.scale_row >= most || (g.along ? 1 : g.slices) * g.b.rows * g.b.scale_row >= most))
    return "it has too many scales";
  return NULL;
}

rfr_status rfi_scaled_sm90(const rfi_scaled_gemm &g, int32_t *taken, int sms, cudaStream_t stream) {
  scaled_problem p = {};
  const int64_t N = g.b.rows;
  rfr_status s = rfi_tma_describe(&p.y, g.y, g.y_type, N, g.a.rows, g.along ? g.slices : 1, N, N * g.a.rows, 16);
  if (s == RFR_OK) s = rfi_cuda_check(cudaMemsetAsync(taken, 0, sizeof *taken, stream), "scaled GEMM");
  if (s != RFR_OK) return s;
  p.groups = g.groups;
  p.a_scale = (const float *)g.a.scale, p.b_scale = (const float *)g.b.scale;
  p.a_scale_row = (int)g.a.scale_row, p.b_scale_row = (int)g.b.scale_row;
  p.a_rows = (int)g.a.rows, p.b_blocks = (int)rfi_blocks_of(N, STEP);
  p.bias = g.bias, p.scale = g.bias_scale, p.bias_dtype = g.bias_type, p.scale_dtype = g.bias_scale_type;
  p.bias_group = N;
  p.out = g.y, p.columns = (int)N, p.reduction = (int)g.a.row, p.first = (int)g.first;
  p.taken = taken;
  if (g.a.dtype == RFR_E5M2)
    return g.y_type == RFR_F32 ? launch_scales<float, true>(g, p, sms, stream)
                               : launch_scales<rfi_bf16, true>(g, p, sms, stream);
  return g.y_type == RFR_F32 ? launch_scales<float, false>(g, p, sms, stream)
                             : launch_scales<rfi_bf16, false>(g, p, sms, stream);
}
