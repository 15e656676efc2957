/* SPDX-License-Identifier: Apache-2.0
 *
 * JSON: a parsed text prints, and the print reads back equal.
 */
#include "base/json.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  json_t *value, *again = NULL;
  rfi_string text = {.ctx = rft_fuzz_ctx()};
  rfr_status s = rfi_json_parse("fuzz.json", (const char *)data, n, &value);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    rft_fuzz_expect(rfi_json_print(value, &text) == RFR_OK, "it does not print");
    rft_fuzz_expect(rfi_json_parse("again.json", text.data, text.n, &again) == RFR_OK, "what was printed is refused");
    rft_fuzz_expect(json_equal(value, again), "it changed by printing");
  }
  json_decref(value);
  json_decref(again);
  rfi_string_deinit(&text);
  rft_fuzz_clean();
  return 0;
}
