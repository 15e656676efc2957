/* SPDX-License-Identifier: Apache-2.0
 *
 * Texts from a model, as tokens. The device has the texts, their cursors and the cached keys and values: prefill reads
 * the prompts in chunks, then each replay of decode reads the last token of each text and appends one. Sampling is an
 * op of the program. The host writes the prompts and reads the appended tokens; it ends a text at a stop token and
 * starts the next prompt in its place. While one text reads its prompt, the others advance by one token per launch.
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
    return rfi_fail(RFI_E_ARGUMENT, "tokens is %lld, top_k %lld and temperature %g; none may be negative",
                    (long long)o->tokens, (long long)o->top_k, o->temperature);
  if (!(o->top_p > 0.0 && o->top_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "top_p is %g; it must be more than 0 and at most 1", o->top_p);
  if (!(o->min_p >= 0.0 && o->min_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "min_p is %g; it must be 0 to 1", o->min_p);
  if (!(o->repetition_penalty > 0.0 && o->repetition_penalty <= 1e6))
    return rfi_fail(RFI_E_ARGUMENT, "repetition_penalty is %g; it must be more than 0; 1 has no effect",
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

/* The state of one text on the device. The host derives the position of the cursor from the launches. */
typedef struct made {
  const rfr_prompt *prompt; /* NULL: idle */
  int32_t *tokens;          /* capacity+1 */
  int64_t cached, known, dropped, added;
} made;

typedef struct batch {
  rfr_run *run;
  const rfr_generate_options *options;
  int64_t n, capacity; /* number of texts; tokens per text */
  rfr_tensor text, cursor;
  int32_t *tokens;
  made *made;
} batch;

static rfr_status set(rfr_run *run, const char *name, const void *value) {
  rfr_tensor x;
  RFI_TRY(rfr_programs_tensor(run->programs, name, &x));
  return rfr_programs_write(run->programs, &x, value);
}

/* A view of `bytes` bytes of a tensor, from byte `at` on. */
static rfr_tensor part_of(rfr_tensor x, int64_t at, int64_t bytes) {
  x.data = (char *)x.data + at;
  x.bytes = bytes;
  return x;
}

/* The number of tokens that are kept of n. */
static int64_t kept_of(int64_t n, int64_t capacity) { return n > capacity ? (capacity + 1) / 2 : n; }

static rfr_status write_cursor(const batch *b, const made *m) {
  const int64_t cursor[RFI_CURSOR_N] = {[RFI_CURSOR_KNOWN] = m->known,
                                        [RFI_CURSOR_DROPPED] = m->dropped,
                                        [RFI_CURSOR_SEED] = m->prompt ? (int64_t)m->prompt->seed : 0};
  const rfr_tensor x = part_of(b->cursor, (m - b->made) * (int64_t)sizeof cursor, sizeof cursor);
  return rfr_programs_write(b->run->programs, &x, cursor);
}

/* Writes the known tokens as the text and clears the cache. */
static rfr_status start(const batch *b, made *m) {
  const int64_t bytes = (b->capacity + 1) * (int64_t)sizeof *m->tokens;
  const rfr_tensor x = part_of(b->text, (m - b->made) * bytes, bytes);
  m->cached = 0;
  RFI_TRY(rfr_programs_write(b->run->programs, &x, m->tokens));
  return write_cursor(b, m);
}

static rfr_status start_prompt(const batch *b, made *m, const rfr_prompt *prompt) {
  m->prompt = prompt;
  m->known = kept_of(prompt->n, b->capacity);
  m->dropped = prompt->n - m->known;
  m->added = 0;
  memcpy(m->tokens, prompt->tokens + m->dropped, (size_t)m->known * sizeof *m->tokens);
  return start(b, m);
}

/* Makes the text idle: a program then finds no token to process. */
static rfr_status end(const batch *b, made *m) {
  m->prompt = NULL;
  m->cached = m->known = m->dropped = 0;
  return write_cursor(b, m);
}

/* A text that fills its caches continues from its last half. */
static rfr_status shorten(const batch *b, made *m) {
  const int64_t kept = kept_of(m->known, b->capacity);
  if (kept == m->known) return RFR_OK;
  memmove(m->tokens, m->tokens + m->known - kept, (size_t)kept * sizeof *m->tokens);
  m->dropped += m->known - kept;
  m->known = kept;
  return start(b, m);
}

static bool is_stop(const rfr_generate_options *o, int32_t token) {
  for (int64_t i = 0; i < o->n_stop; i++)
    if (o->stop[i] == token) return true;
  return false;
}

/* Reads the token that a launch has appended. */
static rfr_status read_token(const batch *b, made *m) {
  const int64_t at = (m - b->made) * (b->capacity + 1) + m->known;
  const rfr_tensor x = part_of(b->text, at * (int64_t)sizeof *m->tokens, sizeof *m->tokens);
  RFI_TRY(rfr_programs_read(b->run->programs, &x, &m->tokens[m->known]));
  const int32_t token = m->tokens[m->known++];
  if (is_stop(b->options, token) || m->prompt->take(token, m->prompt->user) != 0 || ++m->added >= b->options->tokens)
    return end(b, m);
  return RFR_OK;
}

