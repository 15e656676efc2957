/* SPDX-License-Identifier: Apache-2.0
 *
 * Packs windows into the arrays that programs read: tokens, targets, and where documents begin.
 */
#include "train/batch.h"

#include "base/base.h"
#include "core/rng.h"
#include "data/source_dataset.h"

enum { RANDOM_STREAM = 4 };

rfr_status rfi_fill_rows(rfr_run *run, rfi_split split, int64_t first, int64_t rows, int32_t *tokens, int32_t *targets,
                         int32_t *offsets) {
  const rfi_settings *s = run->settings;
  const int64_t S = s->sequence;
  int64_t n = 0;
  for (int64_t r = 0; r < rows; r++) {
    int documents = 1;
    offsets[n] = 0;
    if (split == RFI_TRAIN && run->windows > 0 && first + r >= run->windows)
      for (int64_t i = r * S; i < (r + 1) * S; i++) tokens[i] = 0, targets[i] = RFI_IGNORED_TARGET;
    else if (run->data)
      RFI_TRY(rfi_dataset_window(run->data, split, s->seed, first + r, tokens + r * S, targets + r * S, offsets + n,
                                 &documents));
    for (int d = 0; d < documents; d++) offsets[n++] += (int32_t)(r * S);
  }
  while (n <= rows * S) offsets[n++] = (int32_t)(rows * S);
  if (run->data) return RFR_OK;
  const uint64_t key = rfi_stream_key(s->seed, RANDOM_STREAM);
  const uint32_t vocab = (uint32_t)s->spec.model.vocab_size;
  for (int64_t i = 0; i < rows * S; i++) {
    rfi_u32x4 r = rfi_draw4(key, (uint64_t)(first * S + i), 0, 0, 0);
    tokens[i] = (int32_t)(r.v[0] % vocab);
    targets[i] = (int32_t)(r.v[1] % vocab);
  }
  return RFR_OK;
}

rfr_status rfi_fill_slot(rfr_run *run, int64_t step) {
  const rfi_settings *s = run->settings;
  const int64_t slot = step % s->spec.slots, k = s->spec.microbatches, n = s->spec.slots + 1;
  if (run->own_data) rfi_source_dataset_seek(run->data, run->positions[step % n]);
  for (int64_t m = 0; m < k; m++) {
    const int64_t at = slot * k + m;
    RFI_TRY(rfi_fill_rows(
        run, RFI_TRAIN, (step * k + m) * s->rows, s->rows, (int32_t *)run->tokens.data + at * s->spec.tokens,
        (int32_t *)run->targets.data + at * s->spec.tokens, (int32_t *)run->offsets.data + at * (s->spec.tokens + 1)));
  }
  if (run->own_data) run->positions[(step + 1) % n] = rfi_source_dataset_position(run->data);
  return RFR_OK;
}
