/* SPDX-License-Identifier: Apache-2.0
 *
 * Text from a model, as tokens. The device has the text, its cursor and the cached keys and values: prefill reads the
 * prompt in chunks, then each replay of decode reads the last token and appends one. Sampling is an op of the
 * program. The host writes the prompt and reads the appended tokens; it ends the text at a stop token.
 *
 * The caches have as many rows as a training window. A longer text continues from its last half, read again from
 * position 0. So a token costs the same however long the text is, and no position exceeds those of training.
 */
#include <string.h>

#include "base/base.h"
#include "ops/decode/cursor.h"
#include "train/run_programs.h"
#include "train/state.h"

rfr_generate_options rfr_generate_options_default(void) {
  return (rfr_generate_options){
      .size = sizeof(rfr_generate_options), .tokens = 256, .temperature = 0.8, .top_p = 1.0, .repetition_penalty = 1.0};
}

static rfr_status check_options(const rfr_generate_options *o, int64_t n) {
  if (o->size != sizeof *o) return rfi_fail(RFI_E_ARGUMENT, "rfr_generate_options: size %zu", o->size);
  if (n <= 0) return rfi_fail(RFI_E_ARGUMENT, "the prompt is empty; a model continues at least one token");
  if (o->tokens < 0 || o->top_k < 0 || !(o->temperature >= 0.0))
    return rfi_fail(RFI_E_ARGUMENT, "tokens %lld, top_k %lld, temperature %g: none may be below 0",
                    (long long)o->tokens, (long long)o->top_k, o->temperature);
  if (!(o->top_p > 0.0 && o->top_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "top_p is %g; it is more than 0 and at most 1", o->top_p);
  if (!(o->min_p >= 0.0 && o->min_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "min_p is %g; it is between 0 and 1", o->min_p);
  if (!(o->repetition_penalty > 0.0 && o->repetition_penalty <= 1e6))
    return rfi_fail(RFI_E_ARGUMENT, "repetition_penalty is %g; it is more than 0, and 1 for none",
                    o->repetition_penalty);
  if (o->n_stop < 0 || (o->n_stop > 0 && !o->stop))
    return rfi_fail(RFI_E_ARGUMENT, "stop: %lld tokens", (long long)o->n_stop);
  return RFR_OK;
}

static rfr_status check_tokens(const rfr_run *run, const int32_t *tokens, int64_t n) {
  const int64_t V = run->settings->spec.model.vocab_size;
  for (int64_t i = 0; i < n; i++)
    if (tokens[i] < 0 || tokens[i] >= V)
      return rfi_fail(RFI_E_ARGUMENT, "token %lld is %d; the vocabulary has %lld", (long long)i, (int)tokens[i],
                      (long long)V);
  return RFR_OK;
}

/* The text on the device and the position of its cursor, which follow from the launches. */
typedef struct made {
  rfr_run *run;
  int32_t *tokens; /* capacity+1 */
  int64_t capacity, cached, known, dropped, seed;
  rfr_tensor text;
} made;

static rfr_status set(rfr_run *run, const char *name, const void *value) {
  rfr_tensor x;
  RFI_TRY(rfr_programs_tensor(run->programs, name, &x));
  return rfr_programs_write(run->programs, &x, value);
}

/* How many of n tokens are kept. */
static int64_t kept_of(int64_t n, int64_t capacity) { return n > capacity ? (capacity + 1) / 2 : n; }

/* Writes the known tokens as the text; nothing of it is cached. */
static rfr_status start(made *m) {
  const int64_t cursor[RFI_CURSOR_N] = {
      [RFI_CURSOR_KNOWN] = m->known, [RFI_CURSOR_DROPPED] = m->dropped, [RFI_CURSOR_SEED] = m->seed};
  m->cached = 0;
  RFI_TRY(rfr_programs_write(m->run->programs, &m->text, m->tokens));
  return set(m->run, RFI_NAME_CURSOR, cursor);
}

static rfr_status append(made *m) {
  const int64_t kept = kept_of(m->known, m->capacity), rows = rfi_prefill_rows(&m->run->settings->spec);
  if (kept < m->known) {
    memmove(m->tokens, m->tokens + m->known - kept, (size_t)kept * sizeof *m->tokens);
    m->dropped += m->known - kept;
    m->known = kept;
    RFI_TRY(start(m));
  }
  while (m->cached < m->known) {
    const int64_t left = m->known - m->cached;
    RFI_TRY(rfi_launch(m->run, left > 1 ? RFR_RUN_PREFILL : RFR_RUN_DECODE));
    m->cached += left < rows ? left : rows;
  }
  rfr_tensor token = m->text;
  token.data = (int32_t *)m->text.data + m->known;
  token.bytes = sizeof *m->tokens;
  RFI_TRY(rfr_programs_read(m->run->programs, &token, &m->tokens[m->known]));
  m->known++;
  return RFR_OK;
}

/* Opens the text on the device; m->tokens is to be freed. */
static rfr_status open_text(made *m, rfr_run *run, uint64_t seed) {
  *m = (made){.run = run, .capacity = run->settings->spec.window, .seed = (int64_t)seed};
  RFI_TRY(rfi_state_prepare(run, false));
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TEXT, &m->text));
  return RFI_ALLOC(run->ctx, (size_t)m->text.bytes, &m->tokens);
}

