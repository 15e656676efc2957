/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of a data set and its windows; dataset.h defines both.
 *
 * All tokens are in memory, once, training documents first. The order of an epoch is a
 * Feistel network over the window numbers instead of a shuffled list: a list would have
 * to be computed for every epoch and stored to resume. The network permutes a power of
 * four that is at least W; a result outside 0 .. W-1 goes through the network again (cycle
 * walking), which stays a permutation and takes fewer than four passes on average.
 */
#include "data/dataset.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "core/rng.h"

/* The random stream of the data order ("data" in ASCII); the model uses none with this number. */
enum { DATA_STREAM = 0x64617461, FEISTEL_ROUNDS = 6 };

typedef struct source { /* a file */
  char *path;           /* as matched */
  rfi_split split;      /* not used if blocks are held out */
  rfi_hash hash;
  int64_t size;
  bool kept;
} source;

typedef struct document {
  int source;
  rfi_split split;
  int64_t offset, size; /* in the file */
  int64_t start;        /* in the tokens of its split */
  int64_t tokens;
} document;

typedef struct text_dataset {
  rfi_dataset base; /* must be first: a text_dataset is an rfi_dataset */
  rfr_ctx *ctx;
  source *sources; /* sorted by path */
  int n_sources;
  document *documents; /* sorted by split, then path, then offset */
  int n, capacity;
  uint8_t *bytes[2];     /* without an encoder: bytes are tokens */
  rfi_token_table of[2]; /* with an encoder: one row per document */
  const document *first[2];
  int *files[2]; /* the sources that have bytes in each split */
  double fraction;
  rfi_dataset_encode_fn encode;
  void *encode_user;
} text_dataset;

/* ---- files ---- */

static rfr_status check_root(const char *root) {
  struct stat st;
  if (*root && stat(root, &st) != 0) return rfi_fail(RFI_E_FILE_OPEN, "data.root: %s: %s", root, strerror(errno));
  if (*root && !S_ISDIR(st.st_mode)) return rfi_fail(RFI_E_FILE_OPEN, "data.root: %s is not a folder", root);
  return RFR_OK;
}

rfr_status rfi_find_files(const char *root, const char *const *patterns, int n, rfi_paths *paths) {
  RFI_TRY(check_root(root));
  for (int i = 0; i < n; i++) {
    int before = paths->n;
    RFI_TRY(rfi_glob(root, patterns[i], paths));
    if (paths->n == before)
      return rfi_fail(RFI_E_DATA_EMPTY, "the pattern \"%s\" matches no file in %s", patterns[i], *root ? root : ".");
  }
  rfi_paths_sort(paths);
  return RFR_OK;
}

bool rfi_is_held_out(uint64_t hash, double fraction) {
  /* rounded, because 0.07 * 10000 is slightly more than 700 */
  return hash % 10000 < (uint64_t)(fraction * 10000 + 0.5);
}

/* Both lists are sorted, so one pass merges them to the sources of both splits. Files held out by name leave the
 * training split. */
static rfr_status list_sources(text_dataset *ds, const rfi_paths *train, const rfi_paths *held) {
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)train->n + (size_t)held->n + 1) * sizeof *ds->sources, &ds->sources));
  for (int i = 0, j = 0; i < train->n || j < held->n;) {
    int order = i == train->n ? 1 : j == held->n ? -1 : strcmp(train->items[i], held->items[j]);
    const char *path = order < 0 ? train->items[i] : held->items[j];
    i += order <= 0;
    j += order >= 0;
    source *f = &ds->sources[ds->n_sources];
    RFI_TRY(RFI_ALLOC(ds->ctx, strlen(path) + 1, &f->path));
    strcpy(f->path, path);
    const bool by_path = held->n == 0 && rfi_is_held_out(rfi_hash_bytes(path, strlen(path)).low, ds->fraction);
    f->split = order >= 0 || by_path ? RFI_VALIDATION : RFI_TRAIN;
    f->kept = true;
    ds->n_sources++;
  }
  return RFR_OK;
}

