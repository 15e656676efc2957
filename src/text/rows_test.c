/* SPDX-License-Identifier: Apache-2.0
 *
 * The forms of rows, and the places in their errors.
 */
#include "text/rows.h"

#include <string.h>

#include "support/folder.h"

static rfr_status detect(const char *text, rfi_row_form *form) {
  return rfi_row_detect("a.jsonl", 7, text, strlen(text), form);
}

static rfr_status read_row(rft_folder *f, rfi_row_form form, const char *text, rfi_row *row) {
  return rfi_row_read(f->ctx, form, "a.jsonl", 7, text, strlen(text), row);
}

static const char *const samples[RFI_ROW_FORM_COUNT] = {
    [RFI_ROW_text] = "{\"text\": \"h\\u00e9llo\", \"id\": 3}",
    [RFI_ROW_chat] = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", "
                     "\"content\": [{\"type\": \"text\", \"text\": \"b\"}]}], \"tools\": \"[{\\\"name\\\": 1}]\"}",
    [RFI_ROW_completion] = "{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"completion\": [{\"role\": "
                           "\"assistant\", \"content\": \"b\"}]}",
    [RFI_ROW_alpaca] = "{\"instruction\": \"add\", \"input\": \"1 2\", \"output\": \"3\"}",
    [RFI_ROW_sharegpt] = "{\"system\": \"s\", \"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, "
                         "{\"from\": \"gpt\", \"value\": \"b\"}]}",
    [RFI_ROW_preference] = "{\"prompt\": \"a\", \"chosen\": \"b\", \"rejected\": \"c\"}",
};

static void test_forms(void **state) {
  rft_folder *f = *state;
  rfi_row_form form;
  rfi_row row;
  for (int i = 0; i < RFI_ROW_FORM_COUNT; i++) {
    assert_int_equal(detect(samples[i], &form), RFR_OK);
    assert_int_equal(form, i);
    assert_int_equal(read_row(f, form, samples[i], &row), RFR_OK);
    assert_int_equal(row.form, i);
    switch (i) {
      case RFI_ROW_text: assert_string_equal(row.text, "h\xc3\xa9llo"); break;
      case RFI_ROW_chat:
        assert_int_equal(json_array_size(row.messages), 2);
        assert_int_equal(json_array_size(row.tools), 1);
        assert_int_equal(row.n_prompt, 0);
        break;
      case RFI_ROW_completion:
        assert_int_equal(json_array_size(row.messages), 2);
        assert_int_equal(row.n_prompt, 1);
        break;
      case RFI_ROW_alpaca:
        assert_string_equal(row.prompt, "add\n\n1 2");
        assert_string_equal(row.completion, "3");
        break;
      case RFI_ROW_sharegpt:
        assert_int_equal(json_array_size(row.messages), 3);
        assert_string_equal(json_string_value(json_object_get(json_array_get(row.messages, 0), "role")), "system");
        assert_string_equal(json_string_value(json_object_get(json_array_get(row.messages, 2), "role")), "assistant");
        assert_string_equal(json_string_value(json_object_get(json_array_get(row.messages, 1), "content")), "a");
        break;
      default: assert_string_equal(row.completion, "b"); assert_string_equal(row.rejected, "c");
    }
    rfi_row_deinit(f->ctx, &row);
  }
  assert_int_equal(detect("{\"conversations\": [{\"role\": \"user\", \"content\": \"x\"}]}", &form), RFR_OK);
  assert_int_equal(read_row(f, form, "{\"conversations\": [{\"role\": \"user\", \"content\": \"x\"}]}", &row), RFR_OK);
  assert_int_equal(json_array_size(row.messages), 1);
  rfi_row_deinit(f->ctx, &row);
}

static void test_undetected(void **state) {
  (void)state;
  rfi_row_form form;
  assert_int_equal(detect("{\"content\": \"x\", \"id\": 1}", &form), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "data.format");
  assert_non_null(strstr(rfr_last_error()->message, "a.jsonl:7:1: the keys of the row (content, id) match no form"));
  assert_int_equal(detect("{\"text\": \"x\", \"messages\": []}", &form), RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "match the forms text and chat; set data.format"));
  /* A key whose value is null is absent, as tables write it. */
  assert_int_equal(detect("{\"text\": null, \"messages\": []}", &form), RFR_OK);
  assert_int_equal(form, RFI_ROW_chat);
}

