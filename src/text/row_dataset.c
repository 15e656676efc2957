/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokens of each file stay in its table; a row is a range of a table. For each split, the windows of one epoch are
 * in memory: samples come in order, so an epoch is packed once. If epochs have different shares of a file's rows, their
 * numbers of windows differ; then the numbers of all epochs so far are kept.
 */
#include "text/row_dataset.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/rng.h"
#include "data/file.h"
#include "text/packing.h"
#include "text/row_batch.h"

enum {
  ORDER_STREAM = 0x726f7773, /* random streams: for the order of rows ("rows" in ASCII), of windows, and for shares */
  WINDOW_STREAM,
  SHARE_STREAM,
  ONCE = -1 /* used as an epoch: each row once, in the order of the files */
};

typedef struct row_file {
  char *path; /* as matched */
  int64_t size;
  rfi_hash hash;
  double weight;
  bool held_out; /* held out by name */
  bool dropped;  /* it is empty, or equals a file that is kept */
  rfi_token_table table;
  int64_t first, n; /* number of rows in the training split */
} row_file;

typedef struct place {
  int64_t start; /* in the tokens of the table */
  int32_t n;
  int32_t file;
  int64_t second; /* the rejected answer of a pair, relative to `start`; 0 and 0: the row is one document */
  int32_t n_second;
} place;

static int32_t tokens_of(const place *row) { return row->n + row->n_second; }

typedef struct packed_epoch {
  bool valid;
  uint64_t seed;
  int64_t epoch;
  int64_t *rows; /* rows of the epoch, in placing order */
  rfi_packing packing;
} packed_epoch;

typedef struct row_dataset {
  rfi_dataset base; /* must be first: a row_dataset is an rfi_dataset */
  rfr_ctx *ctx;
  row_file *files;
  int n_files;
  int *listed[2]; /* files with rows in each split */
  place *rows[2];
  int64_t n[2];
  int sequence;
  bool pairs;                 /* rows are preferences */
  bool packing, equal_epochs; /* all weights are integers, so every epoch has the same rows */
  packed_epoch packed[2];
  int64_t *starts; /* first window of each of the epochs 0 .. n_starts - 1, for one seed */
  int64_t n_starts, starts_capacity;
  uint64_t starts_seed;
} row_dataset;

/* ---- files ---- */

static int by_path(const void *a, const void *b) {
  return strcmp(((const row_file *)a)->path, ((const row_file *)b)->path);
}

/* The weight of a file: that of the first pattern that matches it. */
static rfr_status set_weights(row_dataset *ds, const char *root, const rfi_row_dataset_options *o) {
  for (int p = o->n_patterns - 1; p >= 0 && o->weights; p--) {
    rfi_paths paths = {.ctx = ds->ctx};
    const rfr_status s = rfi_glob(root, o->patterns[p], &paths);
    for (int i = 0; i < paths.n; i++) {
      const row_file key = {.path = paths.items[i]};
      row_file *f = bsearch(&key, ds->files, (size_t)ds->n_files, sizeof *f, by_path);
      if (f) f->weight = o->weights[p];
    }
    rfi_paths_deinit(&paths);
    RFI_TRY(s);
  }
  for (int f = 0; f < ds->n_files; f++)
    if (ds->files[f].weight != floor(ds->files[f].weight)) ds->equal_epochs = false;
  return RFR_OK;
}

/* Both lists are sorted. A file in both is held out. */
static rfr_status list_files(row_dataset *ds, const rfi_paths *train, const rfi_paths *held) {
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)train->n + (size_t)held->n + 1) * sizeof *ds->files, &ds->files));
  for (int i = 0, j = 0; i < train->n || j < held->n;) {
    const int order = i == train->n ? 1 : j == held->n ? -1 : strcmp(train->items[i], held->items[j]);
    const char *path = order < 0 ? train->items[i] : held->items[j];
    i += order <= 0;
    j += order >= 0;
    row_file *f = &ds->files[ds->n_files];
    RFI_TRY(RFI_ALLOC(ds->ctx, strlen(path) + 1, &f->path));
    strcpy(f->path, path);
    f->weight = 1;
    f->held_out = order >= 0;
    f->table.ctx = ds->ctx;
    ds->n_files++;
  }
  return RFR_OK;
}

