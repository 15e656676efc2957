/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain check: the resolved configuration, each value with its source; or the files of one split of its data.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

static rfr_status list_files(cli *c, const char *config) {
  rfr_run *run = NULL;
  const bool validation = strcmp(c->files, "validation") == 0;
  rfr_run_options o = cli_run_options(c);
  o.programs = 0;
  o.on_event = warn;
  o.event_user = c;
  rfr_status s = rfr_run_open(c->ctx, config, NULL, &o, &run);
  if (s == RFR_OK && !rfr_run_data_file(run, validation, 0))
    s = cli_usage("set data.validation to a percentage, such as 10%, or to files", "data.validation holds out no file");
  json j = {.f = stdout};
  if (s == RFR_OK && c->json) json_begin(&j, NULL, '{'), json_begin(&j, "files", '[');
  for (int64_t i = 0; s == RFR_OK; i++) {
    const char *path = rfr_run_data_file(run, validation, i);
    if (!path) break;
    if (c->json) json_text(&j, NULL, path);
    else puts(path);
  }
  if (s == RFR_OK && c->json) json_end(&j, ']'), json_end(&j, '}'), putchar('\n');
  rfr_run_close(run);
  return s;
}

/* ---- JSON ---- */

/* A scalar without quotes. */
static void put_plain(json *j, const char *key, const char *s, size_t n) {
  char text[256], *end;
  snprintf(text, sizeof text, "%.*s", (int)n, s);
  const double number = strtod(text, &end);
  const bool is_number = n > 0 && n < sizeof text && *end == '\0' && strchr("-.0123456789", text[0]);
  if (strcmp(text, "true") == 0 || strcmp(text, "false") == 0) json_bool(j, key, text[0] == 't');
  else if (is_number && !strpbrk(text, ".eE")) json_int(j, key, strtoll(text, NULL, 10));
  else if (is_number) json_double(j, key, number);
  else json_text(j, key, text);
}

/* Prints one value as the library prints it: a list, a map, a string in quotes (escaped as in JSON) or a plain scalar.
 * Returns its end. */
static const char *put_value(json *j, const char *key, const char *s, bool nested) {
  if (*s == '[' || *s == '{') {
    const char open = *s++, close = open == '[' ? ']' : '}';
    char name[64];
    json_begin(j, key, open);
    while (*s && *s != close) {
      const size_t n = open == '{' ? strcspn(s, ":") : 0;
      snprintf(name, sizeof name, "%.*s", (int)n, s);
      if (open == '{' && s[n]) s += n + 1, s += strspn(s, " ");
      s = put_value(j, open == '{' ? name : NULL, s, true);
      s += strspn(s, ", ");
    }
    json_end(j, close);
    return s + (*s == close);
  }
  size_t n = 0;
  if (*s == '"') {
    for (n = 1; s[n] && s[n] != '"'; n++) n += s[n] == '\\' && s[n + 1];
    char *text = strndup(s, n += s[n] == '"');
    if (text) json_raw(j, key, text);
    free(text);
    return s + n;
  }
  while (s[n] && !(nested && strchr(",]}", s[n])) && strncmp(s + n, " # ", 3) != 0) n++;
  put_plain(j, key, s, n);
  return s + n;
}

typedef struct resolved {
  json j;
  char section[64];
  char *text;
  size_t n;
  bool failed;
} resolved;

static void collect(const char *text, size_t n, void *user) {
  resolved *r = user;
  char *grown = r->failed ? NULL : realloc(r->text, r->n + n + 1);
  if (!grown) {
    r->failed = true;
    return;
  }
  memcpy(grown + r->n, text, n);
  r->text = grown;
  r->n += n;
  r->text[r->n] = '\0';
}

/* One line of the resolved configuration: "section:", or "  key: VALUE # SOURCE". */
static void put_line(resolved *r, const char *line) {
  char name[160];
  const bool inner = line[0] == ' ';
  line += strspn(line, " ");
  const size_t n = strcspn(line, ":");
  const char *value = line + n;
  if (*value != ':') return;
  value += 1 + strspn(value + 1, " ");
  if (!*value) {
    snprintf(r->section, sizeof r->section, "%.*s.", (int)n, line);
    return;
  }
  snprintf(name, sizeof name, "%s%.*s", inner ? r->section : "", (int)n, line);
  json_begin(&r->j, name, '{');
  value = put_value(&r->j, "value", value, false);
  if (strncmp(value, " # ", 3) == 0) json_text(&r->j, "source", value + 3);
  json_end(&r->j, '}');
}

static rfr_status print_json(cli *c, const char *config, const rfr_run_options *o) {
  resolved r = {.j = {.f = stdout}};
  rfr_status s = rfr_config_resolve(c->ctx, config, o, 1, collect, &r);
  if (s == RFR_OK && r.failed) s = RFR_NO_MEMORY;
  if (s == RFR_OK) {
    json_begin(&r.j, NULL, '{');
    for (char *line = r.text, *next; line && *line; line = next) {
      next = line + strcspn(line, "\n");
      if (*next) *next++ = '\0';
      put_line(&r, line);
    }
    json_end(&r.j, '}');
    putchar('\n');
  }
  free(r.text);
  return s;
}

rfr_status cli_check(cli *c) {
  char *text = NULL;
  if (c->n_operands > 1 && c->files) return cli_usage("omit --files", "--files cannot be used with DATA");
  if (c->n_operands > 1) return cli_check_data(c);
  rfr_status s = cli_read_config(c, &text);
  if (s != RFR_OK) return s;
  rfr_run_options o = cli_run_options(c);
  o.on_event = warn;
  o.event_user = c;
  if (c->files) s = list_files(c, text);
  else if (c->json) s = print_json(c, text, &o);
  else s = rfr_config_resolve(c->ctx, text, &o, 1, cli_write, NULL);
  free(text);
  return s;
}
