/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain train: opens a run, trains, prints the result. The first SIGINT or SIGTERM ends training after the current
 * step with a checkpoint; the second kills the program. A run that ended early prints the command that continues it.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static _Atomic(rfr_run *) running;

static void on_signal(int number) {
  rfr_run *run = atomic_load(&running);
  if (run) rfr_run_request_stop(run);
  if (number == SIGUSR1) return; /* launch.c repeats it */
  signal(number, SIG_DFL);       /* the handler of the second signal */
  if (!run) raise(number);
}

/* ---- the run's folder ---- */

void cli_default_folder(const char *parent, const char *path, char *out, size_t size) {
  const char *base = strrchr(path, '/');
  base = base ? base + 1 : path;
  const char *dot = strchr(base, '.');
  const int n = dot && dot != base ? (int)(dot - base) : (int)strlen(base);
  snprintf(out, size, "%s/%.*s", parent, n, base);
}

/* Finds the configuration to train (NULL: that of the run's folder) and the folder. */
static rfr_status find_run(cli *c, char **text, char folder[4200]) {
  char help[8500];
  *text = NULL;
  switch (cli_operand_kind(c)) {
    case CLI_MODEL:
      snprintf(help, sizeof help, "write a configuration with `model: %s`", c->operand);
      return cli_usage(help, "%s is the folder of a model", c->operand);
    case CLI_OTHER:
      return cli_fail(RFR_IO, "give a configuration, or the folder of a run", "%s is a folder without config.yaml",
                      c->operand);
    case CLI_RUN:
      if (!c->resume && !c->out) {
        snprintf(help, sizeof help, "--resume continues it; --out FOLDER starts another run with its configuration");
        return cli_usage(help, "%s is a run", c->folder);
      }
      if (!c->resume) break;
      if (c->out) return cli_usage("omit --out", "--out is for a new run; %s is a run already", c->folder);
      snprintf(folder, 4200, "%s", c->folder);
      return RFR_OK;
    default: break;
  }
  if (c->out) snprintf(folder, 4200, "%s", c->out);
  else cli_default_folder("runs", c->operand, folder, 4200);
  return cli_read_config(c, text);
}

/* ---- continuing ---- */

/* The command that continues the run, from malloc. The run's configuration, including --set, is in its folder. */
static char *resume_command(const cli *c, const char *folder) {
  char *text = NULL;
  size_t n = 0;
  FILE *f = open_memstream(&text, &n);
  if (!f) return NULL;
  fputs("refrain train ", f);
  if (folder[0] == '-') fputs("./", f);
  cli_put_word(f, folder);
  fputs(" --resume", f);
  if (c->ranks > 1) fprintf(f, " --ranks %lld", (long long)c->ranks);
  if (c->device) fputs(" --device ", f), cli_put_word(f, c->device);
  if (c->threads >= 0) fprintf(f, " --threads %lld", (long long)c->threads);
  if (c->strict) fputs(" --strict", f);
  if (c->eager) fputs(" --eager", f);
  if (c->debug) fputs(" --debug", f);
  if (fclose(f) == 0) return text;
  free(text);
  return NULL;
}

/* Prints the error of a run that ended early, with the command that continues from its checkpoint. `checkpoint` is
 * borrowed from the run, so it names the checkpoint written last. */
static void print_end(const cli *c, rfr_status status, const char *checkpoint, const char *folder) {
  rfr_error e = *rfr_last_error();
  char *command = *checkpoint ? resume_command(c, folder) : NULL, *next = NULL;
  if (e.status == status && command && cli_prints_error(c, &e)) {
    if (status == RFR_STOPPED) {
      if (asprintf(&next, "to continue: %s", command) < 0) next = NULL;
    } else if (asprintf(&next, "%s; to continue from %s: %s", e.next, checkpoint, command) < 0) {
      next = NULL;
    }
    if (next) e.next = next;
    cli_print_error(&e);
  }
  free(command);
  free(next);
}

/* ---- output ---- */

static void on_event(const rfr_event *e, void *user) {
  cli *c = user;
  if (c->launch.rank > 0) return; /* rank 0 prints the same */
  if (e->kind == RFR_EVENT_WARNING) cli_warn(c, e->message);
  else progress_event(e, c->progress);
}

