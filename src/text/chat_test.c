/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "data/file.h"
#include "support/context.h"
#include "text/chat.h"

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

/* ---- the assistant's bytes ---- */

static const char turns[] = "[{\"role\":\"user\",\"content\":\"A\"},{\"role\":\"assistant\",\"content\":\"<t>x</t>B\"},"
                            "{\"role\":\"user\",\"content\":\"C\"},{\"role\":\"assistant\",\"content\":\"<t>y</t>D\"}]";

static void trained(const char *text, const char *messages, const char *expected) {
  rfr_chat_template *chat = parse(text);
  rfr_rendered x;
  if (rfr_chat_render_training(chat, messages, strlen(messages), NULL, &x) != RFR_OK)
    fail_msg("%s", rfr_last_error()->message);
  check_spans(&x, x.trained, x.n_trained, expected);
  rfr_rendered_deinit(&x);
  rfr_chat_template_destroy(chat);
}

static void not_trained(const char *text, const char *messages, const char *slug, const char *part) {
  rfr_chat_template *chat = parse(text);
  rfr_rendered x;
  assert_int_not_equal(rfr_chat_render_training(chat, messages, strlen(messages), NULL, &x), RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (!strstr(rfr_last_error()->message, part)) fail_msg("%s", rfr_last_error()->message);
  assert_null(x.text);
  rfr_chat_template_destroy(chat);
}

/* {% generation %} marks the exact bytes, through string operations and macros. */
static void generation(void **state) {
  (void)state;
  trained("{% for m in messages %}{{ m.role[0] }}:{% if m.role == 'assistant' %}{% generation %} {{ m.content }}</s>\n"
          "{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}",
          turns, "u:A;a:[ <t>x</t>B</s>\n];u:C;a:[ <t>y</t>D</s>\n];");
  trained(
      "{% macro say(m) %}({% generation %}{{ m.content }}{% endgeneration %}){% endmacro %}"
      "{% set all %}{% for m in messages %}{{ say(m) if m.role == 'assistant' else m.content }}{% endfor %}{% endset %}"
      "{{ ('x' ~ all ~ 'x').replace('<t>', '-')|upper|trim('X') }}",
      turns, "A(-[X</T>B])C(-[Y</T>D])");
}

/* Templates whose rendered prefixes are not prefixes of the text: earlier thoughts are removed, or the end of the text
 * has a token of its own. */
static void prefixes(void **state) {
  (void)state;
  /* thoughts of earlier turns are removed */
  trained(
      "{% for m in messages %}{% set c = m.content if loop.last or m.role == 'user' else m.content.split('</t>')[-1] %}"
      "{{ '<|' + m.role + '|>' + c + '<e>\n' }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
      turns, "<|user|>A<e>\n<|assistant|>[B<e>]\n<|user|>C<e>\n<|assistant|>[<t>y</t>D<e>]\n");
  /* the prompt opens a thought that earlier turns lack */
  trained("{% for m in messages %}{% set c = m.content if m.role == 'user' else m.content.split('</t>')[-1] %}"
          "{{ '<|' + m.role + '|>' + c + '<e>' }}{% endfor %}{% if add_generation_prompt %}<|assistant|><t>{% endif %}",
          turns, "<|user|>A<e><|assistant|>[B<e>]<|user|>C<e><|assistant|>[D<e>]");
  /* the template completes the missing thought: trained up to the end of the piece that both texts share */
  trained("{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}</t>{% endif %}{{ "
          "m.content[8:] }}"
          "<e>{% endfor %}{% if add_generation_prompt %}<|assistant|><t>{% endif %}",
          turns, "<|user|><e><|assistant|>[</t>B<e>]<|user|><e><|assistant|>[</t>D<e>]");
  /* a token at the end of all messages */
  trained("{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<e>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
          turns, "<|user|>\nA<e>\n<|assistant|>\n[<t>x</t>B<e>]\n<|user|>\nC<e>\n<|assistant|>\n[<t>y</t>D<e>\n</s>]");
  /* the prompt is written inside the loop; the turn ends with a line end */
  trained("{% for m in messages %}{{ m.role[0]|upper ~ ': ' ~ m.content ~ '\n' }}"
          "{% if loop.last and add_generation_prompt %}A: {% endif %}{% endfor %}",
          turns, "U: A\nA: [<t>x</t>B\n]U: C\nA: [<t>y</t>D\n]");
  /* no prompt at all; a system message that is moved into the last user message */
  trained("{% for m in messages %}{% if m.role == 'user' %}[I]{{ 'S ' if loop.index0 == messages|length - 2 }}"
          "{{ m.content }}[/I]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
          turns, "[I]A[/I][ <t>x</t>B</s>][I]S C[/I][ <t>y</t>D</s>]");
  /* white space of the message itself is kept */
  trained("{% for m in messages %}{{ m.content }} {% endfor %}",
          "[{\"role\":\"user\",\"content\":\"A\"},{\"role\":\"assistant\",\"content\":\"B \"}]", "A [B  ]");
  trained("{% for m in messages %}{{ m.content }}{% endfor %}", "[{\"role\":\"user\",\"content\":\"A\"}]", "A");
}

static void refusals(void **state) {
  (void)state;
  not_trained("{% for m in messages|reverse %}{{ m.content }}{% endfor %}", turns, "chat.mask", "in another order");
  not_trained("{% for m in messages %}{{ '<|a|>' ~ m.content[8:] if loop.last else 'x' }}{% endfor %}"
              "{% if add_generation_prompt %}<|p|>{% endif %}",
              turns, "chat.mask", "does not begin with the template's generation prompt");
  not_trained("{% if messages|length % 2 %}{{ raise_exception('odd') }}{% endif %}", turns, "chat.mask", "odd");
  not_trained("{{ messages|length }}{{ messages|map(attribute='content')|join }}", turns, "chat.mask",
              "outside a loop over the messages");
  not_trained("{% for m in messages %}{{ m.content }}{% endfor %}{% for m in messages %}{{ loop.length }}{% endfor %}",
              turns, "chat.mask", "in more than one place");
  not_trained("{{ messages.x.y }}", turns, "template.render", "\"x\" is undefined");
}

/* ---- foreign bytes ---- */

static void foreign(const char *text, const char *expected) {
  rfr_chat_template *chat = parse(text);
  rfr_rendered x;
  rfr_chat_options o = rfr_chat_options_default();
  const char *m = "[{\"role\":\"user\",\"content\":\" <|e|>\\n<s> \",\"n\":7,\"l\":[\"p\",{\"k\":1}]}]";
  o.tools = "[{\"name\": \"<s>\"}]";
  o.variables = "{\"extra\": \"<s>\"}";
  if (rfr_chat_render(chat, m, strlen(m), &o, &x) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  check_spans(&x, x.foreign, x.n_foreign, expected);
  rfr_rendered_deinit(&x);
  rfr_chat_template_destroy(chat);
}

/* Every operation keeps the origin of its bytes. */
static void provenance(void **state) {
  (void)state;
  foreign("<s>{{ messages[0].content }}{{ bos_token }}{{ extra }}", "<s>[ <|e|>\n<s> ]<s>[<s>]");
  foreign("{% set c = messages[0].content %}{{ c|trim ~ '<s>' ~ c[1:3] }}", "[<|e|>\n<s>]<s>[<|]");
  foreign("{% set c = messages[0].content|trim %}{{ ('a' + c + 'b')|upper }}{{ ('a' ~ c ~ 'b')[::-1] }}",
          "A[<|E|>\n<S>]Bb[>s<\n>|e|<]a");
  foreign("{% set c = messages[0].content %}{{ 'x-y'|replace('-', c.strip()) }}{{ c.strip().replace('e', '<s>') }}",
          "x[<|e|>\n<s>]y[<|]<s>[|>\n<s>]");
  foreign("{{ ['<s>', messages[0].role]|join('<e>') }}{{ '%s<s>%s' % (1, messages[0].role) }}",
          "<s><e>[user]1<s>[user]");
  foreign("{{ messages[0].l|tojson }}{{ messages[0].l }}{{ ['<s>', messages[0].l]|tojson }}",
          "[[\"p\", {\"k\": 1}]['p', {'k': 1}]][\"<s>\", [[\"p\", {\"k\": 1}]]]");
  foreign("{{ messages[0].content|indent(2, true) }}|{{ messages[0].content.split('\n')[0]|title }}",
          "  [ <|e|>]\n  [<s> ]|[ <|e|>]");
  foreign("{% for c in messages[0].role %}{{ c }}<s>{% endfor %}{{ tools|tojson }}",
          "[u]<s>[s]<s>[e]<s>[r]<s>[[{\"name\": \"<s>\"}]]");
  foreign("{% set x %}<s>{{ messages[0].role }}{% endset %}{% macro f(a) %}{{ a }}<e>{% endmacro %}{{ f(x) }}",
          "<s>[user]<e>");
}

/* As apply_chat_template does: null members are absent, reasoning has two names. */
static void members(void **state) {
  (void)state;
  render("{{ messages[0].content is defined }}{{ messages[0].reasoning_content }}{{ messages[0].thinking }}{{ tools is "
         "none }}",
         "[{\"role\":\"assistant\",\"content\":null,\"reasoning\":\"r\"}]", "FalserrTrue");
}

/* ---- folders ---- */

static void put(const char *folder, const char *name, const char *text) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  assert_int_equal(rfi_file_write(ctx, path, text, strlen(text)), RFR_OK);
}

static void opens(const char *folder, const char *choice, const char *expected) {
  rfr_chat_template *chat;
  rfr_rendered x;
  if (rfr_chat_template_open(ctx, folder, choice, &chat) != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  assert_int_equal(rfr_chat_render(chat, "[]", 2, NULL, &x), RFR_OK);
  assert_string_equal(x.text, expected);
  rfr_rendered_deinit(&x);
  rfr_chat_template_destroy(chat);
}

static void folders(void **state) {
  (void)state;
  char folder[] = RFT_BINARY_DIR "/chat-XXXXXX", path[512];
  rfr_chat_template *chat;
  bool exists;
  assert_non_null(mkdtemp(folder));
  assert_int_equal(rfr_chat_template_open(ctx, folder, NULL, &chat), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "chat.template");
  put(folder, "tokenizer_config.json",
      "{\"bos_token\": {\"content\": \"<b>\"}, \"eos_token\": \"<e>\", \"add_bos_token\": true, \"chat_template\": "
      "[{\"name\": \"default\", \"template\": \"{{ bos_token }}1\"}, {\"name\": \"tool_use\", \"template\": \"2\"}]}");
  put(folder, "special_tokens_map.json", "{\"eos_token\": \"no\", \"pad_token\": \"<p>\"}");
  opens(folder, NULL, "<b>1");
  opens(folder, "tool_use", "2");
  assert_int_equal(rfr_chat_template_open(ctx, folder, "rag", &chat), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "chat.template");
  put(folder, "chat_template.json", "{\"chat_template\": \"3\"}");
  opens(folder, NULL, "3");
  put(folder, "chat_template.jinja", "{{ bos_token ~ eos_token ~ pad_token ~ add_bos_token }}4\n");
  opens(folder, NULL, "<b><e><p>4");
  assert_int_equal(rfi_chat_template_exists(ctx, folder, &exists), RFR_OK);
  assert_true(exists);
  snprintf(path, sizeof path, "%s/chat_template.jinja", folder);
  opens(path, NULL, "4");
  put(folder, "chat_template.jinja", "{{ x");
  assert_int_equal(rfr_chat_template_open(ctx, folder, NULL, &chat), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "template.syntax");
  put(folder, "tokenizer_config.json", "[]");
  assert_int_equal(rfr_chat_template_open(ctx, folder, NULL, &chat), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "json");
  assert_int_equal(rfi_tree_remove(ctx, folder), RFR_OK);
}

/* Each allocation fails once: a status, no leak. */
static void allocations(void **state) {
  (void)state;
  const char *text =
      "{% macro f(a) %}{{ a|upper }}{% endmacro %}{% for m in messages %}{{ f(m.content) ~ m|tojson }}{% endfor %}";
  bool done = false;
  for (int64_t k = 1; !done; k++) {
    rfr_chat_template *chat;
    rfr_rendered x;
    rfr_ctx_fail_alloc(ctx, k);
    rfr_status s = rfr_chat_template_create(ctx, "t", text, strlen(text), "{\"a\": \"b\"}", &chat);
    if (s == RFR_OK) {
      s = rfr_chat_render_training(chat, turns, strlen(turns), NULL, &x);
      if (s == RFR_OK) rfr_rendered_deinit(&x);
    }
    rfr_chat_template_destroy(chat);
    done = s == RFR_OK || strcmp(rfr_last_error()->slug, "chat.mask") == 0;
    if (!done) assert_int_equal(s, RFR_NO_MEMORY);
    assert_true(k < 1000);
  }
  rfr_ctx_fail_alloc(ctx, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_context_test(chatml),   rft_context_test(basics),   rft_context_test(generation),
      rft_context_test(prefixes), rft_context_test(refusals), rft_context_test(provenance),
      rft_context_test(members),  rft_context_test(folders),  rft_context_test(allocations),
  };
  return cmocka_run_group_tests_name("chat", tests, NULL, NULL);
}
