/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled FP8 GEMMs on sm_90, with and without groups: y = a bT, both operands contiguous along the sum.
 *
 * Scheduler, producer and consumers as in grouped_sm90.cu. A step is 128 elements of the reduction, the block of a
 * scale. The sums of the tensor core have about 14 bits, so there are two ways to sum:
 *
 *   narrow    the tensor core sums all steps. Only for forwards: one scale per tensor and E4M3 twice
 *   promoted  it sums one step, which is multiplied by the scales of its block and added in f32 registers. While one
 *             warpgroup does this, the other one multiplies. A warpgroup's 256 columns take two turns, because their
 *             sums and a partial result do not fit into its registers together
 *
 * Scales of a and of 128 x 128 elements of b are read one step ahead into registers; scales of each line of b pass
 * through shared memory, since a thread needs those of 64 columns.
 *
 * Along the rows of a group (wgrad) the quantizer has filled the last block of each group with zeros, so no step
 * contains rows of another group.
 */
#include "ops/grouped/tile_sm90.cuh"
#include "ops/quant/scaled_gemm.cuh"

enum {
  STEP = 128,
  /* with at least so many elements per sum on average, TMA adds to f32 memory; shorter sums do not hide the addition */
  LONG = 1024,
  TURN = 3 /* the first of two named barriers; share() uses those before */
};

enum scales { NARROW, TENSOR, BLOCK, LINES }; /* of b; NARROW: one scale per tensor, without promotion */

/* Stages of the ring. */
static constexpr int stages_of(scales S) { return S == LINES ? 3 : 4; }
static constexpr int lines_bytes(scales S) { return S == LINES ? CONSUMERS * 2 * COLUMNS * 4 : 0; }
static constexpr int shared_of(scales S) {
  return stages_of(S) * (PANELS * RFI_PANEL + 16) + CONSUMERS * 4 * 2 * RFI_SLAB + lines_bytes(S) + SLOTS * 16 + 16 +
         SLOTS * TILE_BYTES + 16 + 1024;
}

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
  bool accumulate, engine_adds;
  int32_t *taken;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Whether the warpgroups alternate (ping-pong). With 128 x 128 blocks, alternation together with promote()'s single FMA
 * gains a fifth; neither gains by itself. */
static constexpr bool takes_turns(scales S) { return S == BLOCK; }

/* ALONG: the start of the group in the rows of a and b. */
static __device__ __forceinline__ int start_of(const scaled_problem &p, const tile &t) {
  return p.groups.offset ? (int)rfi_group_start(t.first, p.first + t.group, STEP) * STEP : 0;
}

template <bool ALONG>
static __device__ __forceinline__ void schedule(const scaled_problem &p, const places &at, int rank) {
  const int wide = (p.columns + COLUMNS - 1) / COLUMNS;
  rfi_unit_walk<2> w;
  ring<SLOTS> slot;
  ring<1> turn;
  tile t;
  do {
    const int unit = take(p.taken, at, turn, rank);
    t = {-1, 0, 0, 0, 0, 0, 0};
    if (w.find(p.groups, unit, ROWS, wide)) {
      t = tile_at(w, unit - w.before, wide, COLUMNS, rank);
      const int length = ALONG ? min(t.size, p.reduction - start_of(p, t)) : t.group < p.groups.n ? p.reduction : 0;
      t.steps = (max(length, 0) + STEP - 1) / STEP;
    }
    publish(at, slot, t);
  } while (t.group >= 0);
}

/* ---- producer ---- */