static const char *plural(int64_t n) { return n == 1 ? "" : "s"; }

/* Prints how many files of rows there are, and what was done with long rows. */
static void print_rows(const rfr_run_info *i) {
  const double share = i->train_tokens > 0 ? 100.0 * (double)i->trained_tokens / (double)i->train_tokens : 0.0;
  fprintf(stderr, "        %lld row%s in %lld window%s, %lld tokens (%.3g%%) are trained\n", (long long)i->train_rows,
          plural(i->train_rows), (long long)i->train_windows, plural(i->train_windows), (long long)i->trained_tokens,
          share);
  if (i->truncated_rows > 0)
    fprintf(stderr, "        %lld rows are longer than data.sequence and were truncated by %lld tokens\n",
            (long long)i->truncated_rows, (long long)i->cut_tokens);
  if (i->dropped_rows > 0)
    fprintf(stderr, "        %lld rows are longer than data.sequence and were dropped\n", (long long)i->dropped_rows);
  if (i->untrained_rows > 0)
    fprintf(stderr, "        %lld rows have no trained token and were dropped\n", (long long)i->untrained_rows);
  if (i->equal_rows > 0)
    fprintf(stderr, "        %lld pairs have two equal answers and were dropped\n", (long long)i->equal_rows);
}

static void print_held_out(const rfr_run_info *i) {
  char a[32];
  if (i->validation_tokens == 0) fprintf(stderr, "        nothing is held out for validation\n");
  else if (i->validation_rows > 0)
    fprintf(stderr, "        held out for validation: %lld row%s, %lld tokens\n", (long long)i->validation_rows,
            plural(i->validation_rows), (long long)i->validation_tokens);
  else
    fprintf(stderr, "        held out for validation: %s in %lld file%s, %lld tokens\n",
            cli_bytes(a, i->validation_bytes), (long long)i->validation_files, plural(i->validation_files),
            (long long)i->validation_tokens);
}

static void print_data(const rfr_run_info *i) {
  char a[32];
  fprintf(stderr, "data    %lld file%s, %s, %lld tokens", (long long)i->train_files, plural(i->train_files),
          cli_bytes(a, i->train_bytes), (long long)i->train_tokens);
  /* A run that is given in time does not know its number of steps yet. */
  if (!i->steps_estimated) fprintf(stderr, ": %.3g epoch%s", i->epochs, i->epochs == 1.0 ? "" : "s");
  fputc('\n', stderr);
  if (i->train_rows > 0) print_rows(i);
  if (i->duplicate_files > 0) fprintf(stderr, "        %lld duplicate files skipped\n", (long long)i->duplicate_files);
  if (i->empty_files > 0) fprintf(stderr, "        %lld empty files skipped\n", (long long)i->empty_files);
  print_held_out(i);
}

static void print_model(const rfr_run_info *i) {
  fprintf(stderr, "model   %lld parameters", (long long)i->parameters);
  if (i->adapter_parameters > 0) fprintf(stderr, " and %lld of the adapter", (long long)i->adapter_parameters);
  if (i->trainable_parameters < i->parameters + i->adapter_parameters)
    fprintf(stderr, ", %lld trainable", (long long)i->trainable_parameters);
  else fputs(", all trainable", stderr);
  fprintf(stderr, ", %s\n", rfr_dtype_name(i->dtype));
  if (i->adapter_parameters > 0 && !*i->model)
    fputs("        the base has the random weights of run.seed: the adapter cannot be exported\n", stderr);
}

/* Prints the phases of a ramp that have not ended. */
static void print_phases(const rfr_run *run, int64_t step) {
  rfr_run_phase x;
  const char *before = "; ramp: ";
  for (int i = 0; rfr_run_phase_at(run, i, &x) == RFR_OK && x.until > 0; i++) {
    if (x.until <= step) continue;
    fprintf(stderr, "%s%lld in sequences of %lld until step %lld", before, (long long)x.tokens, (long long)x.sequence,
            (long long)x.until);
    before = ", ";
  }
}

