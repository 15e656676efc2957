/* SPDX-License-Identifier: Apache-2.0
 *
 * The files of a data set and its windows; dataset.h defines both.
 *
 * All bytes are in memory, once, training documents first. The order of an epoch is a
 * Feistel network over the window numbers instead of a shuffled list: a list would have
 * to be made again for every epoch and stored to resume. The network permutes a power of
 * four that is at least W; a result outside 0 .. W-1 is put through again (cycle
 * walking), which stays a permutation and takes fewer than four rounds on average.
 */
#include "data/dataset.h"

#include <stdlib.h>
#include <string.h>

#include "core/rng.h"

/* Number of the data's random stream, unlike any that the model uses ("data" in ASCII). */
enum { DATA_STREAM = 0x64617461, FEISTEL_ROUNDS = 6 };

typedef struct document {
  char *path; /* as matched */
  rfi_split split;
  rfi_hash hash;
  int64_t size;
  int64_t start; /* in its split's bytes */
  bool kept;
} document;

struct rfi_dataset {
  rfr_ctx *ctx;
  document *documents; /* sorted by split, then path */
  int n;
  uint8_t *bytes[2];
  const document *first[2];
  int sequence, context;
  rfi_dataset_stats stats;
};

/* ---- which files ---- */

static rfr_status find_files(const char *root, const char *const *patterns, int n, rfi_paths *paths) {
  for (int i = 0; i < n; i++) {
    int before = paths->n;
    RFI_TRY(rfi_glob(root, patterns[i], paths));
    if (paths->n == before)
      return rfi_fail(RFI_E_DATA_EMPTY, "the pattern \"%s\" names no file in %s", patterns[i], *root ? root : ".");
  }
  rfi_paths_sort(paths);
  return RFR_OK;
}

static bool held_out(const char *path, double fraction) {
  rfi_hash hash = rfi_hash_bytes(path, strlen(path));
  return hash.low % 10000 < (uint64_t)(fraction * 10000 + 0.5); /* rounded: 0.07 * 10000 is a little over 700 */
}

/* Both lists are sorted: one pass makes the documents of both, training ones without those held out by name. */
static rfr_status list_documents(rfi_dataset *ds, const rfi_paths *train, const rfi_paths *held, double fraction) {
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)train->n + (size_t)held->n + 1) * sizeof *ds->documents, &ds->documents));
  for (int i = 0, j = 0; i < train->n || j < held->n;) {
    int order = i == train->n ? 1 : j == held->n ? -1 : strcmp(train->items[i], held->items[j]);
    const char *path = order < 0 ? train->items[i] : held->items[j];
    i += order <= 0;
    j += order >= 0;
    document *d = &ds->documents[ds->n];
    RFI_TRY(RFI_ALLOC(ds->ctx, strlen(path) + 1, &d->path));
    strcpy(d->path, path);
    d->split = order >= 0 || (held->n == 0 && held_out(path, fraction)) ? RFI_VALIDATION : RFI_TRAIN;
    d->kept = true;
    ds->n++;
  }
  return RFR_OK;
}

/* ---- which of equal files ---- */

/* Equal files side by side. Held out by name wins, so that nothing is trained on that is
 * held out; under a fraction the first path decides. */
static int by_content(const void *a, const void *b) {
  const document *x = *(document *const *)a, *y = *(document *const *)b;
  if (x->hash.high != y->hash.high) return x->hash.high < y->hash.high ? -1 : 1;
  if (x->hash.low != y->hash.low) return x->hash.low < y->hash.low ? -1 : 1;
  return strcmp(x->path, y->path);
}

static rfr_status drop_duplicates(rfi_dataset *ds, bool named) {
  document **order;
  RFI_TRY(RFI_ALLOC(ds->ctx, ((size_t)ds->n + 1) * sizeof *order, &order));
  for (int i = 0; i < ds->n; i++) order[i] = &ds->documents[i];
  qsort(order, (size_t)ds->n, sizeof *order, by_content);
  for (int i = 0, end; i < ds->n; i = end) {
    int keeper = i;
    for (end = i + 1; end < ds->n && rfi_hash_equal(order[i]->hash, order[end]->hash); end++)
      if (named && order[keeper]->split == RFI_TRAIN && order[end]->split == RFI_VALIDATION) keeper = end;
    for (int k = i; k < end; k++) {
      if (order[k]->size == 0) {
        order[k]->kept = false;
        ds->stats.empty++;
      } else if (k != keeper) {
        order[k]->kept = false;
        ds->stats.duplicates++;
      }
    }
  }
  rfi_free(ds->ctx, order);
  return RFR_OK;
}

