/* SPDX-License-Identifier: Apache-2.0
 *
 * Interface between the library and its CUDA module: one exported function takes the library's
 * functions that the module needs and returns the backend's table. The module links the CUDA
 * runtime statically and loads cuBLASLt when a GPU is used, so a machine without a GPU can load it
 * and make plans.
 */
#ifndef RFI_CUDA_MODULE_H
#define RFI_CUDA_MODULE_H

#include "backend/graph_order.h"
#include "base/base.h"
#include "refrain/dist.h"

/* A string of the module: RFI_BUILT, the version and a hash of the sources that library and module share
 * (CMakeLists.txt). If it differs from the library's string, the module is not called. */
#define RFI_CUDA_BUILT "rfi_cuda_module_built"

typedef rfr_status (*rfi_cuda_fail)(rfi_error error, const char *format, ...) __attribute__((format(printf, 2, 3)));
void rfi_cuda_errors_go_to(rfi_cuda_fail fail); /* cuda_error.c in the module */

typedef struct rfi_cuda_host {
  rfi_cuda_fail fail;
  rfr_status (*alloc)(rfr_ctx *ctx, size_t bytes, void **out);
  void (*free)(rfr_ctx *ctx, void *memory);
  void *(*arena_alloc)(rfi_arena *arena, size_t bytes);
  const char *(*device)(const rfr_ctx *ctx); /* "cuda", "cuda:1", "cuda:none" */
  bool (*portable)(const rfr_ctx *ctx);      /* use only kernels for sm_80 */
  const rfi_op_def *(*op_def)(rfi_opcode code);
  rfr_status (*outside_failed)(const rfi_opr *op, rfr_status s); /* the error of a registered op's launcher */
  rfr_status (*check_order)(rfr_ctx *ctx, const rfi_bound *bound, const rfi_unit *unit, int n, rfi_unit_edge *edge,
                            int n_edges);
} rfi_cuda_host;

/* The backend, and calls for `doctor`: a description, and the pieces that the module loads. */
typedef struct rfi_cuda_module {
  const rfi_backend *backend;
  rfr_status (*describe)(rfr_ctx *ctx, char *text, size_t size);
  rfr_status (*piece)(int i, rfr_piece *out);
  rfr_status (*nccl_id)(void *id);
  rfr_status (*nccl_create)(rfr_ctx *ctx, const void *id, int size, int rank, double timeout, rfr_comm **out);
} rfi_cuda_module;

#define RFI_CUDA_ENTRY "rfi_cuda_module_get"
typedef const rfi_cuda_module *(*rfi_cuda_entry)(const rfi_cuda_host *host);

#endif
