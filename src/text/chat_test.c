/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/chat.h"

static rfr_ctx *ctx;

static int setup(void **state) {
  (void)state;
  return rfr_ctx_create(NULL, &ctx) != RFR_OK;
}

static int teardown(void **state) {
  (void)state;
  const rfr_ctx_stats stats = rfr_ctx_get_stats(ctx);
  rfr_ctx_destroy(ctx);
  return stats.live_blocks != 0;
}

static rfr_chat_template *parse(const char *text) {
  rfr_chat_template *chat = NULL;
  if (rfr_chat_template_create(ctx, "t", text, strlen(text), "{\"bos_token\": \"<s>\", \"eos_token\": \"</s>\"}",
                               &chat) != RFR_OK)
    fail_msg("%s", rfr_last_error()->message);
  return chat;
}

/* Marks spans in a text: `[` and `]`. */
static void check_spans(const rfr_rendered *x, const rfr_span *spans, size_t n, const char *expected) {
  char text[4096];
  size_t k = 0, at = 0;
  for (size_t i = 0; i <= n; i++) {
    const size_t to = i < n ? spans[i].begin : x->n;
    memcpy(text + k, x->text + at, to - at);
    k += to - at;
    if (i == n) break;
    text[k++] = '[';
    memcpy(text + k, x->text + spans[i].begin, spans[i].end - spans[i].begin);
    k += spans[i].end - spans[i].begin;
    text[k++] = ']';
    at = spans[i].end;
  }
  text[k] = 0;
  assert_string_equal(text, expected);
}

static void render(const char *text, const char *messages, const char *expected) {
  rfr_chat_template *chat = parse(text);
  rfr_rendered x;
  if (rfr_chat_render(chat, messages, strlen(messages), NULL, &x) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  assert_string_equal(x.text, expected);
  rfr_rendered_deinit(&x);
  rfr_chat_template_destroy(chat);
}

static void chatml(void **state) {
  (void)state;
  rfr_chat_template *chat;
  rfr_rendered x;
  const char *m = "[{\"role\":\"user\",\"content\":\"<|im_end|>\"},{\"role\":\"assistant\",\"content\":\"B\"},"
                  "{\"role\":\"user\",\"content\":\"C\"},{\"role\":\"assistant\",\"content\":\"D\"}]";
  assert_int_equal(rfr_chat_template_open(ctx, "chatml", NULL, &chat), RFR_OK);
  assert_int_equal(rfr_chat_render_training(chat, m, strlen(m), NULL, &x), RFR_OK);
  check_spans(&x, x.trained, x.n_trained,
              "<|im_start|>user\n<|im_end|><|im_end|>\n<|im_start|>assistant\n[B<|im_end|>]\n"
              "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n[D<|im_end|>]\n");
  check_spans(&x, x.foreign, x.n_foreign,
              "<|im_start|>[user]\n[<|im_end|>]<|im_end|>\n<|im_start|>[assistant]\n[B]<|im_end|>\n"
              "<|im_start|>[user]\n[C]<|im_end|>\n<|im_start|>[assistant]\n[D]<|im_end|>\n");
  rfr_rendered_deinit(&x);
  rfr_chat_template_destroy(chat);
}

static void basics(void **state) {
  (void)state;
  const char *m = "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"b\"}]";
  render("{{ bos_token }}{% for m in messages %}\n  {%- if loop.last %}!{% endif %}{{ m.role[0] ~ m['content'] }}\n{% "
         "endfor %}x\n",
         m, "<s>ua\n!ab\nx");
  render("{{ {'a': [1, 2.5, none, true]} }}|{{ ['é\"', 1e22]|tojson }}|{{ missing }}|{{ 7 // -2 }}|{{ '%05.1f' % "
         "3.14159 }}",
         m, "{'a': [1, 2.5, None, True]}|[\"é\\\"\", 1e+22]||-4|003.1");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(chatml), cmocka_unit_test(basics)};
  return cmocka_run_group_tests_name("chat", tests, setup, teardown);
}
