/* SPDX-License-Identifier: Apache-2.0
 *
 * Tuning: selects cuBLASLt's algorithm for a GEMM by measuring on random operands, or takes
 * the stored result of an earlier measurement.
 *
 * Candidates are the first that the library's heuristic proposes within the workspace of the plan; split-K schemes that
 * accumulate in the result (by counters, or in a narrow type) are not requested. The candidates are run alternately,
 * and their median times are compared. Training runs at the device's power limit, where other algorithms may be fastest
 * than on a cool device: the first rounds only heat the device, and a round is long enough to keep it at the limit. The
 * fastest candidate is selected if its results are bitwise reproducible for any contents of the workspace; otherwise
 * the next one.
 *
 * An algorithm is stored as the eight words that cuBLASLt allows to store for the same
 * version. Stored words that the library does not offer for the GEMM are refused.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/lt_gemm.h"
#include "backend/cuda/tune.h"

enum { HEAT = 4, ROUNDS = 9, REPEATS = 6, WORDS = 8, LEAST_MICROSECONDS = 1500, MOST_RUNS = 50 };
_Static_assert(sizeof(cublasLtMatmulAlgo_t) == WORDS * sizeof(uint64_t), "an algorithm has WORDS words");
_Static_assert(WORDS * 17 <= RFI_CHOICE, "a word and what separates it");

#define CUDA(call, what) RFI_TRY(rfi_cuda_check(call, what))

typedef struct candidate {
  cublasLtMatmulAlgo_t algo;
  float ms[ROUNDS];
} candidate;

typedef struct bench {
  const rfi_lt_gemm *p;
  cudaStream_t stream;
  cudaEvent_t start, end;
  char *memory; /* one allocation for all buffers below */
  rfi_lt_operands x;
  void *first, *start_d; /* the result of the first run, and the d with which each run starts */
  int *differs;
  size_t d_bytes, gelu_bytes, scale_bytes[2];
  candidate candidates[RFI_LT_MOST];
  int n;
} bench;

/* ---- names and texts ---- */

static rfr_dtype dtype_of(int32_t type) {
  switch (type) {
    case CUDA_R_32F: return RFR_F32;
    case CUDA_R_16BF: return RFR_BF16;
    case CUDA_R_8F_E4M3: return RFR_E4M3;
    case CUDA_R_8F_E5M2: return RFR_E5M2;
    default: return RFR_F16;
  }
}

static const char *type_name(int32_t type) {
  switch (dtype_of(type)) {
    case RFR_F32: return "f32";
    case RFR_BF16: return "bf16";
    case RFR_E4M3: return "e4m3";
    case RFR_E5M2: return "e5m2";
    default: return "f16";
  }
}

/* Text for the scales of a matrix. */
static const char *scale_name(int32_t mode) {
  return mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F       ? "by 1x128 "
         : mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? "by 128x128 "
                                                               : "";
}

/* Row-major shapes: a column-major matrix is the transpose of a row-major one. */
static int print_matrix(const rfi_lt_matrix *m, char *text, size_t size) {
  int n = snprintf(text, size, "%s[%" PRId64 ",%" PRId64 ":%" PRId64, type_name(m->type), m->cols, m->rows, m->ld);
  if (m->batch_stride) n += snprintf(text + n, size - (size_t)n, "@%" PRId64, m->batch_stride);
  return n + snprintf(text + n, size - (size_t)n, "]%s", m->transposed ? "T " : " ");
}

static void print_name(rfi_lt_gemm *p) {
  char a[112], b[112], d[112], batch[32] = "";
  print_matrix(&p->key.b, a, sizeof a);
  print_matrix(&p->key.a, b, sizeof b);
  print_matrix(&p->key.d, d, sizeof d);
  if (p->key.batch != 1) snprintf(batch, sizeof batch, "x%" PRId64 " ", p->key.batch);
  snprintf(p->name, sizeof p->name, "%s%s%s* %s%s%s%s-> %s%s%s", batch, a, scale_name(p->key.scale_b), b,
           scale_name(p->key.scale_a), p->key.bias >= 0 ? "+ bias " : "", p->key.gelu_ld ? "gelu_bwd " : "", d,
           p->key.fast ? "fast " : "", p->key.accumulate ? "added" : "");
  for (size_t n = strlen(p->name); n > 0 && p->name[n - 1] == ' ';) p->name[--n] = '\0';
}

static void print_words(const cublasLtMatmulAlgo_t *algo, char value[RFI_CHOICE]) {
  for (int i = 0, n = 0; i < WORDS; i++)
    n += snprintf(value + n, RFI_CHOICE - (size_t)n, "%s%016" PRIx64, i ? " " : "", algo->data[i]);
}

/* ---- buffers ---- */