template <bool ALONG, bool BESIDE, int STAGES>
static __device__ __forceinline__ void copy_tile(const scaled_problem &p, const tile &t, ring<STAGES> &at,
                                                 const places &in, int rank) {
  const int start = ALONG ? start_of(p, t) : 0, first = ALONG ? 0 : t.first, z = ALONG ? 0 : t.group;
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL,
                   barrier = in.full + at.stage * 8;
    const int x = start + k * STEP;
    rfi_barrier_wait(in.empty + at.stage * 8, at.phase ^ 1);
    rfi_barrier_expect(barrier, PANELS * RFI_PANEL);
#pragma unroll
    for (int q = 0; q < (BESIDE ? 1 : 2); q++) {
      const int panel = BESIDE ? rank : q, row = first + t.row + 64 * panel;
      if (BESIDE) rfi_tma_load_both(a + panel * RFI_PANEL, &p.a, barrier, x, row, 0);
      else rfi_tma_load(a + panel * RFI_PANEL, &p.a, barrier, x, row, 0);
    }
#pragma unroll
    for (int q = 0; q < (BESIDE ? 4 : 2); q++) {
      const int panel = BESIDE ? q : 2 * rank + q, column = t.column + 64 * panel;
      if (BESIDE) rfi_tma_load(b + panel * RFI_PANEL, &p.b, barrier, x, column, z);
      else rfi_tma_load_both(b + panel * RFI_PANEL, &p.b, barrier, x, column, z);
    }
  }
}

template <bool ALONG, int STAGES>
static __device__ __forceinline__ void produce(const scaled_problem &p, const places &in, int rank) {
  ring<SLOTS> slot;
  ring<STAGES> at;
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    if (threadIdx.x != 0) continue;
    if (t.beside) copy_tile<ALONG, true>(p, t, at, in, rank);
    else copy_tile<ALONG, false>(p, t, at, in, rank);
  }
}

/* ---- block scales ---- */

/* The scales that a thread needs for its sums of one step. */
struct step_scales {
  float a[2], b[2]; /* of rows r and r + 8; of both halves of the columns, or of two lines of b */
};

template <bool ALONG, scales S> struct scale_reader {
  int a[2], b[2]; /* indices of the first block's scales */
  int last;       /* index of the last block */

  __device__ __forceinline__ scale_reader(const scaled_problem &p, const tile &t, int row) {
    const int thread = threadIdx.x % 128, r = (ALONG ? 0 : t.first) + row + thread / 32 * 16 + thread % 32 / 4;
    const int start = ALONG ? start_of(p, t) / STEP : 0;
    last = min(p.a_scale_row, p.b_scale_row) - 1 - start;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      a[i] = min(r + 8 * i, p.a_rows - 1) * p.a_scale_row + start;
      const int line = S == LINES ? min(t.column + thread + 128 * i, p.columns - 1)
                                  : (ALONG ? 0 : t.group * p.b_blocks) + min(t.column / STEP + i, p.b_blocks - 1);
      b[i] = line * p.b_scale_row + start;
    }
  }
  __device__ __forceinline__ step_scales read(const scaled_problem &p, int k) const {
    const int at = min(k, last);
    return {{__ldg(p.a_scale + a[0] + at), __ldg(p.a_scale + a[1] + at)},
            {__ldg(p.b_scale + b[0] + at), __ldg(p.b_scale + b[1] + at)}};
  }
};

static __device__ __forceinline__ float2 load_two(uint32_t from) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
  return x;
}

/* Stores the scales of two of 256 lines of b, and waits for the warpgroup's other threads. */
static __device__ __forceinline__ void share(uint32_t to, const step_scales &s, int consumer) {
  const uint32_t mine = to + threadIdx.x % 128 * 4;
  asm volatile("st.shared.f32 [%0], %1;\nst.shared.f32 [%0 + 512], %2;" ::"r"(mine), "f"(s.b[0]), "f"(s.b[1])
               : "memory");
  rfi_named_sync(1 + consumer, 128);
}

/* ---- MMAs ---- */

/* Adds a step's partial result of half of the columns, before the next MMA is issued; otherwise the compiler would keep
 * two partial results in registers. */
template <scales S, int HALF>
static __device__ __forceinline__ void promote(float (&sum)[32][4], const float (&part)[16][4], const step_scales &s,
                                               uint32_t lines) {
#pragma unroll
  for (int n = 0; n < 16; n++) {
    float(&c)[4] = sum[HALF * 16 + n];
    float2 b = {s.b[HALF], s.b[HALF]};
    if (S == LINES) b = load_two(lines + (HALF * 128 + n * 8 + threadIdx.x % 4 * 2) * 4);
    if (S == TENSOR) {
      c[0] += part[n][0], c[1] += part[n][1], c[2] += part[n][2], c[3] += part[n][3];
    } else if (S == BLOCK) { /* one FMA; the product of powers of two is exact */
      const float u = s.a[0] * b.x, v = s.a[1] * b.x;
      c[0] = fmaf(part[n][0], u, c[0]), c[1] = fmaf(part[n][1], u, c[1]);
      c[2] = fmaf(part[n][2], v, c[2]), c[3] = fmaf(part[n][3], v, c[3]);
    } else {
      c[0] += part[n][0] * s.a[0] * b.x, c[1] += part[n][1] * s.a[0] * b.y;
      c[2] += part[n][2] * s.a[1] * b.x, c[3] += part[n][3] * s.a[1] * b.y;
    }
    asm volatile("" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])::"memory");
  }
}

