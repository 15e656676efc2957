/* SPDX-License-Identifier: Apache-2.0
 *
 * The attention kernels of a GPU: f32 arithmetic for every call, tensor cores for the calls that they support.
 */
#ifndef RFI_ATTENTION_CUDA_H
#define RFI_ATTENTION_CUDA_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const rfi_cuda_kernel rfi_attention_any, rfi_attention_any_bwd;
extern const rfi_cuda_kernel rfi_attention_sm80, rfi_attention_sm80_bwd;
extern const rfi_cuda_kernel rfi_attention_few, rfi_attention_few_bwd;   /* for few and short documents */
extern const rfi_cuda_kernel rfi_attention_sm90, rfi_attention_sm90_bwd; /* only for sm_90 */

#ifdef __cplusplus
}
#endif
#endif
