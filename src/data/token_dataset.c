/* SPDX-License-Identifier: Apache-2.0
 *
 * A split is a list of pieces: runs of ids of one file. Pieces of documents are documents; in a file without documents
 * adjacent blocks of a split become one piece. A position in a split is found by binary search.
 */
#include "data/token_dataset.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "data/token_file.h"

typedef struct token_source {
  char *path;        /* as matched */
  rfi_token_file of; /* `ends` is not set */
  int64_t first;     /* number of its first id, counted over all files */
  rfi_hash hash;     /* hash of its ids and documents */
  bool has[2];       /* whether it has ids in each split */
} token_source;

typedef struct piece {
  int64_t start; /* position in its split */
  int64_t first; /* number of its first id, counted over all files */
} piece;

enum { OPEN_FILES = 16 }; /* files that are open at the same time; a file has slot (number modulo this) */

typedef struct token_dataset {
  rfi_dataset base; /* first */
  rfr_ctx *ctx;
  char *root;
  token_source *sources; /* the sources that are kept: held-out ones first, each group sorted by path */
  int n_sources;
  int *files[2]; /* sources with ids in each split */
  piece *pieces[2];
  int64_t capacity[2];
  int64_t vocab, ids; /* ids of all files */
  double fraction;
  rfi_file *open[OPEN_FILES];
  int open_source[OPEN_FILES];
} token_dataset;

/* ---- pieces ---- */

static rfr_status grow(token_dataset *ds, rfi_split split) {
  const int64_t n = ds->base.stats.documents[split];
  const int64_t capacity = ds->capacity[split] ? 2 * ds->capacity[split] : 64;
  piece *grown;
  if (n == INT_MAX) return rfi_fail(RFI_E_OVERFLOW, "the data has too many documents: %d in one split", INT_MAX);
  if (n < ds->capacity[split]) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)capacity * sizeof *grown, &grown));
  if (n) memcpy(grown, ds->pieces[split], (size_t)n * sizeof *grown);
  rfi_free(ds->ctx, ds->pieces[split]);
  ds->pieces[split] = grown;
  ds->capacity[split] = capacity;
  return RFR_OK;
}

/* Appends n ids to a split: as a piece or, with `joins` if they follow the previous piece, to that. */
static rfr_status add_ids(token_dataset *ds, token_source *f, rfi_split split, int64_t first, int64_t n, bool joins) {
  rfi_dataset_stats *stats = &ds->base.stats;
  const int pieces = stats->documents[split];
  const piece *last = pieces ? &ds->pieces[split][pieces - 1] : NULL;
  f->has[split] = true;
  if (!joins || !last || last->first < f->first || last->first + stats->tokens[split] - last->start != first) {
    RFI_TRY(grow(ds, split));
    ds->pieces[split][stats->documents[split]++] = (piece){stats->tokens[split], first};
    stats->trained[split]--; /* the first id of a document is not a target */
  }
  stats->tokens[split] += n;
  stats->trained[split] += n;
  stats->bytes[split] += n * f->of.width;
  return RFR_OK;
}

/* ---- reading all ids once ---- */

enum { SCAN_IDS = 1 << 16, LEAST_PAIRS = 8 };

typedef struct scan {
  rfi_file *file;
  int64_t at, end, vocab; /* ids read, ids of the file */
  bool halves;            /* every second id has been 0, as if ids had twice the width */
  int32_t *ids;           /* (SCAN_IDS) */
  int64_t used, n;
  rfi_hasher *unit, *all;
} scan;

/* The hash of the next n ids. */
static rfr_status hash_unit(scan *x, const rfi_token_file *f, int64_t n, rfi_hash *out) {
  rfi_hasher_reset(x->unit);
  for (int64_t some; n > 0; n -= some) {
    if (x->used == x->n) {
      x->n = x->end - x->at < SCAN_IDS ? x->end - x->at : SCAN_IDS; /* even, except at the end */
      x->used = 0;
      RFI_TRY(rfi_token_file_read(x->file, f, x->at, x->n, x->vocab, x->ids));
      for (int64_t i = 1; i < x->n && x->halves; i += 2) x->halves = x->ids[i] == 0;
      x->at += x->n;
    }
    some = n < x->n - x->used ? n : x->n - x->used;
    rfi_hasher_add(x->unit, x->ids + x->used, (size_t)some * sizeof *x->ids);
    x->used += some;
  }
  *out = rfi_hasher_result(x->unit);
  return RFR_OK;
}

/* A power of two from 256 to 65536, so that a file has at least 256 blocks, as far as these limits allow. */
static int64_t block_length(int64_t tokens) {
  int64_t length = 65536;
  while (length > 256 && tokens / length < 256) length /= 2;
  return length;
}

