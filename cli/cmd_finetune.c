/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain finetune: trains the configuration of rfr_finetune_config as `refrain train` does.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* The value of --set KEY=VALUE, NULL: not given. `key` ends with "=". */
static const char *find_set(const cli *c, const char *key) {
  const size_t n = strlen(key);
  const char *value = NULL;
  for (int i = 0; i < c->sets.n; i++)
    if (strncmp(c->sets.items[i], key, n) == 0) value = c->sets.items[i] + n;
  return value;
}

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

rfr_status cli_finetune_config(cli *c, char **out) {
  cli_string text = {0};
  snprintf(c->config, sizeof c->config, "finetune");
  rfr_run_options o = cli_run_options(c);
  o.on_event = warn;
  o.event_user = c;
  const rfr_status s =
      rfr_finetune_config(c->ctx, c->operand, c->operands + 1, c->n_operands - 1, &o, cli_string_add, &text);
  *out = text.data;
  return s == RFR_OK && text.failed ? RFR_NO_MEMORY : s;
}

/* Prints the commands that accept the run. */
static void print_next(const cli *c, const char *folder, bool adapter) {
  static const char *const uses[][3] = {{"chat with it", "chat", ""},
                                        {"evaluate it", "eval", ""},
                                        {"export the adapter for PEFT", "export", "peft"},
                                        {"merge it into the model", "export", "hf"},
                                        {"merge it into one file", "export", "gguf"}};
  char out[4300];
  const char *device = c->device ? c->device : "";
  puts("next:");
  for (size_t i = 0; i < sizeof uses / sizeof uses[0]; i++) {
    const char *to = uses[i][2];
    if (strcmp(to, "peft") == 0 && !adapter) continue;
    if (strcmp(uses[i][1], "eval") == 0 && !c->evaluated) continue; /* nothing is held out */
    printf("  refrain %s ", uses[i][1]);
    cli_put_word(stdout, folder);
    snprintf(out, sizeof out, strcmp(to, "gguf") == 0 ? "%s.gguf" : "%s-%s", folder, to);
    if (*to) printf(" --to %s --out ", to), cli_put_word(stdout, out);
    else if (*device) printf(" --device "), cli_put_word(stdout, device);
    printf("  # %s\n", !adapter && *to ? "export it" : uses[i][0]);
  }
}

rfr_status cli_finetune(cli *c) {
  char *text = NULL, folder[4200];
  if (c->out) snprintf(folder, sizeof folder, "%s", c->out);
  else cli_default_folder("runs", c->operands[1], folder, sizeof folder);
  rfr_status s = cli_finetune_config(c, &text);
  if (s == RFR_OK) s = cli_train_config(c, text, folder);
  const char *type = find_set(c, "adapter.type=");
  if (s == RFR_OK && !c->quiet && !c->json) print_next(c, folder, !type || strcmp(type, "none") != 0);
  free(text);
  return s;
}