static size_t size_of(int32_t type) {
  switch (type) {
    case CUDA_R_32F: return 4;
    case CUDA_R_8F_E4M3:
    case CUDA_R_8F_E5M2: return 1;
    default: return 2;
  }
}

static size_t bytes_of(const rfi_lt_matrix *m, int64_t batch) {
  return (size_t)((batch - 1) * m->batch_stride + (m->cols - 1) * m->ld + m->rows) * size_of(m->type);
}

static char *take(char **at, size_t bytes) {
  char *mine = *at;
  *at += (bytes + 255) / 256 * 256;
  return mine;
}

/* Assigns the parts of b->memory and returns their total size; b->memory may be NULL. */
static size_t lay_out(bench *b) {
  const rfi_lt_key *k = &b->p->key;
  char *at = b->memory;
  b->d_bytes = bytes_of(&k->d, k->batch);
  b->x.a = take(&at, bytes_of(&k->a, k->batch));
  b->x.b = take(&at, bytes_of(&k->b, k->batch));
  b->x.bias = take(&at, (size_t)k->d.rows * size_of(k->d.type));
  b->gelu_bytes = (size_t)(k->gelu_ld * k->d.cols) * size_of(k->d.type);
  b->x.gelu_x = take(&at, b->gelu_bytes);
  b->x.d = take(&at, b->d_bytes);
  b->first = take(&at, b->d_bytes);
  b->start_d = take(&at, b->d_bytes);
  b->x.workspace = take(&at, RFI_LT_WORKSPACE);
  b->scale_bytes[0] = rfi_lt_scale_bytes(&k->a, k->scale_a), b->scale_bytes[1] = rfi_lt_scale_bytes(&k->b, k->scale_b);
  b->x.scale_a = take(&at, b->scale_bytes[0]);
  b->x.scale_b = take(&at, b->scale_bytes[1]);
  b->differs = (int *)take(&at, sizeof *b->differs);
  return (size_t)(at - b->memory);
}

static rfr_status fill(const bench *b, const void *to, size_t bytes, int32_t type, uint32_t seed) {
  return rfi_cuda_random((void *)to, dtype_of(type), (int64_t)(bytes / size_of(type)), seed, b->stream);
}

static rfr_status set_up(bench *b) {
  const rfi_lt_key *k = &b->p->key;
  CUDA(cudaMalloc((void **)&b->memory, lay_out(b)), "allocating memory to measure a GEMM");
  lay_out(b);
  CUDA(cudaEventCreate(&b->start), "making an event");
  CUDA(cudaEventCreate(&b->end), "making an event");
  RFI_TRY(fill(b, b->x.a, bytes_of(&k->a, k->batch), k->a.type, 1));
  RFI_TRY(fill(b, b->x.b, bytes_of(&k->b, k->batch), k->b.type, 2));
  RFI_TRY(fill(b, b->x.bias, (size_t)k->d.rows * size_of(k->d.type), k->d.type, 3));
  RFI_TRY(fill(b, b->x.gelu_x, b->gelu_bytes, k->d.type, 7));
  RFI_TRY(fill(b, b->start_d, b->d_bytes, k->d.type, 4));
  RFI_TRY(fill(b, b->x.scale_a, b->scale_bytes[0], CUDA_R_32F, 5));
  RFI_TRY(fill(b, b->x.scale_b, b->scale_bytes[1], CUDA_R_32F, 6));
  return rfi_cuda_check(cudaMemcpyAsync(b->x.d, b->start_d, b->d_bytes, cudaMemcpyDeviceToDevice, b->stream),
                        "copying");
}

static void tear_down(bench *b) {
  cudaStreamSynchronize(b->stream);
  if (b->start) cudaEventDestroy(b->start);
  if (b->end) cudaEventDestroy(b->end);
  cudaFree(b->memory);
}

/* ---- measuring ---- */

static rfr_status multiply(const bench *b, const cublasLtMatmulAlgo_t *algo) {
  const cublasStatus_t s = rfi_lt_multiply(b->p, algo, &b->x, b->stream);
  if (s == CUBLAS_STATUS_SUCCESS) return RFR_OK;
  return b->p->lt->core->fail(RFI_E_CUDA, "cuBLASLt refused a GEMM that it offers, status %d: %s", (int)s, b->p->name);
}

static rfr_status time_one(const bench *b, const cublasLtMatmulAlgo_t *algo, int runs, float *ms) {
  CUDA(cudaEventRecord(b->start, b->stream), "recording an event");
  for (int i = 0; i < runs; i++) RFI_TRY(multiply(b, algo));
  CUDA(cudaEventRecord(b->end, b->stream), "recording an event");
  CUDA(cudaEventSynchronize(b->end), "waiting for the device");
  return rfi_cuda_check(cudaEventElapsedTime(ms, b->start, b->end), "reading a time");
}

