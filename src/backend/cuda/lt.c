/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs by cuBLASLt.
 *
 * Our matrices are row-major and cuBLASLt's column-major, so each GEMM is computed transposed: y^T = op(b)^T op(a)^T,
 * where a row-major matrix read as a column-major one is already its transpose. The algorithm, which decides the bits,
 * is among the first that the library's heuristic proposes, chosen by shapes, types and strides, for 16-byte alignment
 * and a workspace of one of two sizes in the plan. Algorithms are measured only if the compile requests it (lt_tune.c).
 */
#include "backend/cuda/lt.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "backend/cuda/cuda.h"
#include "backend/cuda/lt_gemm.h"
#include "backend/cuda/scale_layout.h"
#include "ops/gemm.h"
#include "ops/op_index.h"

typedef rfi_lt_functions functions;
typedef rfi_lt_matrix matrix;
typedef rfi_lt_key key;
typedef rfi_lt_gemm gemm;

/* ---- loading ---- */

static void *load(void) {
  static const char *const names[] = {"libcublasLt.so.13", "/usr/local/cuda/lib64/libcublasLt.so.13"};
  void *object =
      dlopen(names[0], RTLD_NOW | RTLD_NOLOAD | RTLD_LOCAL); /* the copy that the program has already loaded, if any */
  for (size_t i = 0; !object && i < sizeof names / sizeof *names; i++)
    object = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  return object;
}

static rfr_status load_functions(const rfi_cuda_host *core, functions *f) {
  void *object = load();
  if (!object) {
    const char *why = dlerror();
    return core->fail(RFI_E_BACKEND_MISSING, "libcublasLt.so.13 cannot be loaded: %s", why ? why : "not found");
  }
  const struct {
    const char *name;
    void *slot;
  } rows[] = {
#define ROW(name) {#name, &f->name},
      RFI_LT_FUNCTIONS(ROW)
#undef ROW
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    void *symbol = dlsym(object, rows[i].name);
    if (!symbol) return core->fail(RFI_E_BACKEND_MISSING, "libcublasLt.so.13 has no %s", rows[i].name);
    memcpy(rows[i].slot, &symbol, sizeof symbol);
  }
  return RFR_OK;
}

rfr_status rfi_lt_open(const rfi_cuda_host *core, rfr_ctx *ctx, const rfi_cuda_info *info, rfi_lt **out) {
  rfi_lt *lt;
  rfr_status s = core->alloc(ctx, sizeof *lt, (void **)&lt);
  *out = NULL;
  if (s != RFR_OK) return s;
  lt->core = core;
  lt->ctx = ctx;
  lt->info = info;
  s = load_functions(core, &lt->f);
  if (s == RFR_OK && lt->f.cublasLtCreate(&lt->handle) != CUBLAS_STATUS_SUCCESS)
    s = core->fail(RFI_E_CUDA, "cuBLASLt does not start");
  if (s == RFR_OK) *out = lt;
  else core->free(ctx, lt);
  return s;
}

static void gemm_destroy(gemm *p) {
  const functions *f = &p->lt->f;
  if (p->desc) f->cublasLtMatmulDescDestroy(p->desc);
  if (p->A) f->cublasLtMatrixLayoutDestroy(p->A);
  if (p->B) f->cublasLtMatrixLayoutDestroy(p->B);
  if (p->D) f->cublasLtMatrixLayoutDestroy(p->D);
  p->lt->core->free(p->lt->ctx, p);
}

void rfi_lt_close(rfi_lt *lt) {
  if (!lt) return;
  while (lt->gemms) {
    gemm *p = lt->gemms;
    lt->gemms = p->next;
    gemm_destroy(p);
  }
  lt->f.cublasLtDestroy(lt->handle);
  lt->core->free(lt->ctx, lt);
}

bool rfi_lt_describe(const rfi_cuda_host *core, char *text, size_t size) {
  functions f;
  if (load_functions(core, &f) != RFR_OK) {
    snprintf(text, size, "no cuBLASLt 13");
    return false;
  }
  const size_t v = f.cublasLtGetVersion();
  snprintf(text, size, "cuBLASLt %zu.%zu.%zu", v / 10000, v / 100 % 100, v % 100);
  return true;
}

/* ---- GEMMs ---- */

