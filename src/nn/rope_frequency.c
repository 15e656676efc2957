/* SPDX-License-Identifier: Apache-2.0
 *
 * Frequencies of rotary embeddings that are given to rope_table: YaRN, LongRoPE and partial rotation.
 *
 * The formulas are those of the transformers library (modeling_rope_utils.py), in double. The library chooses between
 * LongRoPE's factors by the longest position of each call. A program here is planned once, so the choice depends on the
 * longest document that the program accepts.
 */
#include <math.h>

#include "nn/nn.h"

/* The index of the pair that makes `turns` turns within the original length. */
static double pair_of(const rfr_model_config *c, double turns, double columns) {
  return columns * log((double)c->rope_extension.original / (turns * 2 * M_PI)) / (2 * log(c->rope_theta));
}

/* Divides frequencies by the factor: fully from pair `high` on, not at all up to pair `low`. */
static void yarn(const rfr_model_config *c, int pairs, double *frequency) {
  const rfr_rope_extension *e = &c->rope_extension;
  double low = pair_of(c, e->beta_fast, 2.0 * pairs), high = pair_of(c, e->beta_slow, 2.0 * pairs);
  if (e->truncate) low = floor(low), high = ceil(high);
  low = fmax(low, 0);
  high = fmin(high, 2.0 * pairs - 1);
  if (low == high) high += 0.001;
  for (int d = 0; d < pairs; d++) {
    const double ramp = fmin(fmax((d - low) / (high - low), 0), 1);
    frequency[d] = frequency[d] / e->factor * ramp + frequency[d] * (1 - ramp);
  }
}

int rfi_rope_frequencies(const rfr_model_config *c, int64_t longest, double *frequency, double *scale) {
  const rfr_rope_extension *e = &c->rope_extension;
  const int pairs = (int)((c->rotary_dim > 0 ? c->rotary_dim : c->head_dim) / 2);
  *scale = e->type == RFR_ROPE_PLAIN ? 1.0 : e->attention_factor;
  for (int d = 0; d < pairs; d++) frequency[d] = pow(c->rope_theta, -(double)d / pairs);
  if (e->type == RFR_ROPE_YARN) yarn(c, pairs, frequency);
  const double *factor = longest > e->original ? e->long_factor : e->short_factor;
  for (int d = 0; d < pairs && e->type == RFR_ROPE_LONGROPE; d++) frequency[d] /= factor[d];
  return pairs;
}
