/* SPDX-License-Identifier: Apache-2.0
 *
 * Templates of tests/golden/template.json render as in transformers' Jinja environment (tools/make_template_golden.py).
 */
#include <string.h>

#include "data/json_file.h"
#include "support/context.h"
#include "text/chat.h"

static void golden(void **state) {
  (void)state;
  json_t *file;
  int different = 0;
  assert_int_equal(rfi_json_load(ctx, RFT_SOURCE_DIR "/tests/golden/template.json", &file), RFR_OK);
  const json_t *rows = json_object_get(file, "rows");
  /* 2025-11-24 16:00 UTC, as in the script */
  const rfi_chat_input in = {.messages = json_object_get(file, "messages"),
                             .variables = json_object_get(file, "variables"),
                             .date = 1764000000};
  assert_true(json_array_size(rows) > 100);
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const char *text = json_string_value(json_array_get(json_array_get(rows, i), 0));
    const char *expected = json_string_value(json_array_get(json_array_get(rows, i), 1));
    rfr_chat_template *chat;
    rfr_rendered x = {0};
    rfr_status s = rfr_chat_template_create(ctx, "golden", text, strlen(text), NULL, &chat);
    if (s == RFR_OK) s = rfi_chat_render(chat, &in, &x);
    if (s != RFR_OK) assert_true(s == RFR_INVALID && strncmp(rfr_last_error()->slug, "template.", 9) == 0);
    const char *got = s == RFR_OK ? x.text : NULL;
    if ((got == NULL) != (expected == NULL) || (got && strcmp(got, expected) != 0)) {
      print_error("%s\n  expected %s\n  got      %s\n", text, expected ? expected : "an error",
                  got ? got : rfr_last_error()->message);
      different++;
    }
    rfr_rendered_deinit(&x);
    rfr_chat_template_destroy(chat);
  }
  json_decref(file);
  assert_int_equal(different, 0);
}

/* The message of an error has the name, line and column. */
static void refused(const char *text, const char *slug, const char *expected) {
  rfr_chat_template *chat;
  rfr_rendered x = {0};
  const char *m = "[{\"role\": \"user\", \"content\": \"\xC3\xA9\"}]";
  rfr_status s = rfr_chat_template_create(ctx, "t", text, strlen(text), NULL, &chat);
  if (s == RFR_OK) s = rfr_chat_render(chat, m, strlen(m), NULL, &x);
  assert_int_not_equal(s, RFR_OK);
  assert_string_equal(rfr_last_error()->slug, slug);
  if (strncmp(rfr_last_error()->message, expected, strlen(expected)) != 0) fail_msg("%s", rfr_last_error()->message);
  rfr_chat_template_destroy(chat);
}

static void errors(void **state) {
  (void)state;
  refused("a\n{% if x %}\n  {{ 1 + }}{% endif %}", "template.syntax", "t:3: column 10: unexpected \"}}\"");
  refused("{% include 'x' %}", "template.syntax", "t:1: column 4: the statement \"include\" is not supported");
  refused("{% for x in y recursive %}{% endfor %}", "template.syntax", "t:1: column 15: recursive loops");
  refused("\n{{ messages[0].x.y }}", "template.render", "t:2: column 17: \"x\" is undefined");
  refused("{{ raise_exception('No ' ~ messages[0].content) }}", "template.render",
          "t:1: column 19: the template refuses the conversation: No \xC3\xA9");
  refused("{{ 9223372036854775807 + 1 }}", "template.render", "t:1: column 24: an integer does not fit in 64 bits");
}

/* Each limit stops a template that would run for very long or forever. */
static void limits(void **state) {
  (void)state;
  refused("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "template.limit", "t:1:");
  refused("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "template.limit", "t:1:");
  refused("{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s * 9 %}{% endfor %}",
          "template.limit", "t:1:");
  refused("{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}",
          "template.limit", "t:1:");
  refused("{{ range(100001) }}", "template.limit", "t:1:");
  refused("{% set a = 'a' * 9999999 %}{% set b = 'b' * 9999999 %}{{ b.strip(a ~ 'b') }}", "template.limit", "t:1:");
  refused("{% set a = 'a' * 9999999 %}{{ a.rfind('a' * 4999999 ~ 'b') }}", "template.limit", "t:1:");
  refused("{% set a = 'a' * 60000000 %}{% for i in range(99) %}{{ (a ~ '')|length if a ~ 'x' == a ~ 'y' }}{% endfor %}",
          "template.limit", "t:1:");
  refused("{{ 'a'|map(*(['map'] * 99999))|list }}", "template.limit", "t:1:");
  char deep[4096];
  memset(deep, '(', sizeof deep);
  memcpy(deep, "{{ ", 3);
  deep[2000] = 0;
  refused(deep, "template.syntax", "t:1:");
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(golden), rft_context_test(errors), rft_context_test(limits)};
  return cmocka_run_group_tests_name("template", tests, NULL, NULL);
}
