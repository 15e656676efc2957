/* SPDX-License-Identifier: Apache-2.0 */
#include "model/source.h"

#include <string.h>

#include "data/file.h"
#include "data/gguf.h"
#include "data/json_file.h"
#include "model/gguf_model.h"

/* If the folder is a run, the error names its newest checkpoint. */
static rfr_status refuse_run(rfr_ctx *ctx, const char *folder, const char *config_path) {
  char kind;
  const char *newest = NULL;
  rfi_paths names = {.ctx = ctx};
  RFI_TRY(rfi_path_kind(config_path, &kind));
  if (kind || rfi_path_kind(folder, &kind) != RFR_OK || (kind != 'd' && kind != 'l')) return RFR_OK;
  rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; i < names.n; i++) {
    const char *number = strncmp(names.items[i], "step-", 5) == 0 ? names.items[i] + 5 : "x";
    if (!number[strspn(number, "0123456789")]) newest = names.items[i];
  }
  if (newest)
    s = rfi_fail(RFI_E_RUN_FOLDER, "model: %s is a run's folder, not a model's; give one of its checkpoints: %s/%s",
                 folder, folder, newest);
  rfi_paths_deinit(&names);
  return s;
}

rfr_status rfi_source_config(rfr_ctx *ctx, const char *model, char **path, json_t **out) {
  rfi_gguf *g = NULL;
  bool is_gguf;
  char kind;
  *path = NULL;
  *out = NULL;
  RFI_TRY(rfi_path_kind(model, &kind));
  if (!kind)
    return rfi_fail(RFI_E_FILE_OPEN,
                    "model: %s does not exist; models are not fetched: download the folder from the Hugging Face Hub "
                    "first, with `hf download NAME --local-dir FOLDER`",
                    model);
  RFI_TRY(rfi_gguf_is(ctx, model, &is_gguf));
  RFI_TRY(is_gguf ? rfi_path_join(ctx, "", model, path) : rfi_path_join(ctx, model, "config.json", path));
  if (!is_gguf) {
    RFI_TRY(refuse_run(ctx, model, *path));
    return rfi_json_load(ctx, *path, out);
  }
  RFI_TRY(rfi_gguf_open(ctx, model, &g));
  const rfr_status s = rfi_gguf_config(ctx, g, out);
  rfi_gguf_close(g);
  return s;
}
