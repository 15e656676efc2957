/* SPDX-License-Identifier: Apache-2.0
 *
 * The GGUF container, versions 2 and 3, little-endian: header, metadata (keys with typed values), tensor descriptions,
 * padding, tensor data. Format: docs/gguf.md of ggml.
 *
 * The reader is strict. Each count and length is compared with the bytes that are left in the file before anything is
 * allocated or indexed; sums and products are checked for overflow. Keys and tensor names are unique, and contain no
 * control characters. Arrays of arrays are refused. A tensor has 1 to 4 dimensions of at least 1 and full blocks; the
 * tensors lie in the order of their descriptions, each at the next multiple of general.alignment (a power of two, at
 * most 64 KiB), all inside the file. Values are read through typed getters only. Errors name the file and the byte
 * offset or the key.
 */
#ifndef RFI_GGUF_H
#define RFI_GGUF_H

#include "data/block_formats.h"
#include "data/file.h"

/* Types of metadata values, numbers of the format. */
typedef enum rfi_gguf_kind {
  RFI_GGUF_U8,
  RFI_GGUF_I8,
  RFI_GGUF_U16,
  RFI_GGUF_I16,
  RFI_GGUF_U32,
  RFI_GGUF_I32,
  RFI_GGUF_F32,
  RFI_GGUF_BOOL,
  RFI_GGUF_STRING,
  RFI_GGUF_ARRAY,
  RFI_GGUF_U64,
  RFI_GGUF_I64,
  RFI_GGUF_F64,
  RFI_GGUF_KINDS
} rfi_gguf_kind;

/* One key. A scalar has one element. */
typedef struct rfi_gguf_value {
  const char *key;
  rfi_gguf_kind kind; /* of the elements; never ARRAY */
  bool is_array;
  int64_t count;
  size_t at, end; /* private: bytes of the elements */
} rfi_gguf_value;

typedef struct rfi_gguf_tensor {
  const char *name;
  const rfi_block_format *format;
  int rank;
  int64_t shape[4]; /* as in PyTorch: the last dimension is contiguous; the file has the reverse order */
  int64_t elements, bytes;
  int64_t offset; /* from the start of the file */
} rfi_gguf_tensor;

typedef struct rfi_gguf rfi_gguf;

/* Reads everything but tensor data. Errors: gguf, file.*. */
rfr_status rfi_gguf_open(rfr_ctx *ctx, const char *path, rfi_gguf **out);
void rfi_gguf_close(rfi_gguf *g); /* accepts NULL */
/* *is: the path is a regular file that starts with the magic of GGUF. A missing path or a folder is no error. */
rfr_status rfi_gguf_is(rfr_ctx *ctx, const char *path, bool *is);
const char *rfi_gguf_path(const rfi_gguf *g);
uint32_t rfi_gguf_version(const rfi_gguf *g);

int rfi_gguf_key_count(const rfi_gguf *g);
const rfi_gguf_value *rfi_gguf_key_at(const rfi_gguf *g, int i); /* In the order of the file. */
const rfi_gguf_value *rfi_gguf_key(const rfi_gguf *g, const char *key);
int rfi_gguf_tensor_count(const rfi_gguf *g);
const rfi_gguf_tensor *rfi_gguf_tensor_at(const rfi_gguf *g, int i); /* In the order of the file. */
const rfi_gguf_tensor *rfi_gguf_tensor_find(const rfi_gguf *g, const char *name);

/* Element i of a value. Another kind, or an index past the end, is an error that names the key. A string is not
 * NUL-terminated, lives as long as the file and may have any bytes. Strings of an array are found from its start: read
 * them in order, with *cursor, which starts at 0. */
rfr_status rfi_gguf_int(const rfi_gguf *g, const rfi_gguf_value *v, int64_t i,
                        int64_t *out); /* integers and booleans */
rfr_status rfi_gguf_real(const rfi_gguf *g, const rfi_gguf_value *v, int64_t i, double *out); /* also integers */
rfr_status rfi_gguf_string(const rfi_gguf *g, const rfi_gguf_value *v, const char **text, size_t *n);
rfr_status rfi_gguf_next_string(const rfi_gguf *g, const rfi_gguf_value *v, size_t *cursor, const char **text,
                                size_t *n);

/* Reads rows [first, first + rows) of a tensor, seen as a matrix whose rows are its last dimension, as `dtype` (f32,
 * bf16 or f16) into `out`. head_dim > 0: the rows of each group of head_dim are stored with the two halves of the group
 * interleaved (0, h, 1, h + 1, ..., with h = head_dim / 2), and are read in their own order; first and rows are
 * multiples of head_dim then. Values that a 16-bit dtype does not have are rounded to nearest even. Decodes with all
 * threads of the context. Errors: unsupported for a format that cannot be decoded, file.read. */
rfr_status rfi_gguf_read(rfi_gguf *g, const rfi_gguf_tensor *t, int64_t first, int64_t rows, int64_t head_dim,
                         rfr_dtype dtype, void *out);

#endif
