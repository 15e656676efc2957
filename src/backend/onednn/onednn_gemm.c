/* SPDX-License-Identifier: Apache-2.0
 *
 * GEMMs by oneDNN, 2.x and 3.x in one file: of the calls used here, the two differ in memory
 * descriptors and in the description of a primitive.
 *
 * Invariants: the scratchpad is the caller's, so that a GEMM's memory is planned; a GEMM is
 * created and run with the same number of OpenMP threads, which decides its bits, and the
 * caller's setting is restored; a GEMM that oneDNN would run by reference loops is refused,
 * because the portable kernel is faster. panel_gemm.c takes the GEMMs at which it is faster, and
 * grouped ones; it also packs B for oneDNN (packed_bytes).
 */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cpu/gemm_module.h"
#include "backend/onednn/panel_gemm.h"

__attribute__((visibility("default"))) const rfi_gemm_module *rfi_gemm_module_get(void);

typedef struct engine {
  dnnl_engine_t engine;
  dnnl_stream_t stream;
  int bf16; /* this CPU has bf16 multiplication in hardware */
  rfi_panel_isa panels;
} engine;

enum { A, B, BIAS, Y, SCRATCH, ARGS };

typedef struct gemm {
  rfi_panel_gemm *panels; /* if not NULL, the other fields are not set */
  engine *engine;
  dnnl_primitive_t primitive;
  dnnl_memory_t memory[ARGS]; /* NULL: the primitive has no such argument */
  int threads;
  rfi_module_gemm d;
  size_t packed; /* bytes of B, packed into scratch at each run; 0: it is read in place */
} gemm;

/* ---- the difference between 2.x and 3.x ---- */

#if DNNL_VERSION_MAJOR >= 3
typedef dnnl_memory_desc_t desc_holder; /* a pointer */
typedef const_dnnl_memory_desc_t desc_ref;
static desc_ref ref(const desc_holder *d) { return *d; }
static dnnl_status_t desc_init(desc_holder *d, int rank, const int64_t *dims, dnnl_data_type_t type,
                               const int64_t *strides) {
  return dnnl_memory_desc_create_with_strides(d, rank, dims, type, strides);
}
static dnnl_status_t desc_init_packed(desc_holder *d, const dnnl_dims_t dims) {
  return dnnl_memory_desc_create_with_tag(d, 2, dims, dnnl_bf16, dnnl_BA16a64b2a);
}
static void desc_deinit(desc_holder *d) {
  if (*d) dnnl_memory_desc_destroy(*d);
}
static dnnl_status_t append_sum(dnnl_post_ops_t ops) {
  return dnnl_post_ops_append_sum(ops, 1, 0, dnnl_data_type_undef);
}
static dnnl_status_t describe(dnnl_primitive_desc_t *pd, engine *e, const desc_holder d[ARGS], int bias,
                              dnnl_primitive_attr_t attr) {
  return dnnl_matmul_primitive_desc_create(pd, e->engine, d[A], d[B], bias ? d[BIAS] : NULL, d[Y], attr);
}
#else
typedef dnnl_memory_desc_t desc_holder; /* a struct */
typedef const dnnl_memory_desc_t *desc_ref;
static desc_ref ref(const desc_holder *d) { return d; }
static dnnl_status_t desc_init(desc_holder *d, int rank, const int64_t *dims, dnnl_data_type_t type,
                               const int64_t *strides) {
  return dnnl_memory_desc_init_by_strides(d, rank, dims, type, strides);
}
static dnnl_status_t desc_init_packed(desc_holder *d, const dnnl_dims_t dims) {
  return dnnl_memory_desc_init_by_tag(d, 2, dims, dnnl_bf16, dnnl_BA16a64b2a);
}
static void desc_deinit(desc_holder *d) { (void)d; }
static dnnl_status_t append_sum(dnnl_post_ops_t ops) { return dnnl_post_ops_append_sum(ops, 1); }
static dnnl_status_t describe(dnnl_primitive_desc_t *pd, engine *e, const desc_holder d[ARGS], int bias,
                              dnnl_primitive_attr_t attr) {
  dnnl_matmul_desc_t op;
  dnnl_status_t s = dnnl_matmul_desc_init(&op, &d[A], &d[B], bias ? &d[BIAS] : NULL, &d[Y]);
  return s != dnnl_success ? s : dnnl_primitive_desc_create(pd, &op, attr, e->engine, NULL);
}
#endif

/* ---- the engine ---- */

