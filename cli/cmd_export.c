/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain export: a run's newest checkpoint, or a model, in the format of another program.
 */
#include "cli.h"
#include "refrain/model.h"

rfr_status cli_export(cli *c) {
  rfr_export_options o = rfr_export_options_default();
  if (!c->out) return cli_usage("add --out PATH", "export needs the path of the output");
  if (!c->to) return cli_usage("add --to hf, --to gguf or --to peft", "export needs a format");
  o.format = c->to;
  o.dtype = c->dtype;
  const rfr_status s = rfr_export(c->ctx, c->operand, c->out, &o);
  if (s != RFR_OK) return s;
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
