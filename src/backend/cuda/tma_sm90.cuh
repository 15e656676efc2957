/* SPDX-License-Identifier: Apache-2.0
 *
 * TMA copies of sm_90 with their barriers, and wgmma over 128, 192 and 256 columns.
 *
 * TMA and wgmma use the same panels in shared memory: 64 rows of 128 bytes, with the 128-byte swizzle, aligned to 1024
 * bytes. As in global memory, the rows of a panel are either 64 steps of the reduction, for 64 columns of the result,
 * or 64 rows of the result, for 64 steps of the reduction. A template argument of wgmma selects one of the two.
 */
#ifndef RFI_TMA_SM90_CUH
#define RFI_TMA_SM90_CUH

#include <cuda.h>

#include "backend/cuda/wgmma_sm90.cuh"

enum { RFI_PANEL = 64 * 128 };

/* ---- barriers in shared memory ---- */

static __device__ __forceinline__ void rfi_barrier_init(uint32_t at, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
static __device__ __forceinline__ void rfi_barrier_expect(uint32_t at, uint32_t bytes) {
  rfi_delay();
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void rfi_barrier_wait(uint32_t at, uint32_t parity) {
  rfi_delay();
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}" ::"r"(at),
               "r"(parity)
               : "memory");
}
/* Arrives at the same barrier in block `rank` of the cluster. It reports wgmma reads that were waited for. There are no
 * writes to release, and a release at cluster scope would wait for all outstanding writes. */
