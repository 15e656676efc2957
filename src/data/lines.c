/* SPDX-License-Identifier: Apache-2.0
 *
 * One buffer has the decompressed bytes from the start of the current line. A refill moves them to the front and
 * appends the next bytes. The buffer doubles only when a single line fills it.
 */
#include "data/lines.h"

#include <string.h>
#include <zlib.h>
#include <zstd.h>
#include <zstd_errors.h>

enum { INPUT_BYTES = 128 << 10, FIRST_BUFFER = 256 << 10 };

typedef enum packing { PLAIN, GZIP, ZSTD } packing;

struct rfi_lines {
  rfr_ctx *ctx;
  char *name;
  rfi_file *file;          /* NULL: bytes in memory */
  const uint8_t *bytes;    /* in memory: `size` bytes */
  int64_t size, taken;     /* bytes of the input; bytes read so far */
  int64_t limit, produced; /* limit of, and number of, decompressed bytes */
  packing packing;
  uint8_t *input; /* compressed bytes [input_at, input_end) */
  size_t input_at, input_end, input_size;
  z_stream gzip;
  ZSTD_DStream *zstd;
  bool in_frame; /* inside a gzip member or zstd frame */
  bool ended;
  char *buffer; /* text [at, end) */
  size_t at, end, capacity;
  int64_t line;
};

static rfr_status damaged(const rfi_lines *l, const char *what) {
  return rfi_fail_at(RFI_E_DATA_COMPRESSED, l->name, 0, "the %s data near byte %lld %s",
                     l->packing == GZIP ? "gzip" : "zstd",
                     (long long)(l->taken - (int64_t)(l->input_end - l->input_at)), what);
}

/* Reads up to `n` bytes of the input; *got is 0 at its end. */
static rfr_status take(rfi_lines *l, void *to, size_t n, size_t *got) {
  const int64_t left = l->size - l->taken;
  *got = (int64_t)n < left ? n : (size_t)left;
  if (*got == 0) return RFR_OK;
  if (l->file) RFI_TRY(rfi_file_read_at(l->file, to, *got, l->taken));
  else memcpy(to, l->bytes + l->taken, *got);
  l->taken += (int64_t)*got;
  return RFR_OK;
}

static rfr_status inflate_some(rfi_lines *l, char *to, size_t n, size_t *got) {
  l->gzip.next_in = l->input + l->input_at;
  l->gzip.avail_in = (uInt)(l->input_end - l->input_at);
  l->gzip.next_out = (Bytef *)to;
  l->gzip.avail_out = n > 1 << 30 ? 1 << 30 : (uInt)n;
  const uInt room = l->gzip.avail_out;
  if (!l->in_frame && inflateReset(&l->gzip) != Z_OK) return rfi_fail(RFI_E_INTERNAL, "inflateReset failed");
  l->in_frame = true;
  const int code = inflate(&l->gzip, Z_NO_FLUSH);
  l->input_at = l->input_end - l->gzip.avail_in;
  *got = room - l->gzip.avail_out;
  if (code == Z_STREAM_END) l->in_frame = false;
  else if (code == Z_MEM_ERROR) return rfi_fail(RFI_E_NO_MEMORY, "%s: out of memory in zlib", l->name);
  else if (code != Z_OK && code != Z_BUF_ERROR) return damaged(l, "is not valid");
  return RFR_OK;
}

static rfr_status unzstd_some(rfi_lines *l, char *to, size_t n, size_t *got) {
  ZSTD_inBuffer in = {l->input, l->input_end, l->input_at};
  ZSTD_outBuffer out = {to, n, 0};
  const size_t code = ZSTD_decompressStream(l->zstd, &out, &in);
  l->input_at = in.pos;
  *got = out.pos;
  if (ZSTD_isError(code) && ZSTD_getErrorCode(code) == ZSTD_error_memory_allocation)
    return rfi_fail(RFI_E_NO_MEMORY, "%s: out of memory in zstd", l->name);
  if (ZSTD_isError(code)) return damaged(l, "is not valid");
  l->in_frame = code != 0;
  return RFR_OK;
}

/* Adds at least one decompressed byte to the buffer, or sets `ended`. */
static rfr_status fill(rfi_lines *l) {
  size_t got = 0;
  char *to = l->buffer + l->end;
  const size_t room = l->capacity - l->end;
  if (l->packing == PLAIN) RFI_TRY(take(l, to, room, &got));
  while (l->packing != PLAIN && got == 0) {
    if (l->input_at == l->input_end) {
      l->input_at = 0;
      RFI_TRY(take(l, l->input, l->input_size, &l->input_end));
    }
    const bool no_input = l->input_at == l->input_end;
    if (no_input && !l->in_frame) break;
    RFI_TRY(l->packing == GZIP ? inflate_some(l, to, room, &got) : unzstd_some(l, to, room, &got));
    if (no_input && got == 0 && l->in_frame) return damaged(l, "ends too early");
  }
  l->end += got;
  l->produced += (int64_t)got;
  l->ended = got == 0;
  if (l->produced > l->limit)
    return rfi_fail_at(RFI_E_DATA_COMPRESSED, l->name, 0, "the text has more than %lld bytes", (long long)l->limit);
  if (l->packing != PLAIN && l->produced > RFI_LINES_FREE && l->produced / RFI_LINES_RATIO > l->taken)
    return rfi_fail_at(RFI_E_DATA_COMPRESSED, l->name, 0,
                       "%lld bytes decompress to at least %lld; a ratio above %d is refused", (long long)l->taken,
                       (long long)l->produced, (int)RFI_LINES_RATIO);
  return RFR_OK;
}

