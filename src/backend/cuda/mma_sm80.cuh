/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor cores of sm_80: mma.sync m16n8k16 of bf16 or f16 with sums in f32, tiles in shared memory
 * that ldmatrix reads without bank conflicts, and copies that a thread need not wait for.
 *
 * Fragments of a warp, with g = lane / 4 and c = 2 (lane % 4), two elements a register:
 *   A (16 x 16)  a0 = A[g][c, c+1]   a1 = A[g+8][c, c+1]   a2 = A[g][c+8, c+9]   a3 = A[g+8][c+8, c+9]
 *   B (16 x 8)   b0 = B[c, c+1][g]   b1 = B[c+8, c+9][g]
 *   C (16 x 8)   c0, c1 = C[g][c, c+1]   c2, c3 = C[g+8][c, c+1]       (f32)
 * Two adjacent C of the same rows are, rounded, one A: the result of one mma becomes the left operand of the next
 * without leaving the registers (pack).
 *
 * ldmatrix x4 reads four 8 x 8 matrices, whose rows (16 bytes) lanes 0-7, 8-15, 16-23 and 24-31 point at; lane
 * receives [g][c, c+1] of each, transposed [c, c+1][g].
 *
 * A tile has rows of D elements, 128 bytes or a multiple, and begins at a multiple of 1024 bytes. Chunk i (16
 * bytes) of row r lies at chunk i ^ (r % 8), so that eight rows' chunk i lie in different banks. Row r of every
 * pointer below has r % 8 = lane % 8, and pairs of chunks are even: stepping by 2 i chunks is an xor with 32 i.
 */
#ifndef RFI_MMA_SM80_CUH
#define RFI_MMA_SM80_CUH

#include "backend/cuda/kernels.cuh"

static __device__ __forceinline__ uint32_t rfi_shared_address(const void *x) {
  return (uint32_t)__cvta_generic_to_shared(x);
}

/* Copies 16 bytes, or writes zeros; then nothing is read, but `from` must still be a valid address. */
static __device__ __forceinline__ void rfi_copy16(uint32_t to, const void *from, bool present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void rfi_copy8(uint32_t to, const void *from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(present ? 8 : 0) : "memory");
}
static __device__ __forceinline__ void rfi_copy4(uint32_t to, const void *from, bool present) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(present ? 4 : 0) : "memory");
}
static __device__ __forceinline__ void rfi_copies_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Waits until at most N committed copies are in flight. */
template <int N> static __device__ __forceinline__ void rfi_copies_wait_but(void) {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
static __device__ __forceinline__ void rfi_copies_wait(void) { asm volatile("cp.async.wait_all;" ::: "memory"); }

static __device__ __forceinline__ void rfi_ldmatrix(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}
static __device__ __forceinline__ void rfi_ldmatrix_transposed(uint32_t (&x)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

template <typename T>
__device__ __forceinline__ void rfi_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void rfi_mma<rfi_bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void rfi_mma<rfi_f16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Rounds two adjacent values; the first is in the lower half. */
template <typename T> __device__ __forceinline__ uint32_t rfi_pair(float x, float y);
template <> __device__ __forceinline__ uint32_t rfi_pair<rfi_bf16>(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}
template <> __device__ __forceinline__ uint32_t rfi_pair<rfi_f16>(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

#endif
