/* SPDX-License-Identifier: Apache-2.0
 *
 * The safetensors format: u64 length n, n bytes of JSON, then the tensors' bytes.
 *
 * The reader is strict. In this order it checks: the file has 8 bytes; n <= 100,000,000
 * and 8 + n fits in the file; strict JSON without duplicate names; of every tensor the
 * dtype, begin <= end, the product of its shape without overflow, whole bytes, and that
 * end - begin equals them; sorted by offset the tensors tile [0, end) without hole or
 * overlap; and 8 + n + end is exactly the file's size. So a file has one meaning only,
 * and no size in it can make the reader allocate more than a small multiple of the file.
 *
 * Names are plain strings and never become paths. Errors name the file and the tensor.
 *
 * Several ranks write a file each, KIND-rank-0003-of-0008.safetensors, with parts of tensors. A part is a tensor of its
 * own, NAME@FIRST: the flat elements of NAME from FIRST, whose shape __metadata__ has under NAME. The files of all
 * ranks are read as if they were one with the full tensors; the parts of a tensor must tile it.
 */
#ifndef RFI_SAFETENSORS_H
#define RFI_SAFETENSORS_H

#include "data/file.h"
#include "refrain/dtype.h"

enum { RFI_SAFETENSORS_RANK = 8 };

typedef struct rfi_stored {
  const char *name;
  const char *dtype_name; /* as in the file: "I16" is valid there, but no op computes with it */
  rfr_dtype dtype;        /* RFR_DTYPE_COUNT for a type that the library does not have */
  int rank;
  int64_t shape[RFI_SAFETENSORS_RANK];
  int64_t elements, bytes;
  int64_t offset; /* from the start of the file */
} rfi_stored;

typedef struct rfi_safetensors rfi_safetensors;

rfr_status rfi_safetensors_open(rfr_ctx *ctx, const char *path, rfi_safetensors **out);
/* The files of all ranks, KIND-rank-*-of-*.safetensors of a folder; *out NULL: the folder has none. */
rfr_status rfi_safetensors_open_parts(rfr_ctx *ctx, const char *folder, const char *kind, rfi_safetensors **out);
void rfi_safetensors_close(rfi_safetensors *st); /* accepts NULL */

int rfi_safetensors_count(const rfi_safetensors *st);
/* In order of their bytes. */
const rfi_stored *rfi_safetensors_at(const rfi_safetensors *st, int i);
/* NULL if there is no tensor of this name. */
const rfi_stored *rfi_safetensors_find(const rfi_safetensors *st, const char *name);
/* A string of __metadata__, or NULL. */
const char *rfi_safetensors_metadata(const rfi_safetensors *st, const char *key);

/* The tensor's bytes as stored; `bytes` must be stored->bytes. */
rfr_status rfi_safetensors_read(rfi_safetensors *st, const rfi_stored *stored, void *data, size_t bytes);
/* Reads the tensor's elements as `dtype`; converts between float types if they differ (rounding to nearest even).
 * `elements` must be stored->elements. */
rfr_status rfi_safetensors_read_as(rfi_safetensors *st, const rfi_stored *stored, rfr_dtype dtype, void *data,
                                   int64_t elements);
/* The same for the n elements from `first` on. May be called by any thread, which gets its own errors. */
rfr_status rfi_safetensors_read_range(rfi_safetensors *st, const rfi_stored *stored, rfr_dtype dtype, void *data,
                                      int64_t first, int64_t n);

/* Writing: the header first, then every tensor's bytes in the order of the entries,
 * appended to `file` in pieces of any size. */
typedef struct rfi_safetensors_entry {
  const char *name;
  rfr_dtype dtype;
  int rank;
  int64_t shape[RFI_SAFETENSORS_RANK];
} rfi_safetensors_entry;
/* `metadata` has n_metadata pairs key, value in addition to {"format": "pt"}. *bytes (may be NULL): the number of bytes
 * of tensors that must follow. */
rfr_status rfi_safetensors_write_header(rfr_ctx *ctx, rfi_file *file, const rfi_safetensors_entry *entries, int n,
                                        const char *const *metadata, int n_metadata, int64_t *bytes);

/* The same for the file of a rank's parts. */
enum { RFI_PART_FILE = 64 };
void rfi_safetensors_part_file(char name[RFI_PART_FILE], const char *kind, int rank, int ranks);
typedef struct rfi_safetensors_part {
  rfi_safetensors_entry full; /* shape of the full tensor */
  int64_t first, count;       /* elements of the part */
} rfi_safetensors_part;
rfr_status rfi_safetensors_write_parts_header(rfr_ctx *ctx, rfi_file *file, const rfi_safetensors_part *parts, int n);

#endif
