/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads the module of GEMMs and keeps the handles of selected ones.
 *
 * Invariants: the module is loaded local, never unloaded (its threads and thread-local
 * data outlive a dlclose), and never used above the context's instruction set, on which
 * the bits depend by contract. Equal GEMMs share one handle, because creating one
 * generates code.
 */
#include "backend/cpu/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm_module.h"
#include "base/base.h"
#include "ops/gemm.h"
#include "ops/grouped/grouped.h"
#include "ops/grouped/pair.h"
#include "ops/op_index.h"

typedef struct gemm {
  struct gemm *next;
  rfi_cpu_library *library;
  rfi_module_gemm desc;
  void *handle;    /* NULL: the module has no fast kernel */
  const char *why; /* why the module has none */
  size_t scratch;
} gemm;

struct rfi_cpu_library {
  rfr_ctx *ctx;
  const rfi_gemm_module *module; /* NULL: none */
  void *engine;
  gemm *gemms;
  bool bf16_fast;
  char text[128];
};

/* ---- loading ---- */

static const rfi_gemm_module *load(rfi_cpu_library *l) {
  char path[PATH_MAX];
  if (!*rfi_ctx_module_path(l->ctx)) {
    snprintf(l->text, sizeof l->text, "none (the folder of the library is not known)");
    return NULL;
  }
  int n = snprintf(path, sizeof path, "%s/librefrain_onednn.so", rfi_ctx_module_path(l->ctx));
  if (n < 0 || (size_t)n >= sizeof path) {
    snprintf(l->text, sizeof l->text, "none (the module path is too long)");
    return NULL;
  }
  void *object = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (!object) {
    const char *why = dlerror();
    snprintf(l->text, sizeof l->text, "none (no module librefrain_onednn.so)");
    rfi_log(l->ctx, RFR_LOG_DEBUG, "oneDNN module: %s", why ? why : "cannot be loaded");
    return NULL;
  }
  rfi_gemm_entry entry = NULL;
  void *symbol = dlsym(object, RFI_GEMM_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  const rfi_gemm_module *module = entry ? entry() : NULL;
  if (module && module->abi != RFI_GEMM_ABI) module = NULL;
  if (!module) {
    snprintf(l->text, sizeof l->text, "none (librefrain_onednn.so is of another build)");
    rfi_log(l->ctx, RFR_LOG_WARNING, "%s is of another build of Refrain and is not used", path);
    dlclose(object);
  }
  return module;
}

rfr_status rfi_cpu_library_open(rfr_ctx *ctx, rfi_cpu_library **out) {
  rfi_cpu_library *l = NULL;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *l, &l));
  l->ctx = ctx;
  *out = l;
  if (!rfi_ctx_use_onednn(ctx)) {
    snprintf(l->text, sizeof l->text, "none (turned off)");
    return RFR_OK;
  }
  const rfi_gemm_module *module = load(l);
  if (!module) return RFR_OK;
  char name[32] = "", isa[32] = "";
  int32_t level = 0, fast = 0;
  if (module->open(&l->engine, name, isa, &level, &fast) != RFI_GEMM_OK) {
    snprintf(l->text, sizeof l->text, "none (oneDNN does not start)");
  } else if (level > rfi_ctx_isa(ctx)[1] - '0') {
    snprintf(l->text, sizeof l->text, "none (%s would use %s, above %s)", name, isa, rfi_ctx_isa(ctx));
    module->close(l->engine);
  } else {
    l->module = module;
    l->bf16_fast = fast != 0;
    snprintf(l->text, sizeof l->text, "%s (%s)", name, isa);
  }
  return RFR_OK;
}

void rfi_cpu_library_close(rfi_cpu_library *l) {
  if (!l) return;
  while (l->gemms) {
    gemm *p = l->gemms;
    l->gemms = p->next;
    if (p->handle) l->module->destroy(p->handle);
    rfi_free(l->ctx, p);
  }
  if (l->module) l->module->close(l->engine);
  rfi_free(l->ctx, l);
}

