/* SPDX-License-Identifier: Apache-2.0
 *
 * A common status of all ranks.
 */
#ifndef RFI_AGREE_H
#define RFI_AGREE_H

#include "base/base.h"
#include "refrain/dist.h"

/* All ranks call this, each with its status `s`; if that is an error, rfr_last_error() of the calling thread describes
 * it. If a rank failed, all ranks get the error of the lowest such rank; its message then begins with "rank N: ". With
 * one rank, or comm NULL: returns s. Errors: dist.peer; memory.alloc. */
rfr_status rfi_comm_agree(rfr_ctx *ctx, rfr_comm *comm, rfr_status s);

#endif
