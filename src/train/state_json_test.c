/* SPDX-License-Identifier: Apache-2.0
 *
 * state.json: printed text reads back equal, and text that no run can have written is refused with the reason.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "train/state_json.h"

static void round_trip_of(bool tuned, double seconds) {
  rfr_ctx *ctx;
  assert_int_equal(rfr_ctx_create(NULL, &ctx), RFR_OK);
  rfi_string text = {.ctx = ctx};
  rfi_state_json again, s = {.block = {[RFI_STEP_ATTEMPTED] = INT64_C(1000000000000),
                                       [RFI_STEP_APPLIED] = INT64_C(999999999997),
                                       [RFI_STEP_SEED] = INT64_MIN,
                                       [RFI_STEP_SKIPPED] = 3},
                             .seconds = seconds,
                             .skipped_in_row = tuned ? 3 : 0,
                             .skipped_for_routing = tuned,
                             .configuration = json_pack("{s:s}", "optimizer.lr", "3e-3"),
                             .environment = json_pack("{s:s, s:i}", "isa", "v4", "threads", 2),
                             .tuned = tuned ? json_pack("{s:s, s:s}", "device", "a GPU", "f32[2,3:3]", "0 1") : NULL};
  assert_int_equal(rfi_state_json_print(&s, &text), RFR_OK);
  assert_int_equal(rfi_state_json_parse("state.json", text.data, text.n, &again), RFR_OK);
  assert_true(again.seconds == seconds);
  assert_true(again.skipped_in_row == s.skipped_in_row && again.skipped_for_routing == s.skipped_for_routing);
  assert_memory_equal(again.block, s.block, sizeof s.block);
  assert_true(json_equal(again.configuration, s.configuration) && json_equal(again.environment, s.environment));
  assert_true(tuned ? json_equal(again.tuned, s.tuned) : again.tuned == NULL);
  rfi_state_json_deinit(&again);
  rfi_state_json_deinit(&s);
  rfi_string_deinit(&text);
  rfr_ctx_destroy(ctx);
}

static void round_trip(void **state) {
  (void)state;
  round_trip_of(false, 0);
  round_trip_of(true, 12.375);
}

static void refused(void **state) {
  (void)state;
  static const struct {
    const char *fields, *message;
  } cases[] = {
      {"\"format\": 2, \"step_block\": [3, 2, 1, 1]", "format 2"},
      {"\"step_block\": [3, 2, 1, 1]", "\"format\" is missing"},
      {"\"format\": 1", "step_block"},
      {"\"format\": 1, \"step_block\": [3, 2, 1]", "not an array of 4 integers"},
      {"\"format\": 1, \"step_block\": [3, 2.0, 1, 1]", "not an array of 4 integers"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 0]", "3 steps cannot be 2 applied and 0 skipped ones"},
      {"\"format\": 1, \"step_block\": [3, 4, 1, -1]", "3 steps"},
      {"\"format\": 1, \"step_block\": [-1, -1, 1, 0]", "-1 steps"},
      {"\"format\": 1, \"step_block\": [1000000000001, 1000000000001, 1, 0]", "1000000000001 steps"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"configuration\": [1]", "\"configuration\" is not an object"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"configuration\": {\"a\": {}}", "\"a\" in \"configuration\""},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"configuration\": {}", "\"environment\" is not an object"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"configuration\": {}, \"environment\": {}, \"tuned\": 1",
       "\"tuned\" is not an object"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"seconds\": -1.5", "\"seconds\" is -1.5"},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"seconds\": \"1\"", "\"seconds\""},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"skipped_in_row\": 2", "\"skipped_in_row\""},
      {"\"format\": 1, \"step_block\": [3, 2, 1, 1], \"skipped_for_routing\": 2", "\"skipped_for_routing\""},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    char text[256];
    rfi_state_json s;
    const int n = snprintf(text, sizeof text, "{%s}", cases[i].fields);
    assert_int_equal(rfi_state_json_parse("run/state.json", text, (size_t)n, &s), RFR_INVALID);
    assert_null(s.configuration);
    assert_string_equal(rfr_last_error()->file, "run/state.json");
    if (!strstr(rfr_last_error()->message, cases[i].message)) fail_msg("%s: %s", text, rfr_last_error()->message);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(round_trip), cmocka_unit_test(refused)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
