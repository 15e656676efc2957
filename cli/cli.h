/* SPDX-License-Identifier: Apache-2.0
 *
 * The program: one table of commands, one table of options, one file per command. A
 * command parses nothing and maps no status itself; it calls the public library and
 * returns what that returned.
 */
#ifndef CLI_H
#define CLI_H

#include <stdbool.h>
#include <stdio.h>

#include "refrain/schedule.h"
#include "refrain/train.h"

/*  X(name, operands, least, most, summary) */
#define CLI_COMMANDS(X)                                                                             \
  X(train, "CONFIG.yaml", 1, 1, "train a model; the run's folder is runs/CONFIG, or --out")         \
  X(generate, "RUN", 1, 1, "continue a text with a run's newest checkpoint")                        \
  X(eval, "RUN", 1, 1, "bits per byte of a run's newest checkpoint on its held-out data")           \
  X(check, "CONFIG.yaml", 1, 1, "print the resolved configuration and where each value comes from") \
  X(trace, "CONFIG.yaml", 1, 1, "print a program after a pass")                                     \
  X(plan, "CONFIG.yaml", 1, 1, "print every buffer of the training step before anything runs")      \
  X(schedule, "", 0, 0, "draw a pipeline schedule: bubble, slots and bytes of each rank")           \
  X(profile, "CONFIG|NAME", 1, 1, "time every op of a training step, on random tokens")             \
  X(bench, "[NAME]", 0, 1, "time a training step of a built-in configuration")                      \
  X(doctor, "", 0, 0, "say what this machine and this build have")

enum {
#define CLI_BIT_INDEX(name, operands, least, most, summary) CLI_INDEX_##name,
  CLI_COMMANDS(CLI_BIT_INDEX)
#undef CLI_BIT_INDEX
      CLI_COMMAND_COUNT
};

/* Everything that a command line can say. */
typedef struct cli {
  int command; /* CLI_INDEX_... */
  const char *operand;
  bool help, version, json, quiet;
  const char **sets; /* --set, in order */
  int n_sets;
  const char *out;
  char folder[4096]; /* of the configuration */
  bool resume, strict, debug, eager;
  int64_t threads; /* -1: not given */
  const char *device;
  const char *prompt;
  int64_t tokens, seed, top_k;
  double temperature, top_p;
  const char *after, *phase, *program, *files, *svg, *dtype, *trace;
  bool diff, flat, all, frontier;
  int64_t steps;
  const char *kind, *order, *layers, *file, *costs;
  int64_t stages, microbatches, chunks, group;
  bool communication;
  rfr_ctx *ctx;
} cli;

/* A mistake on the command line: prints error: and help:, returns RFR_INVALID with no
 * library error behind it. */