/* Reads the ids of a file and adds them to a split: to `split`, or with a fraction to that of their hashes. */
static rfr_status scan_ids(token_dataset *ds, token_source *f, rfi_split split, scan *x) {
  const bool splits = ds->fraction > 0, documents = f->of.documents > 0;
  const int64_t block = splits ? block_length(f->of.tokens) : f->of.tokens;
  for (int64_t at = 0, d = 0, end; at < f->of.tokens; at = end, d++) {
    rfi_hash hash;
    end = documents ? f->of.ends[d] : f->of.tokens - at < block ? f->of.tokens : at + block;
    RFI_TRY(hash_unit(x, &f->of, end - at, &hash));
    rfi_hasher_add_u64(x->all, (uint64_t)(end - at));
    rfi_hasher_add_u64(x->all, hash.high);
    rfi_hasher_add_u64(x->all, hash.low);
    const rfi_split side = splits ? rfi_is_held_out(hash.low, ds->fraction) ? RFI_VALIDATION : RFI_TRAIN : split;
    RFI_TRY(add_ids(ds, f, side, f->first + at, end - at, !documents));
    if (!splits || documents) continue;
    ds->base.stats.blocks++;
    ds->base.stats.held_out_blocks += side == RFI_VALIDATION;
  }
  return RFR_OK;
}

static rfr_status check_width(const char *path, const token_source *f, const scan *x, int raw_width) {
  if (raw_width || f->of.format != RFR_TOKENS_NANOGPT || f->of.width != 2 || !x->halves ||
      f->of.tokens < 2 * LEAST_PAIRS)
    return RFR_OK;
  return rfi_fail_at(RFI_E_DATA_TOKENS, path, 0,
                     "every second id of 2 bytes is 0: the file has no header, and probably ids of 4 bytes; set "
                     "data.token_dtype: uint32, or uint16 if the zeros are right");
}

static rfr_status scan_file(token_dataset *ds, token_source *f, const char *path, rfi_split split, int raw_width) {
  scan x = {.end = f->of.tokens, .vocab = ds->vocab, .halves = true};
  rfr_status s = rfi_file_open(ds->ctx, path, &x.file);
  if (s == RFR_OK) s = RFI_ALLOC(ds->ctx, SCAN_IDS * sizeof *x.ids, &x.ids);
  if (s == RFR_OK) s = rfi_hasher_create(ds->ctx, &x.unit);
  if (s == RFR_OK) s = rfi_hasher_create(ds->ctx, &x.all);
  if (s == RFR_OK) s = scan_ids(ds, f, split, &x);
  if (s == RFR_OK) s = check_width(path, f, &x, raw_width);
  if (s == RFR_OK) f->hash = rfi_hasher_result(x.all);
  rfi_hasher_destroy(x.all);
  rfi_hasher_destroy(x.unit);
  rfi_free(ds->ctx, x.ids);
  rfi_file_close(x.file);
  return s;
}

/* ---- files ---- */

/* Whether an earlier source has the same ids and documents. */
static bool is_duplicate(const token_dataset *ds, const token_source *f) {
  for (int i = 0; i < ds->n_sources; i++)
    if (ds->sources[i].of.tokens == f->of.tokens && rfi_hash_equal(ds->sources[i].hash, f->hash)) return true;
  return false;
}

/* Adds a file to the data set, unless it is empty or a duplicate, whose ids are removed from the splits. */
static rfr_status add_file(token_dataset *ds, const char *name, rfi_split split, int raw_width) {
  token_source *f = &ds->sources[ds->n_sources];
  const rfi_dataset_stats before = ds->base.stats;
  char *path;
  *f = (token_source){.first = ds->ids};
  RFI_TRY(rfi_path_join(ds->ctx, ds->root, name, &path));
  const int width = raw_width ? raw_width : ds->vocab <= 65536 ? 2 : 4;
  rfr_status s = rfi_token_file_inspect(ds->ctx, path, width, &f->of);
  if (s == RFR_OK) s = scan_file(ds, f, path, split, raw_width);
  rfi_free(ds->ctx, path);
  rfi_free(ds->ctx, f->of.ends);
  f->of.ends = NULL;
  RFI_TRY(s);
  if (f->of.tokens == 0 || is_duplicate(ds, f)) {
    ds->base.stats = before;
    if (f->of.tokens) ds->base.stats.duplicates++;
    else ds->base.stats.empty++;
    return RFR_OK;
  }
  RFI_TRY(RFI_ALLOC(ds->ctx, strlen(name) + 1, &f->path));
  strcpy(f->path, name);
  ds->ids += f->of.tokens;
  ds->n_sources++;
  return RFR_OK;
}