static void print_steps(const rfr_run *run, const rfr_run_info *i) {
  fputs("steps   ", stderr);
  if (i->time > 0.0 && i->steps_estimated) {
    fprintf(stderr, "for %g s, of %lld tokens each", i->time, (long long)i->tokens_per_step);
  } else {
    if (i->time > 0.0) fprintf(stderr, "for %g s: ", i->time);
    fprintf(stderr, "%lld step%s of %lld tokens", (long long)i->steps, plural(i->steps), (long long)i->tokens_per_step);
  }
  print_phases(run, i->step);
  if (i->step > 0) fprintf(stderr, "; %lld of them are done", (long long)i->step);
  fputc('\n', stderr);
}

/* The planned bytes of the stages' callables on this rank, without the memory that they share with the programs. */
static int64_t stage_bytes(const rfr_run *run) {
  rfr_run_pipeline p;
  rfr_run_get_pipeline(run, &p);
  return p.planned_bytes;
}

/* Prints the table with which training starts. */
static void print_start(rfr_run *run, const rfr_run_info *i) {
  char a[32], b[32];
  rfr_plan_summary plan = {0};
  rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &plan);
  print_data(i);
  print_model(i);
  fprintf(stderr, "memory  %s planned; %s of disk for a checkpoint\n",
          cli_bytes(a, plan.planned_bytes + stage_bytes(run)), cli_bytes(b, i->checkpoint_bytes));
  print_steps(run, i);
}

/* The mean of this session; if the session has a single step, the speed of that. */
static double per_second(const progress *p, double timed, double of_step) {
  if (p->seconds > 0.0) return timed / p->seconds;
  return p->rate > 0.0 ? of_step / p->rate : 0.0;
}

static void print_json(const cli *c, rfr_run *run, const progress *p, const char *folder, double seconds) {
  rfr_run_info info;
  rfr_plan_summary plan = {0};
  rfr_run_get_info(run, &info);
  rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &plan);
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "folder", folder);
  json_text(&j, "checkpoint", info.checkpoint);
  if (cli_has_ranks(c)) json_int(&j, "ranks", c->launch.ranks), json_int(&j, "rank", c->launch.rank);
  json_int(&j, "step", info.step);
  json_int(&j, "steps", info.steps);
  json_int(&j, "skipped", info.skipped);
  json_double(&j, "seconds", seconds);
  json_double(&j, "tokens_per_second", per_second(p, p->timed_tokens, (double)p->tokens));
  json_double(&j, "flops_per_second", per_second(p, p->timed_flops, p->flops));
  if (p->evaluated) json_double(&j, "validation_loss", p->loss);
  if (p->evaluated && p->bytes) json_double(&j, "validation_bits_per_byte", p->bits);
  if (p->evaluated && p->preference) {
    json_double(&j, "validation_margin", p->margin);
    json_double(&j, "validation_accuracy", p->accuracy);
  }
  json_int(&j, "planned_bytes", plan.planned_bytes);
  json_int(&j, "touched_bytes", rfr_programs_touched_bytes(rfr_run_programs(run)));
  if (stage_bytes(run) > 0) json_int(&j, "stage_bytes", stage_bytes(run));
  json_end(&j, '}');
  putchar('\n');
}

static void print_result(rfr_run *run, const progress *p, double seconds) {
  rfr_run_info info;
  rfr_plan_summary plan = {0};
  char a[32];
  rfr_run_get_info(run, &info);
  rfr_program_plan(rfr_run_programs(run), rfr_run_program_index(run, RFR_RUN_TRAIN), &plan);
  if (info.step > info.steps)
    printf("the run has %lld steps already, more than the %lld that are asked for; %s\n", (long long)info.step,
           (long long)info.steps, info.checkpoint);
  else
    printf("%lld of %lld steps in %.1f s, %s\n", (long long)info.step, (long long)info.steps, seconds, info.checkpoint);
  if (p->rate > 0.0)
    printf("speed: %.0f tokens/s, %.4g TFLOP/s of the model\n", per_second(p, p->timed_tokens, (double)p->tokens),
           1e-12 * per_second(p, p->timed_flops, p->flops));
  printf("memory: %lld bytes planned (%s), %lld touched", (long long)plan.planned_bytes,
         cli_bytes(a, plan.planned_bytes), (long long)rfr_programs_touched_bytes(rfr_run_programs(run)));
  if (stage_bytes(run) > 0) printf("; %lld more for the stages of rank 0", (long long)stage_bytes(run));
  putchar('\n');
  if (p->evaluated && p->bytes) printf("validation: %.3f bits per byte\n", p->bits);
  else if (p->evaluated && p->preference)
    printf("validation: loss %.4f, margin %.3f, accuracy %.1f%%\n", p->loss, p->margin, 100.0 * p->accuracy);
  else if (p->evaluated) printf("validation: loss %.4f\n", p->loss);
}

