/* SPDX-License-Identifier: Apache-2.0
 *
 * Lines of a text file, read in pieces; a gzip or zstd file is decompressed on the way.
 *
 * Limits: a line has at most RFI_LINE_LIMIT bytes, a file at most RFI_LINES_LIMIT decompressed bytes. A compressed file
 * with more than RFI_LINES_FREE decompressed bytes has a compression ratio of at most RFI_LINES_RATIO.
 */
#ifndef RFI_LINES_H
#define RFI_LINES_H

#include "data/file.h"

#define RFI_LINE_LIMIT ((int64_t)64 << 20)
#define RFI_LINES_LIMIT ((int64_t)1 << 38)
#define RFI_LINES_FREE ((int64_t)64 << 20)
enum { RFI_LINES_RATIO = 1000 };

typedef struct rfi_lines rfi_lines;

/* The first bytes of the file determine the compression; a name that ends in .gz or .zst must agree. Errors: file.*,
 * data.compressed. */
rfr_status rfi_lines_open(rfr_ctx *ctx, const char *path, rfi_lines **out);
/* The same for `n` bytes in memory, which must stay valid; `name` is the file's name in errors, `limit` the largest
 * number of decompressed bytes. */
rfr_status rfi_lines_open_bytes(rfr_ctx *ctx, const char *name, const void *data, size_t n, int64_t limit,
                                rfi_lines **out);
void rfi_lines_close(rfi_lines *lines); /* accepts NULL */

/* The next line, without its line feed; *text is NULL at the end of the file. The text is valid until the next call.
 * *line counts from 1. Errors: data.compressed, data.row (a line over the limit), file.*, memory.alloc. */
rfr_status rfi_lines_next(rfi_lines *lines, const char **text, size_t *n, int64_t *line);

#endif