/* Equal files are adjacent. The first one is kept: one that is held out, otherwise the first by path. */
static int by_content(const void *a, const void *b) {
  const row_file *x = *(row_file *const *)a, *y = *(row_file *const *)b;
  if (x->size != y->size) return x->size < y->size ? -1 : 1;
  if (x->hash.high != y->hash.high) return x->hash.high < y->hash.high ? -1 : 1;
  if (x->hash.low != y->hash.low) return x->hash.low < y->hash.low ? -1 : 1;
  if (x->held_out != y->held_out) return x->held_out ? -1 : 1;
  return strcmp(x->path, y->path);
}

static void free_file(row_dataset *ds, row_file *f) {
  rfi_free(ds->ctx, f->path);
  rfi_token_table_deinit(&f->table);
}

static rfr_status drop_equal(row_dataset *ds) {
  row_file **order;
  int kept = 0;
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)ds->n_files + 1) * sizeof *order, &order));
  for (int i = 0; i < ds->n_files; i++) order[i] = &ds->files[i];
  qsort(order, (size_t)ds->n_files, sizeof *order, by_content);
  for (int i = 0; i < ds->n_files; i++) {
    const row_file *f = order[i], *before = i ? order[i - 1] : NULL;
    const bool empty = f->size == 0;
    order[i]->dropped = empty || (before && before->size == f->size && rfi_hash_equal(before->hash, f->hash));
    ds->base.stats.empty += empty;
    ds->base.stats.duplicates += f->dropped && !empty;
  }
  rfi_free(ds->ctx, order);
  for (int i = 0; i < ds->n_files; i++) {
    if (ds->files[i].dropped) free_file(ds, &ds->files[i]);
    else ds->files[kept++] = ds->files[i];
  }
  ds->n_files = kept;
  return RFR_OK;
}

/* ---- tokens of a file ---- */

static rfr_status keep_tokens(void *table, const uint32_t *ids, const uint16_t *widths, int64_t n, uint64_t hash,
                              int64_t line) {
  return rfi_token_table_add(table, ids, widths, n, hash, line);
}

static rfr_status file_key(const row_file *f, rfi_hash encoder, rfi_row_form form, rfr_ctx *ctx, rfi_hash *key) {
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(ctx, &h));
  rfi_hasher_add(h, "rows", 4);
  rfi_hasher_add_u64(h, f->hash.high);
  rfi_hasher_add_u64(h, f->hash.low);
  rfi_hasher_add_u64(h, encoder.high);
  rfi_hasher_add_u64(h, encoder.low);
  rfi_hasher_add_u64(h, (uint64_t)form);
  *key = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

static rfr_status load_file(row_dataset *ds, rfi_row_batch *b, const rfi_row_encoder *encoder, const char *root,
                            row_file *f, const rfi_row_dataset_options *o) {
  char *path;
  bool found;
  rfi_hash hash, key, after;
  int64_t size;
  RFI_TRY(rfi_row_encoder_hash(encoder, &hash));
  RFI_TRY(file_key(f, hash, o->form, ds->ctx, &key));
  RFI_TRY(rfi_path_join(ds->ctx, root, f->path, &path));
  rfr_status s = rfi_token_cache_load(o->cache, path, key, rfi_row_encoder_vocab(encoder), &f->table, &found);
  if (s == RFR_OK && !found) {
    s = rfi_row_batch_read(b, path, o->form, keep_tokens, &f->table);
    if (s == RFR_OK) s = rfi_file_hash(ds->ctx, path, &size, &after);
    if (s == RFR_OK && (size != f->size || !rfi_hash_equal(f->hash, after)))
      s = rfi_fail_at(RFI_E_FILE_READ, path, 0, "the file changed while it was read");
    if (s == RFR_OK) s = rfi_token_cache_save(o->cache, path, key, &f->table);
  }
  rfi_free(ds->ctx, path);
  return s;
}