static int32_t type_of(rfr_dtype t) {
  switch (t) {
    case RFR_F32: return CUDA_R_32F;
    case RFR_BF16: return CUDA_R_16BF;
    case RFR_F16: return CUDA_R_16F;
    case RFR_E4M3: return CUDA_R_8F_E4M3;
    case RFR_E5M2: return CUDA_R_8F_E5M2;
    default: return -1;
  }
}

static bool is_fp8(rfr_dtype t) { return t == RFR_E4M3 || t == RFR_E5M2; }

static int64_t size_of(const rfr_arg *x) { return x->type.dtype == RFR_F32 ? 4 : is_fp8(x->type.dtype) ? 1 : 2; }

static bool is_aligned(const rfr_arg *x, int64_t ld, int64_t batch_stride) {
  return (uintptr_t)x->data % 16 == 0 && ld * size_of(x) % 16 == 0 && batch_stride * size_of(x) % 16 == 0;
}

/* Describes a row-major operand as a column-major matrix; false: cuBLASLt does not support its strides. */
static bool see(const rfr_arg *x, bool transposed, matrix *m) {
  const int r = x->type.rank;
  *m = (matrix){.rows = x->type.shape[r - 1],
                .cols = x->type.shape[r - 2],
                .ld = x->type.shape[r - 2] == 1 ? x->type.shape[r - 1] : x->stride[r - 2],
                .batch_stride = r == 3 && x->type.shape[0] > 1 ? x->stride[0] : 0,
                .type = type_of(x->type.dtype),
                .transposed = transposed};
  if (m->cols == 1) m->ld = (m->ld + 7) / 8 * 8; /* with one column the leading dimension is unused */
  if (m->rows > INT32_MAX || m->cols > INT32_MAX || m->ld > INT32_MAX) return false;
  return m->type >= 0 && m->ld >= m->rows && (x->type.shape[r - 1] == 1 || x->stride[r - 1] == 1) &&
         is_aligned(x, m->ld, m->batch_stride);
}

/* cuBLASLt's GELU is less accurate than f32. */
static bool see_gelu(const rfr_arg *x, key *k) {
  k->gelu_ld = x->stride[0];
  return k->d.type == k->a.type && k->d.type != CUDA_R_32F && k->gelu_ld >= k->d.rows && is_aligned(x, k->gelu_ld, 0);
}

/* Fills k; false: cuBLASLt does not support the GEMM. */
static bool describe(const rfr_call *call, const rfi_gemm_desc *g, key *k) {
  memset(k, 0, sizeof *k);
  k->batch = g->batch;
  k->bias = g->bias >= 0 ? type_of(call->in[g->bias].type.dtype) : -1;
  k->accumulate = g->acc >= 0;
  if (g->varies != RFI_GEMM_FIXED || !see(&call->in[g->b], g->tb, &k->a) || !see(&call->in[g->a], g->ta, &k->b) ||
      !see(&call->out[0], false, &k->d))
    return false;
  if (k->batch <= 0 || k->batch > INT32_MAX || k->d.rows <= 0 || k->d.cols <= 0 || k->a.rows <= 0 || k->a.cols <= 0)
    return false;
  if (k->a.type != k->b.type || (k->a.type == CUDA_R_32F && k->d.type != CUDA_R_32F)) return false;
  if (k->d.type != CUDA_R_32F && k->d.type != k->a.type) return false;
  return (k->bias < 0 || k->bias == k->d.type) && (g->gelu_x < 0 || see_gelu(&call->in[g->gelu_x], k));
}

enum { SCALE_BLOCK = 128 }; /* elements per scale in block scaling */

static bool is_each_line(int32_t mode) { return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F; }

/* Finds out whether operand `scale` has one scale per tensor, or one per block: 128 elements of a line, or 128 x 128
 * elements. Hopper has kernels for these if all blocks are full. False: another layout. */
static bool see_scale(const rfr_call *call, const rfr_arg *x, int scale, int major, int32_t *mode) {
  const rfr_type *s = &call->in[scale].type, *q = &x->type;
  *mode = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  if (s->rank == 1) return true;
  *mode = s->shape[0] == q->shape[0] ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                     : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  return s->dtype == RFR_F32 && major == 9 && q->shape[1] % SCALE_BLOCK == 0;
}

/* The same for matmul_scaled. FP8 tensor cores need f32 scales, dimensions that are multiples of 16, and at most one
 * E5M2 operand. With an f32 result, cuBLASLt needs a bf16 bias. */
