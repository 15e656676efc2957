/* SPDX-License-Identifier: Apache-2.0 */
#include "text/row_encoder.h"

#include <string.h>

#include "text/chat.h"
#include "text/tokenizer.h"

/* The date that strftime_now of a template returns: 2024-07-26, the default date in the template of Llama 3. It is
 * fixed so that the tokens of a row do not depend on the day of training. */
#define DATE 1721952000

enum { VERSION = 2 }; /* version of the tokens that this file makes; part of the key of caches */

void rfi_row_tokens_deinit(rfi_row_tokens *t) {
  rfr_tokens_deinit(&t->tokens);
  rfi_free(t->ctx, t->ids);
  rfi_free(t->ctx, t->widths);
  *t = (rfi_row_tokens){0};
}

rfr_status rfi_row_encoder_hash(const rfi_row_encoder *e, rfi_hash *out) {
  rfi_hasher *h;
  RFI_TRY(rfi_hasher_create(e->ctx, &h));
  const rfi_hash tokenizer = e->tokenizer ? rfi_tokenizer_hash(e->tokenizer) : (rfi_hash){0};
  rfi_hasher_add_u64(h, VERSION);
  rfi_hasher_add_u64(h, tokenizer.high);
  rfi_hasher_add_u64(h, tokenizer.low);
  rfi_hasher_add_u64(h, e->tokenizer ? (uint64_t)rfr_tokenizer_eos(e->tokenizer) : 0);
  rfi_hasher_add_u64(h, e->chat ? rfi_chat_template_hash(e->chat) : 0);
  rfi_hasher_add_u64(h, (uint64_t)e->loss);
  *out = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return RFR_OK;
}

int64_t rfi_row_encoder_vocab(const rfi_row_encoder *e) {
  return e->tokenizer ? rfr_tokenizer_vocab_size(e->tokenizer) : 256;
}

/* ---- tokens ---- */

static rfr_status reserve(rfr_ctx *ctx, rfi_row_tokens *t, int64_t n) {
  if (n <= t->capacity) return RFR_OK;
  int64_t capacity = t->capacity ? t->capacity : 1024;
  while (capacity < n) capacity *= 2;
  rfi_free(t->ctx, t->ids);
  rfi_free(t->ctx, t->widths);
  t->ctx = ctx;
  t->ids = NULL;
  t->widths = NULL;
  t->capacity = 0;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)capacity * sizeof *t->ids, &t->ids));
  RFI_TRY(RFI_ALLOC(ctx, (size_t)capacity * sizeof *t->widths, &t->widths));
  t->capacity = capacity;
  return RFR_OK;
}

static uint16_t width(size_t begin, size_t end) {
  return end - begin < UINT16_MAX ? (uint16_t)(end - begin) : UINT16_MAX;
}

/* Whether a token has a byte in one of the spans. A token that starts inside a character covers the character's first
 * byte. */
static bool is_trained(const rfr_span *spans, size_t n, size_t *at, size_t begin, size_t end) {
  if (end <= begin) end = begin + 1;
  while (*at < n && spans[*at].end <= begin) ++*at;
  return *at < n && spans[*at].begin < end && spans[*at].begin < spans[*at].end;
}

/* Tokenizes a text; the spans are sorted and disjoint. `ends`: the tokens added after the text are trained and must
 * include an end token. */
static rfr_status tokenize(const rfi_row_encoder *e, const char *text, size_t n, const rfr_encode_options *options,
                           const rfr_span *trained, size_t n_trained, bool ends, rfi_row_tokens *out) {
  size_t at = 0;
  out->n = 0;
  if (!e->tokenizer) {
    RFI_TRY(reserve(e->ctx, out, (int64_t)n));
    for (size_t i = 0; i < n; i++) {
      const uint32_t mark = is_trained(trained, n_trained, &at, i, i + 1) ? RFI_TOKEN_TRAINED : 0;
      out->ids[i] = (unsigned char)text[i] | mark;
      out->widths[i] = 1;
    }
    out->n = (int64_t)n;
  } else {
    rfr_tokens *t = &out->tokens;
    RFI_TRY(rfr_tokenizer_encode(e->tokenizer, text, n, options, t));
    RFI_TRY(reserve(e->ctx, out, t->n + 1));
    for (int64_t i = 0; i < t->n; i++) {
      const size_t begin = t->begins[i], end = i + 1 < t->n ? t->begins[i + 1] : n;
      const bool is = begin >= n ? ends : is_trained(trained, n_trained, &at, begin, end);
      out->ids[i] = (uint32_t)t->ids[i] | (is ? RFI_TOKEN_TRAINED : 0);
      out->widths[i] = width(begin, end > begin ? end : begin);
    }
    out->n = t->n;
    const int32_t eos = rfr_tokenizer_eos(e->tokenizer);
    if (ends && eos >= 0 && (out->n == 0 || RFI_TOKEN_ID(out->ids[out->n - 1]) != eos)) {
      out->ids[out->n] = (uint32_t)eos | RFI_TOKEN_TRAINED;
      out->widths[out->n++] = 0;
    }
  }
  if (out->n > 0) out->ids[0] &= ~RFI_TOKEN_TRAINED;
  return RFR_OK;
}