/* Runs steps until the end, a stop or an error. */
static rfr_status train(cli *c, rfr_run *run, progress *p, const char *folder) {
  rfr_run_info info;
  rfr_run_get_info(run, &info);
  p->tokens = info.tokens_per_step;
  p->flops = info.flops_per_step;
  rfr_run_phase phase;
  for (int i = 0; rfr_run_phase_at(run, i, &phase) == RFR_OK; i++)
    if (phase.until == 0 || info.step < phase.until) {
      progress_set_tokens(p, phase.tokens);
      break;
    }
  p->bytes = info.byte_tokens;
  p->preference = info.preference;
  if (!p->quiet) {
    progress_close_line(p);
    print_start(run, &info);
    cli_peak(c->ctx, info.dtype, &p->peak); /* if it fails, progress omits the share of the peak */
  }
  /* SA_RESTART: fsync on a network file system is not retried by the library */
  struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
  atomic_store(&running, run);
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  if (cli_has_ranks(c)) sigaction(SIGUSR1, &action, NULL); /* sent by launch.c */
  const double start = cli_now();
  const rfr_status s = rfr_run_train(run);
  const double seconds = cli_now() - start;
  atomic_store(&running, NULL);
  progress_close_line(p);
  if (s != RFR_OK) print_end(c, s, info.checkpoint, folder);
  if (s != RFR_OK && s != RFR_STOPPED) return s;
  if (c->launch.rank > 0) return s;
  if (c->json) print_json(c, run, p, folder, seconds);
  else if (!c->quiet) print_result(run, p, seconds);
  return s;
}

/* Prints the bytes of a step that does not fit, and settings that need less, as `refrain plan` does. */
static void print_no_fit(cli *c, const char *text, const char *folder) {
  char *read = NULL;
  rfr_run *run = NULL;
  cli_fit fit;
  c->resume = false;
  rfr_status s = RFR_OK;
  if (!text) {
    snprintf(c->config, sizeof c->config, "%s/config.yaml", folder);
    s = cli_read_file(c->config, &read);
    text = read;
  }
  if (s == RFR_OK) s = cli_open_config(c, text, RFR_RUN_TRAIN, false, NULL, &run);
  if (s == RFR_OK) s = cli_fit_make(c, text, run, RFR_RUN_TRAIN, &fit);
  if (s == RFR_OK && c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_int(&j, "planned_bytes", fit.plan.planned_bytes);
    cli_fit_json(&fit, &j);
    json_end(&j, '}');
    putchar('\n');
  } else if (s == RFR_OK) {
    fprintf(stderr, "the step needs %lld bytes:\n", (long long)fit.plan.planned_bytes);
    cli_fit_print(&fit, stderr);
  }
  rfr_run_close(run);
  free(read);
}

rfr_status cli_train_config(cli *c, const char *text, const char *folder) {
  rfr_run *run = NULL;
  progress p;
  progress_init(&p, c);
  rfr_run_options o = cli_run_options(c);
  o.on_event = on_event;
  o.event_user = c;
  rfr_status s = rfr_run_open(c->ctx, text, folder, &o, &run);
  if (s == RFR_OK) s = train(c, run, &p, folder);
  progress_close_line(&p);
  cli_report_error(c, s);
  if (s == RFR_NO_FIT && !run && !c->comm) print_no_fit(c, text, folder);
  rfr_run_close(run);
  c->progress = NULL;
  c->evaluated = p.evaluated;
  return s;
}

rfr_status cli_train(cli *c) {
  char *text, folder[4200];
  if (c->strict && !c->resume) return cli_usage("add --resume, or omit --strict", "--strict is for --resume");
  rfr_status s = find_run(c, &text, folder);
  if (s == RFR_OK) s = cli_train_config(c, text, folder);
  free(text);
  return s;
}
