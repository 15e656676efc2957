/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensors of which each rank holds a part (rfr_compile_options.shard), as the programs were recorded: with the full
 * type. Without several ranks every tensor is whole.
 */
#ifndef RFI_PARTS_H
#define RFI_PARTS_H

#include "train/run.h"

/* Keeps the full types of the tensors of run->programs, from the traces that were compiled. */
rfr_status rfi_parts_keep(rfr_run *run, int n, const rfr_trace *const *traces);

/* rfr_programs_tensor and rfr_programs_tensor_at with the full type and its bytes. Of a part `host` is 0 and `data` is
 * the part: use rfi_host_open, or the functions below. */
rfr_status rfi_run_tensor(const rfr_run *run, const char *name, rfr_tensor *out);
rfr_status rfi_run_tensor_at(const rfr_run *run, int i, rfr_tensor *out);
/* Whether this rank has parameter i of the model: in a pipeline a rank has those of its stages. */
bool rfi_is_here(const rfr_run *run, int i);
bool rfi_is_part(const rfr_run *run, const rfr_tensor *x);

/* The bytes of all ranks' parts, x->bytes. All ranks call this at the same time. */
rfr_status rfi_parts_read(rfr_run *run, const rfr_tensor *x, void *to);
/* Takes this rank's part of x->bytes bytes; of a tensor that is no part all of them. */
rfr_status rfi_parts_write(rfr_run *run, const rfr_tensor *x, const void *from);

#endif
