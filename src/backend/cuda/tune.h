/* SPDX-License-Identifier: Apache-2.0
 *
 * Random operands, and a comparison of two results by their bytes; on the device.
 */
#ifndef RFI_TUNE_H
#define RFI_TUNE_H

#include "backend/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n pseudorandom numbers that depend only on the seed: between -1 and 1, or finite 8-bit codes. */
rfr_status rfi_cuda_random(void *to, rfr_dtype dtype, int64_t n, uint32_t seed, cudaStream_t stream);
/* Sets *differs, on the device, to 1 where bytes (an even number) of a and b differ. */
rfr_status rfi_cuda_compare(const void *a, const void *b, int64_t bytes, int *differs, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
