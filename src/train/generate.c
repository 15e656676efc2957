/* SPDX-License-Identifier: Apache-2.0
 *
 * Text from a model. The device has the text, its cursor and the cached keys and values: prefill reads the prompt in
 * chunks, then each replay of decode reads the last token and appends one. Sampling is an op of the program. The host
 * writes the prompt and reads the appended tokens.
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
  return (rfr_generate_options){.size = sizeof(rfr_generate_options), .tokens = 256, .temperature = 0.8, .top_p = 1.0};
}

static rfr_status check_options(const rfr_generate_options *o, size_t n) {
  if (o->size != sizeof *o) return rfi_fail(RFI_E_ARGUMENT, "rfr_generate_options: size %zu", o->size);
  if (n == 0) return rfi_fail(RFI_E_ARGUMENT, "the prompt is empty; a model continues at least one byte");
  if (o->tokens < 0 || o->top_k < 0 || !(o->temperature >= 0.0))
    return rfi_fail(RFI_E_ARGUMENT, "tokens %lld, top_k %lld, temperature %g: none may be below 0",
                    (long long)o->tokens, (long long)o->top_k, o->temperature);
  if (!(o->top_p > 0.0 && o->top_p <= 1.0))
    return rfi_fail(RFI_E_ARGUMENT, "top_p is %g; it is more than 0 and at most 1", o->top_p);
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

rfr_status rfr_run_generate(rfr_run *run, const char *prompt, size_t n, const rfr_generate_options *options,
                            rfr_write_fn write, void *user) {
  rfr_status s;
  const rfr_generate_options o = options ? *options : rfr_generate_options_default();
  RFI_TRY(check_options(&o, n));
  RFI_TRY(rfi_run_check(run, RFR_RUN_GENERATE));
  made m = {.run = run, .capacity = run->settings->spec.window, .seed = (int64_t)o.seed};
  m.known = kept_of((int64_t)n, m.capacity);
  m.dropped = (int64_t)n - m.known;
  RFI_TRY(rfi_state_prepare(run));
  RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TEXT, &m.text));
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)m.text.bytes, &m.tokens));
  for (int64_t i = 0; i < m.known; i++) m.tokens[i] = (unsigned char)prompt[m.dropped + i];
  RFI_GOTO(start(&m));
  RFI_GOTO(set(run, RFI_NAME_TEMPERATURE, &o.temperature));
  RFI_GOTO(set(run, RFI_NAME_TOP_K, &o.top_k));
  RFI_GOTO(set(run, RFI_NAME_TOP_P, &o.top_p));
  for (int64_t i = 0; i < o.tokens && !rfi_stop_requested(run); i++) {
    RFI_GOTO(append(&m));
    const int32_t token = m.tokens[m.known - 1];
    if (token > UINT8_MAX)
      RFI_GOTO(rfi_fail(RFI_E_UNSUPPORTED,
                        "the model drew token %d, which is no byte: data.tokenizer: bytes is for models of bytes",
                        (int)token));
    const char byte = (char)token;
    write(&byte, 1, user);
  }
  s = RFR_OK;
fail:
  rfi_free(run->ctx, m.tokens);
  return s;
}