static int by_path(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool has_path(const rfi_paths *paths, const char *path) {
  return paths->n > 0 && bsearch(&path, paths->items, (size_t)paths->n, sizeof *paths->items, by_path);
}

/* Refuses an index, unless its file of ids is listed too. */
static rfr_status check_index(token_dataset *ds, const rfi_paths *paths, const char *name) {
  char *bin;
  RFI_TRY(rfi_path_join(ds->ctx, "", name, &bin));
  memcpy(bin + strlen(bin) - 4, ".bin", 4);
  const bool listed = has_path(paths, bin);
  rfi_free(ds->ctx, bin);
  if (listed) return RFR_OK;
  return rfi_fail_at(RFI_E_DATA_TOKENS, name, 0, "is the index of a Megatron file; name its .bin file");
}

/* Adds the files of a list, except those of `other`. */
static rfr_status add_files(token_dataset *ds, const rfi_paths *paths, const rfi_paths *other, rfi_split split,
                            int raw_width) {
  for (int i = 0; i < paths->n; i++) {
    const char *name = paths->items[i];
    if (other && has_path(other, name)) continue;
    if (rfi_ends_in(name, ".idx")) RFI_TRY(check_index(ds, paths, name));
    else RFI_TRY(add_file(ds, name, split, raw_width));
  }
  return RFR_OK;
}

static rfr_status list_files(token_dataset *ds) {
  for (int split = 0; split < 2; split++) {
    RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)ds->n_sources + 1) * sizeof *ds->files[split], &ds->files[split]));
    for (int i = 0; i < ds->n_sources; i++)
      if (ds->sources[i].has[split]) ds->files[split][ds->base.stats.files[split]++] = i;
  }
  return RFR_OK;
}

/* Hashes every piece with its split, and the ids of the files. */
static rfr_status hash_all(token_dataset *ds) {
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(ds->ctx, &h));
  for (int i = 0; i < ds->n_sources; i++) {
    rfi_hasher_add_u64(h, ds->sources[i].hash.high);
    rfi_hasher_add_u64(h, ds->sources[i].hash.low);
  }
  for (int split = 0; split < 2; split++) {
    rfi_hasher_add_u64(h, (uint64_t)ds->base.stats.documents[split]);
    for (int i = 0; i < ds->base.stats.documents[split]; i++) {
      rfi_hasher_add_u64(h, (uint64_t)ds->pieces[split][i].start);
      rfi_hasher_add_u64(h, (uint64_t)ds->pieces[split][i].first);
    }
  }
  ds->base.stats.hash = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

static rfr_status check_split(const token_dataset *ds, const rfi_dataset_options *o) {
  const rfi_dataset_stats *s = &ds->base.stats;
  if (ds->fraction == 0 || ds->ids == 0 || (s->tokens[RFI_TRAIN] > 0 && s->trained[RFI_VALIDATION] > 0)) return RFR_OK;
  return rfi_fail(RFI_E_DATA_HELD_OUT,
                  "%g%% of %d documents or blocks of tokens leave %lld tokens to train on and %lld held out; name "
                  "held-out files",
                  100 * o->validation_fraction,
                  s->blocks ? s->blocks : s->documents[RFI_TRAIN] + s->documents[RFI_VALIDATION],
                  (long long)s->tokens[RFI_TRAIN], (long long)s->tokens[RFI_VALIDATION]);
}

static rfr_status open_files(token_dataset *ds, const char *const *patterns, int n_patterns,
                             const rfi_dataset_options *o, int raw_width, rfi_paths *train, rfi_paths *held) {
  RFI_TRY(rfi_find_files(ds->root, patterns, n_patterns, train));
  RFI_TRY(rfi_find_files(ds->root, o->validation_patterns, o->n_validation_patterns, held));
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)train->n + (size_t)held->n + 1) * sizeof *ds->sources, &ds->sources));
  if (held->n > 0) ds->fraction = 0;
  RFI_TRY(add_files(ds, held, NULL, RFI_VALIDATION, raw_width)); /* of equal files the held-out one is kept */
  RFI_TRY(add_files(ds, train, held, RFI_TRAIN, raw_width));
  RFI_TRY(list_files(ds));
  RFI_TRY(check_split(ds, o));
  RFI_TRY(hash_all(ds));
  return rfi_dataset_count_windows(&ds->base, n_patterns ? "tokens" : NULL);
}

/* ---- calls ---- */

