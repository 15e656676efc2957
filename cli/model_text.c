/* SPDX-License-Identifier: Apache-2.0
 *
 * Text in and out of a model; the interface is in model_text.h.
 */
#include "model_text.h"

#include <stdlib.h>
#include <string.h>

/* ---- tokenizer and template ---- */

void cli_text_open(const rfr_run *run, cli_text *out) {
  *out = (cli_text){.tokenizer = rfr_run_tokenizer(run)};
  if (out->tokenizer) rfr_chat_stops(NULL, out->tokenizer, out->stop, CLI_STOPS, &out->n_stop);
}

rfr_status cli_text_open_chat(const cli *c, const rfr_run *run, cli_text *t) {
  if (!t->tokenizer)
    return cli_fail(RFR_UNSUPPORTED, "refrain generate continues a text", "%s is a byte model: it has no template",
                    c->operand);
  t->chat = rfr_run_template(run);
  if (c->template && strcmp(c->template, "model") != 0) {
    const rfr_status s = rfr_chat_template_open(c->ctx, c->template, NULL, &t->own);
    if (s != RFR_OK) return s;
    t->chat = t->own;
  }
  if (!t->chat)
    return cli_fail(RFR_INVALID, "name one: --template chatml, or --template FILE", "%s has no chat template",
                    c->operand);
  return rfr_chat_stops(t->chat, t->tokenizer, t->stop, CLI_STOPS, &t->n_stop);
}

void cli_text_deinit(cli_text *t) {
  if (t->tokenizer) rfr_tokens_deinit(&t->tokens);
  else free(t->tokens.ids);
  rfr_chat_template_destroy(t->own);
}

static rfr_status encode_bytes(cli_text *t, const char *prompt, size_t n) {
  free(t->tokens.ids);
  t->tokens.ids = malloc((n + 1) * sizeof *t->tokens.ids);
  t->tokens.n = (int64_t)n;
  if (!t->tokens.ids) return RFR_NO_MEMORY;
  for (size_t i = 0; i < n; i++) t->tokens.ids[i] = (unsigned char)prompt[i];
  return RFR_OK;
}

rfr_status cli_text_encode(cli_text *t, const char *prompt, size_t n) {
  rfr_encode_options o = rfr_encode_options_default();
  o.add_special = 1;
  if (!t->tokenizer) return encode_bytes(t, prompt, n);
  return rfr_tokenizer_encode(t->tokenizer, prompt, n, &o, &t->tokens);
}

rfr_status cli_text_encode_chat(cli_text *t, const json_t *messages) {
  rfr_chat_options o = rfr_chat_options_default();
  o.add_generation_prompt = 1;
  char *json = json_dumps(messages, 0);
  if (!json) return RFR_NO_MEMORY;
  const rfr_status s = rfr_chat_encode(t->chat, t->tokenizer, json, strlen(json), &o, &t->tokens);
  free(json);
  return s;
}

/* ---- the stream ---- */

/* Finds the first stop string in the pending text, or else the bytes at its end that may begin one. */
static bool find_stop(const cli_stream *x, size_t *at, size_t *held) {
  *held = 0;
  *at = x->n;
  for (int i = 0; i < x->stops->n; i++) {
    const char *stop = x->stops->items[i];
    const size_t n = strlen(stop);
    const char *found = n > 0 && x->n >= n ? memmem(x->pending, x->n, stop, n) : NULL;
    if (found && (size_t)(found - x->pending) < *at) *at = (size_t)(found - x->pending);
    for (size_t k = n > 0 ? n - 1 : 0; k > *held; k--)
      if (k <= x->n && memcmp(x->pending + x->n - k, stop, k) == 0) *held = k;
  }
  return *at < x->n;
}

static void add_piece(const char *piece, size_t n, void *user) {
  cli_stream *x = user;
  size_t at, held;
  if (x->stopped || n == 0) return;
  if (!x->stops || x->stops->n == 0) {
    x->write(piece, n, x->user);
    return;
  }
  cli_string s = {x->pending, x->n, x->capacity, false};
  cli_string_add(piece, n, &s);
  x->pending = s.data, x->n = s.n, x->capacity = s.capacity;
  if (s.failed) {
    x->status = RFR_NO_MEMORY;
    return;
  }
  x->stopped = find_stop(x, &at, &held);
  const size_t ready = x->stopped ? at : x->n - held;
  if (ready > 0) x->write(x->pending, ready, x->user);
  x->n -= ready;
  memmove(x->pending, x->pending + ready, x->n);
}

int cli_stream_take(int32_t token, void *stream) {
  cli_stream *x = stream;
  const char byte = (char)token;
  x->last = cli_now();
  if (x->tokens++ == 0) x->first = x->last;
  if (x->decoder) x->status = rfr_decoder_add(x->decoder, token, add_piece, x);
  else if (token > UINT8_MAX)
    x->status = cli_fail(RFR_UNSUPPORTED, "give the model a tokenizer",
                         "the model sampled token %d, which is not a byte", (int)token);
  else add_piece(&byte, 1, x);
  return x->stopped || x->status != RFR_OK || (x->interrupted && atomic_load(x->interrupted));
}