static rfr_status load_files(row_dataset *ds, const rfi_row_encoder *encoder, const char *root,
                             const rfi_row_dataset_options *o) {
  rfi_row_batch *b;
  RFI_TRY(rfi_row_batch_create(encoder, &b));
  rfr_status s = RFR_OK;
  for (int i = 0; i < ds->n_files && s == RFR_OK; i++) s = load_file(ds, b, encoder, root, &ds->files[i], o);
  rfi_row_batch_destroy(b);
  ds->base.stats.cached = o->cache->hits;
  return s;
}

/* ---- the split ---- */

static int64_t trained_tokens(const uint32_t *ids, int64_t n) {
  int64_t trained = 0;
  for (int64_t i = 1; i < n; i++) trained += ids[i] >> 31;
  return trained;
}

/* The rejected answer of a pair, from `start`. */
static int64_t find_second(const row_file *f, int64_t start, int64_t end) {
  int64_t i = start;
  while (i < end && !(f->table.ids[i] & RFI_TOKEN_REJECTED)) i++;
  return i - start;
}

/* Cuts a row to `most` tokens; of a pair, the longer answer first. */
static void cut_row(place *row, int64_t most) {
  const int64_t half = most / 2, n = row->n, second = row->n_second;
  if (n + second <= most) return;
  if (second == 0) row->n = (int32_t)most;
  else if (n <= half) row->n_second = (int32_t)(most - n);
  else if (second <= most - half) row->n = (int32_t)(most - second);
  else row->n = (int32_t)half, row->n_second = (int32_t)(most - half);
}

static bool is_trained(const row_dataset *ds, const row_file *f, const place *row) {
  const uint32_t *ids = f->table.ids + row->start;
  if (trained_tokens(ids, row->n) == 0) return false;
  return !ds->pairs || trained_tokens(ids + row->second, row->n_second) > 0;
}

/* A pair whose answers are equal, or differ only in tokens that were cut off, has no gradient. */
static bool is_equal_pair(const row_dataset *ds, const row_file *f, const place *row) {
  const uint32_t *chosen = f->table.ids + row->start, *rejected = chosen + row->second;
  if (!ds->pairs || row->n != row->n_second) return false;
  for (int32_t i = 0; i < row->n; i++)
    if (chosen[i] != (rejected[i] & ~RFI_TOKEN_REJECTED)) return false;
  return true;
}

/* Sets the tokens of a row that a window gets; row->n 0: the row is left out. */
static rfr_status fit_row(row_dataset *ds, const row_file *f, int64_t end, int64_t number, rfi_row_truncate truncate,
                          place *row) {
  rfi_dataset_stats *stats = &ds->base.stats;
  const int64_t length = end - row->start, most = ds->sequence;
  const int64_t first = ds->pairs ? find_second(f, row->start, end) : length;
  if (length > most && truncate == RFI_ROW_REFUSE)
    return rfi_fail_at(RFI_E_DATA_LONG, f->path, number, "the row has %lld tokens; data.sequence is %lld",
                       (long long)length, (long long)most);
  if (length > most && truncate == RFI_ROW_DROP) {
    stats->dropped++;
    return RFR_OK;
  }
  row->n = (int32_t)(first < most ? first : most);
  if (ds->pairs) row->second = first, row->n_second = (int32_t)(length - first < most ? length - first : most);
  cut_row(row, most);
  const bool trained = is_trained(ds, f, row);
  if (!trained || is_equal_pair(ds, f, row)) {
    *(trained ? &stats->equal : &stats->untrained) += 1;
    row->n = row->n_second = 0;
  } else if (length > most) {
    stats->truncated++;
    stats->cut += length - most;
  }
  return RFR_OK;
}

static void count_tokens(row_dataset *ds, rfi_split split, const row_file *f, int64_t start, int64_t n) {
  rfi_dataset_stats *stats = &ds->base.stats;
  stats->tokens[split] += n;
  stats->trained[split] += trained_tokens(f->table.ids + start, n);
  for (int64_t i = start; i < start + n; i++) {
    stats->bytes[split] += f->table.widths[i];
    if (i > start && (f->table.ids[i] & RFI_TOKEN_TRAINED)) stats->trained_bytes[split] += f->table.widths[i];
  }
}