static int by_split(const void *a, const void *b) {
  const document *x = a, *y = b;
  if (x->split != y->split) return x->split < y->split ? -1 : 1;
  return strcmp(x->path, y->path);
}

/* Removes what is not kept and lays the documents out. */
static rfr_status lay_out(rfi_dataset *ds) {
  int kept = 0;
  for (int i = 0; i < ds->n; i++) {
    if (ds->documents[i].kept) ds->documents[kept++] = ds->documents[i];
    else rfi_free(ds->ctx, ds->documents[i].path);
  }
  ds->n = kept;
  qsort(ds->documents, (size_t)kept, sizeof *ds->documents, by_split);
  for (int i = 0; i < kept; i++) {
    document *d = &ds->documents[i];
    d->start = ds->stats.bytes[d->split];
    ds->stats.bytes[d->split] += d->size;
    ds->stats.files[d->split]++;
  }
  ds->first[RFI_TRAIN] = ds->documents;
  ds->first[RFI_VALIDATION] = ds->documents + ds->stats.files[RFI_TRAIN];
  return RFR_OK;
}

/* The second look at every file: it must still be the file that was hashed. */
static rfr_status load(rfi_dataset *ds, const char *root) {
  rfr_status s = RFR_OK;
  rfi_hasher *hasher = NULL;
  RFI_GOTO(rfi_hasher_create(ds->ctx, &hasher));
  for (int split = 0; split < 2; split++)
    RFI_GOTO(RFI_ALLOC(ds->ctx, (size_t)ds->stats.bytes[split], &ds->bytes[split]));
  for (int i = 0; i < ds->n; i++) {
    document *d = &ds->documents[i];
    uint8_t *at = ds->bytes[d->split] + d->start;
    char *path;
    rfi_file *file;
    RFI_GOTO(rfi_path_join(ds->ctx, root, d->path, &path));
    s = rfi_file_open(ds->ctx, path, &file);
    if (s == RFR_OK) {
      s = rfi_file_read_at(file, at, (size_t)d->size, 0);
      if (s == RFR_OK && !rfi_hash_equal(rfi_hash_bytes(at, (size_t)d->size), d->hash))
        s = rfi_fail_at(RFI_E_FILE_READ, path, 0, "changed while it was being read");
      rfi_file_close(file);
    }
    rfi_free(ds->ctx, path);
    if (s != RFR_OK) goto fail;
    rfi_hasher_add_u64(hasher, d->split);
    rfi_hasher_add_u64(hasher, (uint64_t)d->size);
    rfi_hasher_add(hasher, at, (size_t)d->size);
  }
  ds->stats.hash = rfi_hasher_result(hasher);
fail:
  rfi_hasher_destroy(hasher);
  return s;
}

static rfr_status count_windows(rfi_dataset *ds) {
  int64_t S = ds->sequence, N = ds->stats.bytes[RFI_TRAIN], M = ds->stats.bytes[RFI_VALIDATION];
  if (N == 0 && ds->stats.files[RFI_VALIDATION] > 0)
    return rfi_fail(RFI_E_DATA_EMPTY, "all %d files are held out, none is left to train on",
                    ds->stats.files[RFI_VALIDATION]);
  if (N <= S)
    return rfi_fail(RFI_E_DATA_EMPTY, "%lld bytes to train on, a window of sequence %lld needs %lld", (long long)N,
                    (long long)S, (long long)S + 1);
  ds->stats.windows[RFI_TRAIN] = (N + S - 1) / S;
  const int64_t new = S - ds->context, behind = M - 1 > S ? M - 1 - S : 0;
  ds->stats.windows[RFI_VALIDATION] = M > 1 ? 1 + (behind + new - 1) / new : 0;
  ds->stats.validation_predicted = M - ds->stats.files[RFI_VALIDATION];
  return RFR_OK;
}

static rfr_status open_parts(rfi_dataset *ds, const char *const *patterns, int n_patterns, const rfi_dataset_options *o,
                             rfi_paths *train, rfi_paths *held) {
  const char *root = o->root ? o->root : "";
  RFI_TRY(find_files(root, patterns, n_patterns, train));
  RFI_TRY(find_files(root, o->validation_patterns, o->n_validation_patterns, held));
  RFI_TRY(list_documents(ds, train, held, o->validation_fraction));
  for (int i = 0; i < ds->n; i++) {
    char *path;
    RFI_TRY(rfi_path_join(ds->ctx, root, ds->documents[i].path, &path));
    rfr_status s = rfi_file_hash(ds->ctx, path, &ds->documents[i].size, &ds->documents[i].hash);
    rfi_free(ds->ctx, path);
    RFI_TRY(s);
  }
  RFI_TRY(drop_duplicates(ds, held->n > 0));
  RFI_TRY(lay_out(ds));
  RFI_TRY(count_windows(ds));
  return load(ds, root);
}

