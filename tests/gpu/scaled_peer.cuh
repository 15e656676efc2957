/* SPDX-License-Identifier: Apache-2.0
 *
 * cuBLASLt as the peer of scaled_check: FP8 GEMMs of the same recipe, timed alternately with ours, so that both run at
 * the device's power limit.
 */
#ifndef RFI_SCALED_PEER_CUH
#define RFI_SCALED_PEER_CUH

#include <algorithm>
#include <cublasLt.h>
#include <functional>
#include <vector>

#include "check.cuh"

static void peer_check(cublasStatus_t s, const char *what) {
  if (s == CUBLAS_STATUS_SUCCESS) return;
  printf("BAD: %s: status %d\n", what, (int)s);
  exit(1);
}
#define LT(call) peer_check(call, #call)

enum peer_scales { PEER_TENSOR, PEER_BLOCK, PEER_LINES }; /* of b; BLOCK and LINES: 1 x 128 for a */

/* y (M, N) = a (M, K) b (N, K)T, row-major: cuBLASLt's column-major yT = b aT. */
struct peer {
  cublasLtHandle_t lt;
  cublasLtMatmulDesc_t desc;
  cublasLtMatrixLayout_t a, b, y;
  cublasLtMatmulHeuristicResult_t found;
  char *workspace;
  enum { WORKSPACE = 32 << 20 };

  peer(int64_t M, int64_t N, int64_t K, cudaDataType_t a_type, cudaDataType_t y_type, peer_scales scales, bool fast,
       const void *a_scale, const void *b_scale) {
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const int8_t fast_sums = fast;
    const int32_t line = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                  mode = scales == PEER_BLOCK ? (int32_t)CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F : line;
    const size_t bytes = WORKSPACE;
    cublasLtMatmulPreference_t prefer;
    int n = 0;
    CUDA(cudaMalloc((void **)&workspace, WORKSPACE));
    LT(cublasLtCreate(&lt));
    LT(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
#define SET(name, value) LT(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_##name, &value, sizeof value))
    SET(TRANSA, transposed);
    SET(FAST_ACCUM, fast_sums);
    SET(A_SCALE_POINTER, b_scale);
    SET(B_SCALE_POINTER, a_scale);
    if (scales != PEER_TENSOR) {
      SET(A_SCALE_MODE, mode);
      SET(B_SCALE_MODE, line);
    }
#undef SET
    LT(cublasLtMatrixLayoutCreate(&b, CUDA_R_8F_E4M3, K, N, K));
    LT(cublasLtMatrixLayoutCreate(&a, a_type, K, M, K));
    LT(cublasLtMatrixLayoutCreate(&y, y_type, N, M, N));
    LT(cublasLtMatmulPreferenceCreate(&prefer));
    LT(cublasLtMatmulPreferenceSetAttribute(prefer, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    LT(cublasLtMatmulAlgoGetHeuristic(lt, desc, b, a, y, y, prefer, 1, &found, &n));
    cublasLtMatmulPreferenceDestroy(prefer);
  }
  peer(const peer &) = delete;
  ~peer() {
    cublasLtMatrixLayoutDestroy(a), cublasLtMatrixLayoutDestroy(b), cublasLtMatrixLayoutDestroy(y);
    cublasLtMatmulDescDestroy(desc);
    cublasLtDestroy(lt);
    cudaFree(workspace);
  }
  void run(const void *a_data, const void *b_data, void *to) const {
    const float one = 1, zero = 0;
    LT(cublasLtMatmul(lt, desc, &one, b_data, b, a_data, a, &zero, to, y, to, y, &found.algo, workspace, WORKSPACE, 0));
  }
};

/* Median times of two functions in ms, run alternately for `turn` ms each; the first rounds heat the device. */
static void race(const std::function<void()> (&run)[2], double (&ms)[2]) {
  enum { HEAT = 2, TURNS = 9 };
  const float turn = 20;
  cudaEvent_t begin, end;
  std::vector<float> times[2];
  int runs[2] = {1, 1};
  CUDA(cudaEventCreate(&begin)), CUDA(cudaEventCreate(&end));
  const auto time = [&](int i) {
    float t;
    CUDA(cudaEventRecord(begin));
    for (int r = 0; r < runs[i]; r++) run[i]();
    CUDA(cudaEventRecord(end)), CUDA(cudaEventSynchronize(end)), CUDA(cudaEventElapsedTime(&t, begin, end));
    return t / (float)runs[i];
  };
  for (int i = 0; i < 2; i++) time(i), runs[i] = std::max(1, (int)(turn / time(i)));
  for (int k = -HEAT; k < TURNS; k++)
    for (int i = 0; i < 2; i++) {
      const float t = time(i);
      if (k >= 0) times[i].push_back(t);
    }
  for (int i = 0; i < 2; i++) std::sort(times[i].begin(), times[i].end()), ms[i] = times[i][TURNS / 2];
  cudaEventDestroy(begin), cudaEventDestroy(end);
}

#endif
