/* SPDX-License-Identifier: Apache-2.0
 *
 * JSONL files, plain and compressed: the form of the first row is detected and each row is read in it; then each line
 * is read in every form.
 */
#include "data/lines.h"
#include "fuzz.h"
#include "text/rows.h"

enum { LIMIT = 1 << 20 };

static void read_rows(const uint8_t *data, size_t n, rfi_row_form form) {
  rfr_ctx *ctx = rft_fuzz_ctx();
  rfi_lines *lines;
  rfi_row row;
  const bool detects = form == RFI_ROW_FORM_COUNT;
  rfr_status s = rfi_lines_open_bytes(ctx, "a.jsonl", data, n, LIMIT, &lines);
  for (int64_t line; s == RFR_OK;) {
    const char *text;
    size_t length;
    s = rfi_lines_next(lines, &text, &length, &line);
    if (s != RFR_OK || !text) break;
    if (rfi_row_is_blank(text, length)) continue;
    if (form == RFI_ROW_FORM_COUNT) s = rfi_row_detect("a.jsonl", line, text, length, &form);
    if (s != RFR_OK) break;
    s = rfi_row_read(ctx, form, "a.jsonl", line, text, length, &row);
    if (s == RFR_OK) {
      rft_fuzz_expect(row.text || row.completion || row.messages || row.chosen_messages, "a row without contents");
      rft_fuzz_expect(!row.messages || (size_t)row.n_prompt <= json_array_size(row.messages), "the prompt is too long");
    }
    rfi_row_deinit(ctx, &row);
    if (!detects && s != RFR_NO_MEMORY) {
      rft_fuzz_status(s);
      s = RFR_OK;
    }
  }
  rft_fuzz_status(s);
  rfi_lines_close(lines);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  read_rows(data, n, RFI_ROW_FORM_COUNT);
  for (int form = 0; form < RFI_ROW_FORM_COUNT && n > 0 && data[0] == '{'; form++)
    read_rows(data, n, (rfi_row_form)form);
  rft_fuzz_clean();
  return 0;
}