/* The file type that the first bytes indicate; NULL: unknown. */
static const char *binary_format(const char *data, size_t n) {
  static const struct {
    const char *name, *magic;
    size_t n;
  } formats[] = {
      {"an ELF file",
       "\x7f"
       "ELF",
       4},
      {"a Parquet file", "PAR1", 4},
      {"a gzip file", "\x1f\x8b", 2},
      {"a zip file", "PK\3\4", 4},
      {"a zstd file", "\x28\xb5\x2f\xfd", 4},
      {"an xz file",
       "\xfd"
       "7zXZ",
       5},
      {"a bzip2 file", "BZh9", 4},
      {"a PNG picture", "\x89PNG", 4},
      {"a JPEG picture", "\xff\xd8\xff", 3},
      {"a GIF picture", "GIF8", 4},
      {"a PDF file", "%PDF-", 5},
      {"an HDF5 file", "\x89HDF", 4},
      {"a SQLite file", "SQLite format 3", 15},
      {"an Arrow file", "ARROW1", 6},
      {"UTF-16 text", "\xff\xfe", 2},
      {"UTF-16 text", "\xfe\xff", 2},
  };
  for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
    if (n >= formats[i].n && memcmp(data, formats[i].magic, formats[i].n) == 0) return formats[i].name;
  return NULL;
}

rfr_status rfi_check_text(const char *path, const char *data, size_t n) {
  const char *format = binary_format(data, n);
  if (format)
    return rfi_fail_at(RFI_E_DATA_BINARY, path, 0, "is %s, not UTF-8 or other text without NUL bytes", format);
  const char *nul = n ? memchr(data, 0, n) : NULL;
  if (nul)
    return rfi_fail_at(RFI_E_DATA_BINARY, path, 0, "has a NUL byte at offset %lld, so it is not text",
                       (long long)(nul - data));
  return RFR_OK;
}

/* Reads a file, which must still have the bytes that were hashed. Free with rfi_free. */
static rfr_status read_source(const text_dataset *ds, const char *root, const source *f, char **data) {
  char *path;
  size_t n;
  RFI_TRY(rfi_path_join(ds->ctx, root, f->path, &path));
  rfr_status s = rfi_file_read(ds->ctx, path, data, &n);
  if (s == RFR_OK && ((int64_t)n != f->size || !rfi_hash_equal(rfi_hash_bytes(*data, n), f->hash)))
    s = rfi_fail_at(RFI_E_FILE_READ, path, 0, "the file changed while it was read");
  rfi_free(ds->ctx, path);
  if (s == RFR_OK) return RFR_OK;
  rfi_free(ds->ctx, *data);
  *data = NULL;
  return s;
}

static rfr_status scan_source(text_dataset *ds, const char *root, source *f) {
  char *path, *data = NULL;
  size_t n;
  RFI_TRY(rfi_path_join(ds->ctx, root, f->path, &path));
  rfr_status s = rfi_file_read(ds->ctx, path, &data, &n);
  if (s == RFR_OK) s = rfi_check_text(path, data, n);
  if (s == RFR_OK) {
    f->size = (int64_t)n;
    f->hash = rfi_hash_bytes(data, n);
  }
  rfi_free(ds->ctx, data);
  rfi_free(ds->ctx, path);
  return s;
}

/* ---- equal files ---- */

static int by_content(const void *a, const void *b) {
  const source *x = *(source *const *)a, *y = *(source *const *)b;
  if (x->hash.high != y->hash.high) return x->hash.high < y->hash.high ? -1 : 1;
  if (x->hash.low != y->hash.low) return x->hash.low < y->hash.low ? -1 : 1;
  return strcmp(x->path, y->path);
}

/* Of equal files one that is held out by name is kept, so that no held-out text is trained on; otherwise the first by
 * path. */
static rfr_status drop_duplicates(text_dataset *ds, bool named) {
  source **order;
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)ds->n_sources + 1) * sizeof *order, &order));
  for (int i = 0; i < ds->n_sources; i++) order[i] = &ds->sources[i];
  qsort(order, (size_t)ds->n_sources, sizeof *order, by_content);
  for (int i = 0, end; i < ds->n_sources; i = end) {
    int keeper = i;
    for (end = i + 1; end < ds->n_sources && rfi_hash_equal(order[i]->hash, order[end]->hash); end++)
      if (named && order[keeper]->split == RFI_TRAIN && order[end]->split == RFI_VALIDATION) keeper = end;
    for (int k = i; k < end; k++) {
      if (order[k]->size == 0) {
        order[k]->kept = false;
        ds->base.stats.empty++;
      } else if (k != keeper) {
        order[k]->kept = false;
        ds->base.stats.duplicates++;
      }
    }
  }
  rfi_free(ds->ctx, order);
  int kept = 0;
  for (int i = 0; i < ds->n_sources; i++) {
    if (ds->sources[i].kept) ds->sources[kept++] = ds->sources[i];
    else rfi_free(ds->ctx, ds->sources[i].path);
  }
  ds->n_sources = kept;
  return RFR_OK;
}