static int by_time(const void *a, const void *b) {
  const float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static int by_median(const void *a, const void *b) {
  return by_time(&((const candidate *)a)->ms[ROUNDS / 2], &((const candidate *)b)->ms[ROUNDS / 2]);
}

/* Sorts the candidates by time, the fastest first. */
static rfr_status measure(bench *b) {
  float ms;
  int runs = 1;
  /* untimed: the first run loads code */
  for (int i = 0; i < b->n; i++) RFI_TRY(time_one(b, &b->candidates[i].algo, 1, &ms));
  RFI_TRY(time_one(b, &b->candidates[0].algo, 1, &ms));
  while (runs < MOST_RUNS && 1e3f * ms * (float)runs < LEAST_MICROSECONDS) runs++;
  for (int round = -HEAT; round < ROUNDS; round++)
    for (int i = 0; i < b->n; i++)
      RFI_TRY(time_one(b, &b->candidates[i].algo, runs, &b->candidates[i].ms[round < 0 ? 0 : round]));
  for (int i = 0; i < b->n; i++) qsort(b->candidates[i].ms, ROUNDS, sizeof(float), by_time);
  qsort(b->candidates, (size_t)b->n, sizeof(candidate), by_median);
  return RFR_OK;
}

static rfr_status repeats(const bench *b, const cublasLtMatmulAlgo_t *algo, bool *same) {
  int differs = 0;
  CUDA(cudaMemsetAsync(b->differs, 0, sizeof differs, b->stream), "filling memory");
  for (int i = 0; i < REPEATS; i++) {
    CUDA(cudaMemcpyAsync(b->x.d, b->start_d, b->d_bytes, cudaMemcpyDeviceToDevice, b->stream), "copying");
    CUDA(cudaMemsetAsync(b->x.workspace, 0x33 * i, RFI_LT_WORKSPACE, b->stream), "filling memory");
    RFI_TRY(multiply(b, algo));
    if (i == 0) CUDA(cudaMemcpyAsync(b->first, b->x.d, b->d_bytes, cudaMemcpyDeviceToDevice, b->stream), "copying");
    else RFI_TRY(rfi_cuda_compare(b->first, b->x.d, (int64_t)b->d_bytes, b->differs, b->stream));
  }
  CUDA(cudaMemcpyAsync(&differs, b->differs, sizeof differs, cudaMemcpyDeviceToHost, b->stream), "copying");
  CUDA(cudaStreamSynchronize(b->stream), "waiting for the device");
  *same = differs == 0;
  return RFR_OK;
}

static rfr_status fastest(bench *b, cublasLtMatmulAlgo_t *out) {
  bool same = false;
  RFI_TRY(set_up(b));
  RFI_TRY(measure(b));
  for (int i = 0; i < b->n && !same; i++) {
    *out = b->candidates[i].algo;
    RFI_TRY(repeats(b, out, &same));
  }
  if (same) return RFR_OK;
  return b->p->lt->core->fail(RFI_E_CUDA, "no cuBLASLt algorithm is deterministic for this GEMM: %s", b->p->name);
}

/* ---- choices ---- */

/* The i-th GEMM that cuBLASLt supports. */
static rfi_lt_gemm *gemm_at(const rfi_lt *lt, int i) {
  rfi_lt_gemm *p = lt->gemms;
  while (p && (!p->usable || i-- > 0)) p = p->next;
  return p;
}

const char *rfi_lt_choice(const rfi_lt *lt, int i) {
  rfi_lt_gemm *p = gemm_at(lt, i);
  if (!p) return NULL;
  print_name(p);
  return p->name;
}

rfr_status rfi_lt_choose(rfi_lt *lt, int i, cudaStream_t stream, const char *stored, char value[RFI_CHOICE]) {
  rfi_lt_gemm *p = gemm_at(lt, i);
  cublasLtMatmulHeuristicResult_t found[RFI_LT_MOST];
  bench b = {.p = p, .stream = stream};
  const int n = rfi_lt_heuristics(p, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, found, RFI_LT_MOST);
  for (int k = 0; k < n; k++) {
    if (found[k].state != CUBLAS_STATUS_SUCCESS || found[k].workspaceSize > rfi_lt_workspace(&p->key)) continue;
    b.candidates[b.n++].algo = found[k].algo;
    print_words(&found[k].algo, value);
    if (!stored || strcmp(value, stored) != 0) continue;
    p->algo = found[k].algo;
    return RFR_OK;
  }
  value[0] = '\0';
  if (stored) return RFR_OK;
  if (b.n == 0) return lt->core->fail(RFI_E_CUDA, "cuBLASLt has no deterministic algorithm: %s", p->name);
  const rfr_status s = fastest(&b, &p->algo);
  tear_down(&b);
  print_words(&p->algo, value);
  return s;
}
