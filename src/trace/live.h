/* SPDX-License-Identifier: Apache-2.0
 *
 * Lifetimes of storages in list order.
 */
#ifndef RFI_LIVE_H
#define RFI_LIVE_H

#include "trace/trace.h"

typedef struct rfi_life {
  int first, last; /* op indices; -1: not touched; last == n_ops: an output */
  bool persistent; /* an input or a result of phase load: lives across steps */
} rfi_life;

/* Alignment of storages: full cache lines (on a GPU a warp's 512 bytes then touch four lines, not five), and the
 * alignment that GPU libraries require of workspaces. */
enum { RFI_ALIGNMENT = 256 };
static inline int64_t rfi_align(int64_t bytes) { return (bytes + RFI_ALIGNMENT - 1) / RFI_ALIGNMENT * RFI_ALIGNMENT; }
/* Bytes of a storage of this type in an arena. */
static inline int64_t rfi_storage_bytes(const rfr_type *type) { return rfi_align(rfi_bytes(type)); }

/* One entry per value (n_values), valid for owners of storage; freed with rfi_free. */
rfr_status rfi_lives(const rfr_trace *t, rfi_life **out);
/* Step-scoped live bytes during each op (n_ops + 2 entries); freed with rfi_free. */
rfr_status rfi_live_bytes(const rfr_trace *t, int64_t **out);
/* Maximum of the step-scoped live bytes. */
rfr_status rfi_live_peak(const rfr_trace *t, int64_t *peak);

#endif
