/* SPDX-License-Identifier: Apache-2.0
 *
 * The rows of a group, for kernels on the CPU and on a GPU. For any values of the offsets, no kernel reads or writes
 * outside the R rows.
 */
#ifndef RFI_GROUPED_H
#define RFI_GROUPED_H

#include <stdint.h>

#ifdef __CUDACC__
#define RFI_GROUPED static __host__ __device__ __forceinline__
#else
#define RFI_GROUPED static inline
#endif

/* The first row of group g; g = G: the first row after all groups. */
RFI_GROUPED int64_t rfi_group_begin(const int32_t *offsets, int64_t g, int64_t R) {
  int64_t at = offsets[g];
  return at < 0 ? 0 : at < R ? at : R;
}
RFI_GROUPED int64_t rfi_group_end(const int32_t *offsets, int64_t g, int64_t R) {
  int64_t begin = rfi_group_begin(offsets, g, R), end = rfi_group_begin(offsets, g + 1, R);
  return end > begin ? end : begin;
}

#endif