rfr_status rfi_text_encode(const rfi_row_encoder *e, const char *text, size_t n, bool parallel, rfi_row_tokens *out) {
  const rfr_span all = {0, n};
  out->n = 0;
  if (n == 0) return RFR_OK;
  rfr_encode_options options = rfr_encode_options_default();
  options.add_special = 1;
  options.parallel = parallel;
  return tokenize(e, text, n, &options, &all, 1, true, out);
}

/* ---- rows ---- */

static rfr_status encode_pair(const rfi_row_encoder *e, const rfi_row *row, rfi_row_tokens *out) {
  rfi_string text = {.ctx = e->ctx};
  const size_t prompt = strlen(row->prompt);
  rfr_status s = rfi_string_append(&text, row->prompt, prompt);
  if (s == RFR_OK) s = rfi_string_append(&text, row->completion, strlen(row->completion));
  const rfr_span all = {0, text.n}, trained = {e->loss == RFI_ROW_LOSS_ALL ? 0 : prompt, text.n};
  rfr_encode_options options = rfr_encode_options_default();
  options.add_special = 1;
  options.foreign = &all;
  options.n_foreign = 1;
  if (s == RFR_OK) s = tokenize(e, text.data ? text.data : "", text.n, &options, &trained, 1, true, out);
  rfi_string_deinit(&text);
  return s;
}

/* The first byte at which a rendered conversation differs from its rendered prompt: the end of the prompt. */
static rfr_status find_prompt_end(const rfi_row_encoder *e, const json_t *messages, int n_prompt, const json_t *tools,
                                  const rfr_rendered *full, size_t *end) {
  *end = 0;
  if (n_prompt == 0) return RFR_OK;
  json_t *prompt = json_array();
  for (int i = 0; prompt && i < n_prompt; i++)
    if (json_array_append(prompt, json_array_get(messages, (size_t)i)) != 0) {
      json_decref(prompt);
      prompt = NULL;
    }
  if (!prompt) return rfi_fail(RFI_E_NO_MEMORY, "out of memory while rendering a row");
  rfr_rendered text;
  const rfi_chat_input in = {.messages = prompt, .tools = tools, .date = DATE};
  const rfr_status s = rfi_chat_render(e->chat, &in, &text);
  json_decref(prompt);
  RFI_TRY(s);
  while (*end < text.n && *end < full->n && text.text[*end] == full->text[*end]) ++*end;
  rfr_rendered_deinit(&text);
  return RFR_OK;
}

static int last_assistant(const json_t *messages) {
  int i = (int)json_array_size(messages) - 1;
  for (; i > 0; i--) {
    const char *role = json_string_value(json_object_get(json_array_get(messages, (size_t)i), "role"));
    if (role && strcmp(role, "assistant") == 0) break;
  }
  return i > 0 ? i : 0;
}

/* Refused: a message of the model under another role would not be trained. */
static rfr_status check_roles(const json_t *messages) {
  static const char known[] = "system developer user assistant tool function ipython observation environment";
  for (size_t i = 0; i < json_array_size(messages); i++) {
    const char *role = json_string_value(json_object_get(json_array_get(messages, i), "role"));
    if (!role || rfi_has_word(known, role)) continue;
    return rfi_fail(RFI_E_DATA_ROW,
                    "messages[%zu].role: \"%.60s\" is unknown and would get no loss; the roles are %s. Rename it, or "
                    "set data.loss: all",
                    i, role, known);
  }
  return RFR_OK;
}

static rfr_status encode_messages(const rfi_row_encoder *e, const json_t *messages, int n_prompt, const json_t *tools,
                                  rfi_row_loss loss, rfi_row_tokens *out) {
  rfr_rendered text;
  const rfi_chat_input in = {.messages = messages, .tools = tools, .date = DATE};
  if (loss != RFI_ROW_LOSS_ALL) RFI_TRY(check_roles(messages));
  RFI_TRY(loss == RFI_ROW_LOSS_ALL ? rfi_chat_render(e->chat, &in, &text)
                                   : rfi_chat_render_training(e->chat, &in, &text));
  rfr_status s = RFR_OK;
  rfr_span all = {0, text.n}, *spans = text.trained;
  size_t n = text.n_trained, prompt = 0;
  if (loss == RFI_ROW_LOSS_ALL) spans = &all, n = 1;
  if (loss == RFI_ROW_LOSS_COMPLETION) s = find_prompt_end(e, messages, n_prompt, tools, &text, &prompt);
  for (; n > 0 && spans[0].end <= prompt; n--) spans++;
  if (n > 0 && spans[0].begin < prompt) spans[0].begin = prompt;
  rfr_encode_options options = rfr_encode_options_default();
  options.foreign = text.foreign;
  options.n_foreign = text.n_foreign;
  if (s == RFR_OK) s = tokenize(e, text.text, text.n, &options, spans, n, false, out);
  rfr_rendered_deinit(&text);
  return s;
}

