/* SPDX-License-Identifier: Apache-2.0
 *
 * Arrays from one element type to another. Kernels have their own fast casts; this is for data from or to files,
 * foreign tensors and tests.
 */
#ifndef RFI_CONVERT_H
#define RFI_CONVERT_H

#include <stdint.h>

#include "refrain/dtype.h"

/* Converts n elements; the two arrays do not overlap and need no alignment. Each value is
 * rounded once, to nearest even, as rfr_float_to_bits says; also from f64 and i64, where a
 * detour over f32 would round twice. Between equal types the bits are copied. To integers:
 * toward zero, saturating, NaN gives 0. To bool: 1 unless the value is zero (NaN gives 1);
 * from bool: any byte but 0 is 1. Types of less than 8 bits are taken one element per byte,
 * in its low bits. */
void rfi_convert(rfr_dtype to, void *dst, rfr_dtype from, const void *src, int64_t n);

#endif