/* ---- documents ---- */

static rfr_status add_document(text_dataset *ds, document d) {
  if (ds->n == ds->capacity) {
    if (ds->capacity > INT_MAX / 2) return rfi_fail(RFI_E_OVERFLOW, "the data has too many documents");
    const int capacity = ds->capacity ? 2 * ds->capacity : 64;
    document *grown;
    RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)capacity * sizeof *grown, &grown));
    if (ds->n) memcpy(grown, ds->documents, (size_t)ds->n * sizeof *grown);
    rfi_free(ds->ctx, ds->documents);
    ds->documents = grown;
    ds->capacity = capacity;
  }
  ds->documents[ds->n++] = d;
  return RFR_OK;
}

/* Whether the split by path leaves text on both sides; the first byte of a document does not count, because it is not
 * predicted. */
static bool is_split(const text_dataset *ds) {
  bool has[2] = {false, false};
  for (int i = 0; i < ds->n_sources; i++)
    has[ds->sources[i].split] |= ds->sources[i].size > (ds->sources[i].split == RFI_VALIDATION);
  return has[RFI_TRAIN] && has[RFI_VALIDATION];
}

/* The end of the block that starts at `start`: the end of the first line at its length or later, but at most twice its
 * length. */
static int64_t block_end(const char *data, int64_t n, int64_t start, int64_t length) {
  if (n - start <= length) return n;
  const int64_t last = n - start < 2 * length ? n : start + 2 * length, first = start + length - 1;
  const char *newline = memchr(data + first, '\n', (size_t)(last - first));
  return newline ? newline - data + 1 : last;
}

/* A power of two from 256 to 65536, so that a file has at least 256 blocks, as far as these limits allow. */
static int64_t block_length(int64_t size) {
  int64_t length = 65536;
  while (length > 256 && size / length < 256) length /= 2;
  return length;
}

/* Makes a document of each block. Blocks are held out by the hash of their bytes, so equal blocks are in one split, and
 * a block stays in its split when files are added. If the hashes leave a split empty, the blocks with the smallest or
 * largest hash change sides. */
static rfr_status split_blocks(text_dataset *ds, const char *root) {
  uint64_t *hash = NULL, low = UINT64_MAX, high = 0;
  int capacity = 0;
  rfr_status s = RFR_OK;
  for (int i = 0; i < ds->n_sources && s == RFR_OK; i++) {
    const int64_t size = ds->sources[i].size, length = block_length(size);
    char *data;
    s = read_source(ds, root, &ds->sources[i], &data);
    for (int64_t at = 0, end; s == RFR_OK && at < size; at = end) {
      end = block_end(data, size, at, length);
      const rfi_hash h = rfi_hash_bytes(data + at, (size_t)(end - at));
      s = add_document(
          ds, (document){i, rfi_is_held_out(h.low, ds->fraction) ? RFI_VALIDATION : RFI_TRAIN, at, end - at, 0, 0});
      if (s == RFR_OK && ds->capacity > capacity) {
        uint64_t *grown;
        s = RFI_ALLOC(ds->ctx, (size_t)ds->capacity * sizeof *grown, &grown);
        if (s != RFR_OK) break;
        if (capacity) memcpy(grown, hash, (size_t)capacity * sizeof *grown);
        rfi_free(ds->ctx, hash);
        hash = grown;
        capacity = ds->capacity;
      }
      if (s != RFR_OK) break;
      hash[ds->n - 1] = h.high;
      if (h.high < low) low = h.high;
      if (h.high > high) high = h.high;
    }
    rfi_free(ds->ctx, data);
  }
  int64_t held = 0;
  for (int i = 0; i < ds->n && s == RFR_OK; i++) held += ds->documents[i].split == RFI_VALIDATION;
  if (s == RFR_OK && low >= high)
    s = rfi_fail(RFI_E_DATA_HELD_OUT, "the files are too short to hold out %g%%: they are one block of text",
                 100 * ds->fraction);
  for (int i = 0; i < ds->n && s == RFR_OK; i++) {
    if (held == 0 && hash[i] == low) ds->documents[i].split = RFI_VALIDATION;
    if (held == ds->n && hash[i] == high) ds->documents[i].split = RFI_TRAIN;
  }
  rfi_free(ds->ctx, hash);
  RFI_TRY(s);
  ds->base.stats.blocks = ds->n;
  /* Consecutive blocks of a split form one document. */
  int kept = 0;
  for (int i = 0; i < ds->n; i++) {
    const document d = ds->documents[i];
    ds->base.stats.held_out_blocks += d.split == RFI_VALIDATION;
    document *before = kept ? &ds->documents[kept - 1] : NULL;
    if (before && before->source == d.source && before->split == d.split) before->size += d.size;
    else ds->documents[kept++] = d;
  }
  ds->n = kept;
  return RFR_OK;
}

