/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine and the build: the properties that results depend on bitwise, and the meaning of precision.dtype: auto.
 * bf16 is chosen where hardware multiplies it, on a GPU or on this CPU; elsewhere f32 is as fast and more precise.
 */
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "backend/cpu/library.h"
#include "base/base.h"
#include "refrain/train.h"
#include "train/machine.h"

rfr_status rfi_host_info_read(rfr_ctx *ctx, rfi_host_info *out) {
  rfi_cpu_library *library = NULL;
  memset(out, 0, sizeof *out);
  RFI_TRY(rfi_cpu_library_open(ctx, &library));
  snprintf(out->matmul, sizeof out->matmul, "%s", rfi_cpu_library_describe(library));
  out->matmul_library = rfi_cpu_library_loaded(library);
  out->bf16_fast = rfi_cpu_library_bf16_fast(library) || strcmp(rfi_ctx_device(ctx), "cpu") != 0;
  rfi_cpu_library_close(library);
  return RFR_OK;
}

rfr_status rfr_machine_describe(rfr_ctx *ctx, rfr_machine *out) {
  rfi_host_info m;
  RFI_TRY(rfi_host_info_read(ctx, &m));
  memset(out, 0, sizeof *out);
  out->size = sizeof *out;
  snprintf(out->matmul, sizeof out->matmul, "%s", m.matmul);
  out->matmul_library = m.matmul_library;
  out->isa = rfi_ctx_isa(ctx);
  out->threads = rfi_ctx_threads(ctx);
  out->has_amx = rfi_cpu_has_amx();
  out->module_path = rfi_ctx_module_path(ctx);
  out->best_dtype = m.bf16_fast ? RFR_BF16 : RFR_F32;
  out->device = rfi_ctx_device(ctx);
  return RFR_OK;
}

rfr_status rfr_cuda_describe(rfr_ctx *ctx, char *text, size_t size) {
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!text || size == 0) return rfi_fail(RFI_E_ARGUMENT, "no room for a text");
  return rfi_backend_describe_cuda(ctx, text, size);
}

rfr_status rfr_cuda_piece(rfr_ctx *ctx, int i, rfr_piece *out) {
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(out, "rfr_piece"));
  return rfi_backend_cuda_piece(ctx, i, out);
}
