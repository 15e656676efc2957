/* SPDX-License-Identifier: Apache-2.0
 *
 * A checkpoint's state.json: counts that steps can have led to, and a print that reads back
 * equal.
 */
#include <string.h>

#include "base/json.h"
#include "fuzz.h"
#include "train/state_json.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_state_json state, again;
  rfi_string text = {.ctx = rft_fuzz_ctx()};
  rfr_status s = rfi_state_json_parse("state.json", (const char *)data, n, &state);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    const int64_t *block = state.block;
    rft_fuzz_expect(block[RFI_STEP_APPLIED] >= 0 && block[RFI_STEP_SKIPPED] >= 0, "a negative count");
    rft_fuzz_expect(block[RFI_STEP_APPLIED] + block[RFI_STEP_SKIPPED] == block[RFI_STEP_ATTEMPTED], "lost steps");
    rft_fuzz_expect(rfi_state_json_print(&state, &text) == RFR_OK, "it does not print");
    rft_fuzz_expect(rfi_state_json_parse("again.json", text.data, text.n, &again) == RFR_OK,
                    "what was printed is refused");
    rft_fuzz_expect(memcmp(block, again.block, sizeof state.block) == 0 &&
                        json_equal(state.configuration, again.configuration) &&
                        json_equal(state.environment, again.environment) &&
                        (state.tuned ? json_equal(state.tuned, again.tuned) : !again.tuned),
                    "it changed by printing");
    rfi_state_json_deinit(&again);
    rfi_state_json_deinit(&state);
  }
  rfi_string_deinit(&text);
  rft_fuzz_clean();
  return 0;
}
