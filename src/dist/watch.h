/* SPDX-License-Identifier: Apache-2.0
 *
 * Waits for ranks that work for a long time between two calls of a communicator, as when a run is opened. A rank that
 * makes progress may take any time. An error names a rank without progress for the communicator's timeout.
 */
#ifndef RFI_WATCH_H
#define RFI_WATCH_H

#include "base/base.h"
#include "refrain/dist.h"

typedef struct rfi_watch rfi_watch;

/* Until rfi_comm_unwatch; all ranks call both at the same places. `ctx`: its progress is that of this rank. No program
 * with collectives runs meanwhile. With one rank, or comm NULL: nothing. Errors: memory.alloc. */
rfr_status rfi_comm_watch(rfr_ctx *ctx, rfr_comm *comm);
/* Waits until all ranks are here; accepts NULL and what is not watched. Errors: dist.peer. */
rfr_status rfi_comm_unwatch(rfr_comm *comm);

/* Around each call of a communicator; `w` NULL: nothing. After an error of enter there is no leave. */
rfr_status rfi_watch_enter(rfi_watch *w);
void rfi_watch_leave(rfi_watch *w);
void rfi_watch_set_timeout(rfi_watch *w, rfr_comm *comm, double timeout);

#endif