static void test_errors(void **state) {
  rft_folder *f = *state;
  static const struct {
    rfi_row_form form;
    const char *text, *message;
  } cases[] = {
      {RFI_ROW_text, "{\"text\": 3}", "a.jsonl:7:10: text: is a number, not a text"},
      {RFI_ROW_text, "{\"test\": 3}", "a.jsonl:7:1: text: the key is missing; it must be a text"},
      {RFI_ROW_text, "[1]", "a.jsonl:7:1: the row is a list, not an object with keys"},
      {RFI_ROW_text, "{\"text\": \"a\xff\"}", "a.jsonl:7:"},
      {RFI_ROW_text, "{\"text\": \"a\\u0000\"}", "a.jsonl:7:"},
      {RFI_ROW_text, "{\"text\": \"a\\ud800\"}", "a.jsonl:7:"},
      {RFI_ROW_text, "{\"text\": \"a\", \"text\": \"b\"}", "duplicate object key"},
      {RFI_ROW_text, "{\"text\": \"a\"} x", "end of the line expected"},
      {RFI_ROW_chat, "{\"messages\": []}", "a.jsonl:7:14: messages: the list is empty"},
      {RFI_ROW_chat, "{\"x\": {\"messages\": 1}, \"messages\": \"a\"}",
       "a.jsonl:7:36: messages: is a text, not a list of messages"},
      {RFI_ROW_chat, "{\"é\": [\"]\\\"\"], \"messages\": [{\"role\": \"user\", \"content\": \"\"}, {\"role\": 1}]}",
       "a.jsonl:7:71: messages[1].role: is a number, not a text"},
      {RFI_ROW_chat, "{\"messages\": [{\"role\": \"user\"}]}",
       "messages[0].content: the key is missing; it must be a text or a list of texts"},
      {RFI_ROW_chat, "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]}",
       "messages[0].content[0]: is not"},
      {RFI_ROW_chat, "{\"messages\": [{\"role\": \"\", \"content\": \"\"}]}", "messages[0].role: is empty"},
      {RFI_ROW_chat, "{\"messages\": [{\"role\": \"a\", \"content\": \"\"}], \"tools\": {}}",
       "tools: is an object, not a list of tools"},
      {RFI_ROW_chat, "{\"messages\": [{\"role\": \"a\", \"content\": \"\"}], \"tools\": \"{\"}",
       "tools: is a text that is not valid JSON"},
      {RFI_ROW_completion, "{\"prompt\": \"a\", \"completion\": []}", "completion: is a list, not a text"},
      {RFI_ROW_completion, "{\"prompt\": [{\"role\": \"a\", \"content\": \"\"}], \"completion\": \"b\"}",
       "completion: is a text, not a list of messages, as the prompt is"},
      {RFI_ROW_alpaca, "{\"instruction\": \"a\", \"input\": 1, \"output\": \"b\"}", "a.jsonl:7:31: input: is a number"},
      {RFI_ROW_sharegpt, "{\"conversations\": [{\"from\": \"alien\", \"value\": \"b\"}]}",
       "a.jsonl:7:29: conversations[0].from: is none of human, gpt"},
      {RFI_ROW_preference, "{\"chosen\": \"a\", \"rejected\": \"b\"}", "prompt: the key is missing"},
      {RFI_ROW_preference, "{\"chosen\": 1, \"rejected\": \"b\"}", "chosen: is a number, not a list of messages"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    rfi_row row;
    assert_int_equal(read_row(f, cases[i].form, cases[i].text, &row), RFR_INVALID);
    rfi_row_deinit(f->ctx, &row);
    assert_string_equal(rfr_last_error()->slug, "data.row");
    assert_int_equal(rfr_last_error()->line, 7);
    if (!strstr(rfr_last_error()->message, cases[i].message))
      fail_msg("%s: not \"%s\"", rfr_last_error()->message, cases[i].message);
  }
}

static void test_tool_calls(void **state) {
  rft_folder *f = *state;
  rfi_row row;
  assert_int_equal(read_row(f, RFI_ROW_chat,
                            "{\"messages\": [{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}], "
                            "\"tools\": []}",
                            &row),
                   RFR_OK);
  assert_null(row.tools);
  rfi_row_deinit(f->ctx, &row);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_forms),
      rft_folder_test(test_undetected),
      rft_folder_test(test_errors),
      rft_folder_test(test_tool_calls),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
