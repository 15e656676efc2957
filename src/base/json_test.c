/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON is read strictly: one value, no NUL, no duplicate key.
 */
#include "base/json.h"

#include <string.h>

#include "support/context.h"

static void test_strict(void **state) {
  (void)state;
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
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    const rfr_status s = rfi_json_parse("a.json", bad[i].text, bad[i].n, &value);
    if (s != RFR_INVALID || strcmp(rfr_last_error()->slug, "json") != 0) fail_msg("text %zu is not refused", i);
    assert_null(value);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_strict)};
  return cmocka_run_group_tests_name("json", tests, NULL, NULL);
}
