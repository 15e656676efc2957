/* SPDX-License-Identifier: Apache-2.0
 *
 * A training step of a small model, with dropout, several microbatches, clipping and AdamW,
 * and helpers for tests of recomputation.
 */
#ifndef RFT_TRAINING_H
#define RFT_TRAINING_H

#include "refrain/nn.h"
#include "support/context.h"

enum { RFT_TOKENS = 64, RFT_VOCAB = 50 }; /* of a microbatch, which has two documents */

rfr_model_config rft_small_llama(int64_t layers);
/* `policy` applies to the blocks; the head follows the search. */
rfr_trace *rft_training(const rfr_model_config *model, int microbatches, rfr_policy policy);
rfr_trace *rft_llama(int64_t layers, int microbatches, rfr_policy policy);
/* Sets initial weights, tokens, documents and seed, always to the same values. */
void rft_init_model(rfr_programs *p, const rfr_model_config *model, int microbatches);
void rft_init_llama(rfr_programs *p, int64_t layers, int microbatches);

rfr_programs *rft_recompute(const rfr_trace *t, rfr_recompute recompute, int64_t budget);
rfr_plan_summary rft_plan(const rfr_programs *p);
/* The number of recomputed ops, without views. */
int rft_clones(const rfr_programs *p);
uint64_t rft_state_hash(rfr_programs *p);
/* A budget between those of the smallest plan (0) and the largest one (1). */
int64_t rft_between(const rfr_trace *t, double part);

#endif
