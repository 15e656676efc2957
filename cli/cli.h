/* SPDX-License-Identifier: Apache-2.0
 *
 * The program: a table of commands, each with its own options (commands.c), a parser (options.c), one file per command.
 * Help, man pages and shell completion are made from the table. A command parses nothing and maps no status to an exit
 * code; it calls the public library and returns the status that it got.
 */
#ifndef CLI_H
#define CLI_H

#include <stdbool.h>
#include <stdio.h>

#include "refrain/dist.h"
#include "refrain/report.h"
#include "refrain/schedule.h"
#include "refrain/train.h"

/* Every command: the file cmd_NAME.c defines cli_NAME. */
#define CLI_COMMANDS(X) \
  X(train)              \
  X(finetune)           \
  X(generate)           \
  X(chat)               \
  X(eval)               \
  X(check)              \
  X(tokenize)           \
  X(tokenizer_train)    \
  X(inspect)            \
  X(export)             \
  X(keys)               \
  X(plan)               \
  X(trace)              \
  X(schedule)           \
  X(profile)            \
  X(report)             \
  X(diff)               \
  X(top)                \
  X(sweep)              \
  X(bench)              \
  X(doctor)

enum {
#define CLI_BIT_INDEX(name) CLI_INDEX_##name,
  CLI_COMMANDS(CLI_BIT_INDEX)
#undef CLI_BIT_INDEX
      CLI_COMMAND_COUNT
};

enum { CLI_FLAG, CLI_TEXT, CLI_INTEGER, CLI_NUMBER, CLI_LIST };
typedef struct cli_option {
  const char *name, *argument; /* argument NULL: a flag */
  const char *choices;         /* the values that the argument may have, separated by spaces; NULL: any */
  int kind;
  size_t offset; /* offset of the field in struct cli */
  const char *help;
} cli_option;

typedef struct cli_command {
  const char *name;
  const char *operands;      /* as help prints them: "CONFIG|RUN", "[NAME]", "" */
  int least, most;           /* number of operands */
  const char *summary;       /* one line */
  const char *details;       /* sentences */
  const char *example;       /* an example command line */
  const cli_option *options; /* the last row has no name */
} cli_command;
const cli_command *cli_command_at(int i); /* NULL past the end */
/* The i-th word for operands, with its meaning; NULL past the end. */
const char *cli_operand_word(int i, const char **meaning);
/* Whether `word` is one of the words of "CONFIG|RUN" or "MODEL DATA...". */
bool cli_has_operand(const cli_command *command, const char *word);

/* Arguments of an option that may be given several times. */
typedef struct cli_list {
  const char **items;
  int n;
} cli_list;

/* Values from the command line. */
typedef struct cli {
  int command;           /* CLI_INDEX_..., -1: none */
  const char **operands; /* in order */
  int n_operands;
  const char *operand; /* the first one; NULL: none */
  char **run_folders;  /* set by cli_run_folders */
  bool help, version, json, quiet;
  cli_list sets; /* --set, in order */
  const char *out;
  char config[4200];              /* path of the configuration, or of the model folder; "": none */
  bool is_model;                  /* the path is a model folder */
  char folder[4096];              /* folder of the configuration, or of the run */
  char base[4200], adapter[4300]; /* if an operand is an adapter: its base, and adapter.from=FOLDER */
  bool resume, strict, debug, eager, once, follow;
  int64_t threads;   /* -1: not given */
  int64_t ranks;     /* 0: not given */
  rfr_launch launch; /* the launch that started this process */
  rfr_comm *comm;    /* NULL: one rank */
  const char *device;
  const char *prompt, *prompts, *system, *template;
  bool ema;
  int64_t tokens, seed, top_k, context, batch;
  double temperature, top_p, min_p, penalty;
  bool chat;
  cli_list stops; /* --stop, in order */
  cli_list specials;
  const char *pattern, *report, *wandb;
  int64_t jobs;
  int64_t vocab, min_frequency, max_bytes;
  const char *after, *phase, *program, *files, *svg, *dtype, *trace, *to;
  bool decode, special;
  bool diff, flat, all, frontier, values;
  int64_t steps, port;
  const char *kind, *order, *layers, *file, *costs, *write_costs;
  double link; /* in GB per second */
  int64_t stages, microbatches, chunks, group;
  bool communication;
  rfr_ctx_options ctx_options; /* options with which ctx was created */
  rfr_ctx *ctx;
  struct progress *progress; /* NULL: progress is not shown */
  int code;                  /* exit code if the command succeeds */
  bool evaluated;            /* the training has evaluated held-out data at its end */
} cli;