static bool describe_scaled(const rfr_call *call, int major, bool fast, key *k) {
  const rfr_arg *a = &call->in[RFI_IN_matmul_scaled_a], *b = &call->in[RFI_IN_matmul_scaled_b], *y = &call->out[0];
  const rfr_arg *bias = call->n_in > RFI_IN_matmul_scaled_bias && call->in[RFI_IN_matmul_scaled_bias].data
                            ? &call->in[RFI_IN_matmul_scaled_bias]
                            : NULL;
  memset(k, 0, sizeof *k);
  k->batch = 1;
  k->bias = bias ? type_of(bias->type.dtype) : -1;
  k->accumulate = call->n_in > RFI_IN_matmul_scaled_acc && call->in[RFI_IN_matmul_scaled_acc].data;
  k->scaled = 1;
  k->fast = fast;
  if (!is_fp8(a->type.dtype) || !is_fp8(b->type.dtype)) return false;
  if (a->type.dtype == RFR_E5M2 && b->type.dtype == RFR_E5M2) return false;
  for (int i = 0; i < 2; i++)
    if (call->in[RFI_IN_matmul_scaled_global_a + i].data) return false;
  if (!see_scale(call, b, RFI_IN_matmul_scaled_scale_b, major, &k->scale_a)) return false;
  if (!see_scale(call, a, RFI_IN_matmul_scaled_scale_a, major, &k->scale_b)) return false;
  /* block scaling: both operands have block scales, and at least one of them has scales per line */
  if (k->scale_a || k->scale_b) {
    if (!k->scale_a || !k->scale_b || (k->scale_a == k->scale_b && !is_each_line(k->scale_a))) return false;
    k->fast = false;
  }
  if (!see(b, true, &k->a) || !see(a, false, &k->b) || !see(y, false, &k->d)) return false;
  if (k->a.rows <= 0 || k->a.cols <= 0 || k->b.cols <= 0) return false;
  if (k->a.rows % 16 != 0 || k->a.cols % 16 != 0 || k->b.cols % 16 != 0) return false;
  return !bias || (k->bias == k->d.type && k->d.type != CUDA_R_32F);
}

static bool make_layout(const functions *f, const matrix *m, int64_t batch, cublasLtMatrixLayout_t *out) {
  const int32_t n = (int32_t)batch;
  if (f->cublasLtMatrixLayoutCreate(out, (cudaDataType_t)m->type, (uint64_t)m->rows, (uint64_t)m->cols, m->ld) !=
      CUBLAS_STATUS_SUCCESS)
    return false;
  if (batch == 1) return true;
  return f->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &n, sizeof n) ==
             CUBLAS_STATUS_SUCCESS &&
         f->cublasLtMatrixLayoutSetAttribute(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &m->batch_stride,
                                             sizeof m->batch_stride) == CUBLAS_STATUS_SUCCESS;
}

