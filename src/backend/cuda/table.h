/* SPDX-License-Identifier: Apache-2.0
 *
 * The module's kernel for an op.
 */
#ifndef RFI_CUDA_TABLE_H
#define RFI_CUDA_TABLE_H

#include "backend/cuda/cuda.h"
#include "trace/trace.h"

/* NULL: there is none. */
const rfi_cuda_kernel *rfi_cuda_kernel_of(rfi_opcode code);

#endif
