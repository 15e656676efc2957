/* SPDX-License-Identifier: Apache-2.0
 *
 * Schedules as text and as order lists, and costs: a schedule that is read prints and reads back equal, accepts sends
 * and receives, and can be simulated.
 */
#include <string.h>

#include "fuzz.h"
#include "refrain/schedule.h"

static void append(const char *text, size_t n, void *user) {
  rft_fuzz_expect(rfi_string_append(user, text, n) == RFR_OK, "no memory for a print");
}

static void print(const rfr_schedule *s, rfi_string *text) {
  *text = (rfi_string){.ctx = rft_fuzz_ctx()};
  rft_fuzz_expect(rfr_schedule_print(s, append, text) == RFR_OK, "it does not print");
}

static void use(rfr_schedule *s) {
  rfi_string once, twice;
  rfr_schedule *again, *with;
  rfr_schedule_info info;
  rfr_schedule_result result;
  print(s, &once);
  rft_fuzz_expect(rfr_schedule_parse(rft_fuzz_ctx(), "again", once.data, once.n, &again) == RFR_OK,
                  "what was printed is refused");
  print(again, &twice);
  rft_fuzz_expect(once.n == twice.n && memcmp(once.data, twice.data, once.n) == 0, "it changed by printing");
  rft_fuzz_expect(rfr_schedule_simulate(s, NULL, 0, &result, NULL, NULL, NULL) == RFR_OK, "it does not run");
  rft_fuzz_expect(result.bubble >= 0 && result.bubble <= 1 && result.slot_bytes >= result.live_bytes, "odd results");
  rft_fuzz_expect(rfr_schedule_get_info(s, &info) == RFR_OK, "no info");
  const rfr_status status = rfr_schedule_add_communication(s, &with);
  rft_fuzz_expect((status == RFR_OK) == !info.communication, "it takes no messages");
  rft_fuzz_status(status);
  rfr_schedule_destroy(with);
  rfr_schedule_destroy(again);
  rfi_string_deinit(&once);
  rfi_string_deinit(&twice);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfr_schedule *s;
  rfr_stage_costs costs[3];
  rfr_status status = rfr_schedule_parse(rft_fuzz_ctx(), "fuzz", (const char *)data, n, &s);
  rft_fuzz_status(status);
  if (status == RFR_OK) use(s);
  rfr_schedule_destroy(s);
  status = rfr_schedule_parse_order(rft_fuzz_ctx(), "fuzz", (const char *)data, n, NULL, 0, &s);
  rft_fuzz_status(status);
  if (status == RFR_OK) use(s);
  rfr_schedule_destroy(s);
  rft_fuzz_status(rfr_schedule_costs_parse(rft_fuzz_ctx(), "fuzz", (const char *)data, n, 3, costs));
  rft_fuzz_clean();
  return 0;
}
