/* SPDX-License-Identifier: Apache-2.0
 *
 * Sharded tensors (rfr_compile_options.shard), described as the programs were recorded: with the full type. With one
 * rank every tensor is complete.
 */
#ifndef RFI_PARTS_H
#define RFI_PARTS_H

#include "train/run.h"

/* Stores the full types of the tensors of run->programs, from the recorded traces. */
rfr_status rfi_parts_keep(rfr_run *run, int n, const rfr_trace *const *traces);

/* rfr_programs_tensor and rfr_programs_tensor_at with the full type and size. For a part, `host` is 0 and `data` is the
 * part: use rfi_host_open, or the functions below. */
rfr_status rfi_run_tensor(const rfr_run *run, const char *name, rfr_tensor *out);
rfr_status rfi_run_tensor_at(const rfr_run *run, int i, rfr_tensor *out);
/* Whether this rank has parameter i of the model; in a pipeline a rank has those of its stages. */
bool rfi_is_here(const rfr_run *run, int i);
bool rfi_is_part(const rfr_run *run, const rfr_tensor *x);
/* Whether each rank writes tensors of a checkpoint to a separate file. */
bool rfi_ranks_save(const rfr_run *run);
/* Whether this rank saves a tensor that is not sharded; one of the ranks that have it does. */
bool rfi_saves(const rfr_run *run, const rfr_tensor *x);
/* Whether a tensor belongs to a parameter: its values, moments or master weight. */
bool rfi_of_parameter(const rfr_tensor *x);
/* Whether a tensor is the average of a parameter (RFI_SUFFIX_EMA). */
bool rfi_is_average(const rfr_tensor *x);

/* A byte range of the full tensor that this rank has, and its position in the part. */
typedef struct rfi_part_range {
  int64_t at, bytes, own;
  int64_t zeros; /* zero bytes of padding that follow in the full tensor */
} rfi_part_range;
enum { RFI_PART_RANGES = 2, RFI_PART_ZEROS = 16 /* maximum */ };
/* *own: the part, as a tensor of the programs. */
rfr_status rfi_part_ranges(const rfr_run *run, const rfr_tensor *x, rfr_tensor *own,
                           rfi_part_range ranges[RFI_PART_RANGES], int *n);
/* Fills own->bytes bytes with a part's first value, 0. Loading leaves it in the padding after the last element. */
rfr_status rfi_part_clear(const rfr_run *run, const rfr_tensor *own, void *part);

/* Gathers the parts of all ranks, x->bytes bytes. All ranks call this together. */
rfr_status rfi_parts_read(rfr_run *run, const rfr_tensor *x, void *to);
/* Writes this rank's part of x->bytes bytes; for a tensor that is not sharded, all bytes. */
rfr_status rfi_parts_write(rfr_run *run, const rfr_tensor *x, const void *from);

#endif
