/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line: the parser and the errors. A command refuses an option that is not in its own list. An unknown
 * option or command is answered with the nearest known one.
 */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

/* ---- errors ---- */

/* Set when the command line is read, because usage errors are printed before struct cli is complete. */
static bool errors_as_json, error_printed;
static int rank_of_process = -1;

void cli_set_rank(int rank) { rank_of_process = rank; }

void cli_print_error(const rfr_error *e) {
  error_printed = true;
  if (errors_as_json) {
    char text[RFR_ERROR_JSON_BYTES];
    rfr_error_json(e, text, sizeof text);
    if (rank_of_process >= 0) fprintf(stderr, "%.*s" JSON_RANK "%d}\n", (int)strlen(text) - 1, text, rank_of_process);
    else fprintf(stderr, "%s\n", text);
    return;
  }
  if (e->status == RFR_STOPPED) fprintf(stderr, "%s\n", e->message);
  else fprintf(stderr, strcmp(e->slug, "usage") == 0 ? "error: %s\n" : "error: %s [%s]\n", e->message, e->slug);
  if (*e->next) fprintf(stderr, "help: %s\n", e->next);
}

static rfr_status fail(rfr_status status, const char *help, const char *format, va_list args) {
  char message[2048];
  vsnprintf(message, sizeof message, format, args);
  cli_print_error(&(rfr_error){.status = status, .slug = "usage", .message = message, .next = help, .file = ""});
  return status;
}

rfr_status cli_fail(rfr_status status, const char *help, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fail(status, help, format, args);
  va_end(args);
  return status;
}

rfr_status cli_usage(const char *help, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fail(RFR_INVALID, help, format, args);
  va_end(args);
  return RFR_INVALID;
}

rfr_status cli_cannot_write(const char *path) {
  return cli_fail(RFR_IO, "check the path and the free space", "%s cannot be written: %s", path, strerror(errno));
}

bool cli_has_ranks(const cli *c) { return c->launch.ranks > 1; }

/* Whether every rank has the same error: one that they agreed on, or one that follows from numbers equal on all
 * ranks. */
bool cli_prints_error(const cli *c, const rfr_error *e) {
  static const char *const common[] = {"dist.run", "run.diverged", "adapter.gradient"};
  int rank;
  char colon = 0;
  if (c->launch.rank == 0) return true;
  for (size_t i = 0; i < sizeof common / sizeof *common; i++)
    if (strcmp(e->slug, common[i]) == 0) return false;
  return e->status != RFR_STOPPED && !(sscanf(e->message, "rank %d%c", &rank, &colon) == 2 && colon == ':');
}

void cli_report_error(const cli *c, rfr_status status) {
  if (status == RFR_OK || error_printed) return;
  char help[64];
  rfr_error e = *rfr_last_error();
  snprintf(help, sizeof help, "refrain %s --help explains the options", cli_command_name(c->command));
  if (!cli_prints_error(c, &e)) return;
  char own[2200];
  if (cli_has_ranks(c) && e.status == status && strncmp(e.message, "rank ", 5) != 0)
    snprintf(own, sizeof own, "rank %d: %s", c->launch.rank, e.message), e.message = own;
  if (strcmp(e.slug, "argument") == 0) e.next = help; /* the option names become the arguments of a library call */
  if (e.status == status) cli_print_error(&e);
  else cli_fail(status, status == RFR_NO_MEMORY ? "free some memory" : "", "%s", rfr_status_name(status));
}

/* ---- the nearest name ---- */

/* Edit distance of two short words: insertions, deletions, replacements. */
static int distance(const char *a, const char *b) {
  enum { MOST = 32 };
  int row[MOST + 1];
  const int n = (int)strlen(a), m = (int)strlen(b);
  if (n > MOST || m > MOST) return MOST;
  for (int j = 0; j <= m; j++) row[j] = j;
  for (int i = 1; i <= n; i++) {
    int corner = row[0];
    row[0] = i;
    for (int j = 1; j <= m; j++) {
      int best = corner + (a[i - 1] != b[j - 1]);
      if (row[j] + 1 < best) best = row[j] + 1;
      if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
      corner = row[j];
      row[j] = best;
    }
  }
  return row[m];
}

/* Finds the names nearest to a word. A name that begins with the word, or with which the word begins, is nearer than
 * any other. Otherwise edits count: at most two, and fewer than the word has letters. */
typedef struct nearest {
  const char *word, *names[5]; /* n of them; or too many */
  int n, least;
} nearest;

