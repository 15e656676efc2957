/* SPDX-License-Identifier: Apache-2.0
 *
 * Loads the CUDA module when a context first uses a GPU, and passes it the library's functions that
 * it needs.
 */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cuda/cuda_module.h"

static rfr_status load(rfr_ctx *ctx, const rfi_cuda_module **out) {
  static const rfi_cuda_host host = {
      .fail = rfi_fail,
      .alloc = rfi_alloc,
      .free = rfi_free,
      .arena_alloc = rfi_arena_alloc,
      .device = rfi_ctx_device,
      .portable = rfi_ctx_cuda_portable,
      .op_def = rfi_op_def_get,
      .outside_failed = rfi_outside_failed,
      .check_order = rfi_order_check,
  };
  char path[PATH_MAX];
  void *object;
  *out = NULL;
  RFI_TRY(rfi_module_open(ctx, "librefrain_cuda.so", "module of CUDA",
                          " (wheel: refrain-cuda; Debian: librefrain*-cuda; builds with nvcc have it)", path, &object));
  const char *built = dlsym(object, RFI_CUDA_BUILT);
  if (!built || strcmp(built, RFI_BUILT) != 0)
    return rfi_fail(RFI_E_BACKEND_BUILD, "%s is of build %s, the library of %s", path,
                    built ? built : "unknown, an old one", RFI_BUILT);
  rfi_cuda_entry entry = NULL;
  void *symbol = dlsym(object, RFI_CUDA_ENTRY);
  memcpy(&entry, &symbol, sizeof entry);
  *out = entry(&host);
  return RFR_OK;
}

rfr_status rfi_backend_describe_cuda(rfr_ctx *ctx, char *text, size_t size) {
  const rfi_cuda_module *module;
  text[0] = '\0';
  RFI_TRY(load(ctx, &module));
  return module->describe(ctx, text, size);
}

rfr_status rfi_backend_cuda_piece(rfr_ctx *ctx, int i, rfr_piece *out) {
  const rfi_cuda_module *module;
  const rfr_status s = load(ctx, &module);
  *out = (rfr_piece){.name = "CUDA module",
                     .costs = "no GPU is used, and no plan is made for one (cuda:none); builds with nvcc have it",
                     .missing = s != RFR_OK};
  if (i == 0 && s == RFR_OK) snprintf(out->found, sizeof out->found, "CUDA module");
  if (i == 0) return RFR_OK;
  return s == RFR_OK ? module->piece(i - 1, out) : rfi_fail(RFI_E_ARGUMENT, "there is no component %d", i);
}

rfr_status rfr_comm_nccl_id(rfr_ctx *ctx, void *id) {
  const rfi_cuda_module *module;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!id) return rfi_fail(RFI_E_ARGUMENT, "id is NULL");
  RFI_TRY(load(ctx, &module));
  return module->nccl_id(id);
}

rfr_status rfr_comm_nccl_create(rfr_ctx *ctx, const void *id, int size, int rank, double timeout, rfr_comm **out) {
  const rfi_cuda_module *module;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!id || !out || size < 1 || rank < 0 || rank >= size || !(timeout >= 0))
    return rfi_fail(RFI_E_ARGUMENT, "rank %d of %d or the timeout of %g seconds is not valid, or id or out is NULL",
                    rank, size, timeout);
  *out = NULL;
  if (strcmp(rfi_ctx_device(ctx), "cpu") == 0)
    return rfi_fail(RFI_E_ARGUMENT,
                    "NCCL needs a GPU, but the context's device is the CPU: use rfr_comm_threads_create");
  RFI_TRY(load(ctx, &module));
  return module->nccl_create(ctx, id, size, rank, timeout, out);
}

rfr_status rfi_backend_find(rfr_ctx *ctx, const rfi_backend **out) {
  const rfi_cuda_module *module;
  *out = &rfi_backend_cpu;
  if (strcmp(rfi_ctx_device(ctx), "cpu") == 0) return RFR_OK;
  RFI_TRY(load(ctx, &module));
  *out = module->backend;
  return RFR_OK;
}