static const char *isa_name(unsigned isa) {
#define HAS(set) ((isa & (unsigned)dnnl_cpu_isa_##set) == (unsigned)dnnl_cpu_isa_##set)
  return HAS(avx512_core_amx)    ? "avx512_core_amx"
         : HAS(avx512_core_bf16) ? "avx512_core_bf16"
         : HAS(avx512_core_vnni) ? "avx512_core_vnni"
         : HAS(avx512_core)      ? "avx512_core"
         : HAS(avx2)             ? "avx2"
         : HAS(sse41)            ? "sse41"
                                 : "scalar";
}

static void engine_close(void *p) {
  engine *e = p;
  if (e->stream) dnnl_stream_destroy(e->stream);
  if (e->engine) dnnl_engine_destroy(e->engine);
  free(e);
}

static rfi_gemm_status engine_open(void **out, char name[32], char isa_text[32], int32_t *level, int32_t *bf16_fast) {
  *out = NULL;
  engine *e = calloc(1, sizeof *e);
  if (!e) return RFI_GEMM_NO_MEMORY;
  /* A library of another major version has other structs; one with its own thread pool would ignore our number of
   * threads. */
  const dnnl_version_t *v = dnnl_version();
  if (v->major != DNNL_VERSION_MAJOR || (v->cpu_runtime != DNNL_RUNTIME_OMP && v->cpu_runtime != DNNL_RUNTIME_SEQ) ||
      dnnl_engine_create(&e->engine, dnnl_cpu, 0) != dnnl_success ||
      dnnl_stream_create(&e->stream, e->engine, dnnl_stream_default_flags) != dnnl_success) {
    engine_close(e);
    return RFI_GEMM_FAILED;
  }
  unsigned isa = (unsigned)dnnl_get_effective_cpu_isa();
  snprintf(name, 32, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
  e->panels = rfi_panel_open(HAS(avx512_core_amx), HAS(avx512_core_bf16));
  static const char *const own[] = {
      [RFI_PANEL_NONE] = "", [RFI_PANEL_DOT] = " + own groups", [RFI_PANEL_AMX] = " + own AMX"};
  snprintf(isa_text, 32, "%s%s", isa_name(isa), own[e->panels]);
  *level = HAS(avx512_core) ? 4 : HAS(avx2) ? 3 : 2;
  *bf16_fast = HAS(avx512_core_amx) || HAS(avx512_core_bf16);
  e->bf16 = HAS(avx512_core_bf16);
  *out = e;
  return RFI_GEMM_OK;
}

/* ---- GEMMs ---- */

static void gemm_destroy(void *p) {
  gemm *m = p;
  for (int i = 0; i < ARGS; i++)
    if (m->memory[i]) dnnl_memory_destroy(m->memory[i]);
  if (m->primitive) dnnl_primitive_destroy(m->primitive);
  rfi_panel_destroy(m->panels);
  free(m);
}

static dnnl_data_type_t type_of(int32_t t) {
  return t == RFI_GEMM_F32    ? dnnl_f32
         : t == RFI_GEMM_BF16 ? dnnl_bf16
         : t == RFI_GEMM_F16  ? dnnl_f16
                              : dnnl_data_type_undef;
}

static rfi_gemm_status status_of(dnnl_status_t s) {
  return s == dnnl_success                                        ? RFI_GEMM_OK
         : s == dnnl_out_of_memory                                ? RFI_GEMM_NO_MEMORY
         : s == dnnl_unimplemented || s == dnnl_invalid_arguments ? RFI_GEMM_UNSUPPORTED
                                                                  : RFI_GEMM_FAILED;
}

/* One operand of shape (batch, rows, cols): rank 3, or 2 without a batch. */
static dnnl_status_t init_desc(desc_holder *out, int batched, int64_t batch, int64_t rows, int64_t cols, int32_t type,
                               const int64_t stride[3]) {
  const int64_t shape[3] = {batch, rows, cols};
  dnnl_dims_t dims = {0}, strides = {0};
  for (int i = batched ? 0 : 1, d = 0; i < 3; i++, d++) {
    dims[d] = shape[i];
    strides[d] = stride[i];
  }
  return desc_init(out, batched ? 3 : 2, dims, type_of(type), strides);
}

static dnnl_status_t init_descs(const rfi_module_gemm *d, bool packed, desc_holder out[ARGS]) {
  const int64_t y_stride[3] = {d->M * d->N, d->N, 1}, bias_stride[3] = {d->N, d->N, 1};
  const dnnl_dims_t b_shape = {d->K, d->N};
  int batched = d->batch > 1;
  dnnl_status_t s = init_desc(&out[A], batched, d->batch, d->M, d->K, d->a, d->a_stride);
  if (s == dnnl_success && packed) s = desc_init_packed(&out[B], b_shape);
  else if (s == dnnl_success) s = init_desc(&out[B], batched, d->batch, d->K, d->N, d->b, d->b_stride);
  if (s == dnnl_success) s = init_desc(&out[Y], batched, d->batch, d->M, d->N, d->y, y_stride);
  if (s == dnnl_success && d->bias != RFI_GEMM_NONE)
    s = init_desc(&out[BIAS], batched, 1, 1, d->N, d->bias, bias_stride);
  return s;
}

static dnnl_status_t init_attr(const rfi_module_gemm *d, dnnl_primitive_attr_t *attr) {
  dnnl_post_ops_t ops = NULL;
  dnnl_status_t s = dnnl_primitive_attr_create(attr);
  if (s == dnnl_success) s = dnnl_primitive_attr_set_scratchpad_mode(*attr, dnnl_scratchpad_mode_user);
  if (s == dnnl_success && d->accumulate) {
    s = dnnl_post_ops_create(&ops);
    if (s == dnnl_success) s = append_sum(ops);
    if (s == dnnl_success) s = dnnl_primitive_attr_set_post_ops(*attr, ops); /* the attribute copies the post-ops */
    if (ops) dnnl_post_ops_destroy(ops);
  }
  return s;
}

/* Names of reference implementations, and of fallbacks to them, contain "ref". */
static int is_fast(dnnl_primitive_desc_t pd) {
  const char *name = NULL;
  return dnnl_primitive_desc_query(pd, dnnl_query_impl_info_str, 0, &name) == dnnl_success && name &&
         !strstr(name, "ref");
}

/* A row or a column whose elements are not adjacent. oneDNN 3.7 reads some of these as if they were. */
static int has_gaps(int64_t rows, int64_t cols, const int64_t stride[3]) {
  return (rows == 1 && cols > 1 && stride[2] != 1) || (cols == 1 && rows > 1 && stride[1] != 1);
}

/* oneDNN packs B again for each block of rows of A. With many rows one copy in its layout, made at each run, is faster;
 * the bits are the same. Two limits, the size of the other operands and 32 MiB, exclude LM heads, whose copy would
 * raise the plan's peak. Returns its size; 0: no copy. */
static size_t packed_bytes(const engine *e, const rfi_module_gemm *d) {
  enum { LEAST_ROWS = 1024, MOST_BYTES = 32 << 20 };
  const int64_t K = (d->K + RFI_PANEL_ROWS - 1) / RFI_PANEL_ROWS * RFI_PANEL_ROWS;
  const int64_t N = (d->N + RFI_PANEL_COLUMNS - 1) / RFI_PANEL_COLUMNS * RFI_PANEL_COLUMNS;
  if (e->panels != RFI_PANEL_DOT || d->b != RFI_GEMM_BF16 || d->batch > 1 || d->M < LEAST_ROWS) return 0;
  if (d->N < RFI_PANEL_COLUMNS || (d->b_stride[1] != 1 && d->b_stride[2] != 1) || K * N > d->M * (d->K + d->N))
    return 0;
  return K * N * 2 <= MOST_BYTES ? (size_t)(K * N) * 2 : 0;
}

static dnnl_status_t create_primitive(gemm *m, size_t *scratch) {
  const rfi_module_gemm *d = &m->d;
  desc_holder desc[ARGS];
  memset(desc, 0, sizeof desc);
  dnnl_primitive_attr_t attr = NULL;
  dnnl_primitive_desc_t pd = NULL;
  dnnl_status_t s = init_descs(d, m->packed, desc);
  if (s == dnnl_success) s = init_attr(d, &attr);
  if (s == dnnl_success) s = describe(&pd, m->engine, desc, d->bias != RFI_GEMM_NONE, attr);
  if (s == dnnl_success && !is_fast(pd)) s = dnnl_unimplemented;
  if (s == dnnl_success) s = dnnl_primitive_create(&m->primitive, pd);
  for (int i = 0; s == dnnl_success && i < SCRATCH; i++)
    if (i != BIAS || d->bias != RFI_GEMM_NONE)
      s = dnnl_memory_create(&m->memory[i], ref(&desc[i]), m->engine->engine, DNNL_MEMORY_NONE);
  if (s == dnnl_success) {
    desc_ref md = dnnl_primitive_desc_query_md(pd, dnnl_query_scratchpad_md, 0);
    *scratch = md ? dnnl_memory_desc_get_size(md) : 0;
    if (*scratch) s = dnnl_memory_create(&m->memory[SCRATCH], md, m->engine->engine, DNNL_MEMORY_NONE);
    *scratch += m->packed;
  }
  if (pd) dnnl_primitive_desc_destroy(pd);
  if (attr) dnnl_primitive_attr_destroy(attr);
  for (int i = 0; i < ARGS; i++) desc_deinit(&desc[i]);
  return s;
}

static rfi_gemm_status gemm_create(void *p, const rfi_module_gemm *d, void **handle, size_t *scratch,
                                   const char **why) {
  engine *e = p;
  *handle = NULL;
  *scratch = 0;
  *why = "the library has no GEMM of these types";
  if (d->a != d->b || (d->a == RFI_GEMM_BF16 && !e->bf16) || d->a == RFI_GEMM_F16 || d->y == RFI_GEMM_F16 ||
      d->bias == RFI_GEMM_F16 || (d->a == RFI_GEMM_F32 && (d->y != RFI_GEMM_F32 || d->bias == RFI_GEMM_BF16)))
    return RFI_GEMM_UNSUPPORTED;
  gemm *m = calloc(1, sizeof *m);
  if (!m) return RFI_GEMM_NO_MEMORY;
  *why = "neither AMX nor AVX512-BF16";
  rfi_gemm_status own = e->panels ? rfi_panel_create(e->panels, d, &m->panels, scratch, why) : RFI_GEMM_UNSUPPORTED;
  if (own != RFI_GEMM_UNSUPPORTED || d->varies) { /* oneDNN has no varying dimensions */
    if (own == RFI_GEMM_OK) *handle = m;
    else gemm_destroy(m);
    return own;
  }
  if (has_gaps(d->M, d->K, d->a_stride) || has_gaps(d->K, d->N, d->b_stride)) {
    *why = "a row or column with gaps between its elements";
    gemm_destroy(m);
    return RFI_GEMM_UNSUPPORTED;
  }
  m->engine = e;
  m->d = *d;
  m->threads = d->threads > 0 ? d->threads : 1;
  m->packed = packed_bytes(e, d);
  const int before = omp_get_max_threads(), dynamic = omp_get_dynamic();
  omp_set_dynamic(0); /* oneDNN plans for omp_get_max_threads(), which may be smaller on a busy machine */
  omp_set_num_threads(m->threads);
  dnnl_status_t s = create_primitive(m, scratch);
  if (status_of(s) == RFI_GEMM_UNSUPPORTED && m->packed) {
    m->packed = 0;
    s = create_primitive(m, scratch);
  }
  omp_set_num_threads(before);
  omp_set_dynamic(dynamic);
  if (s != dnnl_success) gemm_destroy(m);
  else *handle = m;
  return status_of(s);
}

static rfi_gemm_status gemm_execute_groups(void *handle, int64_t groups, rfi_gemm_group_fn group, const void *user,
                                           void *scratch) {
  gemm *m = handle;
  if (!m->panels) return RFI_GEMM_FAILED;
  rfi_panel_execute_groups(m->panels, groups, group, user, scratch);
  return RFI_GEMM_OK;
}

static rfi_gemm_status gemm_execute(void *handle, const void *a, const void *b, const void *bias, void *y,
                                    void *scratch) {
  static const int number[ARGS] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_BIAS, DNNL_ARG_DST, DNNL_ARG_SCRATCHPAD};
  gemm *m = handle;
  if (m->panels) {
    rfi_panel_execute(m->panels, a, b, bias, y, scratch);
    return RFI_GEMM_OK;
  }
  void *data[ARGS] = {(void *)(uintptr_t)a, (void *)(uintptr_t)b, (void *)(uintptr_t)bias, y,
                      (char *)scratch + m->packed};
  if (m->packed) {
    rfi_panel_pack(scratch, b, m->d.K, m->d.N, m->d.b_stride[1], m->d.b_stride[2], m->threads);
    data[B] = scratch;
  }
  dnnl_exec_arg_t args[ARGS];
  dnnl_status_t s = dnnl_success;
  int count = 0;
  for (int i = 0; i < ARGS && s == dnnl_success; i++) {
    if (!m->memory[i]) continue;
    args[count++] = (dnnl_exec_arg_t){number[i], m->memory[i]};
    s = dnnl_memory_set_data_handle(m->memory[i], data[i]);
  }
  int before = omp_get_max_threads();
  omp_set_num_threads(m->threads);
  if (s == dnnl_success) s = dnnl_primitive_execute(m->primitive, m->engine->stream, count, args);
  if (s == dnnl_success) s = dnnl_stream_wait(m->engine->stream);
  omp_set_num_threads(before);
  return status_of(s);
}

const rfi_gemm_module *rfi_gemm_module_get(void) {
  static const rfi_gemm_module module = {RFI_GEMM_ABI, engine_open,         engine_close, gemm_create,
                                         gemm_execute, gemm_execute_groups, gemm_destroy};
  return &module;
}