const char *rfi_cpu_library_describe(const rfi_cpu_library *l) { return l->text; }
bool rfi_cpu_library_loaded(const rfi_cpu_library *l) { return l->module != NULL; }
bool rfi_cpu_library_bf16_fast(const rfi_cpu_library *l) { return l->bf16_fast; }

/* ---- GEMMs ---- */

static rfi_gemm_type type_of(const rfi_arg *x) {
  switch (x->type.dtype) {
    case RFR_F32: return RFI_GEMM_F32;
    case RFR_BF16: return RFI_GEMM_BF16;
    case RFR_F16: return RFI_GEMM_F16;
    default: return RFI_GEMM_NONE;
  }
}

/* Strides of op(x), (rows, columns), as batch, row, column. The stride of a dimension of size 1 is unused; it is set to
 * that of a dense matrix, so that equal GEMMs compare equal and the library gets no invalid stride. */
static void strides(const rfi_arg *x, int transposed, int64_t rows, int64_t cols, int64_t out[3]) {
  int r = x->type.rank, i = transposed ? r - 1 : r - 2, j = transposed ? r - 2 : r - 1;
  out[1] = x->stride[i];
  out[2] = x->stride[j];
  if (rows == 1 && cols == 1) out[1] = out[2] = 1;
  else if (rows == 1) out[1] = out[2] == 1 ? cols : 1;
  else if (cols == 1) out[2] = out[1] == 1 ? rows : 1;
  out[0] = r == 3 && x->type.shape[0] > 1 ? x->stride[0] : rows * cols;
}

static rfr_status run_gemm(const rfi_call *call) {
  const gemm *p = call->library;
  const void *bias = p->desc.bias != RFI_GEMM_NONE ? call->in[RFI_IN_matmul_bias].data : NULL;
  rfi_gemm_status s = p->library->module->execute(p->handle, call->in[0].data, call->in[1].data, bias,
                                                  call->out[0].data, call->workspace);
  return s == RFI_GEMM_OK ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "%s failed to run a GEMM", p->library->text);
}

/* Whether no two elements share an address. */
static bool is_plain(const int64_t stride[3], int64_t rows, int64_t cols) {
  return stride[0] > 0 && (rows == 1 || stride[1] > 0) && (cols == 1 || stride[2] > 0);
}

/* Libraries use 32-bit dimensions and leading dimensions in places: oneDNN divides by zero at multiples of 2^32. */
static bool fits_library(const rfi_module_gemm *d) {
  const int64_t sizes[] = {d->batch, d->M, d->N, d->K, d->a_stride[1], d->a_stride[2], d->b_stride[1], d->b_stride[2]};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    if (sizes[i] > INT32_MAX) return false;
  return true;
}

/* ---- grouped GEMMs: one handle, run once per group with the group's number of rows ---- */

enum { OFFSETS = RFI_IN_grouped_matmul_offsets, SEPARATE = RFI_IN_grouped_matmul_ws };
_Static_assert(OFFSETS == (int)RFI_IN_grouped_wgrad_offsets, "grouped ops have their offsets in one place");

/* Row i of a dense or strided matrix. */
static char *row_of(const rfi_arg *x, int64_t i) {
  return (char *)x->data + i * x->stride[0] * (rfr_dtype_bits(x->type.dtype) / 8);
}

static rfi_gemm_group rows_of_group(const void *user, int64_t g) {
  const rfi_call *call = user;
  const rfi_arg *x = &call->in[0], *w = &call->in[call->n_in > SEPARATE ? SEPARATE + g : 1];
  const int32_t *offsets = call->in[OFFSETS].data;
  const int64_t R = x->type.shape[0], first = rfi_group_begin(offsets, g, R);
  return (rfi_gemm_group){rfi_group_end(offsets, g, R) - first, row_of(x, first),
                          call->n_in > SEPARATE ? w->data : row_of(w, g), row_of(&call->out[0], first)};
}

