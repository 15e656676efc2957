/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of scaled GEMMs by the accumulator that they may use. The kernels of the kernel table promote partial sums
 * to f32. The launchers below sum in the reduced-precision accumulator of the tensor core if there is one scale per
 * tensor.
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
