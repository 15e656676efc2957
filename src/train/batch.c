/* SPDX-License-Identifier: Apache-2.0
 *
 * Packs windows into the arrays that programs read: tokens, targets, where documents begin, and with preferences the
 * rows of the pairs, which are documents 2p and 2p + 1.
 */
#include "train/batch.h"

#include "base/base.h"
#include "core/rng.h"
#include "data/source_dataset.h"
#include "text/row_dataset.h"
#include "train/ramp.h"

enum { RANDOM_STREAM = 4 };

/* Fills window r of a batch and appends its documents and pairs. */
static rfr_status fill_window(rfr_run *run, rfi_split split, bool once, int64_t first, int64_t r,
                              const rfi_batch *batch, int64_t *n_documents, int64_t *n_pairs) {
  const rfi_settings *s = run->settings;
  const int64_t S = s->sequence;
  int32_t *tokens = batch->tokens + r * S, *targets = batch->targets + r * S, *offsets = batch->offsets + *n_documents;
  int documents = 1, pairs = 0;
  offsets[0] = 0;
  if (split == RFI_TRAIN && !once && run->windows > 0 && first + r >= run->windows) {
    for (int64_t i = 0; i < S; i++) tokens[i] = 0, targets[i] = RFI_IGNORED_TARGET;
  } else if (run->data && batch->pairs) {
    documents = 0;
    RFI_TRY(rfi_row_dataset_window(run->data, split, once, s->seed, first + r, tokens, targets, offsets, &documents,
                                   batch->pairs + *n_pairs, &pairs));
  } else if (run->data) {
    RFI_TRY(rfi_dataset_window(run->data, split, s->seed, first + r, tokens, targets, offsets, &documents));
  } else if (batch->pairs) { /* random tokens: each window is a pair */
    documents = 2, pairs = 1;
    offsets[1] = (int32_t)(S / 2);
    batch->pairs[*n_pairs] = 0;
  }
  for (int d = 0; d < documents; d++) offsets[d] += (int32_t)(r * S);
  *n_documents += documents;
  *n_pairs += pairs;
  return RFR_OK;
}

rfr_status rfi_fill_batch(rfr_run *run, rfi_split split, bool once, int64_t first, const rfi_batch *batch) {
  const rfi_settings *s = run->settings;
  const int64_t S = s->sequence, rows = batch->rows;
  int64_t n = 0, pairs = 0;
  for (int64_t r = 0; r < rows; r++) RFI_TRY(fill_window(run, split, once, first, r, batch, &n, &pairs));
  while (n <= rows * S) batch->offsets[n++] = (int32_t)(rows * S);
  while (batch->pairs && pairs < rfi_most_pairs(rows * S)) batch->pairs[pairs++] = RFI_IGNORE;
  if (run->data) return RFR_OK;
  const uint64_t key = rfi_stream_key(s->seed, RANDOM_STREAM);
  const uint32_t vocab = (uint32_t)s->spec.model.vocab_size;
  for (int64_t i = 0; i < rows * S; i++) {
    rfi_u32x4 r = rfi_draw4(key, (uint64_t)(first * S + i), 0, 0, 0);
    batch->tokens[i] = (int32_t)(r.v[0] % vocab);
    batch->targets[i] = (int32_t)(r.v[1] % vocab);
  }
  return RFR_OK;
}

/* The reference model's values for the pairs of a microbatch; 0 without data. */
static void fill_reference(const rfr_run *run, const int32_t *pairs, float *reference) {
  const float *known = run->reference[RFI_TRAIN];
  for (int64_t p = 0; p < rfi_most_pairs(run->settings->spec.tokens); p++)
    reference[p] = known && pairs[p] >= 0 ? known[pairs[p]] : 0;
}

rfr_status rfi_fill_slot(rfr_run *run, int64_t step) {
  const rfi_settings *s = run->settings;
  const int phase = rfi_ramp_phase(s, step);
  const int64_t slot = step % s->spec.slots, k = rfi_ramp_microbatches(s, phase), T = s->spec.tokens,
                P = rfi_most_pairs(T), n = s->spec.slots + 1, before = rfi_ramp_windows(s, step);
  if (run->own_data) rfi_source_dataset_seek(run->data, run->positions[step % n]);
  for (int64_t m = 0; m < k; m++) {
    const int64_t at = slot * rfi_ring_microbatches(&s->spec) + m;
    const rfi_batch batch = {.rows = s->rows,
                             .tokens = (int32_t *)run->tokens.data + at * T,
                             .targets = (int32_t *)run->targets.data + at * T,
                             .offsets = (int32_t *)run->offsets.data + at * (T + 1),
                             .pairs = s->spec.preference ? (int32_t *)run->pairs.data + at * P : NULL};
    RFI_TRY(rfi_fill_batch(run, RFI_TRAIN, false, before + (s->spec.rank * k + m) * s->rows, &batch));
    if (rfi_ramp_sequence(s, phase) < s->sequence) rfi_ramp_cut(batch.offsets, T, rfi_ramp_sequence(s, phase));
    if (batch.pairs) fill_reference(run, batch.pairs, (float *)run->reference_ring.data + at * P);
  }
  if (run->own_data) run->positions[(step + 1) % n] = rfi_source_dataset_position(run->data);
  return RFR_OK;
}
