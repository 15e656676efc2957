/* SPDX-License-Identifier: Apache-2.0
 *
 * Conversations as tokens: a template and a tokenizer together.
 */
#include <string.h>

#include "base/base.h"
#include "refrain/chat.h"

rfr_status rfr_chat_encode(const rfr_chat_template *chat, const rfr_tokenizer *tokenizer, const char *messages,
                           size_t n, const rfr_chat_options *options, rfr_tokens *out) {
  rfr_rendered text;
  RFI_TRY(rfi_check_handle(tokenizer, "rfr_tokenizer"));
  RFI_TRY(rfr_chat_render(chat, messages, n, options, &text));
  rfr_encode_options o = rfr_encode_options_default(); /* the template writes BOS itself */
  o.foreign = text.foreign;
  o.n_foreign = text.n_foreign;
  const rfr_status s = rfr_tokenizer_encode(tokenizer, text.text, text.n, &o, out);
  rfr_rendered_deinit(&text);
  return s;
}

static void add_stop(int32_t id, int32_t *ids, int most, int *n) {
  for (int i = 0; i < *n; i++)
    if (ids[i] == id) return;
  if (id >= 0 && *n < most) ids[(*n)++] = id;
}

/* The first special token that the template writes after the assistant's text. */
static rfr_status find_end_of_turn(const rfr_chat_template *chat, const rfr_tokenizer *tokenizer, int32_t *out) {
  static const char messages[] =
      "[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": \"b\"}]";
  rfr_rendered text;
  rfr_tokens tokens = {0};
  *out = -1;
  RFI_TRY(rfr_chat_render(chat, messages, sizeof messages - 1, NULL, &text));
  const size_t end = text.n_foreign > 0 ? text.foreign[text.n_foreign - 1].end : text.n;
  const rfr_status s = rfr_tokenizer_encode(tokenizer, text.text + end, text.n - end, NULL, &tokens);
  for (int64_t i = 0; s == RFR_OK && i < tokens.n && *out < 0; i++)
    if (rfr_tokenizer_is_special(tokenizer, tokens.ids[i])) *out = tokens.ids[i];
  rfr_tokens_deinit(&tokens);
  rfr_rendered_deinit(&text);
  return s;
}

rfr_status rfr_chat_stops(const rfr_chat_template *chat, const rfr_tokenizer *tokenizer, int32_t *ids, int most,
                          int *n) {
  int32_t end;
  RFI_TRY(rfi_check_handle(tokenizer, "rfr_tokenizer"));
  if (!n || most < 0 || (most > 0 && !ids)) return rfi_fail(RFI_E_ARGUMENT, "rfr_chat_stops: no place for the tokens");
  *n = 0;
  for (int i = 0; rfr_tokenizer_stop(tokenizer, i) >= 0; i++) add_stop(rfr_tokenizer_stop(tokenizer, i), ids, most, n);
  add_stop(rfr_tokenizer_eos(tokenizer), ids, most, n);
  if (!chat) return RFR_OK;
  RFI_TRY(find_end_of_turn(chat, tokenizer, &end));
  add_stop(end, ids, most, n);
  return RFR_OK;
}
