/* SPDX-License-Identifier: Apache-2.0
 *
 * What several commands need: reading a configuration, opening it, bytes and times for
 * people, and JSON.
 */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli.h"

rfr_status cli_read_file(const char *path, char **out) {
  enum { MOST = 1 << 24 }; /* of text that somebody wrote, or a program for a schedule */
  *out = NULL;
  FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "rb");
  if (!f) {
    cli_usage("check the path", "%s: %s", path, strerror(errno));
    return RFR_IO;
  }
  char *text = malloc(MOST + 1);
  size_t n = text ? fread(text, 1, MOST + 1, f) : 0;
  const bool failed = !text || ferror(f) != 0;
  const int error = errno;
  if (f != stdin) fclose(f);
  if (failed || n > MOST || memchr(text, 0, n)) {
    free(text);
    if (failed) {
      const char *help = error == EISDIR ? "give a file; a run's folder has its config.yaml" : "check the path";
      cli_usage(help, "%s cannot be read: %s", path, strerror(error));
      return RFR_IO;
    }
    return cli_usage("give a text", "%s is no text, or one of more than %d MiB", path, MOST >> 20);
  }
  text[n] = '\0';
  *out = text;
  return RFR_OK;
}

rfr_run_options cli_run_options(cli *c) {
  rfr_run_options o = rfr_run_options_default();
  const char *slash = c->operand ? strrchr(c->operand, '/') : NULL;
  o.config_name = c->operand;
  if (slash && (size_t)(slash - c->operand) < sizeof c->folder - 1) {
    snprintf(c->folder, sizeof c->folder, "%.*s", (int)(slash == c->operand ? 1 : slash - c->operand), c->operand);
    o.config_folder = c->folder;
  }
  o.overrides = c->sets;
  o.n_overrides = c->n_sets;
  o.resume = c->resume;
  o.strict = c->strict;
  o.debug = c->debug;
  o.eager = c->eager;
  return o;
}

rfr_status cli_open_config(cli *c, const char *name, const char *text, int program, bool keep_traces, rfr_run **out) {
  rfr_run_options o = cli_run_options(c);
  o.config_name = name;
  o.no_data = 1;
  if (program & RFR_RUN_GENERATE) o.programs = RFR_RUN_GENERATE; /* as the command compiles them */
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
  return cli_usage("give train, evaluate, prefill or decode", "there is no program %s", c->program);
}

void cli_write(const char *text, size_t n, void *user) {
  (void)user;
  fwrite(text, 1, n, stdout);
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

/* Bytes of the character at s, 0 if it is no UTF-8 (RFC 3629: shortest form, no surrogates). */
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

/* Bytes that are no text, as a model of bytes may write them, become U+FFFD each. */
static void put_escaped(FILE *f, const char *s) {
  fputc('"', f);
  for (int n; *s; s += n > 0 ? n : 1) {
    unsigned char u = (unsigned char)*s;
    n = utf8_length((const unsigned char *)s);
    if (n == 0) fputs("\\ufffd", f);
    else if (u == '"' || u == '\\') fprintf(f, "\\%c", u);
    else if (u < 0x20) fprintf(f, "\\u%04x", u);
    else fwrite(s, 1, (size_t)n, f);
  }
  fputc('"', f);
}

static void put_key(json *j, const char *key) {
  if (j->comma) fputs(", ", j->f);
  j->comma = true;
  if (!key) return;
  put_escaped(j->f, key);
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

void json_text(json *j, const char *key, const char *value) {
  put_key(j, key);
  put_escaped(j->f, value);
}

void json_int(json *j, const char *key, int64_t value) {
  put_key(j, key);
  fprintf(j->f, "%lld", (long long)value);
}

void json_double(json *j, const char *key, double value) {
  put_key(j, key);
  if (isfinite(value)) fprintf(j->f, "%.9g", value); /* the program never calls setlocale: the C locale's dot */
  else fputs("null", j->f);
}
