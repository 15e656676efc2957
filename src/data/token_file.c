/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads and writes token files. An index is read as three streams that advance together, so its size is not limited by
 * memory; the ends of documents are kept.
 */
#include "data/token_file.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#include "data/token_table.h"

enum { LLMC_U16 = 20240520, LLMC_EVAL = 20240522, LLMC_U32 = 20240801, LLMC_HEADER = 1024 };
enum { INDEX_HEADER = 34, SEQUENCE_BYTES = 12, BOUND_BYTES = 8 };
static const char index_magic[9] = "MMIDIDX\0"; /* and a second NUL */

#define BAD(path, ...) rfi_fail_at(RFI_E_DATA_TOKENS, path, 0, __VA_ARGS__)

/* X.idx of X.bin. Free with rfi_free. */
static rfr_status index_path(rfr_ctx *ctx, const char *path, char **out) {
  const size_t n = strlen(path);
  RFI_TRY(RFI_ALLOC(ctx, n + 1, out));
  memcpy(*out, path, n + 1);
  memcpy(*out + n - 4, ".idx", 4);
  return RFR_OK;
}

/* ---- an index ---- */

typedef struct stream {
  rfi_file *file;
  int64_t at, end; /* bytes of the file */
  uint8_t data[4096];
  size_t used, n;
} stream;

/* The next number, of `bytes` bytes; the stream must have it. */
static rfr_status next(stream *s, size_t bytes, void *out) {
  if (s->used == s->n) {
    s->n = s->end - s->at < (int64_t)sizeof s->data ? (size_t)(s->end - s->at) : sizeof s->data;
    s->used = 0;
    RFI_TRY(rfi_file_read_at(s->file, s->data, s->n, s->at));
    s->at += (int64_t)s->n;
  }
  memcpy(out, s->data + s->used, bytes);
  s->used += bytes;
  return RFR_OK;
}

/* Types of ids: the code in the index, bytes, sign. Codes 6 and 7 are floating-point types. */
static bool find_type(int code, rfi_token_file *f) {
  static const struct {
    int code, width;
    bool is_signed;
  } types[] = {{1, 1, false}, {2, 1, true}, {3, 2, true}, {4, 4, true}, {5, 8, true}, {8, 2, false}};
  for (size_t i = 0; i < sizeof types / sizeof *types; i++)
    if (types[i].code == code) {
      f->width = types[i].width;
      f->is_signed = types[i].is_signed;
      return true;
    }
  return false;
}

typedef struct index {
  const char *path;
  rfi_file *file;
  uint64_t sequences, bounds;
  stream length, pointer, bound;
} index_file;

static rfr_status read_header(index_file *x, rfi_token_file *f) {
  uint8_t header[INDEX_HEADER];
  uint64_t version;
  const int64_t size = rfi_file_size(x->file);
  if (size < INDEX_HEADER)
    return BAD(x->path, "the file has %" PRId64 " bytes, fewer than the %d of a header", size, INDEX_HEADER);
  RFI_TRY(rfi_file_read_at(x->file, header, sizeof header, 0));
  memcpy(&version, header + 9, 8);
  memcpy(&x->sequences, header + 18, 8);
  memcpy(&x->bounds, header + 26, 8);
  if (memcmp(header, index_magic, sizeof index_magic) != 0)
    return BAD(x->path, "byte 0: the magic number is not that of a Megatron index, MMIDIDX");
  if (version != 1) return BAD(x->path, "byte 9: version %" PRIu64 "; 1 is supported", version);
  if (!find_type(header[17], f))
    return BAD(x->path, "byte 17: ids of type %d; the integer types 1, 2, 3, 4, 5 and 8 are supported", header[17]);
  const uint64_t left = (uint64_t)(size - INDEX_HEADER);
  if (x->sequences > left / SEQUENCE_BYTES)
    return BAD(x->path, "byte 18: %" PRIu64 " sequences; the %" PRIu64 " bytes after the header have room for %" PRIu64,
               x->sequences, left, left / SEQUENCE_BYTES);
  const uint64_t after = left - x->sequences * SEQUENCE_BYTES;
  if (x->bounds > after / BOUND_BYTES || x->bounds < 1)
    return BAD(x->path,
               "byte 26: %" PRIu64 " document bounds; the %" PRIu64
               " bytes after the sequences have room for 1 to %" PRIu64,
               x->bounds, after, after / BOUND_BYTES);
  const uint64_t rest = after - x->bounds * BOUND_BYTES;
  if (rest > 0)
    return BAD(x->path, "byte %" PRIu64 ": %" PRIu64 " bytes after the document bounds%s", (uint64_t)size - rest, rest,
               rest == x->sequences ? "; sequences with modes are not supported" : "");
  const int64_t pointers = INDEX_HEADER + (int64_t)x->sequences * 4, bounds = pointers + (int64_t)x->sequences * 8;
  x->length = (stream){.file = x->file, .at = INDEX_HEADER, .end = pointers};
  x->pointer = (stream){.file = x->file, .at = pointers, .end = bounds};
  x->bound = (stream){.file = x->file, .at = bounds, .end = size};
  return RFR_OK;
}

