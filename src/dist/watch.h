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

/* Active until rfi_comm_unwatch; all ranks call both at the same points. Progress of `ctx` counts as progress of this
 * rank. No program with collectives may run meanwhile. With one rank, or comm NULL, it does nothing. Errors:
 * memory.alloc. */
rfr_status rfi_comm_watch(rfr_ctx *ctx, rfr_comm *comm);
/* Waits until all ranks have called it. Accepts NULL and communicators that are not watched. Errors: dist.peer. */
rfr_status rfi_comm_unwatch(rfr_comm *comm);

/* Enclose each call of a communicator; `w` NULL: no effect. After an error of enter, leave must not be called. */
rfr_status rfi_watch_enter(rfi_watch *w);
void rfi_watch_leave(rfi_watch *w);
void rfi_watch_set_timeout(rfi_watch *w, rfr_comm *comm, double timeout);

#endif
