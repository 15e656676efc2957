/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared by commands: reading and opening a configuration, bytes and times as text, and JSON.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cli.h"

/* ---- strings ---- */

void cli_string_add(const char *text, size_t n, void *user) {
  cli_string *s = user;
  if (s->n + n + 1 > s->capacity) {
    const size_t capacity = 2 * (s->n + n + 1);
    char *data = realloc(s->data, capacity);
    if (!data) {
      s->failed = true;
      return;
    }
    s->data = data;
    s->capacity = capacity;
  }
  memcpy(s->data + s->n, text, n);
  s->n += n;
  s->data[s->n] = '\0';
}

/* ---- files ---- */

rfr_status cli_read_file(const char *path, char **out) {
  enum { MOST = 1 << 24 };
  *out = NULL;
  FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
  if (!f) return cli_fail(RFR_IO, "check the path", "%s: %s", path, strerror(errno));
  char *text = malloc(MOST + 1);
  size_t n = text ? fread(text, 1, MOST + 1, f) : 0;
  const bool failed = !text || ferror(f) != 0;
  const int error = errno;
  if (f != stdin) fclose(f);
  if (!failed && n <= MOST && !memchr(text, 0, n)) {
    text[n] = '\0';
    *out = text;
    return RFR_OK;
  }
  free(text);
  if (failed) return cli_fail(RFR_IO, "check the path", "%s cannot be read: %s", path, strerror(error));
  return cli_usage("give a text file", "%s is larger than %d MiB or contains a NUL byte", path, MOST >> 20);
}

/* ---- the operand ---- */

static bool has_file(const char *folder, const char *name) {
  char path[4200];
  struct stat st;
  return snprintf(path, sizeof path, "%s/%s", folder, name) < (int)sizeof path && stat(path, &st) == 0;
}

/* A run's folder has a log, or at least a checkpoint. */
static bool is_run(const char *folder) {
  DIR *d = opendir(folder);
  bool found = false;
  for (const struct dirent *e; d && !found && (e = readdir(d));)
    found = strcmp(e->d_name, "log.jsonl") == 0 || strncmp(e->d_name, "step-", 5) == 0;
  if (d) closedir(d);
  return found;
}

static bool is_gguf(const char *path) {
  char magic[4] = "";
  const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* O_NONBLOCK: a pipe without a writer must not block */
  const bool is = fd >= 0 && pread(fd, magic, 4, 0) == 4 && memcmp(magic, "GGUF", 4) == 0;
  if (fd >= 0) close(fd);
  return is;
}

cli_operand cli_operand_kind(cli *c) {
  struct stat st;
  size_t n = strlen(c->operand);
  c->folder[0] = '\0';
  if (n >= sizeof c->folder || strcmp(c->operand, "-") == 0 || stat(c->operand, &st) != 0) return CLI_CONFIG;
  memcpy(c->folder, c->operand, n + 1);
  if (S_ISDIR(st.st_mode)) {
    while (n > 1 && c->folder[n - 1] == '/') c->folder[--n] = '\0';
    if (has_file(c->folder, "config.yaml")) return CLI_RUN;
    const bool model = has_file(c->folder, "config.json");
    c->folder[0] = '\0';
    return model ? CLI_MODEL : CLI_OTHER;
  }
  if (is_gguf(c->operand)) {
    c->folder[0] = '\0';
    return CLI_MODEL;
  }
  char *slash = strrchr(c->folder, '/');
  const bool named = strcmp(slash ? slash + 1 : c->folder, "config.yaml") == 0;
  if (slash) slash[slash == c->folder] = '\0';
  else strcpy(c->folder, ".");
  if (named && is_run(c->folder)) return CLI_RUN;
  c->folder[0] = '\0';
  return CLI_CONFIG;
}

rfr_status cli_run_folders(cli *c) {
  static const char name[] = "config.yaml";
  struct stat st;
  c->run_folders = calloc((size_t)c->n_operands, sizeof *c->run_folders);
  if (!c->run_folders) return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
  for (int i = 0; i < c->n_operands; i++) {
    const char *path = c->operands[i], *slash = strrchr(path, '/');
    if (strcmp(slash ? slash + 1 : path, name) != 0 || stat(path, &st) != 0 || !S_ISREG(st.st_mode)) continue;
    char *folder = c->run_folders[i] = strdup(slash ? path : ".");
    if (!folder) return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
    if (slash) folder[slash == path ? 1 : slash - path] = '\0';
    c->operands[i] = folder;
  }
  return RFR_OK;
}

