/* SPDX-License-Identifier: Apache-2.0 */
#include "data/json_file.h"

#include <unistd.h>

#include "support/folder.h"

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
  const struct CMUnitTest tests[] = {rft_folder_test(test_size_limit)};
  return cmocka_run_group_tests_name("json_file", tests, NULL, NULL);
}