static rfr_status encode_turns(const rfi_row_encoder *e, const rfi_row *row, rfi_row_loss loss, rfi_row_tokens *out) {
  json_t *messages = json_pack("[{s:s,s:s},{s:s,s:s}]", "role", "user", "content", row->prompt, "role", "assistant",
                               "content", row->completion);
  if (!messages) return rfi_fail(RFI_E_NO_MEMORY, "out of memory while rendering a row");
  const rfr_status s = encode_messages(e, messages, 1, row->tools, loss, out);
  json_decref(messages);
  return s;
}

static rfr_status encode(const rfi_row_encoder *e, const rfi_row *row, rfi_row_tokens *out);

/* ---- preferences ---- */

/* The number of messages with which both answers begin; each answer must keep at least one. */
static int shared_messages(const rfi_row *row) {
  size_t n = 0;
  while (n + 1 < json_array_size(row->chosen_messages) && n + 1 < json_array_size(row->rejected_messages) &&
         json_equal(json_array_get(row->chosen_messages, n), json_array_get(row->rejected_messages, n)))
    n++;
  return (int)n;
}

/* Encodes the prompt with one answer as a separate row. */
static rfr_status encode_answer(const rfi_row_encoder *e, const rfi_row *row, bool rejected, rfi_row_tokens *out) {
  rfi_row answer = *row;
  answer.form = RFI_ROW_completion;
  if (rejected) answer.completion = row->rejected;
  if (!row->chosen_messages) return encode(e, &answer, out);
  json_t *messages = row->messages ? json_copy(row->messages) : json_array();
  if (!messages || json_array_extend(messages, rejected ? row->rejected_messages : row->chosen_messages) != 0) {
    json_decref(messages);
    return rfi_fail(RFI_E_NO_MEMORY, "out of memory while rendering a row");
  }
  answer.messages = messages;
  if (!row->messages) answer.n_prompt = shared_messages(row);
  const rfr_status s = encode(e, &answer, out);
  json_decref(messages);
  return s;
}

static void append(rfi_row_tokens *to, const rfi_row_tokens *from) {
  if (from->n == 0) return;
  memcpy(to->ids + to->n, from->ids, (size_t)from->n * sizeof *to->ids);
  memcpy(to->widths + to->n, from->widths, (size_t)from->n * sizeof *to->widths);
  to->n += from->n;
}

static rfr_status encode_preference(const rfi_row_encoder *e, const rfi_row *row, rfi_row_tokens *out) {
  rfi_row_tokens chosen = {0}, rejected = {0};
  rfr_status s;
  out->n = 0;
  if (e->loss != RFI_ROW_LOSS_AUTO && e->loss != RFI_ROW_LOSS_COMPLETION)
    return rfi_fail(RFI_E_DATA_FORMAT, "only the answers of preference rows have a loss; set data.loss to auto");
  RFI_GOTO(encode_answer(e, row, false, &chosen));
  RFI_GOTO(encode_answer(e, row, true, &rejected));
  RFI_GOTO(reserve(e->ctx, out, chosen.n + rejected.n));
  if (rejected.n > 0) rejected.ids[0] |= RFI_TOKEN_REJECTED;
  append(out, &chosen);
  append(out, &rejected);
fail:
  rfi_row_tokens_deinit(&chosen);
  rfi_row_tokens_deinit(&rejected);
  return s;
}

static rfr_status encode(const rfi_row_encoder *e, const rfi_row *row, rfi_row_tokens *out) {
  const bool chat = row->form == RFI_ROW_chat || row->form == RFI_ROW_sharegpt;
  rfi_row_loss loss = e->loss;
  if (row->form == RFI_ROW_preference) return encode_preference(e, row, out);
  if (row->form == RFI_ROW_text && loss != RFI_ROW_LOSS_AUTO && loss != RFI_ROW_LOSS_ALL)
    return rfi_fail(RFI_E_DATA_FORMAT, "a text row has no answer; set data.loss to auto or all");
  if (row->form == RFI_ROW_text) return rfi_text_encode(e, row->text, row->text_n, false, out);
  if (row->messages && !e->chat)
    return rfi_fail(RFI_E_DATA_FORMAT, "messages need a chat template, and the model has none; set data.template to "
                                       "chatml or a template's file");
  if (loss == RFI_ROW_LOSS_AUTO) loss = chat ? RFI_ROW_LOSS_ASSISTANT : RFI_ROW_LOSS_COMPLETION;
  if (!row->messages) return e->chat ? encode_turns(e, row, loss, out) : encode_pair(e, row, out);
  return encode_messages(e, row->messages, chat ? last_assistant(row->messages) : row->n_prompt, row->tools, loss, out);
}

rfr_status rfi_row_encode(const rfi_row_encoder *e, const rfi_row *row, const char *file, int64_t line,
                          rfi_row_tokens *out) {
  const rfr_status s = encode(e, row, out);
  return s == RFR_OK ? s : rfi_fail_prefix("%s:%lld: ", file, (long long)line);
}