static int by_split(const void *a, const void *b) {
  const document *x = a, *y = b;
  if (x->split != y->split) return x->split < y->split ? -1 : 1;
  if (x->source != y->source) return x->source < y->source ? -1 : 1; /* sources are sorted by path */
  return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Sorts the documents and counts those of each split. */
static rfr_status lay_out(text_dataset *ds) {
  if (ds->n > 0) qsort(ds->documents, (size_t)ds->n, sizeof *ds->documents, by_split);
  for (int split = 0; split < 2; split++)
    RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)ds->n_sources + 1) * sizeof *ds->files[split], &ds->files[split]));
  for (int i = 0; i < ds->n; i++) {
    document *d = &ds->documents[i];
    int *files = &ds->base.stats.files[d->split];
    ds->base.stats.bytes[d->split] += d->size;
    ds->base.stats.documents[d->split]++;
    if (*files == 0 || ds->files[d->split][*files - 1] != d->source) ds->files[d->split][(*files)++] = d->source;
  }
  ds->first[RFI_TRAIN] = ds->documents;
  ds->first[RFI_VALIDATION] = ds->documents + ds->base.stats.documents[RFI_TRAIN];
  return RFR_OK;
}

/* Appends the documents of source `i` to their splits; `next`: the first documents that are not appended yet. */
static void add_bytes(text_dataset *ds, int i, const char *data, int next[2], const int end[2]) {
  for (int split = 0; split < 2; split++)
    for (; next[split] < end[split] && ds->documents[next[split]].source == i; next[split]++) {
      document *d = &ds->documents[next[split]];
      d->start = ds->base.stats.tokens[split];
      d->tokens = d->size;
      memcpy(ds->bytes[split] + d->start, data + d->offset, (size_t)d->size);
      ds->base.stats.tokens[split] += d->tokens;
    }
}

/* A file of a group that is tokenized together. */
typedef struct encoded {
  int source;
  int first[2], last[2]; /* its documents in each split */
  rfi_token_table table; /* a row per document */
  rfr_status status;
} encoded;

static rfr_status encode_source(const text_dataset *ds, const char *root, encoded *e) {
  const source *f = &ds->sources[e->source];
  rfi_extent *extents = NULL;
  char *data;
  int n = 0;
  RFI_TRY(read_source(ds, root, f, &data));
  const size_t documents =
      (size_t)(e->last[RFI_TRAIN] - e->first[RFI_TRAIN]) + (size_t)(e->last[RFI_VALIDATION] - e->first[RFI_VALIDATION]);
  rfr_status s = RFI_ALLOC(ds->ctx, documents * sizeof *extents, &extents);
  for (int split = 0; split < 2 && s == RFR_OK; split++)
    for (int k = e->first[split]; k < e->last[split]; k++)
      extents[n++] = (rfi_extent){ds->documents[k].offset, ds->documents[k].size};
  if (s == RFR_OK) s = ds->encode(ds->encode_user, f->path, f->hash, data, extents, n, &e->table);
  rfi_free(ds->ctx, extents);
  rfi_free(ds->ctx, data);
  return s;
}

/* Tokenizes files on all threads. The error is that of the first file that has one. This thread encodes that file
 * again, because errors are thread-local. */
