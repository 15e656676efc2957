/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls the caller's function and checks its result: a token outside the vocabulary or documents out of order would
 * make kernels read past the end of their tensors.
 */
#include "data/source_dataset.h"

#include <string.h>

#include "base/base.h"

typedef struct source_dataset {
  rfi_dataset base; /* first */
  rfr_ctx *ctx;
  rfr_data_source source;
  int64_t sequence, vocab_size;
  int64_t position[2]; /* position after the last window of each split */
} source_dataset;

static void close_source(rfi_dataset *ds) { rfi_free(((source_dataset *)ds)->ctx, ds); }

static const char *source_file(const rfi_dataset *ds, rfi_split split, int i, int64_t *bytes) {
  (void)ds, (void)split, (void)i;
  if (bytes) *bytes = 0;
  return NULL;
}

#define BAD(format, ...)                                                                                               \
  rfi_fail(RFI_E_DATA_SOURCE, "%s window %lld: " format, w->validation ? "held-out" : "training", (long long)w->index, \
           __VA_ARGS__)

static rfr_status check_window(const source_dataset *ds, const rfr_window *w) {
  const int64_t S = ds->sequence, V = ds->vocab_size;
  if (w->n_documents < 1 || w->n_documents > S || w->documents[0] != 0)
    return BAD("%lld documents, the first at %d; there is at least one, and the first is at 0",
               (long long)w->n_documents, w->n_documents > 0 ? w->documents[0] : 0);
  for (int64_t d = 1; d < w->n_documents; d++)
    if (w->documents[d] <= w->documents[d - 1] || w->documents[d] >= S)
      return BAD("document %lld begins at %d, after one at %d; the window has %lld tokens", (long long)d,
                 w->documents[d], w->documents[d - 1], (long long)S);
  for (int64_t i = 0; i < S; i++) {
    if (w->tokens[i] < 0 || w->tokens[i] >= V)
      return BAD("token %lld is %d; the vocabulary has %lld", (long long)i, w->tokens[i], (long long)V);
    if ((w->targets[i] < 0 || w->targets[i] >= V) && w->targets[i] != RFR_NO_TARGET)
      return BAD("target %lld is %d; the vocabulary has %lld, and RFR_NO_TARGET is none", (long long)i, w->targets[i],
                 (long long)V);
  }
  return RFR_OK;
}

static void fill_padding(int64_t n, int32_t *tokens, int32_t *targets) {
  for (int64_t i = 0; i < n; i++) tokens[i] = 0, targets[i] = RFR_NO_TARGET;
}

static rfr_status source_window(rfi_dataset *base, rfi_split split, uint64_t seed, int64_t sample, int32_t *tokens,
                                int32_t *targets, int32_t *doc_offsets, int *n_docs) {
  (void)seed;
  source_dataset *ds = (source_dataset *)base;
  rfr_window window = {.size = sizeof window,
                       .validation = split == RFI_VALIDATION,
                       .index = sample,
                       .sequence = ds->sequence,
                       .tokens = tokens,
                       .targets = targets,
                       .documents = doc_offsets,
                       .n_documents = 1};
  const rfr_window *w = &window;
  fill_padding(ds->sequence, tokens, targets);
  doc_offsets[0] = 0;
  *n_docs = 1;
  if (split == RFI_VALIDATION && sample >= ds->source.validation_windows) return RFR_OK;
  if (split == RFI_VALIDATION && sample == 0) ds->position[split] = 0;
  window.position = ds->position[split];
  const int result = ds->source.fill(&window, ds->source.user);
  window.message[sizeof window.message - 1] = '\0';
  if (result != 0) return BAD("the program's function returned %d%s%s", result, *w->message ? ": " : "", w->message);
  RFI_TRY(check_window(ds, w));
  ds->position[split] = w->position;
  *n_docs = (int)w->n_documents;
  return RFR_OK;
}

static rfr_status source_windows(rfi_dataset *base, uint64_t seed, int64_t epochs, int64_t *out) {
  (void)seed;
  if (base->stats.windows[RFI_TRAIN] == 0)
    return rfi_fail(RFI_E_DATA_SOURCE, "run.epochs: the program's data has no end: rfr_data_source.train_windows is 0");
  *out = epochs * base->stats.windows[RFI_TRAIN];
  return RFR_OK;
}

static int64_t source_window_bytes(const rfi_dataset *ds, int64_t sample) {
  (void)ds, (void)sample;
  return 0;
}

static const rfi_dataset_calls source_calls = {close_source, source_file, source_window, source_windows,
                                               source_window_bytes};

rfr_data_source rfr_data_source_default(void) { return (rfr_data_source){.size = sizeof(rfr_data_source)}; }

rfr_status rfi_source_dataset_open(rfr_ctx *ctx, const rfr_data_source *source, int64_t sequence, int64_t vocab_size,
                                   rfi_dataset **out) {
  enum { MOST = 1 << 30 };
  source_dataset *ds;
  *out = NULL;
  if (source->size != sizeof *source)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_data_source: size %zu; start from the default", source->size);
  if (!source->fill) return rfi_fail(RFI_E_ARGUMENT, "rfr_data_source.fill is NULL");
  if (source->train_windows < 0 || source->train_windows > MOST || source->validation_windows < 0 ||
      source->validation_windows > MOST)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_data_source: %lld windows of training, %lld held out; 0 to %d are possible",
                    (long long)source->train_windows, (long long)source->validation_windows, MOST);
  RFI_TRY(RFI_ALLOC(ctx, sizeof *ds, &ds));
  *ds = (source_dataset){
      .base.calls = &source_calls, .ctx = ctx, .source = *source, .sequence = sequence, .vocab_size = vocab_size};
  const char *name = source->name ? source->name : "";
  rfi_dataset_stats *stats = &ds->base.stats;
  stats->windows[RFI_TRAIN] = source->train_windows;
  stats->windows[RFI_VALIDATION] = source->validation_windows;
  stats->tokens[RFI_TRAIN] = source->train_windows * sequence;
  stats->tokens[RFI_VALIDATION] = stats->validation_predicted = source->validation_windows * sequence;
  stats->hash = rfi_hash_bytes(name, strlen(name));
  ds->source.name = NULL; /* it belongs to the caller */
  *out = &ds->base;
  return RFR_OK;
}

int64_t rfi_source_dataset_position(const rfi_dataset *ds) { return ((const source_dataset *)ds)->position[RFI_TRAIN]; }

void rfi_source_dataset_seek(rfi_dataset *ds, int64_t position) {
  ((source_dataset *)ds)->position[RFI_TRAIN] = position;
}
