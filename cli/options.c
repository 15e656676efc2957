/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line: one table of options says which commands take each, how it is read
 * and what the help says. An unknown option or command is answered with the nearest one.
 */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct command {
  const char *name, *operands, *summary;
  int least, most;
} command;
static const command commands[CLI_COMMAND_COUNT] = {
#define CLI_ROW(name, operands, least, most, summary) {#name, operands, summary, least, most},
    CLI_COMMANDS(CLI_ROW)
#undef CLI_ROW
};

enum { FLAG, TEXT, INTEGER, NUMBER, LIST };
#define ON(name) (1u << CLI_INDEX_##name)
#define ALL_COMMANDS (~0u)
#define ON_A_DEVICE (ALL_COMMANDS & ~ON(schedule))
#define CONFIGURED (ON(train) | ON(check) | ON(trace) | ON(plan))

static const struct option {
  const char *name, *argument;
  int kind;
  size_t offset;
  unsigned commands;
  const char *help;
} options[] = {
    {"set", "KEY=VALUE", LIST, 0, CONFIGURED | ON(bench) | ON(profile) | ON(eval),
     "change one configuration value, as model.hidden_size=256"},
    {"dtype", "TYPE", TEXT, offsetof(cli, dtype), ON(bench) | ON(profile), "f32, bf16 or auto: precision.dtype (auto)"},
    {"out", "FOLDER", TEXT, offsetof(cli, out), ON(train), "the run's folder"},
    {"resume", NULL, FLAG, offsetof(cli, resume), ON(train), "continue from the newest checkpoint of the run's folder"},
    {"strict", NULL, FLAG, offsetof(cli, strict), ON(train), "refuse to resume where bits may differ"},
    {"debug", NULL, FLAG, offsetof(cli, debug), ON(train), "guarded memory and a NaN check after every op; slow"},
    {"eager", NULL, FLAG, offsetof(cli, eager), ON(train) | ON(bench),
     "run op by op instead of replaying; the same bits"},
    {"prompt", "TEXT", TEXT, offsetof(cli, prompt), ON(generate), "text to continue"},
    {"tokens", "N", INTEGER, offsetof(cli, tokens), ON(generate), "tokens to append (256)"},
    {"temperature", "X", NUMBER, offsetof(cli, temperature), ON(generate), "0: always the most probable token (0.8)"},
    {"top-k", "K", INTEGER, offsetof(cli, top_k), ON(generate), "draw among the K most probable; 0: all (0)"},
    {"top-p", "P", NUMBER, offsetof(cli, top_p), ON(generate),
     "draw among the most probable that sum to P, above 0 (1)"},
    {"seed", "N", INTEGER, offsetof(cli, seed), ON(generate), "of the draws (0)"},
    {"after", "PASS", TEXT, offsetof(cli, after), ON(trace),
     "record, autodiff, prune, fuse, recompute or lower (lower)"},
    {"phase", "PHASE", TEXT, offsetof(cli, phase), ON(trace), "load, setup, forward, dgrad, wgrad or optim alone"},
    {"program", "NAME", TEXT, offsetof(cli, program), ON(trace) | ON(plan),
     "train, evaluate, prefill or decode (train)"},
    {"diff", NULL, FLAG, offsetof(cli, diff), ON(trace), "what the pass changed"},
    {"flat", NULL, FLAG, offsetof(cli, flat), ON(trace), "the form that can be read back"},
    {"all", NULL, FLAG, offsetof(cli, all), ON(plan), "every buffer on its own line"},
    {"frontier", NULL, FLAG, offsetof(cli, frontier), ON(plan),
     "memory against the work of recomputing, for any budget"},
    {"svg", "FILE", TEXT, offsetof(cli, svg), ON(plan) | ON(schedule), "draw it; - is standard output"},
    {"kind", "KIND", TEXT, offsetof(cli, kind), ON(schedule), "gpipe, 1f1b, interleaved, zb-h1 or zb-v"},
    {"stages", "P", INTEGER, offsetof(cli, stages), ON(schedule), "ranks of the pipeline, for --kind"},
    {"microbatches", "M", INTEGER, offsetof(cli, microbatches), ON(schedule), "for --kind"},
    {"chunks", "V", INTEGER, offsetof(cli, chunks), ON(schedule),
     "stages of each rank; 0: 2 for interleaved and zb-v, else 1 (0)"},
    {"group", "G", INTEGER, offsetof(cli, group), ON(schedule),
     "microbatches that go to a chunk before the next has its turn; 0: P (0)"},
    {"order", "LIST", TEXT, offsetof(cli, order), ON(schedule),
     "an order list instead, as 1,2,-2,-1; a ; begins the next rank's"},
    {"layers", "COUNTS", TEXT, offsetof(cli, layers), ON(schedule), "of each chunk of --order, as 3,2, or of all"},
    {"file", "FILE", TEXT, offsetof(cli, file), ON(schedule),
     "actions instead, as 0F0 0B0, a line for each rank; - is standard input"},
    {"costs", "FILE", TEXT, offsetof(cli, costs), ON(schedule), "seconds and bytes of stages, JSON or CSV"},
    {"communication", NULL, FLAG, offsetof(cli, communication), ON(schedule), "show sends and receives"},
    {"files", "SPLIT", TEXT, offsetof(cli, files), ON(check), "list the files of train or validation instead"},
    {"steps", "N", INTEGER, offsetof(cli, steps), ON(bench) | ON(profile),
     "steps, or compilations, to time; 0: as many as usual (0)"},
    {"trace", "FILE", TEXT, offsetof(cli, trace), ON(profile), "write a step's ops as JSON for Perfetto or Chrome"},
    {"device", "NAME", TEXT, offsetof(cli, device), ON_A_DEVICE,
     "cpu, cuda, cuda:N, or auto: a GPU if there is one (REFRAIN_DEVICE, or cpu)"},
    {"threads", "N", INTEGER, offsetof(cli, threads), ON_A_DEVICE,
     "threads; 0: the cores this process may use (REFRAIN_THREADS, or 0)"},
    {"json", NULL, FLAG, offsetof(cli, json), ALL_COMMANDS & ~(ON(check) | ON(trace)), "print one JSON object"},
    {"quiet", NULL, FLAG, offsetof(cli, quiet), ALL_COMMANDS, "no progress"},
    {"help", NULL, FLAG, offsetof(cli, help), ALL_COMMANDS, "this text"},
};
enum { N_OPTIONS = sizeof options / sizeof options[0] };