/* One sequence: it begins where the one before ended. Adds its ids to *tokens. */
static rfr_status read_sequence(index_file *x, uint64_t i, const rfi_token_file *f, int64_t *tokens) {
  int32_t length;
  int64_t pointer;
  RFI_TRY(next(&x->length, sizeof length, &length));
  RFI_TRY(next(&x->pointer, sizeof pointer, &pointer));
  if (length < 0)
    return BAD(x->path, "byte %" PRIu64 ": sequence %" PRIu64 " has the length %d", INDEX_HEADER + 4 * i, i, length);
  if (pointer != *tokens * f->width)
    return BAD(x->path,
               "byte %" PRIu64 ": sequence %" PRIu64 " begins at byte %" PRId64
               " of the ids; those before it end at %" PRId64,
               INDEX_HEADER + 4 * x->sequences + 8 * i, i, pointer, *tokens * f->width);
  if (length > (f->size / f->width) - *tokens)
    return BAD(x->path,
               "byte %" PRIu64 ": sequence %" PRIu64 " ends at token %" PRId64 "; the .bin file ends at token %" PRId64
               ", at its byte %" PRId64,
               INDEX_HEADER + 4 * i, i, *tokens + length, f->size / f->width, f->size);
  *tokens += length;
  return RFR_OK;
}

static rfr_status read_documents(index_file *x, rfi_token_file *f) {
  uint64_t done = 0; /* sequences */
  int64_t tokens = 0;
  for (uint64_t d = 0; d < x->bounds; d++) {
    int64_t bound;
    RFI_TRY(next(&x->bound, sizeof bound, &bound));
    const uint64_t place = INDEX_HEADER + SEQUENCE_BYTES * x->sequences + 8 * d;
    if (d == 0 ? bound != 0 : bound < 0 || (uint64_t)bound < done || (uint64_t)bound > x->sequences)
      return BAD(x->path,
                 "byte %" PRIu64 ": document bound %" PRIu64 " is sequence %" PRId64 "; %" PRIu64 " to %" PRIu64
                 " is possible",
                 place, d, bound, done, d == 0 ? 0 : x->sequences);
    const int64_t before = tokens;
    for (; done < (uint64_t)bound; done++) RFI_TRY(read_sequence(x, done, f, &tokens));
    if (tokens > before) f->ends[f->documents++] = tokens;
  }
  if (done != x->sequences)
    return BAD(x->path, "byte %" PRId64 ": the last document ends with sequence %" PRIu64 "; there are %" PRIu64,
               rfi_file_size(x->file) - 8, done, x->sequences);
  if (tokens * f->width != f->size)
    return BAD(x->path, "the sequences have %" PRId64 " bytes of ids; the .bin file has %" PRId64, tokens * f->width,
               f->size);
  f->tokens = tokens;
  return RFR_OK;
}

static rfr_status inspect_megatron(rfr_ctx *ctx, const char *path, rfi_token_file *f) {
  index_file *x;
  f->format = RFR_TOKENS_MEGATRON;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *x, &x));
  x->path = path;
  rfr_status s = rfi_file_open(ctx, path, &x->file);
  if (s == RFR_OK) s = read_header(x, f);
  if (s == RFR_OK) s = RFI_ALLOC(ctx, (size_t)x->bounds * sizeof *f->ends, &f->ends);
  if (s == RFR_OK) s = read_documents(x, f);
  rfi_file_close(x->file);
  rfi_free(ctx, x);
  return s;
}

/* ---- one file ---- */