enum { MOST_EDITS = 2 };

static int score(const char *word, const char *name) {
  const size_t n = strlen(word), m = strlen(name), both = n < m ? n : m;
  if (both >= 2 && strncmp(word, name, both) == 0) return 0;
  const int edits = distance(word, name);
  return edits < (int)n ? edits : MOST_EDITS + 1;
}

static void consider(nearest *x, const char *name) {
  const int MOST = sizeof x->names / sizeof *x->names, d = name ? score(x->word, name) : x->least + 1;
  if (d > x->least) return;
  if (d < x->least) x->n = 0, x->least = d;
  for (int i = 0; i < x->n; i++)
    if (strcmp(x->names[i], name) == 0) return;
  if (x->n < MOST) x->names[x->n++] = name;
}

/* Leaves `help` unchanged if there is no such name, or too many. */
static void suggest(const nearest *x, const char *dashes, char *help, size_t size) {
  size_t at = 0;
  if (x->n == 0 || x->n == sizeof x->names / sizeof *x->names) return;
  for (int i = 0; i < x->n && at < size; i++) {
    const char *before = i == 0 ? "did you mean " : i + 1 == x->n ? " or " : ", ";
    at += (size_t)snprintf(help + at, size - at, "%s%s%s%s", before, dashes, x->names[i], i + 1 == x->n ? "?" : "");
  }
}

void cli_suggest(const char *word, const char *(*name)(int i), int n, char *help, size_t size) {
  nearest x = {.word = word, .least = MOST_EDITS};
  for (int i = 0; i < n; i++) consider(&x, name(i));
  suggest(&x, "", help, size);
}

/* ---- parsing ---- */

/* cuda:N is a device too. */
static bool is_choice(const cli_option *o, const char *value) {
  const size_t n = strlen(value);
  for (const char *c = o->choices + strspn(o->choices, " "); *c; c += strcspn(c, " "), c += strspn(c, " "))
    if (strcspn(c, " ") == n && strncmp(c, value, n) == 0) return true;
  return o->offset == offsetof(cli, device);
}

static rfr_status refuse_choice(const cli_option *o, const char *value) {
  char help[256], words[256], *rest = words, *save;
  nearest x = {.word = value, .least = MOST_EDITS};
  snprintf(help, sizeof help, "choose from: %s", o->choices + strspn(o->choices, " "));
  snprintf(words, sizeof words, "%s", o->choices);
  for (const char *c; (c = strtok_r(rest, " ", &save)); rest = NULL) consider(&x, c);
  suggest(&x, "", help, sizeof help);
  return cli_usage(help, "--%s: unknown value \"%s\"", o->name, value);
}

static rfr_status store(cli *c, const cli_option *o, const char *value) {
  void *field = (char *)c + o->offset;
  char *end;
  errno = 0;
  switch (o->kind) {
    case CLI_FLAG: *(bool *)field = true; return RFR_OK;
    case CLI_TEXT:
      if (o->choices && !is_choice(o, value)) return refuse_choice(o, value);
      *(const char **)field = value;
      return RFR_OK;
    case CLI_LIST: {
      cli_list *list = field;
      list->items[list->n++] = value;
      return RFR_OK;
    }
    case CLI_INTEGER: {
      long long x = strtoll(value, &end, 10);
      if (*value == '\0' || *end != '\0' || errno != 0 || x < 0)
        return cli_usage("give a whole number, 0 or more", "--%s: \"%s\" is not a number", o->name, value);
      *(int64_t *)field = x;
      return RFR_OK;
    }
    default: {
      double x = strtod(value, &end);
      if (*value == '\0' || *end != '\0' || !(x >= 0.0 && x < 1e30))
        return cli_usage("give a number, 0 or more", "--%s: \"%s\" is not a number", o->name, value);
      *(double *)field = x;
      return RFR_OK;
    }
  }
}

static rfr_status take_option(int argc, char **argv, int *i, cli *c) {
  char name[40];
  const char *word = argv[*i] + 2, *equals = strchr(word, '=');
  const cli_command *cmd = cli_command_at(c->command);
  char help[160];
  snprintf(help, sizeof help, "refrain %s --help lists the options", cmd->name);
  snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - word) : (int)strlen(word), word);
  for (const cli_option *o = cmd->options; o->name; o++) {
    if (strcmp(o->name, name) != 0) continue;
    const char *value = equals ? equals + 1 : NULL;
    if (o->kind == CLI_FLAG && value) return cli_usage(help, "--%s takes no value", name);
    if (o->kind != CLI_FLAG && !value) {
      if (*i + 1 >= argc) return cli_usage(help, "--%s needs %s", name, o->argument);
      value = argv[++*i];
    }
    return store(c, o, value);
  }
  nearest x = {.word = name, .least = MOST_EDITS};
  for (const cli_option *o = cmd->options; o->name; o++) consider(&x, o->name);
  suggest(&x, "--", help, sizeof help);
  return cli_usage(help, "refrain %s has no option --%s", cmd->name, name);
}

