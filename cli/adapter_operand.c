/* SPDX-License-Identifier: Apache-2.0
 *
 * An adapter's folder given as MODEL: the command gets the base that adapter_config.json names, as in PEFT. Commands
 * that read adapters themselves keep the folder.
 */
#include <jansson.h>
#include <string.h>
#include <sys/stat.h>

#include "cli.h"

static bool exists(const char *folder, const char *name) {
  char path[4400];
  struct stat st;
  return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path && stat(path, &st) == 0;
}

/* A checkpoint of a run is opened through its run. */
static bool is_adapter(const char *folder) {
  return exists(folder, "adapter_config.json") && !exists(folder, "config.yaml") && !exists(folder, "config.json") &&
         !exists(folder, "MANIFEST.json");
}

/* The base that adapter_config.json names; "": none. */
static void read_base(cli *c) {
  char path[4400];
  snprintf(path, sizeof path, "%s/adapter_config.json", c->operand);
  json_t *config = json_load_file(path, 0, NULL);
  const char *base = json_string_value(json_object_get(config, "base_model_name_or_path"));
  snprintf(c->base, sizeof c->base, "%s", base && strlen(base) < sizeof c->base ? base : "");
  json_decref(config);
}

rfr_status cli_take_adapter(cli *c) {
  static const char key[] = "adapter.from=";
  struct stat st;
  const bool reads =
      c->command == CLI_INDEX_export || c->command == CLI_INDEX_inspect || c->command == CLI_INDEX_tokenize;
  if (!c->operand || reads || !cli_has_operand(cli_command_at(c->command), "MODEL") || !is_adapter(c->operand))
    return RFR_OK;
  if (snprintf(c->adapter, sizeof c->adapter, "%s%s", key, c->operand) >= (int)sizeof c->adapter) return RFR_OK;
  read_base(c);
  if (!*c->base || stat(c->base, &st) != 0) {
    char help[4600];
    snprintf(help, sizeof help, "give the folder of its base, with --set %s", c->adapter);
    return cli_fail(RFR_IO, help, "%s is an adapter whose base \"%.500s\" is neither a file nor a folder here",
                    c->operand, c->base);
  }
  c->operand = c->base;
  /* there is space: the array has an entry per argument, and this argument was an operand */
  c->sets.items[c->sets.n++] = c->adapter;
  return RFR_OK;
}