static rfr_status encode_sources(const text_dataset *ds, const char *root, encoded *group, int n) {
  const int most = rfi_ctx_threads(ds->ctx), threads = most < n ? most : n;
  if (threads == 1) {
    for (int i = 0; i < n; i++) RFI_TRY(encode_source(ds, root, &group[i]));
    return RFR_OK;
  }
  RFI_TRY(rfi_check_fork(threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int i = 0; i < n; i++) group[i].status = encode_source(ds, root, &group[i]);
  for (int i = 0; i < n; i++) {
    if (group[i].status == RFR_OK) continue;
    rfi_token_table_deinit(&group[i].table);
    group[i].table = (rfi_token_table){.ctx = ds->ctx};
    RFI_TRY(encode_source(ds, root, &group[i]));
  }
  return RFR_OK;
}

/* Appends the documents of a file to their splits. */
static rfr_status append_tokens(text_dataset *ds, const encoded *e) {
  const rfi_token_table *table = &e->table;
  int64_t row = 0, at = 0;
  for (int split = 0; split < 2; split++)
    for (int k = e->first[split]; k < e->last[split]; k++, at = table->ends[row++]) {
      document *d = &ds->documents[k];
      d->start = ds->base.stats.tokens[split];
      d->tokens = table->ends[row] - at;
      ds->base.stats.tokens[split] += d->tokens;
      RFI_TRY(rfi_token_table_add(&ds->of[split], table->ids + at, table->widths + at, d->tokens, 0, 0));
    }
  return RFR_OK;
}

/* Files are read in groups: up to a number of files, or up to a number of bytes and one more file. */
enum { GROUP_FILES = 1024, GROUP_BYTES = 64 << 20 };

static rfr_status load_tokens(text_dataset *ds, const char *root, int next[2], const int end[2]) {
  encoded *group;
  rfr_status s = RFR_OK;
  RFI_TRY(RFI_ALLOC(ds->ctx, GROUP_FILES * sizeof *group, &group));
  for (int i = 0; i < ds->n_sources && s == RFR_OK;) {
    int n = 0;
    for (int64_t bytes = 0; i < ds->n_sources && n < GROUP_FILES && bytes < GROUP_BYTES; i++) {
      encoded *e = &group[n++];
      *e = (encoded){.source = i, .table = {.ctx = ds->ctx}};
      for (int split = 0; split < 2; split++) {
        e->first[split] = next[split];
        while (next[split] < end[split] && ds->documents[next[split]].source == i) next[split]++;
        e->last[split] = next[split];
      }
      bytes += ds->sources[i].size;
    }
    s = encode_sources(ds, root, group, n);
    for (int k = 0; k < n; k++) {
      if (s == RFR_OK) s = append_tokens(ds, &group[k]);
      rfi_token_table_deinit(&group[k].table);
    }
  }
  rfi_free(ds->ctx, group);
  return s;
}

static rfr_status load_bytes(text_dataset *ds, const char *root, int next[2], const int end[2]) {
  for (int split = 0; split < 2; split++)
    RFI_TRY(RFI_ALLOC(ds->ctx, (size_t)ds->base.stats.bytes[split], &ds->bytes[split]));
  for (int i = 0; i < ds->n_sources; i++) {
    char *data;
    RFI_TRY(read_source(ds, root, &ds->sources[i], &data));
    add_bytes(ds, i, data, next, end);
    rfi_free(ds->ctx, data);
  }
  return RFR_OK;
}

static rfr_status load(text_dataset *ds, const char *root) {
  rfi_hasher *hasher = NULL;
  int next[2] = {0, ds->base.stats.documents[RFI_TRAIN]}; /* documents of a split are in the order of their files */
  const int end[2] = {next[1], ds->n};
  RFI_TRY((ds->encode ? load_tokens : load_bytes)(ds, root, next, end));
  RFI_TRY(rfi_hasher_create(ds->ctx, &hasher));
  for (int i = 0; i < ds->n; i++) {
    const document *d = &ds->documents[i];
    rfi_hasher_add_u64(hasher, d->split);
    rfi_hasher_add_u64(hasher, (uint64_t)d->tokens);
    if (ds->encode) rfi_hasher_add(hasher, ds->of[d->split].ids + d->start, (size_t)d->tokens * sizeof(uint32_t));
    else rfi_hasher_add(hasher, ds->bytes[d->split] + d->start, (size_t)d->tokens);
    if (d->tokens == 0) continue;
    ds->base.stats.trained[d->split] += d->tokens - 1;
    ds->base.stats.trained_bytes[d->split] += d->size - (ds->encode ? ds->of[d->split].widths[d->start] : 1);
  }
  ds->base.stats.hash = rfi_hasher_result(hasher);
  rfi_hasher_destroy(hasher);
  return RFR_OK;
}

rfr_status rfi_dataset_count_windows(rfi_dataset *ds, const char *what) {
  rfi_dataset_stats *stats = &ds->stats;
  int64_t S = ds->sequence, N = stats->tokens[RFI_TRAIN], M = stats->tokens[RFI_VALIDATION];
  if (what && N == 0 && stats->files[RFI_VALIDATION] > 0)
    return rfi_fail(RFI_E_DATA_EMPTY, "%d files are held out; no other file has %s to train on",
                    stats->files[RFI_VALIDATION], what);
  if (what && N <= S)
    return rfi_fail(RFI_E_DATA_EMPTY, "there are %lld %s to train on; a window of sequence %lld needs %lld",
                    (long long)N, what, (long long)S, (long long)S + 1);
  stats->windows[RFI_TRAIN] = (N + S - 1) / S;
  const int64_t new = S - ds->context, after = M - 1 > S ? M - 1 - S : 0;
  stats->windows[RFI_VALIDATION] = M > 1 ? 1 + (after + new - 1) / new : 0;
  stats->validation_predicted = stats->trained[RFI_VALIDATION];
  return RFR_OK;
}

static rfr_status open_splits(text_dataset *ds, const char *const *patterns, int n_patterns,
                              const rfi_dataset_options *o, rfi_paths *train, rfi_paths *held) {
  const char *root = o->root ? o->root : "";
  RFI_TRY(rfi_find_files(root, patterns, n_patterns, train));
  RFI_TRY(rfi_find_files(root, o->validation_patterns, o->n_validation_patterns, held));
  RFI_TRY(list_sources(ds, train, held));
  for (int i = 0; i < ds->n_sources; i++) RFI_TRY(scan_source(ds, root, &ds->sources[i]));
  RFI_TRY(drop_duplicates(ds, held->n > 0));
  if (ds->n_sources > 0 && held->n == 0 && ds->fraction > 0 && !is_split(ds)) {
    RFI_TRY(split_blocks(ds, root));
  } else {
    for (int i = 0; i < ds->n_sources; i++)
      RFI_TRY(add_document(ds, (document){i, ds->sources[i].split, 0, ds->sources[i].size, 0, 0}));
  }
  RFI_TRY(lay_out(ds));
  RFI_TRY(load(ds, root));
  return rfi_dataset_count_windows(&ds->base, ds->encode ? "tokens" : "bytes");
}

static void close_text(rfi_dataset *base) {
  text_dataset *ds = (text_dataset *)base;
  for (int i = 0; i < ds->n_sources; i++) rfi_free(ds->ctx, ds->sources[i].path);
  rfi_free(ds->ctx, ds->sources);
  rfi_free(ds->ctx, ds->documents);
  for (int split = 0; split < 2; split++) {
    rfi_free(ds->ctx, ds->bytes[split]);
    rfi_free(ds->ctx, ds->files[split]);
    rfi_token_table_deinit(&ds->of[split]);
  }
  rfi_free(ds->ctx, ds);
}

static const char *text_file(const rfi_dataset *base, rfi_split split, int i, int64_t *bytes) {
  const text_dataset *ds = (const text_dataset *)base;
  const source *f = &ds->sources[ds->files[split][i]];
  if (bytes) *bytes = f->size;
  return f->path;
}

/* ---- windows ---- */

static uint64_t draw(uint64_t key, uint64_t epoch, uint32_t site, uint32_t x) {
  rfi_u32x4 r = rfi_philox((rfi_u32x4){{x, site, (uint32_t)epoch, (uint32_t)(epoch >> 32)}}, (uint32_t)key,
                           (uint32_t)(key >> 32));
  return (uint64_t)r.v[1] << 32 | r.v[0];
}

uint64_t rfi_permute(uint64_t index, uint64_t n, uint64_t key, uint64_t epoch) {
  int half = 1; /* bits of each half */
  while (half < 32 && (uint64_t)1 << (2 * half) < n) half++;
  uint64_t mask = ((uint64_t)1 << half) - 1;
  do {
    uint64_t left = index >> half, right = index & mask;
    for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
      uint64_t next = left ^ (draw(key, epoch, round, (uint32_t)right) & mask);
      left = right;
      right = next;
    }
    index = left << half | right;
  } while (index >= n);
  return index;
}