static rfr_status check_llmc(const char *path, const int32_t header[3], rfi_token_file *f) {
  const int version = header[0] == LLMC_U16 ? 1 : 7;
  f->format = RFR_TOKENS_LLMC;
  f->width = header[0] == LLMC_U16 ? 2 : 4;
  f->start = LLMC_HEADER;
  if (header[1] != version)
    return BAD(path, "byte 4: version %d of an llm.c file with magic number %d; %d is supported", header[1], header[0],
               version);
  f->tokens = (f->size - LLMC_HEADER) / f->width;
  if (f->size < LLMC_HEADER || header[2] < 0 || (int64_t)header[2] * f->width != f->size - LLMC_HEADER)
    return BAD(path,
               "byte 8: the header promises %d ids of %d bytes; the file has %" PRId64 " bytes after its header of %d",
               header[2], f->width, f->size < LLMC_HEADER ? 0 : f->size - LLMC_HEADER, LLMC_HEADER);
  return RFR_OK;
}

static rfr_status inspect_file(const char *path, rfi_file *file, int raw_width, rfi_token_file *f) {
  int32_t header[3] = {0};
  if (f->size >= (int64_t)sizeof header) RFI_TRY(rfi_file_read_at(file, header, sizeof header, 0));
  if (header[0] == LLMC_U16 || header[0] == LLMC_U32) return check_llmc(path, header, f);
  if (header[0] == LLMC_EVAL) return BAD(path, "byte 0: an llm.c file of questions and answers, not of text");
  f->format = RFR_TOKENS_NANOGPT;
  f->width = raw_width;
  f->tokens = f->size / raw_width;
  if (f->size % raw_width == 0) return RFR_OK;
  return BAD(path, "byte %" PRId64 ": the file has no header, so it has ids of %d bytes, and ends inside one",
             f->size - f->size % raw_width, raw_width);
}

/* A dangling link to an index is an error: without the index, the ids would be read without their documents. */
static rfr_status check_link(const char *path, const char *index) {
  bool dangles;
  RFI_TRY(rfi_path_dangles(index, &dangles));
  return dangles ? BAD(index, "the link leads to no file; %s needs its index, or no link", path) : RFR_OK;
}

rfr_status rfi_token_file_inspect(rfr_ctx *ctx, const char *path, int raw_width, rfi_token_file *out) {
  rfi_file *file;
  char *index, kind;
  *out = (rfi_token_file){0};
  RFI_CHECK(rfi_ends_in(path, ".bin"));
  RFI_TRY(index_path(ctx, path, &index));
  rfr_status s = rfi_file_open(ctx, path, &file);
  if (s == RFR_OK) {
    out->size = rfi_file_size(file);
    s = rfi_path_kind(index, &kind);
    if (s == RFR_OK && !kind) s = check_link(path, index);
    if (s == RFR_OK) s = kind ? inspect_megatron(ctx, index, out) : inspect_file(path, file, raw_width, out);
    rfi_file_close(file);
  }
  rfi_free(ctx, index);
  if (s != RFR_OK) rfi_token_file_deinit(ctx, out);
  return s;
}

void rfi_token_file_deinit(rfr_ctx *ctx, rfi_token_file *f) {
  rfi_free(ctx, f->ends);
  *f = (rfi_token_file){0};
}

/* ---- ids ---- */

static inline int64_t id_at(const uint8_t *raw, int64_t i, int width, bool is_signed) {
  int64_t x = 0;
  memcpy(&x, raw + i * width, (size_t)width);
  if (!is_signed || width == 8) return x;
  const int64_t sign = (int64_t)1 << (8 * width - 1);
  return (x ^ sign) - sign;
}

/* Whether all ids are less than `vocab`. `width` and `is_signed` are constants at each call. */
__attribute__((always_inline)) static inline bool widen(const uint8_t *raw, int64_t n, int width, bool is_signed,
                                                        int64_t vocab, int32_t *out) {
  int bad = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t id = id_at(raw, i, width, is_signed);
    bad |= (uint64_t)id >= (uint64_t)vocab;
    out[i] = (int32_t)id;
  }
  return !bad;
}

static bool widen_any(const uint8_t *raw, int64_t n, const rfi_token_file *f, int64_t vocab, int32_t *out) {
  switch (f->width) {
    case 1: return f->is_signed ? widen(raw, n, 1, true, vocab, out) : widen(raw, n, 1, false, vocab, out);
    case 2: return f->is_signed ? widen(raw, n, 2, true, vocab, out) : widen(raw, n, 2, false, vocab, out);
    case 4: return f->is_signed ? widen(raw, n, 4, true, vocab, out) : widen(raw, n, 4, false, vocab, out);
    default: return widen(raw, n, 8, true, vocab, out);
  }
}

