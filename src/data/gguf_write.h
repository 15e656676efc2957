/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes GGUF files of version 3: first the keys and the descriptions of all tensors, then the header, then the data of
 * the tensors in that order.
 *
 *   rfi_gguf_writer *w;
 *   RFI_TRY(rfi_gguf_writer_create(ctx, &w));
 *   rfi_gguf_put_text(w, "general.architecture", "llama", 5);
 *   rfi_gguf_put_tensor(w, "output_norm.weight", rfi_block_format_named("F32"), 1, shape);
 *   s = rfi_gguf_write_header(w, file);
 *   if (s == RFR_OK) s = rfi_gguf_write_rows(w, file, values, rows);
 *
 * The put functions latch the first error; rfi_gguf_write_header returns it.
 */
#ifndef RFI_GGUF_WRITE_H
#define RFI_GGUF_WRITE_H

#include "data/gguf.h"

typedef struct rfi_gguf_writer rfi_gguf_writer;

rfr_status rfi_gguf_writer_create(rfr_ctx *ctx, rfi_gguf_writer **out);
void rfi_gguf_writer_destroy(rfi_gguf_writer *w); /* accepts NULL */

void rfi_gguf_put_u32(rfi_gguf_writer *w, const char *key, int64_t x); /* an error past 32 bits */
void rfi_gguf_put_f32(rfi_gguf_writer *w, const char *key, double x);
void rfi_gguf_put_bool(rfi_gguf_writer *w, const char *key, bool x);
void rfi_gguf_put_text(rfi_gguf_writer *w, const char *key, const char *text, size_t n);
/* A list of `count` elements of a kind; exactly so many calls of the next two functions must follow. */
void rfi_gguf_put_list(rfi_gguf_writer *w, const char *key, rfi_gguf_kind kind, int64_t count);
void rfi_gguf_put_item(rfi_gguf_writer *w, const char *text, size_t n); /* of a list of strings */
void rfi_gguf_put_number(rfi_gguf_writer *w, double x);                 /* of a list of i32 or f32 */

/* shape: the last dimension is contiguous; it must be full blocks. */
void rfi_gguf_put_tensor(rfi_gguf_writer *w, const char *name, const rfi_block_format *format, int rank,
                         const int64_t *shape);
/* Bytes of the data of all tensors, padding included. */
int64_t rfi_gguf_writer_bytes(const rfi_gguf_writer *w);
rfr_status rfi_gguf_write_header(rfi_gguf_writer *w, rfi_file *file);
/* Encodes the next `rows` rows (of the last dimension) of the current tensor with all threads of the context. After its
 * last row, the next tensor is current. Errors: file.write. */
rfr_status rfi_gguf_write_rows(rfi_gguf_writer *w, rfi_file *file, const float *values, int64_t rows);

#endif
