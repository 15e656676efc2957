/* SPDX-License-Identifier: Apache-2.0
 *
 * Phases of a run; see ramp.h.
 */
#include "train/ramp.h"

#include "base/base.h"

#define FAIL_AT(s, ...) \
  rfi_fail_at(RFI_E_CONFIG_VALUE, (s)->config->file, (s)->config->source[RFI_CFG_batch_ramp].line, __VA_ARGS__)
#define REFUSE(s, ...) \
  rfi_fail_at(RFI_E_UNSUPPORTED, (s)->config->file, (s)->config->source[RFI_CFG_batch_ramp].line, __VA_ARGS__)

static rfr_status check_others(const rfi_settings *s) {
  if (s->parallel.pipeline > 1)
    return REFUSE(
        s, "batch.ramp with parallel.pipeline: a schedule has one number of microbatches; give parallel.pipeline: 1");
  if (s->time > 0)
    return REFUSE(s, "batch.ramp with run.time: run.time needs steps of one size; give run.steps or run.epochs");
  if (s->config->run_watch.n > 0)
    return REFUSE(s, "batch.ramp with run.watch: the program that watches has one size; remove run.watch");
  return RFR_OK;
}

rfr_status rfi_ramp_read(rfi_settings *s) {
  const rfi_config_ramp *ramp = &s->config->batch_ramp;
  rfi_step_spec *spec = &s->spec;
  spec->ring_microbatches = spec->microbatches;
  if (ramp->n == 0) return RFR_OK;
  RFI_TRY(check_others(s));
  for (int i = 0; i < ramp->n; i++) { /* config.c has checked the numbers of each phase by themselves */
    const rfi_config_phase *p = &ramp->items[i];
    const int64_t all = p->tokens / spec->tokens;
    if (all % spec->ranks != 0)
      return FAIL_AT(s, "batch.ramp: until %lld: tokens: %lld are %lld microbatches, which %lld ranks do not divide",
                     (long long)p->until, (long long)p->tokens, (long long)all, (long long)spec->ranks);
    s->ramp[i] = (rfi_ramp_size){p->until, all / spec->ranks, p->sequence};
    if (s->ramp[i].microbatches > spec->ring_microbatches) spec->ring_microbatches = s->ramp[i].microbatches;
  }
  s->n_ramp = ramp->n;
  return RFR_OK;
}

rfr_status rfi_ramp_check_steps(const rfi_settings *s) {
  const char *key = s->epochs > 0 ? "run.epochs" : "run.steps";
  for (int i = 0; i < s->n_ramp && s->steps > 0; i++)
    if (s->ramp[i].until > s->steps)
      return FAIL_AT(s, "batch.ramp: until %lld is after the last step, %lld of %s; lower until, or raise %s",
                     (long long)s->ramp[i].until, (long long)s->steps, key, key);
  return RFR_OK;
}

int rfi_ramp_phase(const rfi_settings *s, int64_t step) {
  int phase = 0;
  while (phase < s->n_ramp && step >= s->ramp[phase].until) phase++;
  return phase;
}

int64_t rfi_ramp_microbatches(const rfi_settings *s, int phase) {
  return phase < s->n_ramp ? s->ramp[phase].microbatches : s->spec.microbatches;
}

int64_t rfi_ramp_sequence(const rfi_settings *s, int phase) {
  return phase < s->n_ramp ? s->ramp[phase].sequence : s->sequence;
}

static int64_t windows_of(const rfi_settings *s, int phase) {
  return rfi_ramp_microbatches(s, phase) * s->spec.ranks * s->rows;
}

int64_t rfi_ramp_tokens(const rfi_settings *s, int phase) { return windows_of(s, phase) * s->sequence; }

rfi_step_spec rfi_ramp_spec(const rfi_settings *s, int phase) {
  rfi_step_spec spec = s->spec;
  spec.microbatches = rfi_ramp_microbatches(s, phase);
  spec.model.longest = rfi_ramp_sequence(s, phase);
  return spec;
}

int64_t rfi_ramp_windows(const rfi_settings *s, int64_t steps) {
  int64_t windows = 0, from = 0;
  for (int phase = 0; phase < s->n_ramp && from < steps; phase++) {
    const int64_t until = s->ramp[phase].until < steps ? s->ramp[phase].until : steps;
    windows += (until - from) * windows_of(s, phase);
    from = until;
  }
  return windows + (steps - from) * windows_of(s, s->n_ramp);
}

int64_t rfi_ramp_steps(const rfi_settings *s, int64_t windows, bool part) {
  int64_t from = 0;
  int phase = 0;
  for (; phase < s->n_ramp; phase++) {
    const int64_t all = (s->ramp[phase].until - from) * windows_of(s, phase);
    if (windows < all) break;
    windows -= all;
    from = s->ramp[phase].until;
  }
  const int64_t each = windows_of(s, phase);
  return from + (windows + (part ? each - 1 : 0)) / each;
}

void rfi_ramp_cut(int32_t *offsets, int64_t tokens, int64_t sequence) {
  int64_t n = 0, more = 0;
  while (offsets[n] < tokens) more += offsets[n++] % sequence != 0; /* more: documents that begin within a sequence */
  int64_t to = tokens / sequence + more;
  for (int64_t i = tokens; i >= to; i--) offsets[i] = (int32_t)tokens;
  int64_t cut = tokens / sequence - 1;
  while (to > 0) { /* merges from the end in place, because the list only grows */
    const int64_t begins = cut >= 0 ? cut * sequence : -1, document = n > 0 ? offsets[n - 1] : -1;
    offsets[--to] = (int32_t)(document > begins ? document : begins);
    n -= document >= begins;
    cut -= begins >= document;
  }
}
