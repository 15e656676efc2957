/* SPDX-License-Identifier: Apache-2.0
 *
 * A common status of all ranks.
 */
#ifndef RFI_AGREE_H
#define RFI_AGREE_H

#include "base/base.h"
#include "refrain/dist.h"

/* All ranks call this with their status `s`, an error being the thread's last one. If a rank failed, all ranks get the
 * error of the lowest such rank, whose message begins with "rank N: ". With one rank, or comm NULL: returns s. Errors:
 * dist.peer; memory.alloc. */
rfr_status rfi_comm_agree(rfr_ctx *ctx, rfr_comm *comm, rfr_status s);

#endif