int64_t rfi_dataset_position(const rfi_dataset *ds, uint64_t seed, int64_t sample) {
  uint64_t W = (uint64_t)ds->stats.windows[RFI_TRAIN], N = (uint64_t)ds->stats.tokens[RFI_TRAIN];
  uint64_t S = (uint64_t)ds->sequence, epoch = (uint64_t)sample / W, key = rfi_stream_key(seed, DATA_STREAM);
  /* The start is drawn over all tokens, so that the tokens shared by two windows change from epoch to epoch. */
  uint64_t start = draw(key, epoch, FEISTEL_ROUNDS, 0) % N;
  return (int64_t)((start + rfi_permute((uint64_t)sample % W, W, key, epoch) * S) % N);
}

/* The document that contains token `at` of a split. */
static const document *document_at(const text_dataset *ds, rfi_split split, int64_t at) {
  const document *first = ds->first[split];
  int low = 0, high = ds->base.stats.documents[split];
  while (high - low > 1) {
    int middle = low + (high - low) / 2;
    if (first[middle].start <= at) low = middle;
    else high = middle;
  }
  return &first[low];
}

static int64_t text_document_end(const rfi_dataset *base, rfi_split split, int64_t at) {
  const document *d = document_at((const text_dataset *)base, split, at);
  return d->start + d->tokens;
}

