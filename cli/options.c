/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line: the tables of commands and options, and the parser. Each option lists the commands that use it;
 * any other command refuses it. An unknown option or command is answered with the nearest known one.
 */
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define MODEL_OPERANDS "CONFIG|RUN|MODEL"
static const cli_command commands[CLI_COMMAND_COUNT] = {
    [CLI_INDEX_train] =
        {"train", "CONFIG|RUN", 1, 1, "train a model",
         "CONFIG is a YAML file; the run is written to runs/CONFIG or to --out. With --resume, training "
         "continues from the newest checkpoint; then the operand may also be the folder of the run.",
         "refrain train examples/demo.yaml --out runs/demo"},
    [CLI_INDEX_generate] = {"generate", "RUN|MODEL", 1, 1, "continue a text with a run's newest checkpoint or a model",
                            "Writes the prompt and the tokens after it to standard output. A MODEL, such as one "
                            "checkpoint of a run, needs a "
                            "vocabulary of bytes.",
                            "refrain generate runs/demo --prompt '#include <'"},
    [CLI_INDEX_eval] = {"eval", "RUN|MODEL", 1, 1, "evaluate a run's newest checkpoint, or a model",
                        "Evaluates on the run's held-out data. For a MODEL, name the data: --set "
                        "data.validation=FILES. Prints bits per byte "
                        "for models of bytes, and the mean loss in nats per token.",
                        "refrain eval runs/demo --json"},
    [CLI_INDEX_check] = {"check", MODEL_OPERANDS, 1, 1, "print the resolved configuration and the source of each value",
                         "Reads the configuration and prints every key with its value and where the value comes from: "
                         "a line of the file, --set, a default, or derived from other keys. Allocates no tensor.",
                         "refrain check examples/small.yaml --set model.hidden_size=256"},
    [CLI_INDEX_keys] = {"keys", "[WORD]", 0, 1, "print the table of configuration keys",
                        "With WORD, only keys whose name or meaning contains it.", "refrain keys recompute"},
    [CLI_INDEX_plan] = {"plan", MODEL_OPERANDS, 1, 1, "print every buffer of a training step and the memory it needs",
                        "Compiles the step and plans its memory without allocating it, so a model of any size can be "
                        "planned on any machine. A step that does not fit is answered with the bytes of each kind and "
                        "with the settings that need less; the exit code is then 3.",
                        "refrain plan examples/small.yaml --svg plan.svg"},
    [CLI_INDEX_trace] = {"trace", MODEL_OPERANDS, 1, 1, "print a program as it is after a pass",
                         "Prints the decisions of the pass as comments, then the program.",
                         "refrain trace examples/small.yaml --after autodiff --phase wgrad"},
    [CLI_INDEX_schedule] = {"schedule", "", 0, 0, "simulate a pipeline schedule",
                            "Prints the actions of each rank over time, the bubble, the microbatch slots and the peak "
                            "bytes. Needs no device and no model. Takes one of --kind, --order and --file.",
                            "refrain schedule --kind 1f1b --stages 4 --microbatches 8"},
    [CLI_INDEX_profile] = {"profile", MODEL_OPERANDS "|NAME", 1, 1, "time every op of a training step on random tokens",
                           "NAME is a benchmark: a built-in configuration, or small. `refrain bench` lists them.",
                           "refrain profile examples/small.yaml --trace step.json"},
    [CLI_INDEX_bench] = {"bench", "[NAME]", 0, 1, "time training steps and replays of built-in programs",
                         "Without NAME, runs every benchmark that suits a CPU.", "refrain bench gpt2-124m --json"},
    [CLI_INDEX_doctor] = {"doctor", "", 0, 0, "print what this machine and this build can use",
                          "Lists the kernels, libraries and modules that were found, and the cost of each missing one.",
                          "refrain doctor"},
};
const cli_command *cli_command_at(int i) { return i >= 0 && i < CLI_COMMAND_COUNT ? &commands[i] : NULL; }
const char *cli_command_name(int command) { return commands[command].name; }

enum { FLAG, TEXT, INTEGER, NUMBER, LIST };
#define ON(name) (1u << CLI_INDEX_##name)
#define ALL_COMMANDS ((1u << CLI_COMMAND_COUNT) - 1)
#define ON_A_DEVICE (ALL_COMMANDS & ~(ON(schedule) | ON(keys)))
#define CONFIGURED (ON(train) | ON(check) | ON(trace) | ON(plan))
#define FIELD(name) offsetof(cli, name)

#define WORD(name) " " #name
#define SECOND_WORD(e, name) " " name
#define PROGRAM_WORD(bit, name) " " #name