static void add_row(row_dataset *ds, rfi_split split, const place *row) {
  row_file *f = &ds->files[row->file];
  ds->rows[split][ds->n[split]++] = *row;
  ds->base.stats.documents[split]++;
  count_tokens(ds, split, f, row->start, row->n);
  if (row->n_second) count_tokens(ds, split, f, row->start + row->second, row->n_second);
  int *listed = ds->listed[split], *files = &ds->base.stats.files[split];
  if (*files == 0 || listed[*files - 1] != row->file) listed[(*files)++] = row->file;
  if (split == RFI_TRAIN && f->n++ == 0) f->first = ds->n[split] - 1;
}

/* The split by hashes holds out a fraction `fraction` of the rows. If that leaves a split empty, it gets the rows with
 * the smallest or the largest hash. */
typedef struct divide {
  bool by_hash, none, all;
  uint64_t least, greatest;
  double fraction;
} divide;

static divide find_divide(const row_dataset *ds, double fraction, bool by_name) {
  divide d = {
      .by_hash = fraction > 0 && !by_name, .none = true, .all = true, .least = UINT64_MAX, .fraction = fraction};
  for (int i = 0; i < ds->n_files; i++)
    for (int64_t r = 0; r < ds->files[i].table.rows; r++) {
      const uint64_t hash = ds->files[i].table.hashes[r];
      if (hash < d.least) d.least = hash;
      if (hash > d.greatest) d.greatest = hash;
      if (rfi_is_held_out(hash, fraction)) d.none = false;
      else d.all = false;
    }
  return d;
}

static rfi_split split_of(const divide *d, const row_file *f, uint64_t hash) {
  if (!d->by_hash) return f->held_out ? RFI_VALIDATION : RFI_TRAIN;
  if (d->none) return hash == d->least ? RFI_VALIDATION : RFI_TRAIN;
  if (d->all) return hash == d->greatest ? RFI_TRAIN : RFI_VALIDATION;
  return rfi_is_held_out(hash, d->fraction) ? RFI_VALIDATION : RFI_TRAIN;
}

static rfr_status split_rows(row_dataset *ds, const rfi_row_dataset_options *o) {
  const divide d = find_divide(ds, o->validation_fraction, o->n_validation_patterns > 0);
  int64_t total = 0;
  for (int i = 0; i < ds->n_files; i++) total += ds->files[i].table.rows;
  if (total == 0) return rfi_fail(RFI_E_DATA_EMPTY, "the files have no rows");
  if (d.by_hash && d.least == d.greatest)
    return rfi_fail(RFI_E_DATA_HELD_OUT, "%g%% of the rows cannot be held out: all rows are equal",
                    100 * o->validation_fraction);
  for (int split = 0; split < 2; split++) {
    RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)total * sizeof(place), &ds->rows[split]));
    RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)ds->n_files * sizeof(int), &ds->listed[split]));
  }
  for (int i = 0; i < ds->n_files; i++) {
    const row_file *f = &ds->files[i];
    for (int64_t r = 0, start = 0; r < f->table.rows; start = f->table.ends[r++]) {
      place row = {.start = start, .file = i};
      RFI_TRY(fit_row(ds, f, f->table.ends[r], f->table.lines[r], o->truncate, &row));
      if (row.n > 0) add_row(ds, split_of(&d, f, f->table.hashes[r]), &row);
    }
  }
  return RFR_OK;
}

static rfr_status check_split(const row_dataset *ds, const rfi_row_dataset_options *o) {
  const rfi_dataset_stats *s = &ds->base.stats;
  const char *held = o->n_validation_patterns > 0 || o->validation_fraction > 0 ? "" : NULL;
  if (ds->n[RFI_TRAIN] == 0 && o->n_patterns > 0)
    return rfi_fail(
        RFI_E_DATA_UNTRAINED,
        "no row is left to train on: %lld rows have no token with a loss in their first %d tokens, %lld are "
        "longer and were dropped, %lld are pairs of equal answers, %lld are held out",
        (long long)s->untrained, ds->sequence, (long long)s->dropped, (long long)s->equal,
        (long long)ds->n[RFI_VALIDATION]);
  if (held && ds->n[RFI_VALIDATION] == 0)
    return rfi_fail(RFI_E_DATA_HELD_OUT,
                    "the rows held out for validation have no token with a loss in their first %d "
                    "tokens",
                    ds->sequence);
  return RFR_OK;
}

