/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors: the tensors of a file that opens lie inside it, tile it, and can be read.
 */
#include "data/safetensors.h"
#include "fuzz.h"

static void read_tensor(rfi_safetensors *st, const rfi_stored *t) {
  void *data = NULL;
  if (RFI_ALLOC(rft_fuzz_ctx(), (size_t)t->bytes + 1, &data) == RFR_OK) {
    rft_fuzz_expect(rfi_safetensors_read(st, t, data, (size_t)t->bytes) == RFR_OK, "a tensor cannot be read");
    rft_fuzz_expect(rfi_safetensors_read(st, t, data, (size_t)t->bytes + 1) != RFR_OK, "too much was read");
    rfi_free(rft_fuzz_ctx(), data);
  }
  data = NULL;
  if (RFI_ALLOC(rft_fuzz_ctx(), (size_t)t->elements * sizeof(float) + 1, &data) != RFR_OK) return;
  rft_fuzz_status(rfi_safetensors_read_as(st, t, RFR_F32, data, t->elements));
  rfi_free(rft_fuzz_ctx(), data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_safetensors *st;
  rfr_status s = rfi_safetensors_open(rft_fuzz_ctx(), rft_fuzz_file(data, n), &st);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    int64_t at = -1;
    for (int i = 0; i < rfi_safetensors_count(st); i++) {
      const rfi_stored *t = rfi_safetensors_at(st, i);
      rft_fuzz_expect(t->bytes >= 0 && t->elements >= 0 && (at < 0 || t->offset == at), "the tensors do not tile");
      at = t->offset + t->bytes;
      rft_fuzz_expect(rfi_safetensors_find(st, t->name) == t, "a name finds another tensor");
      read_tensor(st, t);
    }
    rft_fuzz_expect(at < 0 || at == (int64_t)n, "the tensors do not end with the file");
  }
  rfi_safetensors_close(st);
  rft_fuzz_clean();
  return 0;
}