/* The warpgroups issue their MMAs alternately (ping-pong), so that one promotes while the other one multiplies. Both
 * arrive at named barrier TURN + i: one passes the turn, the other one waits for it. */
static __device__ __forceinline__ void await_turn(int consumer) { rfi_named_sync(TURN + consumer, 128 * CONSUMERS); }
static __device__ __forceinline__ void pass_turn(int consumer) {
  rfi_named_arrive(TURN + (consumer ^ 1), 128 * CONSUMERS);
}

template <bool E5M2, scales S, int HALF>
static __device__ __forceinline__ void multiply_half(float (&part)[16][4], uint32_t panels, int consumer) {
  rfi_wgmma_new(part);
  if (takes_turns(S)) await_turn(consumer);
  rfi_wgmma_begin();
#pragma unroll
  for (int i = 0; i < STEP / 32; i++)
    rfi_wgmma128_fp8<E5M2>(part, rfi_panels(panels + consumer * RFI_PANEL + i * 32, RFI_PANEL),
                           rfi_panels(panels + (2 + HALF * 2) * RFI_PANEL + i * 32, RFI_PANEL), i > 0);
  rfi_wgmma_commit();
  if (takes_turns(S)) pass_turn(consumer);
  rfi_wgmma_wait<0>();
  rfi_wgmma_tie(part);
}

static __device__ __forceinline__ void release(const places &in, int stage) {
  const int lane = threadIdx.x % 32;
  if (lane < 2) rfi_barrier_arrive_at(in.empty + stage * 8, lane);
}

template <bool ALONG, bool E5M2, scales S, int STAGES>
static __device__ __forceinline__ void multiply_promoted(float (&sum)[32][4], const scaled_problem &p, const tile &t,
                                                         ring<STAGES> &at, const places &in, int consumer, int row,
                                                         uint32_t lines) {
  constexpr bool BLOCKS = S == BLOCK || S == LINES;
  float part[16][4];
  clear(sum);
  if (t.steps == 0) return;
  step_scales s = {}, next = {};
  const scale_reader<ALONG, S> reader(p, t, row);
  if (BLOCKS) s = reader.read(p, 0);
  if (S == LINES) share(lines, s, consumer);
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t panels = in.panels + at.stage * PANELS * RFI_PANEL, here = lines + k % 2 * COLUMNS * 4;
    if (BLOCKS) next = reader.read(p, k + 1);
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    multiply_half<E5M2, S, 0>(part, panels, consumer);
    promote<S, 0>(sum, part, s, here);
    multiply_half<E5M2, S, 1>(part, panels, consumer);
    release(in, at.stage);
    promote<S, 1>(sum, part, s, here);
    if (S == LINES) share(lines + (k + 1) % 2 * COLUMNS * 4, next, consumer);
    s = next;
  }
}