/* The hash of everything that determines the windows of all epochs. */
static rfr_status hash_rows(row_dataset *ds) {
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(ds->ctx, &h));
  rfi_hasher_add_u64(h, ds->packing);
  for (int split = 0; split < 2; split++)
    for (int64_t i = 0; i < ds->n[split]; i++) {
      const place *row = &ds->rows[split][i];
      const row_file *f = &ds->files[row->file];
      rfi_hasher_add_u64(h, (uint64_t)split);
      rfi_hasher_add_u64(h, (uint64_t)row->n);
      rfi_hasher_add(h, &f->weight, sizeof f->weight);
      rfi_hasher_add(h, f->table.ids + row->start, (size_t)row->n * sizeof(uint32_t));
      if (row->n_second)
        rfi_hasher_add(h, f->table.ids + row->start + row->second, (size_t)row->n_second * sizeof(uint32_t));
    }
  ds->base.stats.hash = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

/* ---- epochs ---- */

/* The number of rows of a file in epochs 0 .. epoch - 1 beyond the full passes of its weight. */
static int64_t shares_before(const row_file *f, int64_t epoch) {
  return (int64_t)floor((f->weight - floor(f->weight)) * (double)f->n * (double)epoch);
}

/* Lists the rows of an epoch in file order. */
static rfr_status list_epoch(const row_dataset *ds, rfi_split split, uint64_t seed, int64_t epoch, int64_t **out,
                             int64_t *n) {
  int64_t at = 0;
  const bool all = split == RFI_VALIDATION || epoch == ONCE;
  *n = all ? ds->n[split] : 0;
  for (int i = 0; i < ds->n_files && !all; i++) {
    const row_file *f = &ds->files[i];
    *n += (int64_t)floor(f->weight) * f->n + shares_before(f, epoch + 1) - shares_before(f, epoch);
  }
  RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)*n * sizeof **out, out));
  if (all) {
    for (; at < *n; at++) (*out)[at] = at;
    return RFR_OK;
  }
  for (int i = 0; i < ds->n_files; i++) {
    const row_file *f = &ds->files[i];
    const uint64_t key = rfi_stream_key(seed, SHARE_STREAM) + (uint64_t)i;
    for (int64_t pass = 0; pass < (int64_t)floor(f->weight); pass++)
      for (int64_t r = 0; r < f->n; r++) (*out)[at++] = f->first + r;
    for (int64_t k = shares_before(f, epoch); k < shares_before(f, epoch + 1); k++)
      (*out)[at++] = f->first + (int64_t)rfi_permute((uint64_t)(k % f->n), (uint64_t)f->n, key, (uint64_t)(k / f->n));
  }
  return RFR_OK;
}

/* Packs an epoch into ds->packed[split], unless it is there already. */
static rfr_status pack_epoch(row_dataset *ds, rfi_split split, uint64_t seed, int64_t epoch) {
  packed_epoch *p = &ds->packed[split];
  if (p->valid && p->seed == seed && p->epoch == epoch) return RFR_OK;
  int64_t *listed = NULL, n;
  int32_t *lengths = NULL;
  rfr_status s;
  p->valid = false;
  rfi_free(ds->ctx, p->rows);
  p->rows = NULL;
  RFI_GOTO(list_epoch(ds, split, seed, epoch, &listed, &n));
  RFI_GOTO(RFI_ALLOC(ds->ctx, (size_t)n * sizeof *p->rows, &p->rows));
  RFI_GOTO(RFI_ALLOC(ds->ctx, (size_t)n * sizeof *lengths, &lengths));
  const uint64_t key = rfi_stream_key(seed, ORDER_STREAM);
  const bool shuffled = split == RFI_TRAIN && epoch != ONCE;
  for (int64_t i = 0; i < n; i++) {
    const int64_t from = shuffled ? (int64_t)rfi_permute((uint64_t)i, (uint64_t)n, key, (uint64_t)epoch) : i;
    p->rows[i] = listed[from];
    lengths[i] = ds->packing ? tokens_of(&ds->rows[split][p->rows[i]]) : ds->sequence;
  }
  RFI_GOTO(rfi_pack_rows(&p->packing, lengths, n, ds->sequence));
  p->valid = true;
  p->seed = seed;
  p->epoch = epoch;
fail:
  rfi_free(ds->ctx, listed);
  rfi_free(ds->ctx, lengths);
  return s;
}