static rfr_status text_read(rfi_dataset *base, rfi_split split, int64_t at, int64_t n, int32_t *tokens) {
  const text_dataset *ds = (const text_dataset *)base;
  const uint8_t *bytes = ds->bytes[split];
  const uint32_t *ids = ds->of[split].ids;
  for (int64_t i = 0; i < n; i++) tokens[i] = ids ? RFI_TOKEN_ID(ids[at + i]) : bytes[at + i];
  return RFR_OK;
}

static rfr_status stream_window(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                                int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  int64_t S = ds->sequence, N = ds->stats.tokens[split], at;
  const bool ring = split == RFI_TRAIN;
  if (ring) at = rfi_dataset_position(ds, seed, sample);
  else at = sample < ds->stats.windows[split] ? sample * (S - ds->context) : N;
  for (int64_t i = 0; i < S;) {
    if (at == N && ring) at = 0;
    doc_offsets[(*n_docs)++] = (int32_t)i; /* the loop runs once per document, and once for the padding */
    if (at == N) {
      for (; i < S; i++) tokens[i] = 0, targets[i] = RFI_IGNORED_TARGET;
      break;
    }
    const int64_t left = ds->calls->document_end(ds, split, at) - at, n = left < S - i ? left : S - i;
    RFI_TRY(ds->calls->read(ds, split, at, n, tokens + i));
    memcpy(targets + i, tokens + i + 1, (size_t)(n - 1) * sizeof *targets);
    targets[i + n - 1] = RFI_IGNORED_TARGET;
    if (left > n) RFI_TRY(ds->calls->read(ds, split, at + n, 1, targets + i + n - 1));
    i += n;
    at += n;
  }
  const int64_t known = !ring && sample > 0 ? ds->context : 0; /* targets of the previous window */
  for (int64_t i = 0; i < known; i++) targets[i] = RFI_IGNORED_TARGET;
  return RFR_OK;
}

static int64_t text_window_bytes(const rfi_dataset *base, int64_t sample) {
  const text_dataset *ds = (const text_dataset *)base;
  const int64_t S = base->sequence, N = base->stats.tokens[RFI_VALIDATION], new = S - base->context;
  int64_t at = sample > 0 ? sample * new + base->context : 0, end = sample *new + S, bytes = 0;
  if (sample >= base->stats.windows[RFI_VALIDATION]) return 0;
  for (end = end < N ? end : N; at < end;) {
    const document *d = document_at(ds, RFI_VALIDATION, at);
    for (; at < end && at < d->start + d->tokens; at++)
      if (at + 1 < d->start + d->tokens) bytes += ds->encode ? ds->of[RFI_VALIDATION].widths[at + 1] : 1;
  }
  return bytes;
}