static __device__ __forceinline__ void rfi_barrier_arrive_at(uint32_t at, uint32_t rank) {
  rfi_delay();
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
               "}" ::"r"(at),
               "r"(rank)
               : "memory");
}
/* The same with release semantics, to order a load of this thread, for which a plain arrival does not wait. */
static __device__ __forceinline__ void rfi_barrier_release_at(uint32_t at, uint32_t rank) {
  rfi_delay();
  asm volatile("{\n"
               ".reg .b32 there;\n"
               "mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n"
               "}" ::"r"(at),
               "r"(rank)
               : "memory");
}
static __device__ __forceinline__ void rfi_barrier_arrive(uint32_t at) {
  rfi_delay();
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
/* Stores 4 bytes to the same address in block `rank` of the cluster, and counts the bytes at the barrier there. */
static __device__ __forceinline__ void rfi_send(uint32_t to, uint32_t barrier, uint32_t rank, int x) {
  rfi_delay();
  asm volatile("{\n"
               ".reg .b32 there, done;\n"
               "mapa.shared::cluster.u32 there, %0, %2;\n"
               "mapa.shared::cluster.u32 done, %1, %2;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [done];\n"
               "}" ::"r"(to),
               "r"(barrier), "r"(rank), "r"(x)
               : "memory");
}
static __device__ __forceinline__ void rfi_cluster_sync(void) {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
static __device__ __forceinline__ uint32_t rfi_cluster_rank(void) {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/* Named barrier `id`: waits for `threads` threads. */
static __device__ __forceinline__ void rfi_named_sync(int id, int threads) {
  rfi_delay();
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* ---- copies ---- */

static __device__ __forceinline__ void rfi_tma_load(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x, int y,
                                                    int z) {
  rfi_delay();
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/* Multicast into both blocks of a cluster; each counts the bytes at its own barrier. */
static __device__ __forceinline__ void rfi_tma_load_both(uint32_t to, const CUtensorMap *map, uint32_t barrier, int x,
                                                         int y, int z) {
  rfi_delay();
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
               "l"(map), "r"(barrier), "h"((uint16_t)3), "r"(x), "r"(y), "r"(z)
               : "memory");
}
/* The instruction with a map, shared memory and coordinates, if `go`. */
#define RFI_TMA_IF(instruction)                                  \
  asm volatile("{\n"                                             \
               ".reg .pred go;\n"                                \
               "setp.ne.b32 go, %5, 0;\n"                        \
               "@go " instruction " [%0, {%2, %3, %4}], [%1];\n" \
               "}" ::"l"(map),                                   \
               "r"(from), "r"(x), "r"(y), "r"(z), "r"((int)go)   \
               : "memory")
/* Stores if `go`. */
static __device__ __forceinline__ void rfi_tma_store(const CUtensorMap *map, uint32_t from, int x, int y, int z,
                                                     bool go = true) {
  RFI_TMA_IF("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group");
}
/* Adds to f32 elements in the cache, if `go`. Each addition rounds once and flushes subnormal operands and results to
 * zero. The result is deterministic if each element is added to at most once. */
static __device__ __forceinline__ void rfi_tma_add(const CUtensorMap *map, uint32_t from, int x, int y, int z,
                                                   bool go = true) {
  RFI_TMA_IF("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group");
}
#undef RFI_TMA_IF
/* Prefetches into L2. */
static __device__ __forceinline__ void rfi_tma_fetch(const CUtensorMap *map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z)
               : "memory");
}
static __device__ __forceinline__ void rfi_tma_commit(void) {
  rfi_delay();
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Waits until all but the last N committed stores have read shared memory. */
template <int N> static __device__ __forceinline__ void rfi_tma_wait_read(void) {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void rfi_tma_wait_all(void) {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/* ---- wgmma ---- */

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Descriptor of panels from `at` on; `step`: bytes from one column of panels to the next. */
static __device__ __forceinline__ uint64_t rfi_panels(uint32_t at, uint32_t step) {
  return (uint64_t)((at & 0x3ffffu) >> 4) | (uint64_t)(step >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

#define RFI_SUMS1(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define RFI_SUMS4(c, n) RFI_SUMS1(c, n), RFI_SUMS1(c, n + 1), RFI_SUMS1(c, n + 2), RFI_SUMS1(c, n + 3)
#define RFI_SUMS16(c, n) RFI_SUMS4(c, n), RFI_SUMS4(c, n + 4), RFI_SUMS4(c, n + 8), RFI_SUMS4(c, n + 12)
#define RFI_SUM_NAMES256                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "  \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "  \
  "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "  \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}"
#define RFI_SUM_NAMES128                                                                                            \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "  \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define RFI_WGMMA128(type, a, b, ...)                                                                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" b ", 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." type \
               " " RFI_SUM_NAMES128 ", " a                                                                      \
               : RFI_SUMS16(c, 0)                                                                               \
               : __VA_ARGS__, "r"((int)add), "n"((int)COLUMNS))

/* c (64 x 128) = or += a (64 x 16) b (16 x 128): a in registers, or rows of a panel; COLUMNS: of b's panels. */
template <typename T, bool COLUMNS>
static __device__ __forceinline__ void rfi_wgmma128(float (*c)[4], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (__is_same(T, rfi_bf16))
    RFI_WGMMA128("bf16.bf16", "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}", "69", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                 "r"(a[3]), "l"(b));
  else
    RFI_WGMMA128("f16.f16", "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}", "69", "r"(a[0]), "r"(a[1]), "r"(a[2]),
                 "r"(a[3]), "l"(b));
}
template <typename T, bool COLUMNS>
static __device__ __forceinline__ void rfi_wgmma128(float (*c)[4], uint64_t a, uint64_t b, bool add) {
  if constexpr (__is_same(T, rfi_bf16))
    RFI_WGMMA128("bf16.bf16", "%64, %65, p, 1, 1, 0, %67;\n}", "66", "l"(a), "l"(b));
  else RFI_WGMMA128("f16.f16", "%64, %65, p, 1, 1, 0, %67;\n}", "66", "l"(a), "l"(b));
}

#define RFI_WGMMA256(type)                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type " " RFI_SUM_NAMES256 \
               ", %128, %129, 1, 1, 1, %130, %131;"                                     \
               : RFI_SUMS16(c, 0), RFI_SUMS16(c, 16)                                    \
               : "l"(a), "l"(b), "n"((int)A_COLUMNS), "n"((int)B_COLUMNS))

/* c (64 x 256) += a (64 x 16) b (16 x 256); COLUMNS: the rows of the panels lie along the reduction. */
template <typename T, bool A_COLUMNS, bool B_COLUMNS>
static __device__ __forceinline__ void rfi_wgmma256(float (&c)[32][4], uint64_t a, uint64_t b) {
  if constexpr (__is_same(T, rfi_bf16)) RFI_WGMMA256("bf16.bf16");
  else RFI_WGMMA256("f16.f16");
}

#define RFI_WGMMA256_FP8(type)                                                                                   \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k32.f32." type " " RFI_SUM_NAMES256 ", %128, %129, 1, 1, 1;" \
               : RFI_SUMS16(c, 0), RFI_SUMS16(c, 16)                                                             \
               : "l"(a), "l"(b))
#define RFI_SUM_NAMES192                                                                                      \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "     \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, " \
  "%43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define RFI_WGMMA192_FP8(type)                                                                               \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %98, 0;\nwgmma.mma_async.sync.aligned.m64n192k32.f32." type \
               " " RFI_SUM_NAMES192 ", %96, %97, p, 1, 1;\n}"                                                \
               : RFI_SUMS16(c, 0), RFI_SUMS4(c, 16), RFI_SUMS4(c, 20)                                        \
               : "l"(a), "l"(b), "r"((int)add))

/* The same in FP8: a (64 x 32) in E4M3 or E5M2, b in E4M3, both rows of panels. The accumulator has fewer bits than
 * f32. */
template <bool E5M2>
static __device__ __forceinline__ void rfi_wgmma256_fp8(float (&c)[32][4], uint64_t a, uint64_t b) {
  if constexpr (E5M2) RFI_WGMMA256_FP8("e5m2.e4m3");
  else RFI_WGMMA256_FP8("e4m3.e4m3");
}
template <bool E5M2>
static __device__ __forceinline__ void rfi_wgmma192_fp8(float (&c)[24][4], uint64_t a, uint64_t b, bool add) {
  if constexpr (E5M2) RFI_WGMMA192_FP8("e5m2.e4m3");
  else RFI_WGMMA192_FP8("e4m3.e4m3");
}

#endif

/* ---- on the host ---- */

typedef CUresult rfi_encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                               const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                               CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Tensor map of a matrix, or of several, with panels of so many rows; strides in elements. */
static inline rfr_status rfi_tma_describe(CUtensorMap *map, const void *data, rfr_dtype dtype, int64_t wide,
                                          int64_t high, int64_t depth, int64_t row, int64_t group, int rows) {
  void *encode = NULL;
  cudaDriverEntryPointQueryResult found;
  const rfr_status s = rfi_cuda_check(
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
      "cuTensorMapEncodeTiled");
  if (s != RFR_OK) return s;
  const cuuint64_t shape[3] = {(cuuint64_t)wide, (cuuint64_t)high, (cuuint64_t)depth};
  const cuuint32_t size = (cuuint32_t)rfi_element_bytes(dtype);
  const cuuint64_t pitch[2] = {(cuuint64_t)row * size, (cuuint64_t)group * size};
  const cuuint32_t box[3] = {128 / size, (cuuint32_t)rows, 1}, every[3] = {1, 1, 1};
  const CUtensorMapDataType type = size == 1           ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                   : dtype == RFR_F32  ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == RFR_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                       : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult r = ((rfi_encode_fn *)encode)(map, type, 3, (void *)data, shape, pitch, box, every,
                                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return r == CUDA_SUCCESS ? RFR_OK : rfi_cuda_check(cudaErrorInvalidValue, "cuTensorMapEncodeTiled");
}

#endif