/* An error of the program itself: prints it as print_error does and returns `status`. */
rfr_status cli_fail(rfr_status status, const char *help, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A mistake on the command line: cli_fail with RFR_INVALID. */
rfr_status cli_usage(const char *help, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A file that cannot be written: names it with errno, returns RFR_IO. */
rfr_status cli_cannot_write(const char *path);
/* Writes the page of a report into a file; "-" is standard output. */
rfr_status cli_write_page(rfr_report *r, const char *path);
/* Prints an error on standard error: two lines, or with --json one object, which for a rank ends in JSON_RANK N. */
void cli_print_error(const rfr_error *e);
#define JSON_RANK ", \"rank\": "
/* Makes errors in JSON name this process as rank `rank`. */
void cli_set_rank(int rank);
/* Prints the error of a failed call, unless an error was already printed. */
void cli_report_error(const cli *c, rfr_status status);
/* Prints a warning on standard error, with --json as an object, with --quiet too. */
void cli_warn(const cli *c, const char *message);
/* Fills `c` from the arguments; cli_deinit frees the lists. */
rfr_status cli_parse(int argc, char **argv, cli *c);
void cli_deinit(cli *c);
void cli_print_help(FILE *f, int command); /* -1: help of the program */
/* The same as JSON: one command, or all of them. */
void cli_print_help_json(FILE *f, int command);
const char *cli_command_name(int command);

#define CLI_DECLARE(name) rfr_status cli_##name(cli *c);
CLI_COMMANDS(CLI_DECLARE)
#undef CLI_DECLARE

/* ---- several ranks: launch.c ---- */

/* Whether the command runs over the ranks of a launcher, or of --ranks. */
bool cli_has_ranks(const cli *c);
/* Reads the launcher's variables. If the process must start --ranks ranks: starts them, waits for them, and returns
 * with *done set and their exit code. */
rfr_status cli_start_ranks(cli *c, const char *device, char **argv, bool *done, int *code);
/* Joins the other ranks; call it after the context was created. */
rfr_status cli_join_ranks(cli *c);
/* Waits until all ranks have finished the command; an error names a stopped rank. */
rfr_status cli_leave_ranks(cli *c);
/* Whether this is rank 0, which prints what all ranks have in common: results, progress, and common errors. */
bool cli_prints_error(const cli *c, const rfr_error *e);

/* ---- shared by commands ---- */

/* The contents of a small text file, NUL-terminated, from malloc; "-" is standard input. */
rfr_status cli_read_file(const char *path, char **out);
/* A growing string. */
typedef struct cli_string {
  char *data; /* NUL-terminated; NULL: empty */
  size_t n, capacity;
  bool failed; /* out of memory */
} cli_string;
void cli_string_add(const char *text, size_t n, void *string); /* a rfr_write_fn */
/* Adds a NUL-terminated text, with U+FFFD for each byte that is not part of UTF-8. */
void cli_string_add_utf8(cli_string *s, const char *text, size_t n);

/* Kinds of operands. */
typedef enum cli_operand {
  CLI_CONFIG, /* a file, or a name that does not exist */
  CLI_RUN,    /* a folder with config.yaml, or that file itself, in a folder with a run's log or checkpoints */
  CLI_MODEL,  /* a folder with config.json */
  CLI_OTHER   /* any other folder */
} cli_operand;
/* Also sets c->folder to the run's folder, else to "". */
cli_operand cli_operand_kind(cli *c);
/* The operands as folders: the config.yaml of a run becomes its folder. For commands that accept only runs. */
rfr_status cli_run_folders(cli *c);
/* Refuses an operand such as org/name, if no such path exists: it is a name on the Hugging Face Hub, and models are not
 * downloaded. */
rfr_status cli_refuse_hub_name(const cli *c);
/* Replaces an operand that is an adapter folder by its base, with adapter.from in the configuration. */
rfr_status cli_take_adapter(cli *c);
/* The configuration that the operand names, from malloc: a file, that of a run, or one made for a model folder, whose
 * training step has 512 tokens. Sets c->config. */
rfr_status cli_read_config(cli *c, char **out);
/* PARENT/NAME for path/NAME.yaml */
void cli_default_folder(const char *parent, const char *path, char *out, size_t size);
/* Trains with the configuration `text` (NULL: that of the folder) and prints the result. */
rfr_status cli_train_config(cli *c, const char *text, const char *folder);
/* The configuration that fine-tunes c->operands[0] on the files in the later operands, from malloc. */
rfr_status cli_finetune_config(cli *c, char **out);
/* `check` with data: describes what `finetune` would train on. */
rfr_status cli_check_data(cli *c);
/* For generate and eval: a configuration made for a model folder, or NULL for the newest checkpoint of a run. */
rfr_status cli_find_weights(cli *c, char **config);
/* Run options from the command line. Relative paths start at the folder of c->config, for a model at the working
 * folder. */
rfr_run_options cli_run_options(cli *c);
/* Opens the operand's configuration without data and memory, for plans and traces of `program` (RFR_RUN_...) and of the
 * programs compiled together with it. `on_event` gets c; NULL: none. */
rfr_status cli_open_config(cli *c, const char *text, int program, bool keep_traces, rfr_event_fn on_event,
                           rfr_run **out);
/* --program as RFR_RUN_...; train by default. */
rfr_status cli_program(const cli *c, int *out);
/* Writes to standard output; an rfr_write_fn. */
void cli_write(const char *text, size_t n, void *user);
/* A word for a shell, quoted if necessary. */
void cli_put_word(FILE *f, const char *word);
/* Text, escaped for XML. */
void cli_put_xml(FILE *f, const char *text);
/* "1.4 GiB" into 32 bytes. */
const char *cli_bytes(char buf[32], int64_t bytes);
double cli_now(void); /* seconds, monotonic */
/* "Intel(R) Xeon(R) ..., 2 threads" */
const char *cli_device(const cli *c, char buf[160]);

double cli_median(double *x, int n); /* sorts x */

/* A built-in configuration. */
typedef struct cli_builtin {
  const char *name, *what, *config;
  bool large; /* for a GPU: runs only if it is named */
} cli_builtin;
const cli_builtin *cli_builtin_at(int i);              /* NULL past the end */
const cli_builtin *cli_builtin_find(const char *name); /* NULL: none */
/* Opens one for timing its training step on random tokens; applies --set and --dtype. */
rfr_status cli_open_timed(cli *c, const cli_builtin *b, rfr_run **out);

/* The machine's peak: the best rate of a large GEMM in a type, in floating-point operations per second. 0: cannot be
 * measured. */
rfr_status cli_peak(rfr_ctx *ctx, rfr_dtype dtype, double *rate);
/* Upper bounds of an op's rate, per second. An op whose operands are in a cache may exceed them. */
typedef struct cli_ceilings {
  rfr_dtype dtype;
  double product[RFR_DTYPE_COUNT]; /* floating-point operations of GEMMs by type of the operands; 0: not measured */
  double stream;                   /* bytes read and written, from and to memory */
} cli_ceilings;
/* Measures the ceilings for `dtype`, f32, and the types in which the n ops count FLOPs. */
rfr_status cli_ceilings_measure(const cli *c, rfr_dtype dtype, const rfr_op_time *ops, int n, cli_ceilings *out);
/* The minimum time of an op under the ceilings, in seconds. */
double cli_ceilings_least(const cli_ceilings *c, const rfr_op_time *op);

/* Draws a program's plan: time to the right, addresses upward. One self-contained SVG. */
rfr_status cli_plan_svg(const rfr_programs *p, int program, const char *title, FILE *f);

/* `plan --ranks`: prints the plan of each kind of rank of the configuration `text`. */
rfr_status cli_plan_ranks(cli *c, const char *text, FILE *f);

/* The recompute frontier as a table. */
void cli_frontier_table(const rfr_programs *p, int program, const rfr_frontier_point *point, int n, FILE *f);

/* Prints `text` from column `at` on, wrapped between words at 80 columns; later lines start at column `indent`. Ends
 * the line. */
void cli_put_wrapped(FILE *f, const char *text, int at, int indent);

/* Replaces `help` by the names nearest to a word: names with a common beginning, otherwise names at most two edits
 * away. */
void cli_suggest(const char *word, const char *(*name)(int i), int n, char *help, size_t size);

/* A simulated schedule. */
typedef struct schedule_run {
  const rfr_schedule *schedule;
  rfr_schedule_info info;
  rfr_schedule_result result;
  rfr_rank_result *ranks;
  double *start, *end; /* per action, rank after rank */
} schedule_run;
/* `costs` per stage, or NULL: F, I and W take 1 and keep 1. */
rfr_status schedule_run_make(const rfr_schedule *s, const rfr_stage_costs *costs, schedule_run *out);
void schedule_run_deinit(schedule_run *s);
void schedule_run_table(const schedule_run *s, FILE *f);
/* One lane per rank, time to the right. One self-contained SVG. */
void schedule_run_svg(const schedule_run *s, const char *title, FILE *f);

/* A JSON object printed piece by piece; numbers do not depend on the locale. */
typedef struct json {
  FILE *f;
  bool comma;
} json;
void json_begin(json *j, const char *key, char bracket); /* key NULL: none */
void json_end(json *j, char bracket);
void json_text(json *j, const char *key, const char *value);
void json_bytes(json *j, const char *key, const char *value, size_t n); /* a NUL follows them */
void json_int(json *j, const char *key, int64_t value);
void json_double(json *j, const char *key, double value);
/* A value that is already JSON. */
void json_raw(json *j, const char *key, const char *value);
void json_bool(json *j, const char *key, bool value);

/* Settings that may need less memory. */
typedef struct cli_setting {
  const char *what, *set[6]; /* --set arguments, up to a NULL */
  int64_t bytes;             /* bytes of the plan with them */
  double extra_flops;        /* recompute work, relative to the step */
} cli_setting;
enum { CLI_FIT_SETTINGS = 8 };
/* The bytes of a plan, and the bytes that it may have. */
typedef struct cli_fit {
  rfr_plan_summary plan;
  rfr_memory memory; /* memory at the peak */
  int64_t limit;     /* memory.budget, or the machine's memory; 0: unknown */
  bool is_budget, fits;
  cli_setting settings[CLI_FIT_SETTINGS]; /* if the plan does not fit: settings that need less */
  int n_settings;
} cli_fit;
/* Checks one program of a run that was opened with the configuration `text`; plans it again with each setting. */
rfr_status cli_fit_make(cli *c, const char *text, rfr_run *run, int which, cli_fit *out);
/* Prints the bytes by kind, whether they fit, and the settings. */
void cli_fit_print(const cli_fit *fit, FILE *f);
void cli_fit_json(const cli_fit *fit, json *j); /* as members of the open object */
/* Prints the error of a plan that does not fit; returns RFR_NO_FIT. */
rfr_status cli_fit_fail(const cli_fit *fit);

/* Progress on standard error: at a terminal one line that is rewritten, else plain lines. */
typedef struct progress {
  bool quiet, terminal, open_line;
  bool evaluating_line; /* the current line is that of an evaluation */
  bool bytes;           /* the model's tokens are bytes */
  bool preference;      /* losses are of pairs of answers */
  double flops, peak;   /* per step; per second, 0: unknown */
  int64_t tokens;       /* per step */
  double last;          /* cli_now of the last line */
  int64_t first_step;   /* 0: none yet */
  double rate;          /* smoothed seconds per step */
  /* seconds of this session, without the first step, which touches its memory for the first time */
  double timed_tokens, timed_flops, seconds;
  bool evaluated;
  double loss, bits, margin, accuracy; /* of the last evaluation */
} progress;
void progress_init(progress *p, cli *c); /* Makes p c->progress. */
/* In a ramp: later steps have `tokens` tokens; 0: no change. */
void progress_set_tokens(progress *p, int64_t tokens);
void progress_event(const rfr_event *event, void *progress);
/* Ends the current progress line, so that other text starts on a new one. Accepts NULL. */
void progress_close_line(progress *p);

#endif