static bool is_stop(const rfr_generate_options *o, int32_t token) {
  for (int64_t i = 0; i < o->n_stop; i++)
    if (o->stop[i] == token) return true;
  return false;
}

rfr_status rfr_run_generate_tokens(rfr_run *run, const int32_t *prompt, int64_t n, const rfr_generate_options *options,
                                   rfr_token_fn take, void *user) {
  rfr_status s;
  made m = {0};
  const rfr_generate_options o = options ? *options : rfr_generate_options_default();
  RFI_TRY(check_options(&o, n));
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  RFI_TRY(check_tokens(run, prompt, n));
  const double sampling[RFI_SAMPLING_N] = {[RFI_SAMPLING_TEMPERATURE] = o.temperature,
                                           [RFI_SAMPLING_TOP_K] = (double)o.top_k,
                                           [RFI_SAMPLING_TOP_P] = o.top_p,
                                           [RFI_SAMPLING_MIN_P] = o.min_p,
                                           [RFI_SAMPLING_PENALTY] = o.repetition_penalty};
  RFI_GOTO(open_text(&m, run, o.seed));
  m.known = kept_of(n, m.capacity);
  m.dropped = n - m.known;
  memcpy(m.tokens, prompt + m.dropped, (size_t)m.known * sizeof *m.tokens);
  RFI_GOTO(start(&m));
  RFI_GOTO(set(run, RFI_NAME_SAMPLING, sampling));
  for (int64_t i = 0; i < o.tokens && !rfi_stop_requested(run); i++) {
    RFI_GOTO(append(&m));
    const int32_t token = m.tokens[m.known - 1];
    if (is_stop(&o, token) || take(token, user) != 0) break;
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, m.tokens);
  return s;
}

/* ---- bytes ---- */

typedef struct byte_writer {
  rfr_write_fn write;
  void *user;
  int32_t token; /* that is no byte; 0: none */
} byte_writer;

static int write_byte(int32_t token, void *user) {
  byte_writer *w = user;
  const char byte = (char)token;
  if (token > UINT8_MAX) w->token = token;
  else w->write(&byte, 1, w->user);
  return token > UINT8_MAX;
}

rfr_status rfr_run_generate(rfr_run *run, const char *prompt, size_t n, const rfr_generate_options *options,
                            rfr_write_fn write, void *user) {
  rfr_status s;
  byte_writer w = {write, user, 0};
  int32_t *tokens = NULL;
  if (!run) return rfi_fail(RFI_E_ARGUMENT, "run is NULL");
  if (run->settings->tokenizer)
    return rfi_fail(RFI_E_DATA_TOKENIZER, "the model's tokens are not bytes: rfr_run_generate_tokens takes tokens");
  if (n > INT32_MAX) return rfi_fail(RFI_E_ARGUMENT, "the prompt has %zu bytes", n);
  if (run->settings->tokenizer)
    return rfi_fail(RFI_E_UNSUPPORTED, "the run's tokens are not bytes; encode the prompt for rfr_run_generate_tokens");
  RFI_TRY(RFI_ALLOC(run->ctx, (n + 1) * sizeof *tokens, &tokens));
  for (size_t i = 0; i < n; i++) tokens[i] = (unsigned char)prompt[i];
  RFI_GOTO(rfr_run_generate_tokens(run, tokens, (int64_t)n, options, write_byte, &w));
  if (w.token)
    RFI_GOTO(rfi_fail(RFI_E_UNSUPPORTED,
                      "the model sampled token %d, which is not a byte; data.tokenizer: bytes needs a byte model",
                      (int)w.token));
  s = RFR_OK;
fail:
  rfi_free(run->ctx, tokens);
  return s;
}

/* ---- logits ---- */

rfr_status rfr_run_score(rfr_run *run, const int32_t *tokens, int64_t n, float *logits) {
  rfr_status s;
  made m = {0};
  rfr_tensor row;
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  if (n < 1 || n > run->settings->spec.window)
    return rfi_fail(RFI_E_ARGUMENT, "%lld tokens; the caches hold 1 to %lld (data.sequence)", (long long)n,
                    (long long)run->settings->spec.window);
  RFI_TRY(check_tokens(run, tokens, n));
  RFI_GOTO(open_text(&m, run, 0));
  m.known = n;
  memcpy(m.tokens, tokens, (size_t)n * sizeof *tokens);
  RFI_GOTO(start(&m));
  RFI_GOTO(rfr_program_output(run->programs, rfr_run_program_index(run, RFR_RUN_DECODE), RFI_NAME_LOGITS, &row));
  for (int64_t i = 0; i < n; i++) {
    RFI_GOTO(rfi_launch(run, RFR_RUN_DECODE));
    RFI_GOTO(rfr_programs_read(run->programs, &row, logits + i * run->settings->spec.model.vocab_size));
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, m.tokens);
  return s;
}