template <int STAGES>
static __device__ __forceinline__ void multiply_narrow(float (&sum)[32][4], const tile &t, ring<STAGES> &at,
                                                       const places &in, int consumer) {
  int before = 0; /* the stage that the MMAs in flight still read */
  clear(sum);
  rfi_wgmma_tie(sum);
  for (int k = 0; k < t.steps; k++, at.next()) {
    const uint32_t a = in.panels + at.stage * PANELS * RFI_PANEL, b = a + 2 * RFI_PANEL;
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

/* Without rows to multiply, only signals the barriers on which the other warpgroup and the other block wait. */
template <scales S, int STAGES>
static __device__ __forceinline__ void skip(const tile &t, ring<STAGES> &at, const places &in, int consumer) {
  for (int k = 0; k < t.steps; k++, at.next()) {
    rfi_barrier_wait(in.full + at.stage * 8, at.phase);
    for (int half = 0; takes_turns(S) && half < 2; half++) await_turn(consumer), pass_turn(consumer);
    release(in, at.stage);
  }
}

/* ---- epilogue ---- */

/* Multiplies one scale after the other, because the product of the scales might underflow. */
static __device__ __forceinline__ void scale_sums(float (&sum)[32][4], float a, float b) {
#pragma unroll
  for (int n = 0; n < 32; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) sum[n][i] = sum[n][i] * a * b;
}

/* Writes a warp's 16 rows of a tile, of which `left` are valid; `row` is the index of the first one in y. */
template <typename O, bool ALONG>
static __device__ __forceinline__ void write(const float (&sum)[32][4], const scaled_problem &p, uint32_t staging,
                                             const tile &t, int row, int left) {
  O *const y = (O *)p.out + ((ALONG ? (int64_t)t.group * p.groups.high : 0) + row) * p.columns;
  if (!p.accumulate && (ALONG || left >= 16)) {
    store_warp<O, false>(sum, p, staging, t.column, row, ALONG ? t.group : 0);
    return;
  }
  if constexpr (ALONG && sizeof(O) == 4) {
    if (p.engine_adds) {
      store_warp<O, true>(sum, p, staging, t.column, row, t.group);
      return;
    }
  }
  if (threadIdx.x % 32 == 0) rfi_tma_wait_read<0>();
  __syncwarp();
  if constexpr (ALONG) write_warp<O, float, true>(sum, p, staging, y, t.column, left);
  else write_warp<O, O, false>(sum, p, staging, y, t.column, left);
}

template <typename O, bool ALONG, bool E5M2, scales S, int STAGES>
static __device__ __forceinline__ void consume(const scaled_problem &p, const places &in, uint32_t lines,
                                               int consumer) {
  const int warp = (int)(threadIdx.x % 128) / 32;
  const uint32_t staging = in.staging + (consumer * 4 + warp) * 2 * RFI_SLAB;
  ring<SLOTS> slot;
  ring<STAGES> at;
  float sum[32][4];
  if (takes_turns(S) && consumer == 1) pass_turn(consumer);
  for (tile t; (t = next_tile(in, slot)).group >= 0;) {
    const int row = t.row + consumer * 64, left = (ALONG ? p.groups.high : t.size) - row;
    if (left <= 0 || t.column >= p.columns) {
      skip<S>(t, at, in, consumer);
      continue;
    }
    if (ALONG && p.accumulate && t.steps == 0) continue;
    if constexpr (S == NARROW) multiply_narrow(sum, t, at, in, consumer);
    else multiply_promoted<ALONG, E5M2, S>(sum, p, t, at, in, consumer, row, lines + consumer * 2 * COLUMNS * 4);
    if (t.group < p.groups.n) {
      if (S == NARROW || S == TENSOR) scale_sums(sum, p.a_scale[t.group], p.b_scale[t.group]);
      if (p.bias) add_bias(sum, p, t.group, (ALONG ? 0 : t.first) + row, t.column, left);
    }
    if constexpr (ALONG && sizeof(O) == 4)
      if (p.engine_adds && threadIdx.x % 32 == 0) fetch_warp(p, t.column, row + warp * 16, t.group);
    write<O, ALONG>(sum, p, staging, t, (ALONG ? row : t.first + row) + warp * 16, left - warp * 16);
  }
  /* receives the turn that the other warpgroup passed last */
  if (takes_turns(S) && consumer == 0) await_turn(consumer);
  if (threadIdx.x % 32 == 0) rfi_tma_wait_all();
}

#endif

template <typename O, bool ALONG, bool E5M2, scales S>
static __global__ void __launch_bounds__(THREADS, 1) scaled(const __grid_constant__ scaled_problem p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int STAGES = stages_of(S);
  extern __shared__ char memory[];
  places at;
  at.panels = (rfi_shared_address(memory) + 1023) / 1024 * 1024;
  at.staging = at.panels + STAGES * PANELS * RFI_PANEL;
  const uint32_t lines = at.staging + CONSUMERS * 4 * 2 * RFI_SLAB;
  at.tile = lines + lines_bytes(S);
  const int rank = (int)rfi_cluster_rank();
  set_up<STAGES>(at);
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x < 32) produce<ALONG, STAGES>(p, at, rank);
    else if (threadIdx.x < 64) schedule<ALONG>(p, at, rank);
    __syncwarp();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<O, ALONG, E5M2, S, STAGES>(p, at, lines, rfi_same((int)threadIdx.x / 128) - 1);
  }
  rfi_cluster_sync(); /* the other block may still write to this block's shared memory */
#endif
}