static void close_tokens(rfi_dataset *base) {
  token_dataset *ds = (token_dataset *)base;
  for (int i = 0; i < OPEN_FILES; i++) rfi_file_close(ds->open[i]);
  for (int i = 0; i < ds->n_sources; i++) rfi_free(ds->ctx, ds->sources[i].path);
  for (int split = 0; split < 2; split++) {
    rfi_free(ds->ctx, ds->files[split]);
    rfi_free(ds->ctx, ds->pieces[split]);
  }
  rfi_free(ds->ctx, ds->sources);
  rfi_free(ds->ctx, ds->root);
  rfi_free(ds->ctx, ds);
}

static const char *token_source_file(const rfi_dataset *base, rfi_split split, int i, int64_t *bytes) {
  const token_dataset *ds = (const token_dataset *)base;
  const token_source *f = &ds->sources[ds->files[split][i]];
  if (bytes) *bytes = f->of.size;
  return f->path;
}

/* Finds the piece that contains token `at` of a split. */
static int piece_at(const token_dataset *ds, rfi_split split, int64_t at) {
  int low = 0, high = ds->base.stats.documents[split];
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (ds->pieces[split][middle].start <= at) low = middle;
    else high = middle;
  }
  return low;
}

static int64_t token_document_end(const rfi_dataset *base, rfi_split split, int64_t at) {
  const token_dataset *ds = (const token_dataset *)base;
  const int next = piece_at(ds, split, at) + 1;
  return next < base->stats.documents[split] ? ds->pieces[split][next].start : base->stats.tokens[split];
}

static rfr_status open_source(token_dataset *ds, int i, rfi_file **out) {
  const token_source *f = &ds->sources[i];
  rfi_file **slot = &ds->open[i % OPEN_FILES];
  char *path;
  *out = *slot;
  if (*slot && ds->open_source[i % OPEN_FILES] == i) return RFR_OK;
  rfi_file_close(*slot);
  *slot = NULL;
  RFI_TRY(rfi_path_join(ds->ctx, ds->root, f->path, &path));
  rfr_status s = rfi_file_open(ds->ctx, path, slot);
  if (s == RFR_OK && rfi_file_size(*slot) != f->of.size) {
    s = rfi_fail_at(RFI_E_FILE_READ, path, 0, "the file changed during the run: it had %lld bytes, now %lld",
                    (long long)f->of.size, (long long)rfi_file_size(*slot));
    rfi_file_close(*slot);
    *slot = NULL;
  }
  rfi_free(ds->ctx, path);
  ds->open_source[i % OPEN_FILES] = i;
  *out = *slot;
  return s;
}

static rfr_status token_read(rfi_dataset *base, rfi_split split, int64_t at, int64_t n, int32_t *tokens) {
  token_dataset *ds = (token_dataset *)base;
  const piece *p = &ds->pieces[split][piece_at(ds, split, at)];
  const int64_t first = p->first + at - p->start;
  int low = 0, high = ds->n_sources;
  rfi_file *file;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (ds->sources[middle].first <= first) low = middle;
    else high = middle;
  }
  RFI_TRY(open_source(ds, low, &file));
  return rfi_token_file_read(file, &ds->sources[low].of, first - ds->sources[low].first, n, ds->vocab, tokens);
}

/* The bytes of text that ids stand for are not known. */
static int64_t no_bytes(const rfi_dataset *ds, int64_t sample) {
  (void)ds, (void)sample;
  return 0;
}

static const rfi_dataset_calls token_calls = {.close = close_tokens,
                                              .file = token_source_file,
                                              .windows = rfi_stream_windows,
                                              .window_bytes = no_bytes,
                                              .document_end = token_document_end,
                                              .read = token_read};

rfr_status rfi_token_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                                  const rfi_dataset_options *options, int64_t vocab, int raw_width, rfi_dataset **out) {
  const char *root = options->root ? options->root : "";
  rfi_paths train = {.ctx = ctx}, held = {.ctx = ctx};
  token_dataset *ds;
  *out = NULL;
  RFI_TRY(rfi_dataset_check_options(options));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *ds, &ds));
  *ds = (token_dataset){.base = {.calls = &token_calls, .sequence = options->sequence, .context = options->context},
                        .ctx = ctx,
                        .vocab = vocab,
                        .fraction = options->validation_fraction};
  ds->base.stats.token_files = true;
  rfr_status s = RFI_ALLOC(ctx, strlen(root) + 1, &ds->root);
  if (s == RFR_OK) {
    strcpy(ds->root, root);
    s = open_files(ds, patterns, n_patterns, options, raw_width, &train, &held);
  }
  rfi_paths_deinit(&train);
  rfi_paths_deinit(&held);
  if (s == RFR_OK) *out = &ds->base;
  else close_tokens(&ds->base);
  return s;
}
