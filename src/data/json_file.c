/* SPDX-License-Identifier: Apache-2.0 */
#include "data/json_file.h"

rfr_status rfi_json_load(rfr_ctx *ctx, const char *path, json_t **out) {
  char *text;
  size_t n;
  *out = NULL;
  RFI_TRY(rfi_file_read_limited(ctx, path, RFI_JSON_LIMIT, &text, &n));
  rfr_status s = rfi_json_parse(path, text, n, out);
  rfi_free(ctx, text);
  return s;
}