rfr_status cli_refuse_hub_name(const cli *c) {
  static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-";
  static const char *const files[] = {".yaml", ".yml", ".json", ".jsonl", ".gguf", ".safetensors", ".txt"};
  struct stat st;
  const char *name = c->operand;
  if (!name || !cli_has_operand(cli_command_at(c->command), "MODEL") || stat(name, &st) == 0) return RFR_OK;
  if (name[0] == '.' || name[0] == '-') return RFR_OK;
  const size_t owner = strspn(name, plain);
  if (owner == 0 || name[owner] != '/' || !name[owner + 1] || name[owner + 1 + strspn(name + owner + 1, plain)])
    return RFR_OK;
  for (size_t i = 0; i < sizeof files / sizeof files[0]; i++) {
    const size_t n = strlen(name), k = strlen(files[i]);
    if (n > k && strcmp(name + n - k, files[i]) == 0) return RFR_OK;
  }
  char folder[512], help[1200];
  snprintf(folder, sizeof folder, "%.*s", (int)owner, name);
  if (stat(folder, &st) == 0 || strcmp(folder, "runs") == 0) return RFR_OK; /* the path is misspelt */
  snprintf(
      help, sizeof help,
      "if it is a model on the Hugging Face Hub: download it, `hf download %.200s --local-dir %.200s`, and give the "
      "folder; refrain fetches no models",
      name, name + owner + 1);
  return cli_fail(RFR_IO, help, "%s is neither a file nor a folder here", name);
}

/* The window is the model's maximum sequence length, or less: the window of a plan, or the context of a text. */
static rfr_status config_of_model(cli *c, char **out) {
  const bool writes = c->command == CLI_INDEX_generate || c->command == CLI_INDEX_chat;
  cli_string text = {0};
  const rfr_run_options o = cli_run_options(c);
  const rfr_status s = rfr_model_run_config(c->ctx, c->operand, writes ? 2048 : 512, &o, cli_string_add, &text);
  *out = text.data;
  return s == RFR_OK && text.failed ? RFR_NO_MEMORY : s;
}

rfr_status cli_read_config(cli *c, char **out) {
  const cli_operand kind = cli_operand_kind(c);
  *out = NULL;
  switch (kind) {
    case CLI_RUN: snprintf(c->config, sizeof c->config, "%s/config.yaml", c->folder); break;
    case CLI_MODEL:
      c->is_model = true;
      snprintf(c->config, sizeof c->config, "%s", c->operand);
      return config_of_model(c, out);
    case CLI_OTHER:
      return cli_fail(RFR_IO, "give a configuration, the folder of a run, a Hugging Face folder or a GGUF file",
                      "%s is a folder without config.yaml and without config.json", c->operand);
    default: snprintf(c->config, sizeof c->config, "%s", c->operand);
  }
  return cli_read_file(c->config, out);
}

rfr_status cli_find_weights(cli *c, char **config) {
  static const char help[] = "give the folder of a run, a Hugging Face folder or a GGUF file";
  struct stat st;
  const cli_operand kind = cli_operand_kind(c);
  *config = NULL;
  if (kind == CLI_MODEL) return cli_read_config(c, config);
  const bool checkpoint = has_file(c->operand, "MANIFEST.json") || has_file(c->operand, "adapter_config.json");
  if (kind == CLI_OTHER && !checkpoint)
    return cli_fail(RFR_IO, help, "%s is a folder without config.yaml and without config.json", c->operand);
  if (kind == CLI_CONFIG && stat(c->operand, &st) != 0)
    return cli_fail(RFR_IO, help, "%s: %s", c->operand, strerror(errno));
  if (c->folder[0]) c->operand = c->folder; /* the run of a config.yaml */
  return RFR_OK;
}

rfr_run_options cli_run_options(cli *c) {
  rfr_run_options o = rfr_run_options_default();
  const char *slash = strrchr(c->config, '/');
  if (c->config[0]) o.config_name = c->config;
  if (slash && !c->is_model && (size_t)(slash - c->config) < sizeof c->folder - 1) {
    snprintf(c->folder, sizeof c->folder, "%.*s", (int)(slash == c->config ? 1 : slash - c->config), c->config);
    o.config_folder = c->folder;
  }
  o.overrides = c->sets.items;
  o.n_overrides = c->sets.n;
  o.resume = c->resume;
  o.strict = c->strict;
  o.debug = c->debug;
  o.eager = c->eager;
  o.comm = c->comm;
  o.ema = c->ema;
  return o;
}

rfr_status cli_open_config(cli *c, const char *text, int program, bool keep_traces, rfr_event_fn on_event,
                           rfr_run **out) {
  rfr_run_options o = cli_run_options(c);
  o.on_event = on_event;
  o.event_user = c;
  o.plan_only = 1;
  if (program & RFR_RUN_GENERATE) o.programs = RFR_RUN_GENERATE; /* `generate` compiles these programs */
  o.keep_traces = keep_traces;
  return rfr_run_open(c->ctx, text, NULL, &o, out);
}