rfr_status cli_usage(const char *help, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Fills `c` from the arguments; the caller frees c->sets. */
rfr_status cli_parse(int argc, char **argv, cli *c);
void cli_print_help(FILE *f, int command); /* -1: of the program */
const char *cli_command_name(int command);

#define CLI_DECLARE(name, operands, least, most, summary) rfr_status cli_##name(cli *c);
CLI_COMMANDS(CLI_DECLARE)
#undef CLI_DECLARE

/* ---- shared by commands ---- */

/* The whole of a small file, NUL-terminated, from malloc; "-" is standard input. */
rfr_status cli_read_file(const char *path, char **out);
/* Run options from the command line; c->folder is set from the operand. */
rfr_run_options cli_run_options(cli *c);
/* Opens a configuration without its data, for plans and traces of one of its programs (RFR_RUN_...) and those that
 * are compiled with it. */
rfr_status cli_open_config(cli *c, const char *name, const char *text, int program, bool keep_traces, rfr_run **out);
/* --program as RFR_RUN_...; train when it is not given. */
rfr_status cli_program(const cli *c, int *out);
/* Writes to standard output; an rfr_write_fn. */
void cli_write(const char *text, size_t n, void *user);
/* Text as XML has it, for pictures. */
void cli_put_xml(FILE *f, const char *text);
/* "1.4 GiB" into 32 bytes. */
const char *cli_bytes(char buf[32], int64_t bytes);
double cli_now(void); /* seconds, monotonic */
/* "Intel(R) Xeon(R) ..., 2 threads" */
const char *cli_device(const cli *c, char buf[160]);

double cli_median(double *x, int n); /* sorts x */

/* A configuration that the program knows by name. */
typedef struct cli_builtin {
  const char *name, *what, *config;
  bool large; /* for a GPU: timed only when it is named */
} cli_builtin;
const cli_builtin *cli_builtin_at(int i);              /* NULL past the end */
const cli_builtin *cli_builtin_find(const char *name); /* NULL: none */
/* Opens one to time its training step on random tokens, with --set and --dtype. */
rfr_status cli_open_timed(cli *c, const cli_builtin *b, rfr_run **out);

/* Best rate of a large matrix product in a type, floating-point operations per second: what
 * this program calls the machine's peak. 0 when it cannot be measured. */
rfr_status cli_peak(rfr_ctx *ctx, rfr_dtype dtype, double *rate);
/* What no op can beat for long; per second. */
typedef struct cli_ceilings {
  rfr_dtype dtype;
  double product, product_f32; /* floating-point operations, in `dtype` and in f32 */
  double stream;               /* bytes read and written, from and to memory */
} cli_ceilings;
rfr_status cli_ceilings_measure(const cli *c, rfr_dtype dtype, cli_ceilings *out);
/* The least time that the ceilings leave an op, seconds. */
double cli_ceilings_least(const cli_ceilings *c, const rfr_op_time *op);

/* Draws a program's plan: time to the right, addresses upward. One self-contained SVG. */
rfr_status cli_plan_svg(const rfr_programs *p, int program, const char *title, FILE *f);

/* Memory against recomputing, a line for each point, without a word on what to make of it. */
void cli_frontier_table(const rfr_programs *p, int program, const rfr_frontier_point *point, int n, FILE *f);

/* What there is most like a word, of n; NULL: nothing is. */
const char *cli_nearest(const char *word, const char *(*name)(int i), int n);

/* A schedule that ran on paper. */
typedef struct schedule_run {
  const rfr_schedule *schedule;
  rfr_schedule_info info;
  rfr_schedule_result result;
  rfr_rank_result *ranks;
  double *start, *end; /* of each action, rank after rank */
} schedule_run;
/* `costs` of each stage, or NULL: F, I and W take 1 and keep 1. */
rfr_status schedule_run_make(const rfr_schedule *s, const rfr_stage_costs *costs, schedule_run *out);
void schedule_run_deinit(schedule_run *s);
void schedule_run_table(const schedule_run *s, FILE *f);
/* One lane a rank, time to the right. One self-contained SVG. */
void schedule_run_svg(const schedule_run *s, const char *title, FILE *f);

/* A JSON object printed piece by piece; numbers do not depend on the locale. */
typedef struct json {
  FILE *f;
  bool comma;
} json;
void json_begin(json *j, const char *key, char bracket); /* key NULL: none */
void json_end(json *j, char bracket);
void json_text(json *j, const char *key, const char *value);
void json_int(json *j, const char *key, int64_t value);
void json_double(json *j, const char *key, double value);

/* Progress on standard error: one line that is rewritten at a terminal, plain lines else. */
typedef struct progress {
  bool quiet, terminal, open_line, json;
  rfr_run *run;         /* set once it is open */
  double flops, peak;   /* per step; per second */
  int64_t tokens;       /* per step */
  double started, last; /* seconds of cli_now */
  int64_t first_step, last_step;
  double rate; /* smoothed seconds per step */
  double bits; /* of the last evaluation; 0: none */
} progress;
void progress_init(progress *p, const cli *c);
void progress_event(const rfr_event *event, void *user);
void progress_close_line(progress *p);

#endif
