/* SPDX-License-Identifier: Apache-2.0
 *
 * Ranges for profilers, by NVTX: work enqueued between a begin and its end is shown as one op, inside its layer.
 */
#ifndef RFI_RANGES_H
#define RFI_RANGES_H

#include <stdbool.h>

#include "trace/trace.h"

typedef struct rfi_ranges {
  void *domain;         /* NULL: no profiler; each call below is then one comparison */
  const rfi_opr *layer; /* an op of the open range of a phase and layer; NULL: none is open */
} rfi_ranges;

bool rfi_ranges_built(void); /* the build had NVTX's headers */
void rfi_ranges_open(rfi_ranges *r);
void rfi_ranges_close(rfi_ranges *r);

/* Opens the range of an op, "rmsnorm", inside the range of its phase and layer, "forward layers.3", which stays open
 * for the next op. rfi_ranges_end closes it. */
void rfi_ranges_begin(rfi_ranges *r, const rfi_opr *op);
void rfi_ranges_begin_named(rfi_ranges *r, const char *name);
void rfi_ranges_end(rfi_ranges *r);
void rfi_ranges_end_layer(rfi_ranges *r); /* Call after the last op. */

#endif