static rfr_status find_command(const char *word, int *out) {
  for (*out = 0; *out < CLI_COMMAND_COUNT; ++*out)
    if (strcmp(word, cli_command_name(*out)) == 0) return RFR_OK;
  char help[128] = "refrain --help lists the commands";
  cli_suggest(word, cli_command_name, CLI_COMMAND_COUNT, help, sizeof help);
  *out = -1;
  return cli_usage(help, "there is no command %s", word);
}

static bool asks_for_json(int argc, char **argv) {
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    if (strcmp(argv[i], "--json") == 0) return true;
  return false;
}

/* The words that may follow --version, help and --help: at most one command, and --json. */
static rfr_status parse_help(int argc, char **argv, cli *c) {
  for (int i = 2; i < argc; i++) {
    if (strcmp(argv[i], "--json") == 0) {
      c->json = true;
    } else if (c->version || c->command >= 0 || argv[i][0] == '-') {
      return cli_usage("omit it", "unexpected argument %s", argv[i]);
    } else {
      const rfr_status s = find_command(argv[i], &c->command);
      if (s != RFR_OK) return s;
    }
  }
  return RFR_OK;
}

rfr_status cli_parse(int argc, char **argv, cli *c) {
  memset(c, 0, sizeof *c);
  c->command = -1;
  c->tokens = 256;
  c->temperature = 0.8;
  c->top_p = 1.0;
  c->penalty = 1.0;
  c->vocab = 32768;
  c->jobs = 1;
  c->min_frequency = 2;
  c->threads = -1;
  c->launch.ranks = 1;
  c->launch.launcher = "";
  c->sets.items = calloc((size_t)argc, sizeof *c->sets.items);
  c->stops.items = calloc((size_t)argc, sizeof *c->stops.items);
  c->specials.items = calloc((size_t)argc, sizeof *c->specials.items);
  c->operands = calloc((size_t)argc, sizeof *c->operands);
  errors_as_json = asks_for_json(argc, argv); /* so that errors before --json are printed as JSON too */
  if (!c->sets.items || !c->stops.items || !c->specials.items || !c->operands)
    return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
  if (argc < 2) return cli_usage("refrain --help lists the commands", "a command is missing");
  c->help = strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0;
  c->version = strcmp(argv[1], "--version") == 0;
  if (c->help || c->version) return parse_help(argc, argv, c);
  rfr_status s = find_command(argv[1], &c->command);
  if (s != RFR_OK) return s;
  const cli_command *cmd = cli_command_at(c->command);
  char help[64];
  snprintf(help, sizeof help, "refrain %s --help explains the command", cmd->name);
  bool options_end = false;
  for (int i = 2; i < argc; i++) {
    if (!options_end && strcmp(argv[i], "--") == 0) {
      options_end = true;
    } else if (!options_end && strcmp(argv[i], "-h") == 0) {
      c->help = true;
    } else if (!options_end && argv[i][0] == '-' && argv[i][1] == '-') {
      s = take_option(argc, argv, &i, c);
      if (s != RFR_OK) return s;
    } else if (!options_end && argv[i][0] == '-' && argv[i][1] != '\0') {
      return cli_usage("options are written out, as --quiet", "there is no option %s", argv[i]);
    } else {
      if (c->n_operands == cmd->most)
        return cli_usage("quote a name that contains spaces", "unexpected argument %s", argv[i]);
      c->operands[c->n_operands++] = argv[i];
    }
  }
  c->operand = c->operands[0];
  if (!c->help && c->n_operands < cmd->least) return cli_usage(help, "refrain %s needs %s", cmd->name, cmd->operands);
  return RFR_OK;
}

void cli_deinit(cli *c) {
  free(c->sets.items);
  free(c->stops.items);
  free(c->specials.items);
  for (int i = 0; c->run_folders && i < c->n_operands; i++) free(c->run_folders[i]);
  free(c->run_folders);
  free(c->operands);
}