static rfi_gemm_group weight_of_group(const void *user, int64_t g) {
  const rfi_call *call = user;
  const rfi_arg *dy = &call->in[0], *x = &call->in[1];
  const int32_t *offsets = call->in[OFFSETS].data;
  const int64_t R = x->type.shape[0], first = rfi_group_begin(offsets, g, R);
  return (rfi_gemm_group){rfi_group_end(offsets, g, R) - first, row_of(dy, first), row_of(x, first),
                          row_of(&call->out[0], g)};
}

static rfr_status run_groups(const rfi_call *call, rfi_gemm_group_fn group) {
  const gemm *p = call->library;
  const int64_t groups = call->in[OFFSETS].type.shape[0] - 1;
  const rfi_gemm_status s = p->library->module->execute_groups(p->handle, groups, group, call, call->workspace);
  return s == RFI_GEMM_OK ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "%s failed to run a GEMM", p->library->text);
}
static rfr_status run_grouped(const rfi_call *call) {
  const rfi_arg *y = &call->out[0];
  const int64_t R = y->type.shape[0],
                last = rfi_group_begin(call->in[OFFSETS].data, call->in[OFFSETS].type.shape[0] - 1, R);
  memset(row_of(y, last), 0, (size_t)(row_of(y, R) - row_of(y, last)));
  return run_groups(call, rows_of_group);
}
static rfr_status run_wgrad(const rfi_call *call) {
  const rfi_arg *dw = &call->out[0];
  const gemm *p = call->library;
  for (int64_t g = 0; g < dw->type.shape[0] && !p->desc.accumulate; g++)
    if (weight_of_group(call, g).n == 0) memset(row_of(dw, g), 0, (size_t)(row_of(dw, 1) - row_of(dw, 0)));
  return run_groups(call, weight_of_group);
}

static bool same_strides(const rfi_arg *a, const rfi_arg *b) {
  return memcmp(a->stride, b->stride, sizeof a->stride) == 0;
}

/* Strides of op(x) of a matrix with one pointer per group: batch (unused), row, column. */
static void group_strides(const rfi_arg *x, bool transposed, int64_t out[3]) {
  const int r = x->type.rank;
  memcpy(out, (int64_t[]){1, x->stride[transposed ? r - 1 : r - 2], x->stride[transposed ? r - 2 : r - 1]},
         3 * sizeof *out);
}

static bool grouped_strides(const rfi_call *call, const rfi_gemm_desc *g, const rfi_arg *b, rfi_module_gemm *d) {
  if (g->bias >= 0 || call->in[g->offsets].type.shape[0] < 2) return false;
  for (int i = g->separate; i >= 0 && i < call->n_in; i++)
    if (!same_strides(&call->in[i], b)) return false;
  group_strides(&call->in[g->a], g->ta, d->a_stride);
  group_strides(b, g->tb, d->b_stride);
  return true;
}

/* Fills `d`. Returns false if the GEMM is empty, repeats elements or has other types; then the portable kernel is
 * used. */
static bool describe(const rfi_call *call, const rfi_gemm_desc *g, rfi_module_gemm *d) {
  const rfi_arg *a = &call->in[g->a], *b = &call->in[g->separate >= 0 ? g->separate : g->b], *y = &call->out[0];
  memset(d, 0, sizeof *d); /* also the padding, because descriptions are compared as bytes */
  d->batch = g->batch, d->M = g->M, d->N = g->N, d->K = g->K;
  d->varies = (int32_t)g->varies;
  if (g->varies == RFI_GEMM_FIXED) {
    strides(a, g->ta, d->M, d->K, d->a_stride);
    strides(b, g->tb, d->K, d->N, d->b_stride);
  } else if (!grouped_strides(call, g, b, d)) {
    return false;
  }
  d->a = type_of(a);
  d->b = type_of(b);
  d->y = type_of(y);
  d->bias = g->bias >= 0 ? type_of(&call->in[g->bias]) : RFI_GEMM_NONE;
  d->accumulate = g->acc >= 0;
  d->threads = call->threads;
  if (!d->a || !d->b || !d->y) return false;
  return d->batch > 0 && d->M > 0 && d->N > 0 && d->K > 0 && is_plain(d->a_stride, d->M, d->K) &&
         is_plain(d->b_stride, d->K, d->N);
}

