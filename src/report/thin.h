/* SPDX-License-Identifier: Apache-2.0
 *
 * Fewer points for a curve. The rows are split into buckets of equal size; of each bucket the first, the last, the
 * smallest and the largest point stay, so that no extreme is lost and a line through the points looks like the line
 * through all of them at that width.
 */
#ifndef RFI_THIN_H
#define RFI_THIN_H

#include "report/run_log.h"

/* The indices into rows of the points of a series that are kept, ascending, at most max(most, 4); NaN is never kept.
 * `out` has space for `most` + 4; returns their number. */
int64_t rfi_thin(const rfi_log_rows *rows, rfi_series series, int64_t most, int64_t *out);

#endif