rfr_generate_options cli_sampling(const cli *c, const cli_text *text) {
  rfr_generate_options g = rfr_generate_options_default();
  g.tokens = c->tokens;
  g.temperature = c->temperature;
  g.top_k = c->top_k;
  g.top_p = c->top_p;
  g.min_p = c->min_p;
  g.repetition_penalty = c->penalty;
  g.seed = (uint64_t)c->seed;
  g.stop = text->stop;
  g.n_stop = text->n_stop;
  return g;
}

rfr_status cli_stream_begin(const cli *c, const rfr_run *run, cli_stream *x) {
  rfr_run_info info;
  x->stops = &c->stops;
  if (x->text->tokenizer && !x->decoder) x->status = rfr_decoder_create(x->text->tokenizer, 0, &x->decoder);
  x->start = x->first = x->last = cli_now();
  x->tokens = 0;
  x->stopped = false;
  if (x->status != RFR_OK) return x->status;
  rfr_run_get_info(run, &info);
  if (x->text->tokens.n > info.window) {
    char line[128];
    snprintf(line, sizeof line, "the prompt has %lld tokens and the context %lld: only its last %lld are read",
             (long long)x->text->tokens.n, (long long)info.window, (long long)(info.window + 1) / 2);
    cli_warn(c, line);
  }
  return RFR_OK;
}

rfr_status cli_stream_end(cli_stream *x) {
  rfr_status s = x->status;
  if (s == RFR_OK && x->decoder) s = rfr_decoder_end(x->decoder, add_piece, x);
  if (s == RFR_OK && !x->stopped && x->n > 0) x->write(x->pending, x->n, x->user); /* it was not a stop string */
  x->n = 0;
  return s;
}

rfr_status cli_stream_run(cli *c, rfr_run *run, cli_stream *x) {
  const rfr_generate_options g = cli_sampling(c, x->text);
  rfr_status s = cli_stream_begin(c, run, x);
  if (s == RFR_OK) s = rfr_run_generate_tokens(run, x->text->tokens.ids, x->text->tokens.n, &g, cli_stream_take, x);
  return s == RFR_OK ? cli_stream_end(x) : s;
}

void cli_stream_deinit(cli_stream *x) {
  rfr_decoder_destroy(x->decoder);
  free(x->pending);
}

double cli_stream_rate(const cli_stream *x) {
  return x->tokens > 1 && x->last > x->first ? (double)(x->tokens - 1) / (x->last - x->first) : 0.0;
}

/* ---- opening ---- */

rfr_status cli_check_sampling(const cli *c) {
  if (!(c->top_p > 0.0 && c->top_p <= 1.0))
    return cli_usage("give more than 0 and at most 1; 1 samples among all tokens", "--top-p %g is not a probability",
                     c->top_p);
  if (!(c->min_p <= 1.0))
    return cli_usage("give at most 1; 0 samples among all tokens", "--min-p %g is not a probability", c->min_p);
  if (!(c->penalty > 0.0 && c->penalty <= 1e6))
    return cli_usage("give more than 0 and at most 1e6; 1 has no effect", "--repetition-penalty %g is out of range",
                     c->penalty);
  for (int i = 0; i < c->stops.n; i++)
    if (!*c->stops.items[i]) return cli_usage("give at least one byte, or omit it", "--stop is empty");
  return RFR_OK;
}

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

/* Adds --set, and the keys for one window of --context tokens; nothing is trained. */
static bool add_context(const cli *c, char key[3][48], cli_list *sets) {
  *sets = (cli_list){calloc((size_t)c->sets.n + 3, sizeof *sets->items), 0};
  if (!sets->items) return false;
  for (int i = 0; i < c->sets.n; i++) sets->items[sets->n++] = c->sets.items[i];
  if (c->context == 0) return true;
  snprintf(key[0], sizeof key[0], "data.sequence=%lld", (long long)c->context);
  snprintf(key[1], sizeof key[1], "batch.tokens=%lld", (long long)c->context);
  snprintf(key[2], sizeof key[2], "batch.microbatch=1");
  for (int i = 0; i < 3; i++) sets->items[sets->n++] = key[i];
  return true;
}

rfr_status cli_open_generator(cli *c, rfr_run **out) {
  char *config = NULL, key[3][48];
  cli_list sets = {0};
  *out = NULL;
  rfr_status s = cli_find_weights(c, &config);
  if (s == RFR_OK && !add_context(c, key, &sets)) s = RFR_NO_MEMORY;
  if (s == RFR_OK) {
    rfr_run_options o = cli_run_options(c);
    o.programs = RFR_RUN_GENERATE;
    o.texts = c->batch;
    o.on_event = warn;
    o.event_user = c;
    o.overrides = sets.items;
    o.n_overrides = sets.n;
    s = rfr_run_open(c->ctx, config, config ? NULL : c->operand, &o, out);
  }
  free(sets.items);
  free(config);
  return s;
}