static rfr_status fail_id(rfi_file *file, const rfi_token_file *f, const uint8_t *raw, int64_t first, int64_t vocab) {
  const bool bare = f->format == RFR_TOKENS_NANOGPT;
  int64_t i = 0;
  while ((uint64_t)id_at(raw, i, f->width, f->is_signed) < (uint64_t)vocab) i++;
  return BAD(rfi_file_path(file),
             "byte %" PRId64 ": token %" PRId64 " is %" PRId64 "; the model has vocab_size %" PRId64 "%s%s",
             f->start + (first + i) * f->width, first + i, id_at(raw, i, f->width, f->is_signed), vocab,
             bare ? "; the file has no header and is read as " : "",
             !bare           ? ""
             : f->width == 2 ? "uint16 (data.token_dtype)"
                             : "uint32 (data.token_dtype)");
}

rfr_status rfi_token_file_read(rfi_file *file, const rfi_token_file *f, int64_t first, int64_t n, int64_t vocab,
                               int32_t *out) {
  uint8_t raw[16384];
  for (int64_t some; n > 0; first += some, out += some, n -= some) {
    some = n < (int64_t)sizeof raw / f->width ? n : (int64_t)sizeof raw / f->width;
    RFI_TRY(rfi_file_read_at(file, raw, (size_t)(some * f->width), f->start + first * f->width));
    if (!widen_any(raw, some, f, vocab, out)) return fail_id(file, f, raw, first, vocab);
  }
  return RFR_OK;
}

/* ---- writing ---- */

enum { WRITE_BYTES = 1 << 16 };

struct rfi_token_writer {
  rfr_ctx *ctx;
  rfr_token_format format;
  int width;
  int64_t vocab, tokens;
  char *path, *temporary, *index, *index_temporary;
  rfi_file *file, *index_file;
  int32_t *lengths; /* Megatron: of the documents */
  int64_t documents, capacity;
  uint8_t data[WRITE_BYTES];
  size_t n;
};

static rfr_status check_absent(const char *path) {
  char kind;
  RFI_TRY(rfi_path_kind(path, &kind));
  return kind ? rfi_fail_at(RFI_E_EXPORT_EXISTS, path, 0, "the file exists already") : RFR_OK;
}

/* Removes a file left by an interrupted call of a process that had our process id. */
static rfr_status start_file(rfr_ctx *ctx, const char *path, char **temporary, rfi_file **file) {
  RFI_TRY(rfi_path_temporary(ctx, path, temporary));
  RFI_TRY(rfi_tree_remove(ctx, *temporary));
  return rfi_file_create(ctx, *temporary, file);
}

static rfr_status flush(rfi_token_writer *w, rfi_file *file) {
  const size_t n = w->n;
  w->n = 0;
  return rfi_file_append(file, w->data, n);
}

static rfr_status put(rfi_token_writer *w, rfi_file *file, const void *number, size_t bytes) {
  if (w->n + bytes > WRITE_BYTES) RFI_TRY(flush(w, file));
  memcpy(w->data + w->n, number, bytes);
  w->n += bytes;
  return RFR_OK;
}

static rfr_status put_header(rfi_token_writer *w) {
  const int32_t header[LLMC_HEADER / 4] = {w->width == 2 ? LLMC_U16 : LLMC_U32, w->width == 2 ? 1 : 7};
  return w->format == RFR_TOKENS_LLMC ? put(w, w->file, header, sizeof header) : RFR_OK;
}

rfr_status rfi_token_writer_create(rfr_ctx *ctx, const char *path, rfr_token_format format, int64_t vocab,
                                   rfi_token_writer **out) {
  rfi_token_writer *w;
  *out = NULL;
  if (!rfi_ends_in(path, ".bin") || strlen(path) < 5)
    return BAD(path, "the name of a token file ends in .bin, because training reads the tokens of such files");
  RFI_TRY(RFI_ALLOC(ctx, sizeof *w, &w));
  *w = (rfi_token_writer){.ctx = ctx, .format = format, .vocab = vocab};
  /* Megatron itself uses 65500, so that ids added by its tokenizers do not change the type. */
  w->width = vocab <= (format == RFR_TOKENS_MEGATRON ? 65499 : 65536) ? 2 : 4;
  rfr_status s = RFI_ALLOC(ctx, strlen(path) + 1, &w->path);
  if (s == RFR_OK) strcpy(w->path, path);
  if (s == RFR_OK) s = index_path(ctx, path, &w->index);
  if (s == RFR_OK) s = check_absent(w->path);
  if (s == RFR_OK) s = check_absent(w->index); /* with it, any X.bin would be read as Megatron's */
  if (s == RFR_OK) s = start_file(ctx, w->path, &w->temporary, &w->file);
  if (s == RFR_OK) s = put_header(w);
  if (s == RFR_OK) *out = w;
  else rfi_token_writer_destroy(w);
  return s;
}

