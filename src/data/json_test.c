/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON is read strictly: one value, no NUL, no key twice, and no file that is too large.
 */
#include "data/json.h"

#include <string.h>
#include <unistd.h>

#include "support/folder.h"

static void test_strict(void **state) {
  rft_folder *f = *state;
  static const struct {
    const char *text;
    size_t n;
  } bad[] = {
      {"{}\0x", 4},
      {"{}\0", 3},
      {"{\"a\0b\": 1}", 10},
      {"{\"a\\u0000b\": 1}", 15},
      {"{\"a\": 1, \"a\": 2}", 16},
      {"{} {}", 5},
      {"[1,]", 4},
      {"\"\xff\"", 3},
      {"NaN", 3},
  };
  json_t *value;
  (void)f;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const rfr_status s = rfi_json_parse("a.json", bad[i].text, bad[i].n, &value);
    if (s != RFR_INVALID || strcmp(rfr_last_error()->slug, "json") != 0) fail_msg("text %zu is not refused", i);
    assert_null(value);
  }
}

static void test_size_limit(void **state) {
  rft_folder *f = *state;
  json_t *value;
  rft_write(f, "a.json", "{}", 2);
  assert_int_equal(truncate(rft_path(f, "a.json"), (int64_t)RFI_JSON_LIMIT + 1), 0); /* sparse */
  assert_int_equal(rfi_json_load(f->ctx, rft_path(f, "a.json"), &value), RFR_INVALID);
  assert_string_equal(rfr_last_error()->slug, "file.size");
  assert_null(value);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_folder_test(test_strict), rft_folder_test(test_size_limit)};
  return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}
