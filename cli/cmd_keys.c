/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain keys: the table of configuration keys, or of those that contain a word.
 */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cli.h"

/* Whether `text` contains `word`, ignoring case. */
static bool contains(const char *text, const char *word) {
  const size_t n = strlen(word);
  for (; *text; text++)
    if (strncasecmp(text, word, n) == 0) return true;
  return n == 0;
}

static bool is_wanted(const rfr_config_key *key, const char *word) {
  return !word || contains(key->name, word) || contains(key->meaning, word) || contains(key->accepted, word);
}

/* The last name of a key, as "lr" of "optimizer.lr". */
static const char *last_name(int i) {
  rfr_config_key key;
  if (rfr_config_key_at(i, &key) != RFR_OK) return NULL;
  const char *dot = strrchr(key.name, '.');
  return dot ? dot + 1 : key.name;
}

static void print_text(const rfr_config_key *key) {
  printf("%s\n    %s; default %s", key->name, key->type, *key->initial ? key->initial : "none");
  if (*key->accepted) printf("; %s", key->accepted);
  printf("\n    ");
  cli_put_wrapped(stdout, key->meaning, 4, 4);
}

static void print_json(json *j, const rfr_config_key *key) {
  json_begin(j, NULL, '{');
  json_text(j, "name", key->name);
  json_text(j, "type", key->type);
  json_text(j, "default", key->initial);
  json_text(j, "accepted", key->accepted);
  json_text(j, "meaning", key->meaning);
  json_bool(j, "resume_may_change", key->may_change);
  json_end(j, '}');
}

rfr_status cli_keys(cli *c) {
  rfr_config_key key;
  json j = {.f = stdout};
  int n = 0, found = 0;
  for (; rfr_config_key_at(n, &key) == RFR_OK; n++) found += is_wanted(&key, c->operand);
  if (found == 0) {
    char help[160] = "refrain keys lists them all";
    cli_suggest(c->operand, last_name, n, help, sizeof help);
    return cli_usage(help, "no configuration key contains \"%s\"", c->operand);
  }
  if (c->json) json_begin(&j, NULL, '{'), json_begin(&j, "keys", '[');
  for (int i = 0; rfr_config_key_at(i, &key) == RFR_OK; i++) {
    if (!is_wanted(&key, c->operand)) continue;
    if (c->json) print_json(&j, &key);
    else print_text(&key);
  }
  if (c->json) json_end(&j, ']'), json_end(&j, '}'), putchar('\n');
  return RFR_OK;
}