/* The number of windows of the training split before `epoch`. */
static rfr_status windows_before(rfi_dataset *base, uint64_t seed, int64_t epoch, int64_t *out) {
  row_dataset *ds = (row_dataset *)base;
  if (ds->equal_epochs) {
    *out = epoch * base->stats.windows[RFI_TRAIN];
    return RFR_OK;
  }
  if (ds->starts_seed != seed) ds->n_starts = 0;
  ds->starts_seed = seed;
  while (ds->n_starts <= epoch) {
    if (ds->n_starts == ds->starts_capacity) {
      const int64_t capacity = ds->starts_capacity ? 2 * ds->starts_capacity : 16;
      int64_t *grown;
      RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)capacity * sizeof *grown, &grown));
      if (ds->n_starts) memcpy(grown, ds->starts, (size_t)ds->n_starts * sizeof *grown);
      rfi_free(ds->ctx, ds->starts);
      ds->starts = grown;
      ds->starts_capacity = capacity;
    }
    int64_t start = 0;
    if (ds->n_starts > 0) {
      RFI_TRY(pack_epoch(ds, RFI_TRAIN, seed, ds->n_starts - 1));
      start = ds->starts[ds->n_starts - 1] + ds->packed[RFI_TRAIN].packing.windows;
    }
    ds->starts[ds->n_starts++] = start;
  }
  *out = ds->starts[epoch];
  return RFR_OK;
}

/* The epoch of a training sample, and the sample's number in it. */
static rfr_status find_epoch(row_dataset *ds, uint64_t seed, int64_t sample, int64_t *epoch, int64_t *index) {
  int64_t start, next;
  *epoch = 0;
  if (ds->equal_epochs) {
    const int64_t W = ds->base.stats.windows[RFI_TRAIN];
    *epoch = sample / W;
    *index = sample % W;
    return RFR_OK;
  }
  if (ds->starts_seed == seed && ds->n_starts > 1) { /* starts at the last known epoch, because samples come in order */
    *epoch = ds->n_starts - 2;
    while (ds->starts[*epoch] > sample) --*epoch;
  }
  RFI_TRY(windows_before(&ds->base, seed, *epoch, &start));
  for (;; ++*epoch, start = next) {
    RFI_TRY(windows_before(&ds->base, seed, *epoch + 1, &next));
    if (sample < next) break;
  }
  *index = sample - start;
  return RFR_OK;
}

/* ---- windows ---- */

/* The destination of a window. */
typedef struct window {
  int32_t *tokens, *targets, *doc_offsets;
  int *n_docs;
  int64_t at;
} window;

static void put_document(window *w, const uint32_t *ids, int32_t n) {
  w->doc_offsets[(*w->n_docs)++] = (int32_t)w->at;
  for (int32_t i = 0; i < n; i++, w->at++) {
    w->tokens[w->at] = RFI_TOKEN_ID(ids[i]);
    w->targets[w->at] = i + 1 < n && (ids[i + 1] & RFI_TOKEN_TRAINED) ? RFI_TOKEN_ID(ids[i + 1]) : RFI_IGNORED_TARGET;
  }
}

/* Packs the epoch of a sample. *index: the sample's window there; one past the last if there is none. */
static rfr_status find_window(row_dataset *ds, rfi_split split, bool once, uint64_t seed, int64_t sample,
                              int64_t *index) {
  int64_t epoch = 0;
  *index = sample;
  if (split == RFI_TRAIN && !once) RFI_TRY(find_epoch(ds, seed, sample, &epoch, index));
  else seed = 0;
  RFI_TRY(pack_epoch(ds, split, seed, once && split == RFI_TRAIN ? ONCE : epoch));
  const rfi_packing *p = &ds->packed[split].packing;
  if (split == RFI_TRAIN && !once)
    *index = (int64_t)rfi_permute((uint64_t)*index, (uint64_t)p->windows, rfi_stream_key(seed, WINDOW_STREAM),
                                  (uint64_t)epoch);
  if (*index > p->windows) *index = p->windows;
  return RFR_OK;
}