rfr_status cli_usage(const char *help, const char *format, ...) {
  va_list args;
  va_start(args, format);
  fputs("error: ", stderr);
  vfprintf(stderr, format, args);
  fprintf(stderr, "\nhelp: %s\n", help);
  va_end(args);
  return RFR_INVALID;
}

/* Edits between two short words: insertions, deletions, replacements. */
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

const char *cli_nearest(const char *word, const char *(*name)(int i), int n) {
  const char *best = NULL;
  int least = 3;
  for (int i = 0; i < n; i++) {
    const char *other = name(i);
    int d = other ? distance(word, other) : least;
    if (d < least) least = d, best = other;
  }
  return best;
}

const char *cli_command_name(int command) { return commands[command].name; }

static const char *nearest_option(const char *word, int command) {
  const char *best = NULL;
  int least = 3;
  for (int i = 0; i < N_OPTIONS; i++) {
    if (!(options[i].commands >> command & 1)) continue;
    int d = distance(word, options[i].name);
    if (d < least) least = d, best = options[i].name;
  }
  return best;
}

void cli_print_help(FILE *f, int command) {
  if (command < 0) {
    fputs("usage: refrain COMMAND [OPTIONS]\n\nTrains transformers: traced once, planned to the byte, replayed.\n\n",
          f);
    for (int i = 0; i < CLI_COMMAND_COUNT; i++)
      fprintf(f, "  %-9s %-12s %s\n", commands[i].name, commands[i].operands, commands[i].summary);
    fputs("\n  refrain COMMAND --help lists a command's options; refrain --version prints the version.\n"
          "\nExit codes: 0 done; 1 the run failed; 2 usage or bad input; 3 does not fit, or a library is\n"
          "missing; 4 input or output; 5 stopped early and resumable; 70 our own defect.\n",
          f);
    return;
  }
  const struct command *c = &commands[command];
  fprintf(f, "usage: refrain %s %s%s[OPTIONS]\n\n%s\n\n", c->name, c->operands, *c->operands ? " " : "", c->summary);
  for (int i = 0; i < N_OPTIONS; i++) {
    if (!(options[i].commands >> command & 1)) continue;
    char left[64];
    snprintf(left, sizeof left, "--%s%s%s", options[i].name, options[i].argument ? " " : "",
             options[i].argument ? options[i].argument : "");
    fprintf(f, "  %-22s %s\n", left, options[i].help);
  }
}

