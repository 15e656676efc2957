/* SPDX-License-Identifier: Apache-2.0
 *
 * Configurations: a parsed configuration prints as YAML that reads back to the same text.
 */
#include <string.h>

#include "fuzz.h"
#include "train/config.h"

static rfr_status read_text(const char *text, size_t n, rfi_string *printed) {
  rfi_config *config;
  rfr_status s = rfi_config_read(rft_fuzz_ctx(), "fuzz.yaml", text, n, NULL, NULL, 0, &config);
  rft_fuzz_status(s);
  if (s == RFR_OK) rft_fuzz_expect(rfi_config_print(config, false, printed) == RFR_OK, "it does not print");
  rfi_config_destroy(config);
  return s;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_string once = {.ctx = rft_fuzz_ctx()}, twice = {.ctx = rft_fuzz_ctx()};
  if (read_text((const char *)data, n, &once) == RFR_OK) {
    rft_fuzz_expect(read_text(once.data, once.n, &twice) == RFR_OK, "what was printed is refused");
    rft_fuzz_expect(once.n == twice.n && memcmp(once.data, twice.data, once.n) == 0, "it changed by printing");
  }
  rfi_string_deinit(&once);
  rfi_string_deinit(&twice);
  rft_fuzz_clean();
  return 0;
}
