/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs by cuBLASLt without a GPU, over fakes of CUDA and cuBLASLt: a GEMM that fails in a dead context
 * is reported as backend.dead, whichever call fails first; a refused GEMM is reported with its shapes.
 */
#include "backend/cuda/cuda_error.c"
#include "backend/cuda/lt.c"

#include "support/context.h"

static cudaError_t context; /* the error that the fake runtime returns */
static cublasStatus_t library;
static int cleared;

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  (void)stream;
  return context;
}
cudaError_t cudaGetLastError(void) {
  cleared++;
  return context;
}
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorIllegalAddress ? "an address" : "another"; }
const char *cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }

rfr_status rfi_cuda_scale_layout(const float *from, int64_t lines, int64_t blocks, bool each_line, float *to,
                                 cudaStream_t stream) {
  (void)from, (void)lines, (void)blocks, (void)each_line, (void)to, (void)stream;
  return RFR_OK;
}

static cublasStatus_t multiply(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                               cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                               const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                               const cublasLtMatmulAlgo_t *algo, void *workspace, size_t bytes, cudaStream_t stream) {
  (void)handle, (void)desc, (void)alpha, (void)A, (void)a, (void)B, (void)b, (void)beta, (void)C, (void)c;
  (void)D, (void)d, (void)algo, (void)workspace, (void)bytes, (void)stream;
  return library;
}

static rfr_status call(void) {
  static const rfi_cuda_host host = {.fail = rfi_fail};
  rfi_lt lt = {.core = &host, .f.cublasLtMatmul = multiply};
  gemm p = {.lt = &lt, .key = {.a = {.rows = 7}, .b = {.rows = 5}, .bias = -1}};
  const rfr_arg in[2] = {{0}}, out[1] = {{0}};
  rfi_cuda_errors_go_to(rfi_fail);
  return run(&(rfr_call){.n_in = 2, .n_out = 1, .in = in, .out = out, .library = &p});
}

static void is(rfr_status s, const char *slug, const char *says) {
  assert_int_not_equal(s, RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, says)) fail_msg("\"%s\" does not say %s", rfr_last_error()->message, says);
}

static void test_good(void **state) {
  (void)state;
  context = cudaErrorIllegalAddress; /* must not be queried */
  library = CUBLAS_STATUS_SUCCESS;
  OK(call());
}

static void test_dead(void **state) {
  (void)state;
  context = cudaErrorIllegalAddress;
  library = CUBLAS_STATUS_EXECUTION_FAILED;
  is(call(), "backend.dead", "multiplying by cuBLASLt: the GPU's context is dead: an address");
  library = CUBLAS_STATUS_INTERNAL_ERROR;
  is(call(), "backend.dead", "the GPU's context is dead");
}

/* The error of the query must not appear in the next call. */
static void test_refused(void **state) {
  static const cudaError_t answers[] = {cudaSuccess, cudaErrorNotReady, cudaErrorStreamCaptureUnsupported};
  (void)state;
  library = CUBLAS_STATUS_NOT_SUPPORTED;
  for (int i = 0; i < 3; i++) {
    context = answers[i];
    cleared = 0;
    is(call(), "cuda", "cuBLASLt refused a GEMM, status 15: 7 x 0, rows of 0, and 5 x 0");
    assert_int_equal(cleared, 1);
  }
}

static cublasStatus_t custom_option(const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t attr,
                                    void *to, size_t size, size_t *written) {
  if (attr != CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION || size != sizeof(uint32_t)) return CUBLAS_STATUS_INVALID_VALUE;
  *(uint32_t *)to = (uint32_t)algo->data[0];
  *written = size;
  return CUBLAS_STATUS_SUCCESS;
}

/* With the gradient of GELU an algorithm must use all multiprocessors; otherwise it must have room for two tiles. In 16
 * bits its warpgroups must not share a tile. */
static void test_preferred(void **state) {
  static const struct {
    int64_t gelu_ld;
    float waves;
    cublasStatus_t state;
    bool preferred;
    int32_t type;
    uint32_t option;
  } rows[] = {{3072, 0.91f, CUBLAS_STATUS_SUCCESS, false},
              {3072, 1.0f, CUBLAS_STATUS_SUCCESS, true},
              {3072, 1.0f, CUBLAS_STATUS_NOT_SUPPORTED, false},
              {0, 1.0f, CUBLAS_STATUS_SUCCESS, false},
              {0, 74.5f, CUBLAS_STATUS_SUCCESS, true, CUDA_R_32F, 4},
              {0, 62.0f, CUBLAS_STATUS_SUCCESS, false},
              {0, 93.1f, CUBLAS_STATUS_SUCCESS, false},
              {0, 93.1f, CUBLAS_STATUS_SUCCESS, true, CUDA_R_16BF, 1},
              {0, 93.1f, CUBLAS_STATUS_SUCCESS, false, CUDA_R_16BF, 4},
              {0, 74.5f, CUBLAS_STATUS_SUCCESS, true, CUDA_R_16F, 2},
              {0, 74.5f, CUBLAS_STATUS_SUCCESS, false, CUDA_R_16F, 5},
              {0, 124.1f, CUBLAS_STATUS_SUCCESS, false, CUDA_R_16BF, 0}};
  static const rfi_cuda_info info = {.sms = 132};
  rfi_lt lt = {.info = &info, .f.cublasLtMatmulAlgoConfigGetAttribute = custom_option};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const gemm p = {
        .lt = &lt,
        .key = {
            .batch = 1, .a = {.type = rows[i].type}, .d = {.rows = 3072, .cols = 65536}, .gelu_ld = rows[i].gelu_ld}};
    const cublasLtMatmulHeuristicResult_t x = {
        .algo.data[0] = rows[i].option, .wavesCount = rows[i].waves, .state = rows[i].state};
    assert_int_equal(is_preferred(&p, &x), rows[i].preferred);
  }
}

/* FP8 sums twice as many elements in the same time; a backward with promoted accumulation has other kernels. */
static void test_stores(void **state) {
  static const struct {
    int32_t scaled, fast;
    int64_t sum;
    bool much;
  } rows[] = {{0, 0, 4096, true}, {0, 0, 4112, false}, {1, 1, 4112, true},
              {1, 1, 8192, true}, {1, 1, 8208, false}, {1, 0, 2048, false}};
  (void)state;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const key k = {
        .a = {.rows = rows[i].sum, .cols = 64, .transposed = 1}, .scaled = rows[i].scaled, .fast = rows[i].fast};
    assert_int_equal(stores_much(&k), rows[i].much);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_good), rft_context_test(test_dead),
                                     rft_context_test(test_refused), rft_context_test(test_preferred),
                                     rft_context_test(test_stores)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
