/* SPDX-License-Identifier: Apache-2.0
 *
 * Token files of nanoGPT, llm.c and Megatron: the ids of a file that is accepted lie inside it and can be read in any
 * piece; documents tile them. An input is a byte whose lowest bit chooses the width of ids without a header, two bytes
 * with the length of the index (0: no index), the index, and the file of ids.
 */
#include <string.h>

#include "data/token_file.h"
#include "fuzz.h"

enum { VOCAB = 50257, PREFIX = 3, MOST = 1 << 14 };

static void read_ids(const char *path, const rfi_token_file *t) {
  static int32_t all[MOST], one;
  rfi_file *file;
  if (t->tokens > MOST || rfi_file_open(rft_fuzz_ctx(), path, &file) != RFR_OK) return;
  const rfr_status s = rfi_token_file_read(file, t, 0, t->tokens, VOCAB, all);
  rft_fuzz_status(s);
  rft_fuzz_expect(s == RFR_OK || strcmp(rfr_last_error()->slug, "data.tokens") == 0, "ids outside the file");
  for (int64_t i = 0; i < t->tokens && s == RFR_OK; i += 1 + t->tokens / 3) {
    rft_fuzz_expect(all[i] >= 0 && all[i] < VOCAB, "an id outside the vocabulary");
    rft_fuzz_expect(rfi_token_file_read(file, t, i, 1, VOCAB, &one) == RFR_OK && one == all[i], "a piece differs");
  }
  rfi_file_close(file);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  char path[64];
  rfi_token_file t;
  if (n < PREFIX) return 0;
  const size_t left = n - PREFIX, length = (size_t)(data[1] | data[2] << 8), index = length < left ? length : left;
  rft_fuzz_put("t.idx", length ? data + PREFIX : NULL, index);
  rft_fuzz_put("t.bin", data + PREFIX + index, left - index);
  rfi_snprintf(path, sizeof path, "%s/t.bin", rft_fuzz_folder());
  const rfr_status s = rfi_token_file_inspect(rft_fuzz_ctx(), path, data[0] & 1 ? 4 : 2, &t);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    rft_fuzz_expect(t.tokens >= 0 && t.start + t.tokens * t.width == (int64_t)(left - index),
                    "ids do not fill the file");
    for (int64_t d = 0; d < t.documents; d++) rft_fuzz_expect(t.ends[d] > (d ? t.ends[d - 1] : 0), "an empty document");
    rft_fuzz_expect(!t.documents || t.ends[t.documents - 1] == t.tokens, "ids after the last document");
    read_ids(path, &t);
  }
  rfi_token_file_deinit(rft_fuzz_ctx(), &t);
  rft_fuzz_clean();
  return 0;
}