rfr_status rfi_row_dataset_window(rfi_dataset *base, rfi_split split, bool once, uint64_t seed, int64_t sample,
                                  int32_t *tokens, int32_t *targets, int32_t *doc_offsets, int *n_docs, int32_t *rows,
                                  int *n_rows) {
  row_dataset *ds = (row_dataset *)base;
  window w = {tokens, targets, doc_offsets, n_docs, 0};
  const int64_t S = ds->sequence;
  int64_t index;
  RFI_TRY(find_window(ds, split, once, seed, sample, &index));
  const packed_epoch *e = &ds->packed[split];
  const rfi_packing *p = &e->packing;
  if (n_rows) *n_rows = 0;
  for (int64_t k = index < p->windows ? p->first[index] : 0; index < p->windows && k < p->first[index + 1]; k++) {
    const place *row = &ds->rows[split][e->rows[p->rows[k]]];
    const uint32_t *ids = ds->files[row->file].table.ids + row->start;
    put_document(&w, ids, row->n);
    if (ds->pairs) put_document(&w, ids + row->second, row->n_second);
    if (n_rows) rows[(*n_rows)++] = (int32_t)e->rows[p->rows[k]];
  }
  if (w.at == 0 || (w.at < S && !ds->pairs)) doc_offsets[(*n_docs)++] = (int32_t)w.at;
  for (; w.at < S; w.at++) tokens[w.at] = 0, targets[w.at] = RFI_IGNORED_TARGET;
  return RFR_OK;
}

rfr_status rfi_row_dataset_windows_once(rfi_dataset *base, rfi_split split, int64_t *out) {
  row_dataset *ds = (row_dataset *)base;
  *out = 0;
  if (ds->n[split] == 0) return RFR_OK;
  RFI_TRY(pack_epoch(ds, split, 0, split == RFI_TRAIN ? ONCE : 0));
  *out = ds->packed[split].packing.windows;
  return RFR_OK;
}

static rfr_status row_window(rfi_dataset *base, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                             int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  return rfi_row_dataset_window(base, split, false, seed, sample, tokens, targets, doc_offsets, n_docs, NULL, NULL);
}

static int64_t row_window_bytes(const rfi_dataset *base, int64_t sample) {
  const row_dataset *ds = (const row_dataset *)base;
  const packed_epoch *e = &ds->packed[RFI_VALIDATION];
  const rfi_packing *p = &e->packing;
  int64_t bytes = 0;
  for (int64_t k = sample < p->windows ? p->first[sample] : 0; sample < p->windows && k < p->first[sample + 1]; k++) {
    const place *row = &ds->rows[RFI_VALIDATION][e->rows[p->rows[k]]];
    const rfi_token_table *t = &ds->files[row->file].table;
    const int64_t second = row->start + row->second;
    for (int64_t i = row->start + 1; i < row->start + row->n; i++)
      if (t->ids[i] & RFI_TOKEN_TRAINED) bytes += t->widths[i];
    for (int64_t i = second + 1; i < second + row->n_second; i++)
      if (t->ids[i] & RFI_TOKEN_TRAINED) bytes += t->widths[i];
  }
  return bytes;
}

static const char *row_file_at(const rfi_dataset *base, rfi_split split, int i, int64_t *bytes) {
  const row_dataset *ds = (const row_dataset *)base;
  const row_file *f = &ds->files[ds->listed[split][i]];
  if (bytes) *bytes = f->size;
  return f->path;
}

const uint32_t *rfi_row_dataset_row(const rfi_dataset *base, rfi_split split, int64_t i, int64_t *n) {
  const row_dataset *ds = (const row_dataset *)base;
  *n = 0;
  if (i < 0 || i >= ds->n[split]) return NULL;
  const place *row = &ds->rows[split][i];
  *n = row->second + (ds->pairs ? row->n_second : row->n); /* for a pair, also what was cut from the chosen answer */
  return ds->files[row->file].table.ids + row->start;
}

