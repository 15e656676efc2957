/* SPDX-License-Identifier: Apache-2.0
 *
 * A checkpoint's manifest, in a folder with one file "a" that contains "hello": whatever the manifest has, no file
 * outside the folder is named.
 */
#include <string.h>

#include "data/checkpoint.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  rfi_checkpoint *c;
  rft_fuzz_put("a", "hello", 5);
  rft_fuzz_put("MANIFEST.json", data, n);
  rfr_status s = rfi_checkpoint_open(rft_fuzz_ctx(), NULL, rft_fuzz_folder(), &c);
  rft_fuzz_status(s);
  if (s == RFR_OK) {
    rft_fuzz_expect(c->step >= 0, "a negative step");
    for (int i = 0; i < c->files.n; i++) {
      char *path;
      rft_fuzz_expect(strchr(c->files.items[i], '/') == NULL, "a file elsewhere");
      rft_fuzz_expect(rfi_checkpoint_path(c, c->files.items[i], &path) == RFR_OK, "no path");
      rfi_free(rft_fuzz_ctx(), path);
    }
  }
  rfi_checkpoint_close(c);
  rft_fuzz_clean();
  return 0;
}