rfr_status rfi_dataset_open(rfr_ctx *ctx, const char *const *patterns, int n_patterns,
                            const rfi_dataset_options *options, rfi_dataset **out) {
  rfi_dataset *ds;
  *out = NULL;
  if (options->sequence < 1) return rfi_fail(RFI_E_ARGUMENT, "sequence %d, at least 1 is needed", options->sequence);
  if (options->context < 0 || options->context >= options->sequence)
    return rfi_fail(RFI_E_ARGUMENT, "context %d in windows of %d tokens", options->context, options->sequence);
  if (!(options->validation_fraction >= 0 && options->validation_fraction < 1))
    return rfi_fail(RFI_E_ARGUMENT, "the held-out fraction must lie in [0, 1)");
  if (n_patterns < 1) return rfi_fail(RFI_E_DATA_EMPTY, "no pattern names the training files");
  RFI_TRY(RFI_ALLOC(ctx, sizeof *ds, &ds));
  ds->ctx = ctx;
  ds->sequence = options->sequence;
  ds->context = options->context;
  rfi_paths train = {.ctx = ctx}, held = {.ctx = ctx};
  rfr_status s = open_parts(ds, patterns, n_patterns, options, &train, &held);
  rfi_paths_deinit(&train);
  rfi_paths_deinit(&held);
  if (s == RFR_OK) *out = ds;
  else rfi_dataset_close(ds);
  return s;
}

void rfi_dataset_close(rfi_dataset *ds) {
  if (!ds) return;
  for (int i = 0; i < ds->n; i++) rfi_free(ds->ctx, ds->documents[i].path);
  rfi_free(ds->ctx, ds->documents);
  for (int split = 0; split < 2; split++) rfi_free(ds->ctx, ds->bytes[split]);
  rfi_free(ds->ctx, ds);
}

const rfi_dataset_stats *rfi_dataset_get_stats(const rfi_dataset *ds) { return &ds->stats; }

const char *rfi_dataset_document(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes) {
  const document *d = ds->first[split] + i;
  if (bytes) *bytes = d->size;
  return d->path;
}

/* ---- which bytes ---- */

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
  uint64_t W = (uint64_t)ds->stats.windows[RFI_TRAIN], N = (uint64_t)ds->stats.bytes[RFI_TRAIN];
  uint64_t S = (uint64_t)ds->sequence, epoch = (uint64_t)sample / W, key = rfi_stream_key(seed, DATA_STREAM);
  /* The ring may start anywhere, not only within a window: the windows that hold a byte twice move too. */
  uint64_t start = draw(key, epoch, FEISTEL_ROUNDS, 0) % N;
  return (int64_t)((start + rfi_permute((uint64_t)sample % W, W, key, epoch) * S) % N);
}

/* The document that holds byte `at` of a split. */
static const document *document_at(const rfi_dataset *ds, rfi_split split, int64_t at) {
  const document *first = ds->first[split];
  int low = 0, high = ds->stats.files[split];
  while (high - low > 1) {
    int middle = low + (high - low) / 2;
    if (first[middle].start <= at) low = middle;
    else high = middle;
  }
  return &first[low];
}

rfr_status rfi_dataset_window(const rfi_dataset *ds, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                              int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  *n_docs = 0;
  if (sample < 0) return rfi_fail(RFI_E_ARGUMENT, "no window: sample %lld", (long long)sample);
  int64_t S = ds->sequence, N = ds->stats.bytes[split], at;
  bool ring = split == RFI_TRAIN; /* the end of the held-out bytes is an end */
  if (ring) at = rfi_dataset_position(ds, seed, sample);
  else at = sample < ds->stats.windows[split] ? sample * (S - ds->context) : N;
  const int64_t known = !ring && sample > 0 ? ds->context : 0; /* targets of the window before */
  for (int64_t i = 0; i < S;) {
    if (at == N && ring) at = 0;
    doc_offsets[(*n_docs)++] = (int32_t)i; /* every turn but the first begins a document, or the padding */
    if (at == N) {
      for (; i < S; i++) tokens[i] = 0, targets[i] = RFI_IGNORED_TARGET;
      break;
    }
    const document *d = document_at(ds, split, at);
    const uint8_t *bytes = ds->bytes[split];
    int64_t end = d->start + d->size;
    for (; i < S && at < end; i++, at++) {
      tokens[i] = bytes[at];
      targets[i] = i >= known && at + 1 < end ? bytes[at + 1] : RFI_IGNORED_TARGET;
    }
  }
  return RFR_OK;
}