static bool make_desc(const functions *f, const key *k, cublasLtMatmulDesc_t *out) {
  const cublasOperation_t a = k->a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                          b = k->b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasLtEpilogue_t epilogue = k->gelu_ld > 0 ? CUBLASLT_EPILOGUE_DGELU
                                      : k->bias >= 0 ? CUBLASLT_EPILOGUE_BIAS
                                                     : CUBLASLT_EPILOGUE_DEFAULT;
  const int8_t fast = (int8_t)k->fast;
#define SET(name, value) \
  (f->cublasLtMatmulDescSetAttribute(*out, CUBLASLT_MATMUL_DESC_##name, &value, sizeof value) == CUBLAS_STATUS_SUCCESS)
  if (f->cublasLtMatmulDescCreate(out, CUBLAS_COMPUTE_32F, CUDA_R_32F) != CUBLAS_STATUS_SUCCESS) return false;
  if (!SET(TRANSA, a) || !SET(TRANSB, b)) return false;
  if (k->scaled && !SET(FAST_ACCUM, fast)) return false;
  /* with block scales, the library proposes algorithms only if the scale pointers are set; each call sets its own */
  const void *const somewhere = (const void *)(uintptr_t)256;
  if (k->scale_a && (!SET(A_SCALE_MODE, k->scale_a) || !SET(B_SCALE_MODE, k->scale_b))) return false;
  if (k->scale_a && (!SET(A_SCALE_POINTER, somewhere) || !SET(B_SCALE_POINTER, somewhere))) return false;
  if (!SET(EPILOGUE, epilogue) || (k->bias >= 0 && !SET(BIAS_DATA_TYPE, k->bias))) return false;
  return k->gelu_ld == 0 || (SET(EPILOGUE_AUX_LD, k->gelu_ld) && SET(EPILOGUE_AUX_POINTER, somewhere));
#undef SET
}

/* Split-K needs a workspace; it is faster for long sums with few results. */
size_t rfi_lt_workspace(const key *k) {
  enum { SMALL_FLOPS = 1 << 29, SHORT_SUM = 2048 };
  const int64_t K = k->a.transposed ? k->a.rows : k->a.cols;
  const double flops = 2.0 * (double)k->batch * (double)k->d.rows * (double)k->d.cols * (double)K;
  return K <= SHORT_SUM && flops <= SMALL_FLOPS ? 0 : RFI_LT_WORKSPACE;
}

size_t rfi_lt_scale_bytes(const matrix *m, int32_t mode) {
  const int64_t blocks = m->rows / SCALE_BLOCK, lines = (m->cols + SCALE_BLOCK - 1) / SCALE_BLOCK;
  if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return sizeof(float);
  return (size_t)(is_each_line(mode) ? m->cols * blocks : lines * ((blocks + 3) / 4 * 4)) * sizeof(float);
}

/* Bytes of the workspace for a matrix's scales; 0: the call's scales are already in cuBLASLt's layout. */
static size_t scale_space(const matrix *m, int32_t mode) {
  if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return 0;
  if (!is_each_line(mode) && m->rows / SCALE_BLOCK % 4 == 0) return 0;
  return (rfi_lt_scale_bytes(m, mode) + 255) / 256 * 256;
}

int rfi_lt_heuristics(const gemm *p, uint32_t reductions, cublasLtMatmulHeuristicResult_t *out, int most) {
  const functions *f = &p->lt->f;
  const size_t workspace = rfi_lt_workspace(&p->key);
  const uint32_t alignment = 16;
  cublasLtMatmulPreference_t pref = NULL;
  int n = 0;
  if (f->cublasLtMatmulPreferenceCreate(&pref) != CUBLAS_STATUS_SUCCESS) return 0;
#define PREFER(name, value) \
  f->cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_##name, &value, sizeof value)
  PREFER(MAX_WORKSPACE_BYTES, workspace);
  PREFER(REDUCTION_SCHEME_MASK, reductions);
  PREFER(MIN_ALIGNMENT_A_BYTES, alignment);
  PREFER(MIN_ALIGNMENT_B_BYTES, alignment);
  PREFER(MIN_ALIGNMENT_C_BYTES, alignment);
  PREFER(MIN_ALIGNMENT_D_BYTES, alignment);
#undef PREFER
  const cublasStatus_t s =
      f->cublasLtMatmulAlgoGetHeuristic(p->lt->handle, p->desc, p->A, p->B, p->D, p->D, pref, most, out, &n);
  f->cublasLtMatmulPreferenceDestroy(pref);
  return s == CUBLAS_STATUS_SUCCESS ? n : 0;
}

static bool is_16_bits(const key *k) { return k->a.type == CUDA_R_16BF || k->a.type == CUDA_R_16F; }

/* Whether all warpgroups of a block compute one tile, so that no GEMM runs while they store. A bit of cuBLASLt 13.1's
 * custom option seems to mean this; it is undocumented and inferred from times. With a bias, kernels of 128 x 160 have
 * the bit and those of 128 x 128 do not: GPT-2 124M's GEMMs with a bias take 4 to 15 % less time with the latter. */
static bool shares_tile(const gemm *p, const cublasLtMatmulAlgo_t *algo) {
  enum { SHARED = 4 };
  uint32_t option = 0;
  size_t written;
  const cublasStatus_t s = p->lt->f.cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION,
                                                                         &option, sizeof option, &written);
  return s != CUBLAS_STATUS_SUCCESS || (option & SHARED) != 0;
}

/* Whether a Hopper multiprocessor can have the accumulators of two tiles at a time, so that it stores one tile while it
 * computes the other. These are tiles of 128 x 160 to 128 x 176; in 16 bits also 128 x 128, the largest tile with a
 * bias. The tile size is derived from the number of waves. */
static bool holds_two_tiles(const gemm *p, const cublasLtMatmulHeuristicResult_t *x) {
  enum { LEAST_WAVES = 4, LEAST_AREA = 19000, LEAST_AREA_16_BITS = 16000, MOST_AREA = 23000 };
  const bool narrow = is_16_bits(&p->key);
  const double results = (double)p->key.batch * (double)p->key.d.rows * (double)p->key.d.cols;
  const double area = results / ((double)x->wavesCount * p->lt->info->sms);
  if (x->wavesCount < LEAST_WAVES || area < (narrow ? LEAST_AREA_16_BITS : LEAST_AREA) || area > MOST_AREA)
    return false;
  return !narrow || !shares_tile(p, &x->algo);
}

/* The kernels with the gradient of GELU are persistent, with one block per multiprocessor. Clusters whose size does not
 * divide the number of multiprocessors leave some idle. */
static bool fills_device(const cublasLtMatmulHeuristicResult_t *x) { return x->wavesCount > 0.99f; }

static bool is_preferred(const gemm *p, const cublasLtMatmulHeuristicResult_t *x) {
  if (x->state != CUBLAS_STATUS_SUCCESS) return false;
  return p->key.gelu_ld > 0 ? fills_device(x) : holds_two_tiles(p, x);
}

/* Whether stores are a large part of the time: sums of at most 4,096 elements of 16 bits, or of 8,192 FP8 elements with
 * the tensor cores' own accumulation. */
static bool stores_much(const key *k) {
  const int64_t sum = k->a.transposed ? k->a.rows : k->a.cols;
  return k->scaled ? k->fast && sum <= 8192 : sum <= 4096;
}

/* The library's first algorithm. If stores are a large part of the time, the first algorithm that has room for two
 * tiles, if there is one: on an H200 at its power limit 2 to 25 % faster in 16 bits, 4 to 28 % in FP8. With the
 * gradient of GELU, the first one that uses all multiprocessors: 11 % faster for GPT-2 124M. */
static bool choose_algorithm(gemm *p) {
  cublasLtMatmulHeuristicResult_t found[RFI_LT_MOST];
  const int n = rfi_lt_heuristics(p, CUBLASLT_REDUCTION_SCHEME_MASK, found, RFI_LT_MOST);
  int best = 0;
  if (n < 1) return false;
  if (p->lt->info->major == 9 && stores_much(&p->key))
    while (best < n && !is_preferred(p, &found[best])) best++;
  p->algo = found[best < n ? best : 0].algo;
  return true;
}

static rfr_status find(rfi_lt *lt, const key *k, gemm **out) {
  for (*out = lt->gemms; *out && memcmp(&(*out)->key, k, sizeof *k) != 0;) *out = (*out)->next;
  if (*out) return RFR_OK;
  gemm *p;
  const rfr_status s = lt->core->alloc(lt->ctx, sizeof *p, (void **)&p);
  if (s != RFR_OK) return s;
  p->lt = lt;
  p->key = *k;
  p->next = lt->gemms;
  lt->gemms = *out = p;
  p->usable = make_desc(&lt->f, k, &p->desc) && make_layout(&lt->f, &k->a, k->batch, &p->A) &&
              make_layout(&lt->f, &k->b, k->batch, &p->B) && make_layout(&lt->f, &k->d, k->batch, &p->D) &&
              choose_algorithm(p);
  return RFR_OK;
}

cublasStatus_t rfi_lt_multiply(const gemm *p, const cublasLtMatmulAlgo_t *algo, const rfi_lt_operands *x,
                               cudaStream_t stream) {
  const functions *f = &p->lt->f;
  const float one = 1.0f, beta = p->key.accumulate ? 1.0f : 0.0f;
  if (p->key.bias >= 0)
    f->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &x->bias, sizeof x->bias);
  if (p->key.gelu_ld > 0)
    f->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &x->gelu_x, sizeof x->gelu_x);
  if (p->key.scaled) {
    f->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &x->scale_a, sizeof x->scale_a);
    f->cublasLtMatmulDescSetAttribute(p->desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &x->scale_b, sizeof x->scale_b);
  }
  return f->cublasLtMatmul(p->lt->handle, p->desc, &one, x->a, p->A, x->b, p->B, &beta, x->d, p->D, x->d, p->D, algo,
                           x->workspace, rfi_lt_workspace(&p->key), stream);
}

