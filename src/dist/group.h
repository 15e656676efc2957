/* SPDX-License-Identifier: Apache-2.0
 *
 * Sums over a subset of the ranks of a communicator: each pipeline rank reduces with its data-parallel peers.
 */
#ifndef RFI_GROUP_H
#define RFI_GROUP_H

#include "dist/comm.h"

/* Before sums between GPUs: all ranks of the communicator call it at the same time, after rfi_comm_connect, each with
 * its group, ranks [first, first + size). Groups do not overlap. Without effect between ranks with memory of the host,
 * and a second time. Errors: dist.peer; no_memory. */
rfr_status rfi_group_connect(rfr_comm *c, int first, int size);
/* n sums, of kind RFI_ALL_REDUCE, over ranks [first, first + size), which call this together; `from` is `to`.
 * Memory of the host, `stream` NULL: made of messages, in rank order, in f32, rounded once, so with the same bits on
 * each rank. Between GPUs all sums are one launch of NCCL on the stream, in NCCL's order.
 * Errors: those of rfi_comm_send and rfi_comm_receive; no_memory. */
rfr_status rfi_group_all_reduce(rfr_ctx *ctx, rfr_comm *c, int first, int size, const rfi_collective *what, int n,
                                void *stream);

#endif
