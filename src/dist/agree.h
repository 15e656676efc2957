/* SPDX-License-Identifier: Apache-2.0
 *
 * One verdict of all ranks.
 */
#ifndef RFI_AGREE_H
#define RFI_AGREE_H

#include "base/base.h"
#include "refrain/dist.h"

/* All ranks call this with their status `s`, an error being the thread's last one. If a rank failed, all ranks return
 * the error of the lowest such rank; on the others its message begins with "rank N: ". comm NULL: returns s. Errors:
 * dist.peer; memory.alloc. */
rfr_status rfi_comm_agree(rfr_ctx *ctx, rfr_comm *comm, rfr_status s);

#endif
