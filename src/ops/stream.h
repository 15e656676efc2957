/* SPDX-License-Identifier: Apache-2.0
 *
 * Prefetch and non-temporal stores, for kernels whose operands do not fit into the caches.
 *
 * A core keeps a limited number of cache lines in flight, and the hardware prefetcher stops at page ends, so explicit
 * prefetch helps an update that reads four arrays. A normal store first reads its line from memory; a non-temporal
 * store of a full line does not. It suits data that would be evicted before it is read again. Neither changes results.
 */
#ifndef RFI_STREAM_H
#define RFI_STREAM_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "ops/walk.h"

enum {
  RFI_LINE = 64,
  RFI_STREAM_BYTES = 1 << 20 /* larger operands are evicted from the cache before they are read */
};

/* Prefetches elements i ... i + n - 1 of a dense operand; addresses past its end are allowed. */
static inline void rfi_fetch(const rfi_arg *a, int64_t i, int64_t n) {
  const int size = rfr_dtype_bits(a->type.dtype) / 8;
  const uintptr_t from = (uintptr_t)a->data + (uintptr_t)(i * size);
  for (int64_t b = 0; b < n * size; b += RFI_LINE) __builtin_prefetch((const void *)(from + (uintptr_t)b));
}

/* Copies `bytes`, a multiple of the line size. Other threads see the data after rfi_stream_end. */
static inline void rfi_stream(void *restrict to, const void *restrict from, int64_t bytes) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < bytes; i += 64)
    _mm512_stream_si512((void *)((char *)to + i), _mm512_loadu_si512((const char *)from + i));
#elif defined(__SSE2__)
  for (int64_t i = 0; i < bytes; i += 16)
    _mm_stream_si128((void *)((char *)to + i), _mm_loadu_si128((const void *)((const char *)from + i)));
#else
  memcpy(to, from, (size_t)bytes);
#endif
}
static inline void rfi_stream_end(void) {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

#endif