static rfr_status run_gemm(const rfr_call *call, const rfi_lt_operands *x) {
  const gemm *p = call->library;
  const cublasStatus_t s = rfi_lt_multiply(p, &p->algo, x, (cudaStream_t)call->stream);
  if (s == CUBLAS_STATUS_SUCCESS) return RFR_OK;
  const rfr_status alive = rfi_cuda_alive((cudaStream_t)call->stream, "multiplying by cuBLASLt");
  if (alive != RFR_OK) return alive;
  return p->lt->core->fail(RFI_E_CUDA,
                           "cuBLASLt refused a GEMM, status %d: %lld x %lld, rows of %lld, and %lld x %lld, rows of "
                           "%lld, into rows of %lld",
                           (int)s, (long long)p->key.a.rows, (long long)p->key.a.cols, (long long)p->key.a.ld,
                           (long long)p->key.b.rows, (long long)p->key.b.cols, (long long)p->key.b.ld,
                           (long long)p->key.d.ld);
}

static rfr_status run(const rfr_call *call) {
  const gemm *p = call->library;
  return run_gemm(call, &(rfi_lt_operands){.a = call->in[RFI_IN_matmul_b].data,
                                           .b = call->in[RFI_IN_matmul_a].data,
                                           .bias = p->key.bias >= 0 ? call->in[RFI_IN_matmul_bias].data : NULL,
                                           .d = call->out[0].data,
                                           .workspace = call->workspace});
}