static const cli_option options[] = {
    {"set", "KEY=VALUE", NULL, LIST, 0, CONFIGURED | ON(bench) | ON(profile) | ON(eval),
     "override one configuration key, as model.hidden_size=256; may be given several times"},
    {"dtype", "TYPE", "f32 bf16 f16 auto", TEXT, FIELD(dtype), ON(bench) | ON(profile),
     "type of weights and activations: precision.dtype (auto)"},
    {"out", "FOLDER", NULL, TEXT, FIELD(out), ON(train), "folder of the run (runs/CONFIG)"},
    {"resume", NULL, NULL, FLAG, FIELD(resume), ON(train), "continue from the newest checkpoint of the run"},
    {"strict", NULL, NULL, FLAG, FIELD(strict), ON(train),
     "refuse to resume on another machine, library or thread count, where bits may differ"},
    {"debug", NULL, NULL, FLAG, FIELD(debug), ON(train), "guard every buffer and check every result for NaN; slow"},
    {"eager", NULL, NULL, FLAG, FIELD(eager), ON(train) | ON(bench),
     "run op by op instead of replaying a captured step; the results are bitwise the same"},
    {"prompt", "TEXT", NULL, TEXT, FIELD(prompt), ON(generate), "text to continue (a newline)"},
    {"tokens", "N", NULL, INTEGER, FIELD(tokens), ON(generate), "tokens to generate (256)"},
    {"temperature", "X", NULL, NUMBER, FIELD(temperature), ON(generate),
     "sampling temperature; 0 takes the most probable token (0.8)"},
    {"top-k", "K", NULL, INTEGER, FIELD(top_k), ON(generate), "sample among the K most probable tokens; 0 for all (0)"},
    {"top-p", "P", NULL, NUMBER, FIELD(top_p), ON(generate),
     "sample among the most probable tokens whose probabilities add up to P (1)"},
    {"seed", "N", NULL, INTEGER, FIELD(seed), ON(generate), "seed of the sampling (0)"},
    {"after", "PASS", "record" RFR_PASSES(WORD), TEXT, FIELD(after), ON(trace), "pass to print after (lower)"},
    {"phase", "PHASE", "" RFR_PHASES(SECOND_WORD), TEXT, FIELD(phase), ON(trace), "print the ops of one phase only"},
    {"program", "NAME", "" RFR_RUN_PROGRAMS(PROGRAM_WORD), TEXT, FIELD(program), ON(trace) | ON(plan),
     "program of the run (train)"},
    {"diff", NULL, NULL, FLAG, FIELD(diff), ON(trace), "print what the pass changed"},
    {"flat", NULL, NULL, FLAG, FIELD(flat), ON(trace), "print the form that rfr_trace_parse reads"},
    {"all", NULL, NULL, FLAG, FIELD(all), ON(plan), "print every buffer on its own line"},
    {"frontier", NULL, NULL, FLAG, FIELD(frontier), ON(plan),
     "print the recompute frontier: memory against extra work, for every budget"},
    {"svg", "FILE", NULL, TEXT, FIELD(svg), ON(plan) | ON(schedule), "write a picture; - is standard output"},
    {"kind", "KIND", "gpipe 1f1b interleaved zb-h1 zb-v", TEXT, FIELD(kind), ON(schedule), "kind of schedule"},
    {"stages", "P", NULL, INTEGER, FIELD(stages), ON(schedule), "ranks of the pipeline, for --kind"},
    {"microbatches", "M", NULL, INTEGER, FIELD(microbatches), ON(schedule), "microbatches of a step, for --kind"},
    {"chunks", "V", NULL, INTEGER, FIELD(chunks), ON(schedule),
     "stages of each rank; 0: 2 for interleaved and zb-v, else 1 (0)"},
    {"group", "G", NULL, INTEGER, FIELD(group), ON(schedule),
     "microbatches that a rank runs in one stage before it turns to the next; 0: P (0)"},
    {"order", "LIST", NULL, TEXT, FIELD(order), ON(schedule),
     "order list instead of a kind, as 1,2,-2,-1; a ; starts the next rank"},
    {"layers", "COUNTS", NULL, TEXT, FIELD(layers), ON(schedule),
     "layers of each chunk of --order, as 3,2; one count is for all"},
    {"file", "FILE", NULL, TEXT, FIELD(file), ON(schedule),
     "actions instead of a kind, as 0F0 0B0, one line per rank; - is standard input"},
    {"costs", "FILE", NULL, TEXT, FIELD(costs), ON(schedule), "seconds and bytes of each stage, JSON or CSV"},
    {"communication", NULL, NULL, FLAG, FIELD(communication), ON(schedule), "add sends and receives"},
    {"files", "SPLIT", "train validation", TEXT, FIELD(files), ON(check), "list the data files of one split instead"},
    {"steps", "N", NULL, INTEGER, FIELD(steps), ON(bench) | ON(profile),
     "steps to time; 0: as many as a few seconds allow (0)"},
    {"trace", "FILE", NULL, TEXT, FIELD(trace), ON(profile), "write one step's ops as JSON for Perfetto or Chrome"},
    {"device", "NAME", "cpu cuda cuda:0 cuda:none auto", TEXT, FIELD(device), ON_A_DEVICE,
     "where to run (REFRAIN_DEVICE, or cpu); cuda:none plans for a GPU that is not there"},
    {"threads", "N", NULL, INTEGER, FIELD(threads), ON_A_DEVICE,
     "threads; 0: the cores that this process may use (REFRAIN_THREADS, or 0)"},
    {"json", NULL, NULL, FLAG, FIELD(json), ALL_COMMANDS,
     "print one JSON object on standard output, errors as one on standard error; no progress"},
    {"quiet", NULL, NULL, FLAG, FIELD(quiet), ON_A_DEVICE & ~ON(doctor),
     "print no progress; warnings and errors remain"},
    {"help", NULL, NULL, FLAG, FIELD(help), ALL_COMMANDS, "print this text"},
};
enum { N_OPTIONS = sizeof options / sizeof options[0] };
const cli_option *cli_option_at(int i) { return i >= 0 && i < N_OPTIONS ? &options[i] : NULL; }

