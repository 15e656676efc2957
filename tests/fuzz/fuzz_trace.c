/* SPDX-License-Identifier: Apache-2.0
 *
 * Traces: a trace that is read is valid, prints, and reads back equal.
 */
#include "fuzz.h"
#include "refrain/trace.h"

static void append(const char *text, size_t n, void *user) {
  rft_fuzz_expect(rfi_string_append(user, text, n) == RFR_OK, "no memory for a print");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfr_trace *t, *again = NULL;
  rfr_status s = rfr_trace_parse(rft_fuzz_ctx(), "fuzz.txt", (const char *)data, n, &t);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    rfi_string text = {.ctx = rft_fuzz_ctx()};
    rfr_print_options o = rfr_print_options_default();
    rft_fuzz_expect(rfr_trace_verify(t) == RFR_OK, "what was parsed does not verify");
    rft_fuzz_expect(rfr_trace_print(t, &o, append, &text) == RFR_OK, "it does not print for people");
    text.n = 0;
    o.flat = 1;
    rft_fuzz_expect(rfr_trace_print(t, &o, append, &text) == RFR_OK, "it does not print");
    s = rfr_trace_parse(rft_fuzz_ctx(), "again.txt", text.data, text.n, &again);
    rft_fuzz_expect(s == RFR_OK, "what was printed is refused");
    rft_fuzz_expect(rfr_trace_equal(t, again), "it changed by printing");
    rfi_string_deinit(&text);
  }
  rfr_trace_destroy(t);
  rfr_trace_destroy(again);
  rft_fuzz_clean();
  return 0;
}
