/* SPDX-License-Identifier: Apache-2.0 */
#include "text/model_file.h"

#include "text/gguf_tokenizer.h"

rfr_status rfi_model_has_files(rfr_ctx *ctx, const char *path, bool *has) {
  char kind;
  *has = false;
  RFI_TRY(rfi_path_kind(path, &kind));
  if (kind == 'f') return rfi_gguf_is(ctx, path, has);
  *has = kind == 'd' || kind == 'l';
  return RFR_OK;
}

rfr_status rfi_model_file(rfr_ctx *ctx, const char *model, const char *name, int64_t limit, char **data, size_t *n) {
  bool is_gguf;
  char *path = NULL, kind = 0;
  rfi_gguf *g = NULL;
  *data = NULL;
  *n = 0;
  RFI_TRY(rfi_gguf_is(ctx, model, &is_gguf));
  if (is_gguf) {
    RFI_TRY(rfi_gguf_open(ctx, model, &g));
    const rfr_status s = rfi_gguf_text_file(ctx, g, name, data, n);
    rfi_gguf_close(g);
    return s;
  }
  RFI_TRY(rfi_path_join(ctx, model, name, &path));
  rfr_status s = rfi_path_kind(path, &kind);
  if (s == RFR_OK && kind) s = rfi_file_read_limited(ctx, path, limit, data, n);
  rfi_free(ctx, path);
  return s;
}
