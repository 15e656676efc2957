/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates: the input is a template, a line "----", and JSON: a list of messages, or an object with "messages",
 * "tools" and "variables". A conversation renders or is refused. Spans are sorted, disjoint and inside the text. Text
 * that the conversation brings is foreign: a marker that only messages contain is never outside a foreign span.
 */
#include <string.h>

#include "base/json.h"
#include "fuzz.h"
#include "text/chat.h"

/* The marker is one code point, so that a template cannot compose it; no template may contain it. */
static const char marker[] = "\xE2\x98\x83"; /* a snowman */

static void check_spans(const rfr_rendered *x, const rfr_span *spans, size_t n) {
  size_t end = 0;
  for (size_t i = 0; i < n; i++) {
    rft_fuzz_expect(spans[i].begin >= end && spans[i].begin < spans[i].end && spans[i].end <= x->n, "a span is wrong");
    end = spans[i].end;
  }
}

static void check_marker(const rfr_rendered *x) {
  size_t k = 0;
  const char *at = x->text;
  while ((at = memmem(at, x->n - (size_t)(at - x->text), marker, 3)) != NULL) {
    const size_t begin = (size_t)(at - x->text);
    while (k < x->n_foreign && x->foreign[k].end <= begin) k++;
    rft_fuzz_expect(k < x->n_foreign && x->foreign[k].begin <= begin && begin + 3 <= x->foreign[k].end,
                    "text of a message is not foreign");
    at += 3;
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfr_ctx *ctx = rft_fuzz_ctx();
  const char *text = (const char *)data, *line = n ? memmem(text, n, "\n----\n", 6) : NULL;
  const size_t n_template = line ? (size_t)(line - text) : n;
  rfr_chat_template *chat;
  rfr_status s = rfr_chat_template_create(ctx, "fuzz", n ? text : "", n_template, "{\"bos_token\": \"<s>\"}", &chat);
  rft_fuzz_status(s);
  json_t *json = NULL;
  if (s == RFR_OK && line) {
    s = rfi_json_parse("messages", line + 6, n - n_template - 6, &json);
    rft_fuzz_status(s);
  }
  if (s == RFR_OK && json) {
    rfi_chat_input in = {.messages = json, .date = 1};
    if (json_is_object(json))
      in = (rfi_chat_input){json_object_get(json, "messages"), json_object_get(json, "tools"),
                            json_object_get(json, "variables"), true, 1};
    const bool marked = !memmem(text, n_template, marker, 3) && !memmem(text, n_template, "\\", 1);
    rfr_rendered x;
    s = rfi_chat_render(chat, &in, &x);
    rft_fuzz_status(s);
    if (s == RFR_OK) {
      check_spans(&x, x.foreign, x.n_foreign);
      check_spans(&x, x.trained, x.n_trained);
      if (marked) check_marker(&x);
    }
    rfr_rendered_deinit(&x);
    s = rfi_chat_render_training(chat, &in, &x);
    rft_fuzz_status(s);
    if (s == RFR_OK) check_spans(&x, x.trained, x.n_trained);
    rfr_rendered_deinit(&x);
  }
  json_decref(json);
  rfr_chat_template_destroy(chat);
  rft_fuzz_clean();
  return 0;
}