static rfr_status run_gelu_bwd(const rfr_call *call) {
  return run_gemm(call, &(rfi_lt_operands){.a = call->in[RFI_IN_matmul_gelu_bwd_b].data,
                                           .b = call->in[RFI_IN_matmul_gelu_bwd_a].data,
                                           .gelu_x = call->in[RFI_IN_matmul_gelu_bwd_x].data,
                                           .d = call->out[0].data,
                                           .workspace = call->workspace});
}

/* The scales of a matrix in cuBLASLt's layout; they are copied to *space if the layout differs. */
static rfr_status lay_out_scales(const rfr_call *call, int scale, const matrix *m, int32_t mode, char **space,
                                 const void **out) {
  const rfr_arg *s = &call->in[scale];
  const size_t bytes = scale_space(m, mode);
  *out = bytes ? *space : s->data;
  if (!bytes) return RFR_OK;
  *space += bytes;
  return rfi_cuda_scale_layout(s->data, s->type.shape[0], s->type.shape[1], is_each_line(mode), (float *)*out,
                               (cudaStream_t)call->stream);
}

static rfr_status run_scaled(const rfr_call *call) {
  const gemm *p = call->library;
  char *space = call->workspace ? (char *)call->workspace + rfi_lt_workspace(&p->key) : NULL;
  const void *scale_a, *scale_b;
  rfr_status s = lay_out_scales(call, RFI_IN_matmul_scaled_scale_b, &p->key.a, p->key.scale_a, &space, &scale_a);
  if (s == RFR_OK) s = lay_out_scales(call, RFI_IN_matmul_scaled_scale_a, &p->key.b, p->key.scale_b, &space, &scale_b);
  if (s != RFR_OK) return s;
  return run_gemm(call, &(rfi_lt_operands){.a = call->in[RFI_IN_matmul_scaled_b].data,
                                           .b = call->in[RFI_IN_matmul_scaled_a].data,
                                           .bias = p->key.bias >= 0 ? call->in[RFI_IN_matmul_scaled_bias].data : NULL,
                                           .scale_a = scale_a,
                                           .scale_b = scale_b,
                                           .d = call->out[0].data,
                                           .workspace = call->workspace});
}

static rfr_status bind_gemm(rfi_lt *lt, const key *k, rfr_kernel_fn fn, rfi_bound *b) {
  gemm *p = NULL;
  if (lt) {
    const rfr_status s = find(lt, k, &p);
    if (s != RFR_OK) return s;
    if (!p->usable) return RFR_OK;
  }
  b->run = fn;
  b->kernel = "cuBLASLt";
  b->workspace = rfi_lt_workspace(k) + scale_space(&k->a, k->scale_a) + scale_space(&k->b, k->scale_b);
  b->call.library = p;
  return RFR_OK;
}

rfr_status rfi_lt_select(rfi_lt *lt, const rfi_op_def *def, rfi_bound *b) {
  key k;
  rfi_gemm_desc g;
  if (!rfi_call_gemm(def, &b->call, &g) || !describe(&b->call, &g, &k)) return RFR_OK;
  return bind_gemm(lt, &k, g.gelu_x < 0 ? run : run_gelu_bwd, b);
}

rfr_status rfi_lt_select_scaled(rfi_lt *lt, bool fast, rfi_bound *b) {
  key k;
  return describe_scaled(&b->call, lt ? lt->info->major : 9, fast, &k) ? bind_gemm(lt, &k, run_scaled, b) : RFR_OK;
}