/* ---- errors ---- */

/* Set once, when the command line is read: usage errors are printed before a struct cli is complete. */
static bool errors_as_json, error_printed;

void cli_print_error(const rfr_error *e) {
  error_printed = true;
  if (errors_as_json) {
    char text[RFR_ERROR_JSON_BYTES];
    rfr_error_json(e, text, sizeof text);
    fprintf(stderr, "%s\n", text);
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

void cli_report(const cli *c, rfr_status status) {
  if (status == RFR_OK || error_printed) return;
  char help[64];
  rfr_error e = *rfr_last_error();
  snprintf(help, sizeof help, "refrain %s --help explains the options", cli_command_name(c->command));
  if (strcmp(e.slug, "argument") == 0) e.next = help; /* the options of the command line became arguments of a call */
  if (e.status == status) cli_print_error(&e);
  else cli_fail(status, status == RFR_NO_MEMORY ? "free some memory" : "", "%s", rfr_status_name(status));
}

/* ---- help ---- */

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

enum { COLUMNS = 80, HELP_COLUMN = 24 };

void cli_put_wrapped(FILE *f, const char *text, int at, int indent) {
  while (*text) {
    const int n = (int)strcspn(text, " ");
    if (at > indent && at + 1 + n > COLUMNS) {
      fprintf(f, "\n%*s", indent, "");
      at = indent;
    } else if (at > indent) {
      fputc(' ', f);
      at++;
    }
    fwrite(text, 1, (size_t)n, f);
    at += n;
    text += n;
    text += strspn(text, " ");
  }
  fputc('\n', f);
}

static void put_option(FILE *f, const cli_option *o) {
  char text[512];
  const int n = fprintf(f, "  --%s%s%s", o->name, o->argument ? " " : "", o->argument ? o->argument : "");
  int at = snprintf(text, sizeof text, "%s", o->help);
  bool is_first = true;
  for (const char *c = o->choices; c && *c; is_first = false) {
    c += strspn(c, " ");
    const int length = (int)strcspn(c, " ");
    at += snprintf(text + at, sizeof text - (size_t)at, "%s%.*s", is_first ? "; one of " : ", ", length, c);
    c += length;
  }
  if (n + 1 < HELP_COLUMN) fprintf(f, "%*s", HELP_COLUMN - n, "");
  else fprintf(f, "\n%*s", HELP_COLUMN, "");
  cli_put_wrapped(f, text, HELP_COLUMN, HELP_COLUMN);
}

void cli_print_help(FILE *f, int command) {
  if (command < 0) {
    fputs("usage: refrain COMMAND [OPTIONS]\n\n"
          "Trains transformers. A step is traced once, planned to the byte, captured and replayed.\n\n",
          f);
    for (int i = 0; i < CLI_COMMAND_COUNT; i++)
      fprintf(f, "  %-9s %-21s %s\n", commands[i].name, commands[i].operands, commands[i].summary);
    fputs("\nCONFIG is a YAML file, RUN the folder of a run, MODEL a Hugging Face folder.\n"
          "`refrain help COMMAND` prints a command's options, `refrain --version` the version.\n"
          "\nExit codes: 0 done; 1 the run failed; 2 wrong usage or input; 3 does not fit, or a library\n"
          "is missing; 4 input or output failed; 5 stopped early, can be resumed; 70 a defect of Refrain.\n",
          f);
    return;
  }
  const cli_command *c = &commands[command];
  fprintf(f, "usage: refrain %s %s%s[OPTIONS]\n\n", c->name, c->operands, *c->operands ? " " : "");
  cli_put_wrapped(f, c->details, 0, 0);
  fprintf(f, "\n  %s\n\noptions:\n", c->example);
  for (int i = 0; i < N_OPTIONS; i++)
    if (options[i].commands >> command & 1) put_option(f, &options[i]);
}

/* ---- parsing ---- */

/* cuda:N is a device too. */
static bool is_choice(const cli_option *o, const char *value) {
  const size_t n = strlen(value);
  for (const char *c = o->choices + strspn(o->choices, " "); *c; c += strcspn(c, " "), c += strspn(c, " "))
    if (strcspn(c, " ") == n && strncmp(c, value, n) == 0) return true;
  return o->offset == FIELD(device);
}

static rfr_status refuse_choice(const cli_option *o, const char *value) {
  char help[256], word[32], near[32] = "";
  int least = 3;
  snprintf(help, sizeof help, "choose from: %s", o->choices + strspn(o->choices, " "));
  for (const char *c = o->choices + strspn(o->choices, " "); *c; c += strcspn(c, " "), c += strspn(c, " ")) {
    snprintf(word, sizeof word, "%.*s", (int)strcspn(c, " "), c);
    const int d = distance(value, word);
    if (d < least) least = d, memcpy(near, word, sizeof near);
  }
  if (*near) snprintf(help, sizeof help, "did you mean %s?", near);
  return cli_usage(help, "--%s: unknown value \"%s\"", o->name, value);
}

static rfr_status store(cli *c, const cli_option *o, const char *value) {
  void *field = (char *)c + o->offset;
  char *end;
  errno = 0;
  switch (o->kind) {
    case FLAG: *(bool *)field = true; return RFR_OK;
    case TEXT:
      if (o->choices && !is_choice(o, value)) return refuse_choice(o, value);
      *(const char **)field = value;
      return RFR_OK;
    case LIST: c->sets[c->n_sets++] = value; return RFR_OK;
    case INTEGER: {
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
  const cli_command *cmd = &commands[c->command];
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

static rfr_status find_command(const char *word, int *out) {
  for (*out = 0; *out < CLI_COMMAND_COUNT; ++*out)
    if (strcmp(word, commands[*out].name) == 0) return RFR_OK;
  char help[64] = "refrain --help lists the commands";
  const char *near = cli_nearest(word, cli_command_name, CLI_COMMAND_COUNT);
  if (near) snprintf(help, sizeof help, "did you mean %s?", near);
  *out = -1;
  return cli_usage(help, "there is no command %s", word);
}

static bool asks_for_json(int argc, char **argv) {
  for (int i = 1; i < argc && strcmp(argv[i], "--") != 0; i++)
    if (strcmp(argv[i], "--json") == 0) return true;
  return false;
}

rfr_status cli_parse(int argc, char **argv, cli *c) {
  memset(c, 0, sizeof *c);
  c->command = -1;
  c->tokens = 256;
  c->temperature = 0.8;
  c->top_p = 1.0;
  c->threads = -1;
  c->sets = calloc((size_t)argc, sizeof *c->sets);
  errors_as_json = asks_for_json(argc, argv); /* errors before --json follow it too */
  if (!c->sets) return cli_fail(RFR_NO_MEMORY, "free some memory", "out of memory");
  if (argc < 2) return cli_usage("refrain --help lists the commands", "a command is missing");
  c->help = strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0;
  c->version = strcmp(argv[1], "--version") == 0;
  if (c->help && argc > 2) return find_command(argv[2], &c->command);
  if (c->help || c->version) return RFR_OK;
  rfr_status s = find_command(argv[1], &c->command);
  if (s != RFR_OK) return s;
  const cli_command *cmd = &commands[c->command];
  char help[64];
  snprintf(help, sizeof help, "refrain %s --help explains the command", cmd->name);
  int operands = 0;
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
      if (operands++ == cmd->most)
        return cli_usage("quote a name that contains spaces", "unexpected argument %s", argv[i]);
      c->operand = argv[i];
    }
  }
  if (!c->help && operands < cmd->least) return cli_usage(help, "refrain %s needs %s", cmd->name, cmd->operands);
  return RFR_OK;
}