/* ---- opening ---- */

static void close_rows(rfi_dataset *base) {
  row_dataset *ds = (row_dataset *)base;
  for (int i = 0; i < ds->n_files; i++) free_file(ds, &ds->files[i]);
  for (int split = 0; split < 2; split++) {
    rfi_free(ds->ctx, ds->rows[split]);
    rfi_free(ds->ctx, ds->listed[split]);
    rfi_free(ds->ctx, ds->packed[split].rows);
    rfi_packing_deinit(&ds->packed[split].packing);
  }
  rfi_free(ds->ctx, ds->files);
  rfi_free(ds->ctx, ds->starts);
  rfi_free(ds->ctx, ds);
}

static const rfi_dataset_calls row_calls = {close_rows, row_file_at, row_window, windows_before, row_window_bytes};

static rfr_status open_rows(row_dataset *ds, const rfi_row_encoder *encoder, const rfi_row_dataset_options *o,
                            rfi_paths *train, rfi_paths *held) {
  const char *root = o->root ? o->root : "";
  rfi_dataset_stats *stats = &ds->base.stats;
  RFI_TRY(rfi_find_files(root, o->patterns, o->n_patterns, train));
  RFI_TRY(rfi_find_files(root, o->validation_patterns, o->n_validation_patterns, held));
  RFI_TRY(list_files(ds, train, held));
  RFI_TRY(set_weights(ds, root, o));
  for (int i = 0; i < ds->n_files; i++) {
    char *path;
    RFI_TRY(rfi_path_join(ds->ctx, root, ds->files[i].path, &path));
    const rfr_status s = rfi_file_hash(ds->ctx, path, &ds->files[i].size, &ds->files[i].hash);
    rfi_free(ds->ctx, path);
    RFI_TRY(s);
  }
  RFI_TRY(drop_equal(ds));
  RFI_TRY(load_files(ds, encoder, root, o));
  RFI_TRY(split_rows(ds, o));
  RFI_TRY(check_split(ds, o));
  RFI_TRY(hash_rows(ds));
  for (int split = 0; split < 2; split++) {
    if (ds->n[split] == 0) continue;
    RFI_TRY(pack_epoch(ds, (rfi_split)split, 0, 0));
    stats->windows[split] = ds->packed[split].packing.windows;
  }
  stats->validation_predicted = stats->trained[RFI_VALIDATION];
  return RFR_OK;
}

rfr_status rfi_row_dataset_open(const rfi_row_encoder *encoder, const rfi_row_dataset_options *o, rfi_dataset **out) {
  row_dataset *ds;
  *out = NULL;
  if (o->sequence < 1) return rfi_fail(RFI_E_ARGUMENT, "sequence is %d; it must be at least 1", o->sequence);
  if (!(o->validation_fraction >= 0 && o->validation_fraction < 1))
    return rfi_fail(RFI_E_ARGUMENT, "validation_fraction is %g; it must be at least 0 and less than 1",
                    o->validation_fraction);
  if (o->n_patterns < 1 && o->n_validation_patterns < 1)
    return rfi_fail(RFI_E_DATA_EMPTY, "there is no pattern for training files");
  RFI_TRY(RFI_ALLOC(encoder->ctx, sizeof *ds, &ds));
  ds->base.calls = &row_calls;
  ds->base.stats.rows = true;
  ds->ctx = encoder->ctx;
  ds->sequence = o->sequence;
  ds->packing = o->packing;
  ds->pairs = o->form == RFI_ROW_preference;
  ds->equal_epochs = true;
  for (int split = 0; split < 2; split++) ds->packed[split].packing.ctx = ds->ctx;
  rfi_paths train = {.ctx = ds->ctx}, held = {.ctx = ds->ctx};
  const rfr_status s = open_rows(ds, encoder, o, &train, &held);
  rfi_paths_deinit(&train);
  rfi_paths_deinit(&held);
  if (s == RFR_OK) *out = &ds->base;
  else close_rows(&ds->base);
  return s;
}
