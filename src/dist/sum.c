/* SPDX-License-Identifier: Apache-2.0
 *
 * The sum of the terms of all ranks: in rank order, in f32, rounded once. So sums between threads and between MPI
 * processes are bitwise equal to those of one rank that adds the same terms in that order.
 */
#include "core/convert.h"
#include "dist/comm.h"

enum { BLOCK = 2048 }; /* elements summed at once */

void rfi_collective_sum(rfr_dtype dtype, int terms, const void *(*term)(const void *user, int r), const void *user,
                        int64_t n, void *to) {
  float total[BLOCK], next[BLOCK];
  const int64_t each = rfi_collective_element(dtype);
  for (int64_t done = 0; done < n; done += BLOCK) {
    const int64_t m = n - done < BLOCK ? n - done : BLOCK, at = done * each;
    rfi_convert(RFR_F32, total, dtype, (const char *)term(user, 0) + at, m);
    for (int r = 1; r < terms; r++) {
      rfi_convert(RFR_F32, next, dtype, (const char *)term(user, r) + at, m);
      for (int64_t i = 0; i < m; i++) total[i] += next[i];
    }
    rfi_convert(dtype, (char *)to + at, RFR_F32, total, m);
  }
}