rfr_status cli_program(const cli *c, int *out) {
  static const struct {
    const char *name;
    int program;
  } names[] = {
#define PROGRAM_NAME(bit, name) {#name, RFR_RUN_##bit},
      RFR_RUN_PROGRAMS(PROGRAM_NAME)
#undef PROGRAM_NAME
  };
  *out = RFR_RUN_TRAIN;
  if (!c->program) return RFR_OK;
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
    if (strcmp(c->program, names[i].name) != 0) continue;
    *out = names[i].program;
    return RFR_OK;
  }
  return RFR_INVALID; /* the option table allows no other name */
}

void cli_write(const char *text, size_t n, void *user) {
  (void)user;
  fwrite(text, 1, n, stdout);
}

void cli_put_word(FILE *f, const char *word) {
  static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./:=,+@%-";
  if (*word && word[strspn(word, plain)] == '\0') {
    fputs(word, f);
    return;
  }
  fputc('\'', f);
  for (; *word; word++) {
    if (*word == '\'') fputs("'\\''", f);
    else fputc(*word, f);
  }
  fputc('\'', f);
}

void cli_put_xml(FILE *f, const char *text) {
  for (; *text; text++) {
    const unsigned char c = (unsigned char)*text;
    if (c == '<') fputs("&lt;", f);
    else if (c == '>') fputs("&gt;", f);
    else if (c == '&') fputs("&amp;", f);
    else fputc(c < 0x20 ? ' ' : c, f);
  }
}

const char *cli_bytes(char buf[32], int64_t bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double x = (double)bytes;
  int u = 0;
  while (fabs(x) >= 1024.0 && u < 4) x /= 1024.0, u++;
  snprintf(buf, 32, u == 0 ? "%.0f %s" : "%.1f %s", x, units[u]);
  return buf;
}

double cli_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Length of the UTF-8 sequence at s, 0 if there is none (RFC 3629: shortest form, no surrogates). */
static int utf8_length(const unsigned char *s) {
  const int n = s[0] < 0x80 ? 1 : s[0] >= 0xC2 && s[0] < 0xE0 ? 2 : s[0] >= 0xE0 && s[0] < 0xF0 ? 3 : 4;
  if (n == 1) return 1;
  if (s[0] < 0xC2 || s[0] > 0xF4) return 0;
  for (int i = 1; i < n; i++)
    if ((s[i] & 0xC0) != 0x80) return 0;
  if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F)) return 0;
  if ((s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F)) return 0;
  return n;
}

void cli_string_add_utf8(cli_string *s, const char *text, size_t n) {
  const char *const end = text + n;
  while (text < end) {
    const int length = utf8_length((const unsigned char *)text);
    if (length == 0) cli_string_add("\xEF\xBF\xBD", 3, s);
    else cli_string_add(text, (size_t)length, s);
    text += length == 0 ? 1 : length;
  }
}

/* Replaces each byte that is not part of UTF-8 text by U+FFFD, because a byte-level model may generate any byte. */
static void put_escaped(FILE *f, const char *s, size_t bytes) {
  const char *const end = s + bytes;
  fputc('"', f);
  while (s < end) {
    const unsigned char u = (unsigned char)*s;
    const int n = utf8_length((const unsigned char *)s);
    if (n == 0) fputs("\\ufffd", f);
    else if (u == '"' || u == '\\') fprintf(f, "\\%c", u);
    else if (u < 0x20) fprintf(f, "\\u%04x", u);
    else fwrite(s, 1, (size_t)n, f);
    s += n == 0 ? 1 : n;
  }
  fputc('"', f);
}

static void put_key(json *j, const char *key) {
  if (j->comma) fputs(", ", j->f);
  j->comma = true;
  if (!key) return;
  put_escaped(j->f, key, strlen(key));
  fputs(": ", j->f);
}

void json_begin(json *j, const char *key, char bracket) {
  put_key(j, key);
  fputc(bracket, j->f);
  j->comma = false;
}

void json_end(json *j, char bracket) {
  fputc(bracket, j->f);
  j->comma = true;
}

void json_text(json *j, const char *key, const char *value) { json_bytes(j, key, value, strlen(value)); }

void json_bytes(json *j, const char *key, const char *value, size_t n) {
  put_key(j, key);
  put_escaped(j->f, value, n);
}

void json_int(json *j, const char *key, int64_t value) {
  put_key(j, key);
  fprintf(j->f, "%lld", (long long)value);
}

void json_double(json *j, const char *key, double value) {
  put_key(j, key);
  /* the program never calls setlocale, so the decimal sign is a dot */
  if (isfinite(value)) fprintf(j->f, "%.9g", value);
  else fputs("null", j->f);
}

void json_bool(json *j, const char *key, bool value) {
  put_key(j, key);
  fputs(value ? "true" : "false", j->f);
}

void json_raw(json *j, const char *key, const char *value) {
  put_key(j, key);
  fputs(value, j->f);
}