/* One launch: each text processes its next tokens. */
static rfr_status advance(const batch *b) {
  bool prefill = false;
  for (int64_t i = 0; i < b->n; i++) {
    if (b->made[i].prompt) RFI_TRY(shorten(b, &b->made[i]));
    prefill |= b->made[i].known - b->made[i].cached > 1;
  }
  const int64_t rows = prefill ? rfi_prefill_rows(&b->run->settings->spec) : 1;
  RFI_TRY(rfi_launch(b->run, prefill ? RFR_RUN_PREFILL : RFR_RUN_DECODE));
  for (int64_t i = 0; i < b->n; i++) {
    made *m = &b->made[i];
    if (!m->prompt) continue;
    const int64_t left = m->known - m->cached;
    m->cached += left < rows ? left : rows;
    if (m->cached == m->known) RFI_TRY(read_token(b, m));
  }
  return RFR_OK;
}

/* Initializes the texts on the device, all idle; free with close_batch. */
static rfr_status open_batch(batch *b, rfr_run *run) {
  *b = (batch){.run = run, .n = rfi_step_texts(&run->settings->spec), .capacity = run->settings->spec.window};
  RFI_TRY(rfi_state_prepare(run, false));
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TEXT, &b->text));
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_CURSOR, &b->cursor));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)b->text.bytes, &b->tokens));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)b->n * sizeof *b->made, &b->made));
  for (int64_t i = 0; i < b->n; i++) {
    b->made[i] = (made){.tokens = b->tokens + i * (b->capacity + 1)};
    RFI_TRY(write_cursor(b, &b->made[i]));
  }
  return RFR_OK;
}

static void close_batch(batch *b) {
  if (!b->run) return;
  rfi_free(b->run->ctx, b->tokens);
  rfi_free(b->run->ctx, b->made);
}

rfr_status rfr_run_generate_batch(rfr_run *run, const rfr_prompt *prompts, int64_t n,
                                  const rfr_generate_options *options) {
  rfr_status s;
  batch b = {0};
  const rfr_generate_options o = options ? *options : rfr_generate_options_default();
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  if (n < 0 || (n > 0 && !prompts)) return rfi_fail(RFI_E_ARGUMENT, "%lld prompts", (long long)n);
  for (int64_t i = 0; i < n; i++) {
    if (!prompts[i].tokens || !prompts[i].take)
      return rfi_fail(RFI_E_ARGUMENT, "rfr_prompt.%s of prompt %lld is NULL", prompts[i].tokens ? "take" : "tokens",
                      (long long)i);
    RFI_TRY(check_options(&o, prompts[i].n));
    RFI_TRY(check_tokens(run, prompts[i].tokens, prompts[i].n));
  }
  const double sampling[RFI_SAMPLING_N] = {[RFI_SAMPLING_TEMPERATURE] = o.temperature,
                                           [RFI_SAMPLING_TOP_K] = (double)o.top_k,
                                           [RFI_SAMPLING_TOP_P] = o.top_p,
                                           [RFI_SAMPLING_MIN_P] = o.min_p,
                                           [RFI_SAMPLING_PENALTY] = o.repetition_penalty};
  RFI_GOTO(open_batch(&b, run));
  b.options = &o;
  RFI_GOTO(set(run, RFI_NAME_SAMPLING, sampling));
  int64_t next = o.tokens > 0 ? 0 : n;
  while (!rfi_stop_requested(run)) {
    bool any = false;
    for (int64_t i = 0; i < b.n; i++) {
      if (!b.made[i].prompt && next < n) RFI_GOTO(start_prompt(&b, &b.made[i], &prompts[next++]));
      any |= b.made[i].prompt != NULL;
    }
    if (!any) break;
    RFI_GOTO(advance(&b));
  }
  s = RFR_OK;
fail:
  close_batch(&b);
  return s;
}

rfr_status rfr_run_generate_tokens(rfr_run *run, const int32_t *prompt, int64_t n, const rfr_generate_options *options,
                                   rfr_token_fn take, void *user) {
  const rfr_generate_options o = options ? *options : rfr_generate_options_default();
  return rfr_run_generate_batch(run, &(rfr_prompt){prompt, n, o.seed, take, user}, 1, &o);
}

/* ---- bytes ---- */

typedef struct byte_writer {
  rfr_write_fn write;
  void *user;
  int32_t token; /* a generated token that is not a byte; 0: none */
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
  if (n > INT32_MAX) return rfi_fail(RFI_E_ARGUMENT, "the prompt has %zu bytes, which is too many", n);
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
  batch b = {0};
  rfr_tensor row;
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  const int64_t V = run->settings->spec.model.vocab_size;
  if (n < 1 || n > run->settings->spec.window)
    return rfi_fail(RFI_E_ARGUMENT, "%lld tokens; the KV cache holds 1 to %lld (data.sequence)", (long long)n,
                    (long long)run->settings->spec.window);
  RFI_TRY(check_tokens(run, tokens, n));
  RFI_GOTO(open_batch(&b, run));
  RFI_GOTO(start_prompt(&b, b.made, &(rfr_prompt){.tokens = tokens, .n = n}));
  RFI_GOTO(rfr_program_output(run->programs, rfr_run_program_index(run, RFR_RUN_DECODE), RFI_NAME_LOGITS, &row));
  row = part_of(row, 0, V * (int64_t)sizeof *logits); /* logits of the first text */
  for (int64_t i = 0; i < n; i++) {
    RFI_GOTO(rfi_launch(run, RFR_RUN_DECODE));
    RFI_GOTO(rfr_programs_read(run->programs, &row, logits + i * V));
  }
  s = RFR_OK;
fail:
  close_batch(&b);
  return s;
}
