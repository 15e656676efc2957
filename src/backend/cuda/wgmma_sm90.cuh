/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor cores of sm_90a: wgmma m64n64k16 of bf16 or f16 with sums in f32. A warpgroup (four warps, the first one a
 * multiple of four) issues it together. It reads its right operand, and optionally the left one, from shared memory
 * while the warps continue.
 *
 * A tile in shared memory is a sequence of panels of 64 elements. A panel begins at a multiple of 1024 bytes and has
 * rows of 128 bytes. Chunk i (16 bytes) of row r is stored as chunk i ^ (r % 8), the 128-byte swizzle. A wgmma reads a
 * panel in one of two ways:
 *
 *   along k     64 rows, 16 elements of each from element 16 i on, at + 32 i bytes
 *   transposed  16 rows from row 16 i on, 64 elements of each, at + 2048 i bytes
 *
 * Each warp has 16 of the 64 rows. Its sums, and a left operand in registers, have the layouts of C and A in
 * mma_sm80.cuh.
 *
 * Between the start and the end of a wgmma its registers must not be accessed, but the compiler does not know this. So
 * call begin, the wgmma functions, then end: begin and end keep the accumulators in registers. Threads that write
 * shared memory, also by cp.async, make the data visible to a wgmma by shared_written in each thread and a barrier.
 */
#ifndef RFI_WGMMA_SM90_CUH
#define RFI_WGMMA_SM90_CUH

#include "backend/cuda/mma_sm80.cuh"

/* With RFI_DELAYS, which tests define, threads wait before a barrier or a copy: one time in four, for up to 2 us,
 * depending on the clock. Threads that arrive together wait equally long. */
static __device__ __forceinline__ void rfi_delay(void) {
#ifdef RFI_DELAYS
  const unsigned together = __activemask();
  uint32_t x = ((uint32_t)clock64() ^ threadIdx.x / 32 * 0x85EBCA6Bu ^ blockIdx.x * 0xC2B2AE35u) * 0x9E3779B9u;
  x = __shfl_sync(together, x ^ x >> 15, __ffs((int)together) - 1);
  if (x >> 30 == 0) __nanosleep(x & 2047);
  __syncwarp(together);
#endif
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

static __device__ __forceinline__ void rfi_shared_written(void) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* Descriptor of 64 rows, or of 16 rows read as columns, from a panel's address on; `more` bytes can be added with one
 * instruction. */
static __device__ __forceinline__ uint64_t rfi_wgmma_panel(uint32_t at, uint32_t more = 0) {
  const uint32_t low = ((at & 0x3ffffu) >> 4 | 1u << 16) + (more >> 4);
  return (uint64_t)((1024u >> 4) | 1u << 30) << 32 | low;
}

template <int N> static __device__ __forceinline__ void rfi_wgmma_tie(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])::"memory");
}
/* Marks accumulators that the first wgmma overwrites. */
template <int N> static __device__ __forceinline__ void rfi_wgmma_new(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : "=f"(c[n][0]), "=f"(c[n][1]), "=f"(c[n][2]), "=f"(c[n][3]));
}
static __device__ __forceinline__ void rfi_wgmma_begin(void) { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void rfi_wgmma_commit(void) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/* Waits until at most N committed groups are in flight. */
template <int N> static __device__ __forceinline__ void rfi_wgmma_wait(void) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* A barrier in shared memory with separate arrive and wait. */
static __device__ __forceinline__ void rfi_mbarrier_init(uint32_t at, int threads) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(threads) : "memory");
}
static __device__ __forceinline__ void rfi_mbarrier_arrive(uint32_t at) {
  rfi_delay();
  asm volatile("{\n.reg .b64 t;\nmbarrier.arrive.shared.b64 t, [%0];\n}" ::"r"(at) : "memory");
}
static __device__ __forceinline__ void rfi_mbarrier_wait(uint32_t at, int parity) {
  rfi_delay();
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(at),
      "r"(parity)
      : "memory");
}

/* Changes the number of registers per thread; all threads of a warpgroup must call it. */
template <int N> static __device__ __forceinline__ void rfi_registers_more(void) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> static __device__ __forceinline__ void rfi_registers_fewer(void) {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* Four 8 x 8 matrices, whose rows (16 bytes) lanes 0-7, 8-15, 16-23 and 24-31 point at. */
static __device__ __forceinline__ void rfi_stmatrix(uint32_t to, const uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}

#define RFI_WGMMA_SUMS(c)                                                                                      \
  "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]),     \
      "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), \
      "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), \
      "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), \
      "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
#define RFI_WGMMA_SUM_NAMES                                                                               \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"

/* c (64 x 64) = or += a (64 x 16) b: a in registers, or rows of a panel; b rows of a panel, or, TRANSPOSED, columns. */
#define RFI_WGMMA(type, a, b, ...)                                                                             \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" b ", 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." type \
               " " RFI_WGMMA_SUM_NAMES ", " a                                                                  \
               : RFI_WGMMA_SUMS(c)                                                                             \
               : __VA_ARGS__, "r"((int)add), "n"((int)TRANSPOSED))

template <typename T, bool TRANSPOSED>
static __device__ __forceinline__ void rfi_wgmma(float (*c)[4], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (__is_same(T, rfi_bf16))
    RFI_WGMMA("bf16.bf16", "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}", "37", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b));
  else
    RFI_WGMMA("f16.f16", "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}", "37", "r"(a[0]), "r"(a[1]), "r"(a[2]),
              "r"(a[3]), "l"(b));
}
template <typename T, bool TRANSPOSED, bool COLUMNS = false> /* COLUMNS: a as columns of a panel too */
static __device__ __forceinline__ void rfi_wgmma(float (*c)[4], uint64_t a, uint64_t b, bool add) {
  if constexpr (__is_same(T, rfi_bf16))
    RFI_WGMMA("bf16.bf16", "%32, %33, p, 1, 1, %34, %36;\n}", "35", "l"(a), "l"(b), "n"((int)COLUMNS));
  else RFI_WGMMA("f16.f16", "%32, %33, p, 1, 1, %34, %36;\n}", "35", "l"(a), "l"(b), "n"((int)COLUMNS));
}

#endif
#endif
