/* SPDX-License-Identifier: Apache-2.0
 *
 * Selects the kernels of ops (cuda_select.c).
 */
#ifndef RFI_CUDA_SELECT_H
#define RFI_CUDA_SELECT_H

#include "backend/cuda/lt.h"

typedef struct rfi_selector {
  const rfi_cuda_host *core;
  rfi_lt *lt;
  rfi_device *device; /* call->library of the kernels */
  cudaStream_t stream;
  bool copies; /* ranks exchange memory by copy engines */
} rfi_selector;

/* Sets the kernel, workspace and library of b. If there is no kernel, b->run stays NULL and b->why may have the
 * reason. */
rfr_status rfi_cuda_select(const rfi_selector *from, const rfi_opr *op, rfi_arena *memory, rfi_bound *b);

#endif