rfr_status rfi_stream_windows(rfi_dataset *base, uint64_t seed, int64_t epochs, int64_t *out) {
  (void)seed;
  *out = epochs * base->stats.windows[RFI_TRAIN];
  return RFR_OK;
}

static const rfi_dataset_calls text_calls = {.close = close_text,
                                             .file = text_file,
                                             .windows = rfi_stream_windows,
                                             .window_bytes = text_window_bytes,
                                             .document_end = text_document_end,
                                             .read = text_read};

/* ---- opening ---- */

rfr_status rfi_dataset_check_options(const rfi_dataset_options *options) {
  if (options->sequence < 1)
    return rfi_fail(RFI_E_ARGUMENT, "sequence is %d; it must be at least 1", options->sequence);
  if (options->context < 0 || options->context >= options->sequence)
    return rfi_fail(RFI_E_ARGUMENT, "context is %d; it must be 0 to %d (sequence - 1)", options->context,
                    options->sequence - 1);
  if (!(options->validation_fraction >= 0 && options->validation_fraction < 1))
    return rfi_fail(RFI_E_ARGUMENT, "validation_fraction is %g; it must be at least 0 and less than 1",
                    options->validation_fraction);
  return RFR_OK;
}

rfr_status rfi_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                            const rfi_dataset_options *options, rfi_dataset **out) {
  text_dataset *ds;
  *out = NULL;
  RFI_TRY(rfi_dataset_check_options(options));
  if (n_patterns < 1) return rfi_fail(RFI_E_DATA_EMPTY, "there is no pattern for training files");
  RFI_TRY(RFI_ALLOC(ctx, sizeof *ds, &ds));
  ds->base.calls = &text_calls;
  ds->ctx = ctx;
  ds->of[0].ctx = ds->of[1].ctx = ctx;
  ds->encode = options->encode;
  ds->encode_user = options->encode_user;
  ds->base.sequence = options->sequence;
  ds->base.context = options->context;
  ds->fraction = options->validation_fraction;
  rfi_paths train = {.ctx = ctx}, held = {.ctx = ctx};
  rfr_status s = open_splits(ds, patterns, n_patterns, options, &train, &held);
  rfi_paths_deinit(&train);
  rfi_paths_deinit(&held);
  if (s == RFR_OK) *out = &ds->base;
  else close_text(&ds->base);
  return s;
}

/* ---- all data sets ---- */

void rfi_dataset_close(rfi_dataset *ds) {
  if (ds) ds->calls->close(ds);
}

const rfi_dataset_stats *rfi_dataset_get_stats(const rfi_dataset *ds) { return &ds->stats; }

const char *rfi_dataset_file(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes) {
  return ds->calls->file(ds, split, i, bytes);
}

rfr_status rfi_dataset_window(rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                              int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  *n_docs = 0;
  if (sample < 0) return rfi_fail(RFI_E_ARGUMENT, "sample is %lld; it must not be negative", (long long)sample);
  return (ds->calls->window ? ds->calls->window : stream_window)(ds, split, seed, sample, tokens, targets, doc_offsets,
                                                                 n_docs);
}

rfr_status rfi_dataset_windows(rfi_dataset *ds, uint64_t seed, double epochs, int64_t *out) {
  const double full = floor(epochs);
  int64_t windows, next;
  if (!(epochs >= 0 && epochs <= 1e6)) return rfi_fail(RFI_E_ARGUMENT, "epochs is %g; it must be 0 to 1e6", epochs);
  RFI_TRY(ds->calls->windows(ds, seed, (int64_t)full, &windows));
  if (epochs > full) {
    RFI_TRY(ds->calls->windows(ds, seed, (int64_t)full + 1, &next));
    windows += (int64_t)ceil((epochs - full) * (double)(next - windows));
  }
  *out = windows;
  return RFR_OK;
}

int64_t rfi_dataset_window_bytes(const rfi_dataset *ds, int64_t sample) { return ds->calls->window_bytes(ds, sample); }