static rfr_status store(cli *c, const struct option *o, const char *value) {
  void *field = (char *)c + o->offset;
  char *end;
  errno = 0;
  switch (o->kind) {
    case FLAG: *(bool *)field = true; return RFR_OK;
    case TEXT: *(const char **)field = value; return RFR_OK;
    case LIST: c->sets[c->n_sets++] = value; return RFR_OK;
    case INTEGER: {
      long long x = strtoll(value, &end, 10);
      if (*value == '\0' || *end != '\0' || errno != 0 || x < 0)
        return cli_usage("give a whole number that is not negative", "--%s %s is no number", o->name, value);
      *(int64_t *)field = x;
      return RFR_OK;
    }
    default: {
      double x = strtod(value, &end);
      if (*value == '\0' || *end != '\0' || !(x >= 0.0 && x < 1e30))
        return cli_usage("give a number that is not negative", "--%s %s is no number", o->name, value);
      *(double *)field = x;
      return RFR_OK;
    }
  }
}

static rfr_status take_option(int argc, char **argv, int *i, cli *c) {
  char name[40];
  const char *word = argv[*i] + 2, *equals = strchr(word, '=');
  const struct command *cmd = &commands[c->command];
  char help[96];
  snprintf(help, sizeof help, "refrain %s --help lists the options", cmd->name);
  snprintf(name, sizeof name, "%.*s", equals ? (int)(equals - word) : (int)strlen(word), word);
  for (int k = 0; k < N_OPTIONS; k++) {
    if (strcmp(options[k].name, name) != 0 || !(options[k].commands >> c->command & 1)) continue;
    const char *value = equals ? equals + 1 : NULL;
    if (options[k].kind == FLAG && value) return cli_usage(help, "--%s takes no value", name);
    if (options[k].kind != FLAG && !value) {
      if (*i + 1 >= argc) return cli_usage(help, "--%s needs %s", name, options[k].argument);
      value = argv[++*i];
    }
    return store(c, &options[k], value);
  }
  const char *near = nearest_option(name, c->command);
  if (near) snprintf(help, sizeof help, "did you mean --%s?", near);
  return cli_usage(help, "refrain %s has no option --%s", cmd->name, name);
}

rfr_status cli_parse(int argc, char **argv, cli *c) {
  memset(c, 0, sizeof *c);
  c->command = -1;
  c->tokens = 256;
  c->temperature = 0.8;
  c->top_p = 1.0;
  c->threads = -1;
  c->sets = calloc((size_t)argc, sizeof *c->sets);
  if (!c->sets) return cli_usage("free some memory", "out of memory");
  if (argc < 2) return cli_usage("refrain --help lists the commands", "a command is missing");
  if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0) {
    c->help = true;
    return RFR_OK;
  }
  if (strcmp(argv[1], "--version") == 0) {
    c->version = true;
    return RFR_OK;
  }
  for (int i = 0; i < CLI_COMMAND_COUNT; i++)
    if (strcmp(argv[1], commands[i].name) == 0) c->command = i;
  if (c->command < 0) {
    char help[64] = "refrain --help lists the commands";
    const char *near = cli_nearest(argv[1], cli_command_name, CLI_COMMAND_COUNT);
    if (near) snprintf(help, sizeof help, "did you mean %s?", near);
    return cli_usage(help, "there is no command %s", argv[1]);
  }
  const struct command *cmd = &commands[c->command];
  int operands = 0;
  bool options_end = false;
  for (int i = 2; i < argc; i++) {
    if (!options_end && strcmp(argv[i], "--") == 0) {
      options_end = true;
    } else if (!options_end && strcmp(argv[i], "-h") == 0) {
      c->help = true;
    } else if (!options_end && argv[i][0] == '-' && argv[i][1] == '-') {
      rfr_status s = take_option(argc, argv, &i, c);
      if (s != RFR_OK) return s;
    } else if (!options_end && argv[i][0] == '-' && argv[i][1] != '\0') {
      return cli_usage("options are spelled out: --help lists them", "there is no option %s", argv[i]);
    } else {
      if (operands++ == cmd->most) return cli_usage("quote names with spaces", "%s is one operand too many", argv[i]);
      c->operand = argv[i];
    }
  }
  if (!c->help && operands < cmd->least)
    return cli_usage("refrain COMMAND --help says what it takes", "refrain %s needs %s", cmd->name, cmd->operands);
  return RFR_OK;
}
