/* SPDX-License-Identifier: Apache-2.0
 *
 * Scaled GEMMs of the module by the accumulator that they may use. Kernels of the table promote partial sums to f32;
 * those below sum in the tensor core's own accumulator if there is one scale per tensor.
 */
#ifndef RFI_SCALED_CUDA_H
#define RFI_SCALED_CUDA_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Kernels for forwards. */
extern const rfi_cuda_kernel rfi_cuda_scaled_forward, rfi_cuda_grouped_scaled_forward;

#ifdef __cplusplus
}
#endif
#endif