static rfr_status add_length(rfi_token_writer *w, int64_t n) {
  if (n > INT32_MAX)
    return BAD(w->path, "document %" PRId64 " has %" PRId64 " tokens; Megatron's index counts %d", w->documents, n,
               INT32_MAX);
  if (w->documents == w->capacity) {
    const int64_t capacity = w->capacity ? 2 * w->capacity : 1024;
    int32_t *grown;
    RFI_TRY(RFI_ALLOC(w->ctx, (size_t)capacity * sizeof *grown, &grown));
    if (w->documents) memcpy(grown, w->lengths, (size_t)w->documents * sizeof *grown);
    rfi_free(w->ctx, w->lengths);
    w->lengths = grown;
    w->capacity = capacity;
  }
  w->lengths[w->documents++] = (int32_t)n;
  return RFR_OK;
}

rfr_status rfi_token_writer_add(rfi_token_writer *w, const uint32_t *ids, int64_t n) {
  if (w->format == RFR_TOKENS_LLMC && n > INT32_MAX - w->tokens)
    return BAD(w->path, "%" PRId64 " tokens; the header of an llm.c file counts %d: write several files", w->tokens + n,
               INT32_MAX);
  if (w->format == RFR_TOKENS_MEGATRON) RFI_TRY(add_length(w, n));
  for (int64_t i = 0; i < n; i++) {
    const int32_t id = RFI_TOKEN_ID(ids[i]);
    RFI_CHECK(id < w->vocab);
    RFI_TRY(put(w, w->file, &id, (size_t)w->width)); /* little-endian: the low bytes are first */
  }
  w->tokens += n;
  return RFR_OK;
}

static rfr_status put_index(rfi_token_writer *w) {
  const uint64_t version = 1, sequences = (uint64_t)w->documents, bounds = sequences + 1;
  const uint8_t code = w->width == 2 ? 8 : 4;
  int64_t pointer = 0;
  rfi_file *f = w->index_file;
  RFI_TRY(put(w, f, index_magic, sizeof index_magic));
  RFI_TRY(put(w, f, &version, 8));
  RFI_TRY(put(w, f, &code, 1));
  RFI_TRY(put(w, f, &sequences, 8));
  RFI_TRY(put(w, f, &bounds, 8));
  for (int64_t d = 0; d < w->documents; d++) RFI_TRY(put(w, f, &w->lengths[d], 4));
  for (int64_t d = 0; d < w->documents; pointer += (int64_t)w->lengths[d++] * w->width) RFI_TRY(put(w, f, &pointer, 8));
  for (int64_t d = 0; d <= w->documents; d++) RFI_TRY(put(w, f, &d, 8));
  return flush(w, f);
}

static rfr_status finish_file(rfi_file **file) {
  rfi_file *f = *file;
  *file = NULL;
  return rfi_file_finish(f, NULL);
}

/* The index first: without it the ids would be read as nanoGPT's. */
rfr_status rfi_token_writer_finish(rfi_token_writer *w) {
  const int32_t tokens = (int32_t)w->tokens;
  const bool indexed = w->format == RFR_TOKENS_MEGATRON;
  RFI_TRY(flush(w, w->file));
  if (w->format == RFR_TOKENS_LLMC) RFI_TRY(rfi_file_overwrite(w->file, &tokens, sizeof tokens, 8));
  RFI_TRY(finish_file(&w->file));
  if (indexed) {
    RFI_TRY(start_file(w->ctx, w->index, &w->index_temporary, &w->index_file));
    RFI_TRY(put_index(w));
    RFI_TRY(finish_file(&w->index_file));
    RFI_TRY(rfi_file_rename(w->ctx, w->index_temporary, w->index));
  }
  return rfi_file_rename(w->ctx, w->temporary, w->path);
}

void rfi_token_writer_destroy(rfi_token_writer *w) {
  if (!w) return;
  rfr_ctx *ctx = w->ctx;
  rfi_file_close(w->file);
  rfi_file_close(w->index_file);
  if (w->temporary) rfi_tree_discard(w->temporary);
  if (w->index_temporary) rfi_tree_discard(w->index_temporary);
  rfi_free(ctx, w->lengths);
  rfi_free(ctx, w->path);
  rfi_free(ctx, w->temporary);
  rfi_free(ctx, w->index);
  rfi_free(ctx, w->index_temporary);
  rfi_free(ctx, w);
}
