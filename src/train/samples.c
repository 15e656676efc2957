/* SPDX-License-Identifier: Apache-2.0
 *
 * Text is made by the programs that `generate` uses, compiled with the training program over the same weights. Every
 * sample has the seed of the run, so two samples differ by the weights alone.
 */
#include "train/samples.h"

#include <string.h>

#include "base/json.h"
#include "data/file.h"
#include "text/unicode.h"
#include "train/events.h"

typedef struct sample {
  rfr_run *run;
  rfr_decoder *decoder; /* NULL: tokens are bytes */
  rfi_string text;
  rfr_status status;
} sample;

static rfr_status encode(rfr_run *run, rfr_tokens *out) {
  const char *prompt = run->settings->config->run_sample_prompt;
  const rfr_tokenizer *tokenizer = rfr_run_tokenizer(run);
  if (tokenizer) return rfr_tokenizer_encode(tokenizer, prompt, strlen(prompt), NULL, out);
  const size_t n = strlen(prompt);
  RFI_TRY(RFI_ALLOC(run->ctx, n * sizeof *out->ids, &out->ids));
  for (size_t i = 0; i < n; i++) out->ids[i] = (unsigned char)prompt[i];
  out->n = (int64_t)n;
  return RFR_OK;
}

static void drop(rfr_run *run, rfr_tokens *tokens) {
  if (rfr_run_tokenizer(run)) rfr_tokens_deinit(tokens);
  else rfi_free(run->ctx, tokens->ids);
}

rfr_status rfi_samples_check(rfr_run *run) {
  const rfi_settings *s = run->settings;
  const rfi_config_source *at = &s->config->source[RFI_CFG_run_sample_prompt];
  rfr_tokens tokens = {0};
  if (s->sample_every == 0) return RFR_OK;
  if (s->parallel.ranks > 1)
    return rfi_fail(RFI_E_UNSUPPORTED, "run.sample_every: a run over several ranks has no samples");
  if (!s->tokenizer && run->data && rfi_dataset_get_stats(run->data)->token_files)
    return rfi_fail(RFI_E_DATA_TOKENIZER, "run.sample_every: the data are token files; data.tokenizer has their texts");
  rfr_status status = encode(run, &tokens);
  if (status == RFR_OK && tokens.n == 0)
    status = rfi_fail_at(RFI_E_CONFIG_VALUE, at->line ? at->from : s->config->file, at->line,
                         "run.sample_prompt has no token; a model continues at least one");
  drop(run, &tokens);
  return status;
}

static void add_text(const char *text, size_t n, void *user) {
  sample *s = user;
  if (s->status == RFR_OK) s->status = rfi_string_append(&s->text, text, n);
}

static int add_token(int32_t token, void *user) {
  sample *s = user;
  const char byte = (char)token;
  if (s->decoder && s->status == RFR_OK) s->status = rfr_decoder_add(s->decoder, token, add_text, s);
  else add_text(&byte, 1, s);
  return s->status != RFR_OK;
}

static rfr_status generate(sample *s) {
  rfr_run *run = s->run;
  rfr_tokens tokens = {0};
  rfr_generate_options o = rfr_generate_options_default();
  o.tokens = run->settings->config->run_sample_tokens;
  o.seed = (uint64_t)run->settings->seed;
  const rfr_tokenizer *tokenizer = rfr_run_tokenizer(run);
  rfr_status status = tokenizer ? rfr_decoder_create(tokenizer, 0, &s->decoder) : RFR_OK;
  if (status == RFR_OK) status = encode(run, &tokens);
  if (status == RFR_OK) status = rfr_run_generate_tokens(run, tokens.ids, tokens.n, &o, add_token, s);
  if (status == RFR_OK && s->decoder) status = rfr_decoder_end(s->decoder, add_text, s);
  drop(run, &tokens);
  rfr_decoder_destroy(s->decoder);
  return status == RFR_OK ? s->status : status;
}

/* A model of bytes may write any byte: those that are no UTF-8 become U+FFFD, as do bytes of 0. */
static rfr_status put_valid(const char *text, size_t n, rfi_string *out) {
  for (size_t i = 0; i < n;) {
    const int length = text[i] ? rfi_utf8_length(text + i, n - i) : 0;
    RFI_TRY(length > 0 ? rfi_string_append(out, text + i, (size_t)length) : rfi_string_append(out, "\xef\xbf\xbd", 3));
    i += length > 0 ? (size_t)length : length < 0 ? (size_t)-length : 1;
  }
  return RFR_OK;
}

static rfr_status print_line(const sample *s, rfi_string *out) {
  rfi_string valid = {.ctx = s->run->ctx};
  json_t *o = json_object();
  rfr_status status = put_valid(s->text.data ? s->text.data : "", s->text.n, &valid);
  if (status == RFR_OK) status = rfi_json_set(o, "step", json_integer(s->run->step));
  if (status == RFR_OK) status = rfi_json_set(o, "prompt", json_string(s->run->settings->config->run_sample_prompt));
  if (status == RFR_OK) status = rfi_json_set(o, "text", json_string(valid.data ? valid.data : ""));
  if (status == RFR_OK) status = rfi_json_print_compact(o, out);
  if (status == RFR_OK) status = rfi_string_append(out, "\n", 1);
  json_decref(o);
  rfi_string_deinit(&valid);
  return status;
}

static void append_line(rfr_run *run, const rfi_string *line) {
  char wrong[256];
  if (rfi_run_append(run, "samples.jsonl", line->data, line->n, wrong)) return;
  run->settings->sample_every = 0;
  rfi_run_warn(run, "samples.jsonl cannot be written (%s); the run goes on without samples", wrong);
}

rfr_status rfi_samples_take(rfr_run *run) {
  sample s = {.run = run, .text = {.ctx = run->ctx}};
  rfi_string line = {.ctx = run->ctx};
  rfr_status status = generate(&s);
  if (status == RFR_OK && !rfi_stop_requested_here(run)) { /* a stop request cuts a text */
    status = print_line(&s, &line);
    if (status == RFR_OK) append_line(run, &line);
  }
  rfi_string_deinit(&line);
  rfi_string_deinit(&s.text);
  return status;
}