/* Makes space for at least one byte after the text. */
static rfr_status make_room(rfi_lines *l) {
  if (l->at > 0) {
    memmove(l->buffer, l->buffer + l->at, l->end - l->at);
    l->end -= l->at;
    l->at = 0;
  }
  if (l->end < l->capacity) return RFR_OK;
  if ((int64_t)l->capacity > RFI_LINE_LIMIT)
    return rfi_fail_at(RFI_E_DATA_ROW, l->name, l->line + 1, "the line has more than %lld bytes",
                       (long long)RFI_LINE_LIMIT);
  char *grown;
  RFI_TRY(RFI_ALLOC(l->ctx, 2 * l->capacity, &grown));
  memcpy(grown, l->buffer, l->end);
  rfi_free(l->ctx, l->buffer);
  l->buffer = grown;
  l->capacity *= 2;
  return RFR_OK;
}

rfr_status rfi_lines_next(rfi_lines *l, const char **text, size_t *n, int64_t *line) {
  *text = NULL;
  *n = 0;
  *line = l->line + 1;
  for (size_t seen = 0;;) {
    const char *start = l->buffer + l->at;
    const size_t have = l->end - l->at;
    const char *newline = have > seen ? memchr(start + seen, '\n', have - seen) : NULL;
    if (newline || (l->ended && have > 0)) {
      *text = start;
      *n = newline ? (size_t)(newline - start) : have;
      l->at += *n + (newline != NULL);
      l->line++;
      return RFR_OK;
    }
    if (l->ended) return RFR_OK;
    seen = have;
    RFI_TRY(make_room(l));
    RFI_TRY(fill(l));
  }
}

static rfr_status find_packing(rfi_lines *l) {
  size_t n;
  RFI_TRY(take(l, l->input, 4, &n));
  l->taken = 0;
  if (n >= 2 && memcmp(l->input, "\x1f\x8b", 2) == 0) l->packing = GZIP;
  else if (n == 4 && memcmp(l->input, "\x28\xb5\x2f\xfd", 4) == 0) l->packing = ZSTD;
  if (rfi_ends_in(l->name, ".gz") && l->packing != GZIP)
    return rfi_fail_at(RFI_E_DATA_COMPRESSED, l->name, 0, "the name ends in .gz, but the file is not a gzip file");
  if (rfi_ends_in(l->name, ".zst") && l->packing != ZSTD)
    return rfi_fail_at(RFI_E_DATA_COMPRESSED, l->name, 0, "the name ends in .zst, but the file is not a zstd file");
  return RFR_OK;
}

static rfr_status start(rfi_lines *l) {
  l->input_size = l->size < INPUT_BYTES ? (size_t)l->size + 4 : INPUT_BYTES;
  RFI_TRY(RFI_ALLOC(l->ctx, l->input_size, &l->input));
  RFI_TRY(find_packing(l));
  if (l->packing == GZIP && inflateInit2(&l->gzip, 15 + 16) != Z_OK) { /* 15 + 16: the gzip format */
    l->packing = PLAIN;
    return rfi_fail(RFI_E_NO_MEMORY, "%s: out of memory in zlib", l->name);
  }
  if (l->packing == ZSTD && !(l->zstd = ZSTD_createDStream()))
    return rfi_fail(RFI_E_NO_MEMORY, "%s: out of memory in zstd", l->name);
  l->capacity = l->packing == PLAIN && l->size < FIRST_BUFFER ? (size_t)l->size + 1 : FIRST_BUFFER;
  return RFI_ALLOC(l->ctx, l->capacity, &l->buffer);
}

static rfr_status create(rfr_ctx *ctx, const char *name, rfi_file *file, const void *data, int64_t size, int64_t limit,
                         rfi_lines **out) {
  rfi_lines *l = NULL;
  rfr_status s = RFI_ALLOC(ctx, sizeof *l, &l);
  if (s != RFR_OK) {
    rfi_file_close(file);
    return s;
  }
  l->ctx = ctx;
  l->file = file;
  l->bytes = data;
  l->size = size;
  l->limit = limit;
  RFI_GOTO(RFI_ALLOC(ctx, strlen(name) + 1, &l->name));
  strcpy(l->name, name);
  RFI_GOTO(start(l));
  *out = l;
  return RFR_OK;
fail:
  rfi_lines_close(l);
  return s;
}

rfr_status rfi_lines_open(rfr_ctx *ctx, const char *path, rfi_lines **out) {
  rfi_file *file;
  *out = NULL;
  RFI_TRY(rfi_file_open(ctx, path, &file));
  return create(ctx, path, file, NULL, rfi_file_size(file), RFI_LINES_LIMIT, out);
}

rfr_status rfi_lines_open_bytes(rfr_ctx *ctx, const char *name, const void *data, size_t n, int64_t limit,
                                rfi_lines **out) {
  *out = NULL;
  return create(ctx, name, NULL, data, (int64_t)n, limit, out);
}

void rfi_lines_close(rfi_lines *l) {
  if (!l) return;
  if (l->packing == GZIP) inflateEnd(&l->gzip);
  ZSTD_freeDStream(l->zstd);
  rfi_file_close(l->file);
  rfi_free(l->ctx, l->input);
  rfi_free(l->ctx, l->buffer);
  rfi_free(l->ctx, l->name);
  rfi_free(l->ctx, l);
}
