/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain export: a run's newest checkpoint, or a model, in the format of another program.
 */
#include <jansson.h>
#include <string.h>

#include "cli.h"
#include "refrain/model.h"

/* PEFT opens the base by the path in adapter_config.json, and cannot open a GGUF file. */
static void warn_of_gguf(cli *c) {
  char path[4300], line[4500];
  snprintf(path, sizeof path, "%s/adapter_config.json", c->out);
  json_t *config = json_load_file(path, 0, NULL);
  const char *base = json_string_value(json_object_get(config, "base_model_name_or_path"));
  const size_t n = base ? strlen(base) : 0;
  if (n > 5 && strcmp(base + n - 5, ".gguf") == 0) {
    snprintf(line, sizeof line,
             "%s names the GGUF file %.2000s as its base, which PEFT cannot open: set base_model_name_or_path to the "
             "Hugging Face folder or name of the same model",
             path, base);
    cli_warn(c, line);
  }
  json_decref(config);
}

rfr_status cli_export(cli *c) {
  rfr_export_options o = rfr_export_options_default();
  if (!c->out) return cli_usage("add --out PATH", "export needs the path of the output");
  if (!c->to) return cli_usage("add --to hf, --to gguf or --to peft", "export needs a format");
  o.format = c->to;
  o.dtype = c->dtype;
  o.ema = c->ema;
  const rfr_status s = rfr_export(c->ctx, c->operand, c->out, &o);
  if (s != RFR_OK) return s;
  if (strcmp(c->to, "peft") == 0) warn_of_gguf(c);
  json j = {.f = stdout};
  if (c->json) {
    json_begin(&j, NULL, '{');
    json_text(&j, "out", c->out);
    json_end(&j, '}');
    putchar('\n');
  } else if (!c->quiet) {
    printf("%s\n", c->out);
  }
  return RFR_OK;
}
