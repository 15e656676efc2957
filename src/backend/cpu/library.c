/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads the module of matrix products and keeps the handles that bind makes.
 *
 * Invariants: the module is loaded local, never unloaded (its threads and thread-local
 * data outlive a dlclose), and never used above the instruction set of the context,
 * because that set is what the bits are said to depend on. Equal products share one
 * handle: making one compiles code.
 */
#include "backend/cpu/library.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "backend/cpu/gemm_module.h"
#include "base/base.h"

typedef struct product {
  struct product *next;
  rfi_cpu_library *library;
  rfi_gemm_desc desc;
  void *handle; /* NULL: the module has no fast way */
  size_t scratch;
} product;

struct rfi_cpu_library {
  rfr_ctx *ctx;
  const rfi_gemm_module *module; /* NULL: none */
  void *engine;
  product *products;
  bool bf16_fast;
  char text[128];
};

/* ---- loading ---- */

static const rfi_gemm_module *load(rfi_cpu_library *l) {
  char path[PATH_MAX];
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
  while (l->products) {
    product *p = l->products;
    l->products = p->next;
    if (p->handle) l->module->destroy(p->handle);
    rfi_free(l->ctx, p);
  }
  if (l->module) l->module->close(l->engine);
  rfi_free(l->ctx, l);
}

const char *rfi_cpu_library_describe(const rfi_cpu_library *l) { return l->text; }
bool rfi_cpu_library_loaded(const rfi_cpu_library *l) { return l->module != NULL; }
bool rfi_cpu_library_bf16_fast(const rfi_cpu_library *l) { return l->bf16_fast; }

/* ---- products ---- */

static rfi_gemm_type type_of(const rfi_arg *x) {
  switch (x->type.dtype) {
    case RFR_F32: return RFI_GEMM_F32;
    case RFR_BF16: return RFI_GEMM_BF16;
    case RFR_F16: return RFI_GEMM_F16;
    default: return RFI_GEMM_NONE;
  }
}

/* Strides of op(x), (rows, columns), as batch, row, column. A dimension of size 1 is never
 * stepped over: it gets the stride that a dense matrix would have, so that equal products
 * compare equal and no library stumbles over an odd number. */
static void strides(const rfi_arg *x, int transposed, int64_t rows, int64_t cols, int64_t out[3]) {
  int r = x->type.rank, i = transposed ? r - 1 : r - 2, j = transposed ? r - 2 : r - 1;
  out[1] = x->stride[i];
  out[2] = x->stride[j];
  if (rows == 1 && cols == 1) out[1] = out[2] = 1;
  else if (rows == 1) out[1] = out[2] == 1 ? cols : 1;
  else if (cols == 1) out[2] = out[1] == 1 ? rows : 1;
  out[0] = r == 3 && x->type.shape[0] > 1 ? x->stride[0] : rows * cols;
}

static rfr_status run_product(const rfi_call *call) {
  const product *p = call->library;
  const void *bias = p->desc.bias != RFI_GEMM_NONE ? call->in[2].data : NULL;
  rfi_gemm_status s = p->library->module->execute(p->handle, call->in[0].data, call->in[1].data, bias,
                                                  call->out[0].data, call->workspace);
  return s == RFI_GEMM_OK ? RFR_OK : rfi_fail(RFI_E_INTERNAL, "%s failed to run a matrix product", p->library->text);
}

/* No two elements at one address. */
static bool is_plain(const int64_t stride[3], int64_t rows, int64_t cols) {
  return stride[0] > 0 && (rows == 1 || stride[1] > 0) && (cols == 1 || stride[2] > 0);
}

/* Fills `d`; false when the product is empty or repeats elements: the portable kernel takes those. */
static bool describe(const rfi_call *call, rfi_gemm_desc *d) {
  const rfi_arg *a = &call->in[0], *b = &call->in[1], *y = &call->out[0];
  int r = y->type.rank, ta = call->attr[0].i != 0, tb = call->attr[1].i != 0;
  memset(d, 0, sizeof *d); /* padding too: descriptors are compared as bytes */
  d->batch = r == 3 ? y->type.shape[0] : 1;
  d->M = y->type.shape[r - 2];
  d->N = y->type.shape[r - 1];
  d->K = a->type.shape[ta ? r - 2 : r - 1];
  strides(a, ta, d->M, d->K, d->a_stride);
  strides(b, tb, d->K, d->N, d->b_stride);
  d->a = type_of(a);
  d->b = type_of(b);
  d->y = type_of(y);
  d->bias = call->n_in > 2 && call->in[2].data ? type_of(&call->in[2]) : RFI_GEMM_NONE;
  d->accumulate = call->n_in > 3 && call->in[3].data;
  d->threads = call->threads;
  return d->batch > 0 && d->M > 0 && d->N > 0 && d->K > 0 && is_plain(d->a_stride, d->M, d->K) &&
         is_plain(d->b_stride, d->K, d->N);
}

rfr_status rfi_cpu_library_bind(rfi_cpu_library *l, rfi_opcode code, const rfi_call *call, rfi_kernel_fn *run,
                                size_t *workspace, void **handle) {
  rfi_gemm_desc d;
  *run = NULL;
  *workspace = 0;
  *handle = NULL;
  if (!l->module || code != RFI_OP_matmul || !describe(call, &d)) return RFR_OK;
  product *p = l->products;
  while (p && memcmp(&p->desc, &d, sizeof d) != 0) p = p->next;
  if (!p) {
    RFI_TRY(RFI_ALLOC(l->ctx, sizeof *p, &p));
    p->library = l;
    p->desc = d;
    rfi_gemm_status s = l->module->create(l->engine, &d, &p->handle, &p->scratch);
    if (s == RFI_GEMM_NO_MEMORY) {
      rfi_free(l->ctx, p);
      return rfi_fail(RFI_E_NO_MEMORY, "%s could not allocate a matrix product", l->text);
    }
    if (s != RFI_GEMM_OK) p->handle = NULL;
    p->next = l->products;
    l->products = p;
  }
  if (p->handle) {
    *run = run_product;
    *workspace = p->scratch;
    *handle = p;
  }
  return RFR_OK;
}