/* ---- host code ---- */

template <typename O, bool ALONG, bool E5M2, scales S>
static rfr_status launch(const scaled_problem &p, int sms, cudaStream_t stream) {
  const rfr_status s = rfi_cuda_check(
      cudaFuncSetAttribute(scaled<O, ALONG, E5M2, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_of(S)),
      "scaled GEMM");
  if (s != RFR_OK) return s;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = (unsigned)(sms / 2 * 2), config.blockDim = THREADS;
  config.dynamicSmemBytes = shared_of(S), config.stream = stream;
  config.attrs = &cluster, config.numAttrs = 1;
  return rfi_cuda_check(cudaLaunchKernelEx(&config, scaled<O, ALONG, E5M2, S>, p), "scaled GEMM");
}

template <typename O, bool E5M2>
static rfr_status launch_scales(const rfi_scaled_gemm &g, const scaled_problem &p, int sms, cudaStream_t stream) {
  if (g.along) {
    if (g.b.scaling == RFR_SCALING_ROW128) return launch<O, true, E5M2, LINES>(p, sms, stream);
    if (g.b.scaling == RFR_SCALING_BLOCK128) return launch<O, true, E5M2, BLOCK>(p, sms, stream);
    return launch<O, true, E5M2, TENSOR>(p, sms, stream);
  }
  if (g.b.scaling == RFR_SCALING_BLOCK128) return launch<O, false, E5M2, BLOCK>(p, sms, stream);
  if constexpr (!E5M2)
    if (g.narrow) return launch<O, false, false, NARROW>(p, sms, stream);
  return launch<O, false, E5M2, TENSOR>(p, sms, stream);
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
  const int64_t depth = g.along ? 1 : g.slices, N = g.b.rows;
  rfr_status s = rfi_tma_describe(&p.a, g.a.q, g.a.dtype, g.a.row, g.a.rows, 1, g.a.row, g.a.row * g.a.rows, 64);
  if (s == RFR_OK) s = rfi_tma_describe(&p.b, g.b.q, g.b.dtype, g.b.row, N, depth, g.b.row, g.b.row * N, 64);
  if (s == RFR_OK) s = rfi_tma_describe(&p.y, g.y, g.y_type, N, g.a.rows, g.along ? g.slices : 1, N, N * g.a.rows, 16);
  if (s == RFR_OK) s = rfi_cuda_check(cudaMemsetAsync(taken, 0, sizeof *taken, stream), "scaled GEMM");
  if (s != RFR_OK) return s;
  p.groups = g.groups;
  p.a_scale = (const float *)g.a.scale, p.b_scale = (const float *)g.b.scale;
  p.a_scale_row = (int)g.a.scale_row, p.b_scale_row = (int)g.b.scale_row;
  p.a_rows = (int)g.a.rows, p.b_blocks = (int)rfi_blocks_of(N, STEP);
  p.bias = g.bias, p.scale = g.bias_scale, p.bias_dtype = g.bias_type, p.scale_dtype = g.bias_scale_type;
  p.bias_group = N;
  p.out = g.y, p.columns = (int)N, p.reduction = (int)g.a.row, p.first = (int)g.first;
  p.accumulate = g.accumulate != 0;
  p.engine_adds = g.along && p.accumulate && g.y_type == RFR_F32 && g.a.row >= LONG * g.slices;
  p.taken = taken;
  if (g.a.dtype == RFR_E5M2)
    return g.y_type == RFR_F32 ? launch_scales<float, true>(g, p, sms, stream)
                               : launch_scales<rfi_bf16, true>(g, p, sms, stream);
  return g.y_type == RFR_F32 ? launch_scales<float, false>(g, p, sms, stream)
                             : launch_scales<rfi_bf16, false>(g, p, sms, stream);
}
