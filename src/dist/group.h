/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over a subset of the ranks of a communicator: each pipeline rank reduces with its data-parallel peers.
 */
#ifndef RFI_GROUP_H
#define RFI_GROUP_H

#include "dist/comm.h"

/* Must precede group sums between GPUs. All ranks of the communicator call it together, after rfi_comm_connect, each
 * with its group, ranks [first, first + size). Groups do not overlap. In host memory, and at a second call, it has no
 * effect. Errors: dist.peer; no_memory. */
rfr_status rfi_group_connect(rfr_comm *c, int first, int size);
/* n sums of kind RFI_ALL_REDUCE over ranks [first, first + size), which call this together; `from` is `to`. In host
 * memory, `stream` is NULL and the sums are built from messages: in rank order, in f32, rounded once, so they are
 * bitwise equal on all ranks. Between GPUs all sums are one NCCL launch on the stream, in NCCL's order. Errors: those
 * of rfi_comm_send and rfi_comm_receive; no_memory. */
rfr_status rfi_group_all_reduce(rfr_ctx *ctx, rfr_comm *c, int first, int size, const rfi_collective *what, int n,
                                void *stream);

#endif