/* The grouped GEMM, then the activation. */
static rfr_status run_swiglu(const rfi_call *call) {
  const gemm *gemm = call->library;
  rfi_pair p;
  rfi_pair_of(call, &p);
  RFI_TRY(run_grouped(&p.gemm));
  if (!p.act.out->data) return RFR_OK;
  return rfi_cpu_kernel(rfi_ctx_isa(gemm->library->ctx), RFI_OP_swiglu_weighted)->run(&p.act);
}

/* The function that runs a GEMM of this op with the module. */
static rfi_kernel_fn runner(const rfi_op_def *def, const rfi_gemm_desc *g) {
  if (def->code == RFI_OP_grouped_swiglu) return run_swiglu;
  return g->varies == RFI_GEMM_FIXED ? run_gemm : g->varies == RFI_GEMM_VARIES_M ? run_grouped : run_wgrad;
}

static gemm *find_gemm(const rfi_cpu_library *l, const rfi_module_gemm *d) {
  gemm *p = l->gemms;
  while (p && memcmp(&p->desc, d, sizeof *d) != 0) p = p->next;
  return p;
}

rfr_status rfi_cpu_library_select(rfi_cpu_library *l, const rfi_op_def *def, const rfi_call *call, rfi_kernel_fn *run,
                                  size_t *workspace, void **handle) {
  rfi_module_gemm d;
  rfi_gemm_desc g;
  *run = NULL;
  *workspace = 0;
  *handle = NULL;
  if (!l->module || !rfi_call_gemm(def, call, &g) || g.gelu_x >= 0) return RFR_OK;
  if (!describe(call, &g, &d) || !fits_library(&d)) return RFR_OK;
  gemm *p = find_gemm(l, &d);
  if (!p) {
    RFI_TRY(RFI_ALLOC(l->ctx, sizeof *p, &p));
    p->library = l;
    p->desc = d;
    rfi_gemm_status s = l->module->create(l->engine, &d, &p->handle, &p->scratch, &p->why);
    if (s == RFI_GEMM_NO_MEMORY) {
      rfi_free(l->ctx, p);
      return rfi_fail(RFI_E_NO_MEMORY, "%s could not create a GEMM", l->text);
    }
    if (s != RFI_GEMM_OK) p->handle = NULL;
    p->next = l->gemms;
    l->gemms = p;
  }
  if (p->handle) {
    *run = runner(def, &g);
    *workspace = p->scratch;
    *handle = p;
    if (*run == run_swiglu) {
      rfi_pair pair;
      rfi_pair_of(call, &pair);
      *workspace += pair.scratch;
    }
  }
  return RFR_OK;
}

const char *rfi_cpu_library_lacks(const rfi_cpu_library *l, const rfi_op_def *def, const rfi_call *call) {
  rfi_module_gemm d;
  rfi_gemm_desc g;
  if (!rfi_call_gemm(def, call, &g) || g.varies == RFI_GEMM_FIXED) return NULL;
  const rfi_arg *a = &call->in[g.a], *b = &call->in[g.separate >= 0 ? g.separate : g.b];
  if (a->type.dtype != b->type.dtype) return "types are mixed";
  if (a->type.dtype != RFR_BF16) return "operands are not bf16";
  if (!l->module) return "oneDNN is not used";
  if (g.bias >= 0) return "a bias is added";
  const gemm *p = describe(call, &g, &d) ? find_gemm(l, &d) : NULL;
  return p ? p->why : "operands are empty or have strides that the module does not take";
}
