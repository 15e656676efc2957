/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and closing a run: configuration, data, programs, state, folder, in this order,
 * so that a mistake is found before anything costly happens, and nothing is written
 * before everything that can be wrong has been looked at.
 *
 * A run given in seconds is compiled twice: once with a provisional schedule to time a
 * few replays, then with the number of steps that came out. The number goes into the
 * folder's configuration, and a resume takes it from there: no clock decides a bit of a
 * run that is continued.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "nn/nn.h"
#include "train/run.h"

rfr_run_options rfr_run_options_default(void) {
  return (rfr_run_options){.size = sizeof(rfr_run_options), .programs = RFR_RUN_TRAIN | RFR_RUN_EVALUATE};
}

int rfr_run_program_index(const rfr_run *run, int program) {
  for (int i = 0; run && i < run->n_programs; i++)
    if (run->bits[i] == program) return i;
  return -1;
}

rfr_programs *rfr_run_programs(rfr_run *run) { return run ? run->programs : NULL; }

rfr_status rfi_run_check(const rfr_run *run, int programs) {
  RFI_TRY(rfi_check_handle(run, "rfr_run"));
  if (run->options.plan_only) return rfi_fail(RFI_E_PROGRAM_PLAN_ONLY, "the run was opened with plan_only");
  if ((run->options.programs & programs) == programs) return RFR_OK;
  return rfi_fail(RFI_E_ARGUMENT, "the run was opened without RFR_RUN_%s",
                  programs == RFR_RUN_TRAIN      ? "TRAIN"
                  : programs == RFR_RUN_EVALUATE ? "EVALUATE"
                                                 : "GENERATE");
}

/* ---- programs ---- */

typedef struct printed {
  rfi_string text;
  rfr_status status; /* of the first piece that did not fit in memory */
} printed;

static void print_to_string(const char *text, size_t n, void *user) {
  printed *p = user;
  if (p->status == RFR_OK) p->status = rfi_string_append(&p->text, text, n);
}

#define PASS_NAME(name) , #name
static const char *const passes[] = {"record" RFR_PASSES(PASS_NAME)};
#undef PASS_NAME

/* Bit i is program i. */
static const struct {
  const char *name;
  rfr_status (*record)(rfr_ctx *, const rfi_step_spec *, rfr_trace **);
} kinds[] = {
#define KIND(bit, name) {#name, rfi_trace_##name},
    RFR_RUN_PROGRAMS(KIND)
#undef KIND
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };
_Static_assert(RFR_RUN_ALL == (1 << N_KINDS) - 1, "a bit for each program");

static rfr_status write_trace(rfr_run *run, int program, const char *pass, const char *folder) {
  rfr_status s;
  char *path = NULL, name[64];
  printed out = {.text.ctx = run->ctx};
  const rfr_trace *t = rfr_program_trace(run->programs, program, pass);
  if (!t) return RFR_OK;
  int which = 0;
  while (run->bits[program] >> which != 1) which++;
  snprintf(name, sizeof name, "%s-%s.txt", kinds[which].name, pass);
  RFI_GOTO(rfi_path_join(run->ctx, folder, name, &path));
  const rfr_print_options o = rfr_print_options_default();
  RFI_GOTO(rfr_trace_print(t, &o, print_to_string, &out));
  RFI_GOTO(out.status);
  s = rfi_file_write(run->ctx, path, out.text.data, out.text.n);
fail:
  rfi_string_deinit(&out.text);
  rfi_free(run->ctx, path);
  return s;
}

static rfr_status write_traces(rfr_run *run) {
  char *folder = NULL;
  RFI_TRY(rfi_path_join(run->ctx, run->folder, "traces", &folder));
  rfr_status s = rfi_dir_create(folder);
  for (int p = 0; s == RFR_OK && p < run->n_programs; p++)
    for (size_t i = 0; s == RFR_OK && i < sizeof passes / sizeof passes[0]; i++)
      s = write_trace(run, p, passes[i], folder);
  rfi_free(run->ctx, folder);
  return s;
}

/* The tensors that the host fills and reads. */
static rfr_status find_tensors(rfr_run *run) {
  if (rfr_run_program_index(run, RFR_RUN_TRAIN) >= 0) {
    RFI_TRY(rfr_programs_tensor(run->programs, "step", &run->block));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TOKENS, &run->tokens));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TARGETS, &run->targets));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_OFFSETS, &run->offsets));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_METRICS, &run->metrics));
    rfr_tensor zeros;
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_ZERO_STEPS, &zeros));
    RFI_TRY(rfi_host_keep(run, &zeros));
  }
  if (rfr_run_program_index(run, RFR_RUN_EVALUATE) >= 0) {
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_EVAL_TOKENS, &run->eval_tokens));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_EVAL_TARGETS, &run->eval_targets));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_EVAL_OFFSETS, &run->eval_offsets));
    RFI_TRY(rfi_host_keep(run, &run->eval_tokens));
    RFI_TRY(rfi_host_keep(run, &run->eval_targets));
    RFI_TRY(rfi_host_keep(run, &run->eval_offsets));
  }
  return RFR_OK;
}

/* ---- tuning ---- */

/* What was chosen before, for the next compile: all of it, or measure. Freed by the caller. */
static rfr_status list_choices(const rfr_run *run, rfr_compile_options *o, rfr_choice **out) {
  const char *name;
  json_t *value;
  *out = NULL;
  if (!run->tuned) return RFR_OK;
  RFI_TRY(RFI_ALLOC(run->ctx, (json_object_size(run->tuned) + 1) * sizeof **out, out));
  json_object_foreach(run->tuned, name, value) {
    const char *text = json_string_value(value);
    (*out)[o->n_choices++] = (rfr_choice){name, text ? text : ""};
  }
  o->choices = *out;
  return RFR_OK;
}

static rfr_status keep_choices(rfr_run *run, double seconds) {
  char message[128];
  rfr_choice c;
  json_t *object = json_object();
  rfr_status s = object ? RFR_OK : rfi_fail(RFI_E_NO_MEMORY, "what was chosen");
  for (int i = 0; s == RFR_OK && rfr_programs_choice_at(run->programs, i, &c) == RFR_OK; i++)
    s = rfi_json_set(object, c.name, json_string(c.value));
  const size_t n = json_object_size(object);
  if (s == RFR_OK && n == 0 && !run->tuned)
    rfi_warn(run, "run.tune: there is nothing to choose on device %s", rfi_ctx_device(run->ctx));
  snprintf(message, sizeof message, "%s %zu algorithms", run->tuned ? "took the stored" : "chose by measuring", n);
  json_decref(run->tuned);
  run->tuned = object;
  if (s == RFR_OK && n > 0)
    rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = seconds});
  return s;
}

static rfr_status compile(rfr_run *run) {
  rfr_status s = RFR_OK;
  rfr_choice *choices = NULL;
  rfr_trace *traces[N_KINDS] = {NULL};
  const char *names[N_KINDS];
  char message[128];
  run->n_programs = 0;
  for (int i = 0; i < N_KINDS; i++) {
    if (!(run->options.programs >> i & 1)) continue;
    names[run->n_programs] = kinds[i].name;
    run->bits[run->n_programs] = 1 << i;
    RFI_GOTO(kinds[i].record(run->ctx, &run->settings->spec, &traces[run->n_programs]));
    run->n_programs++;
  }
  rfr_compile_options o = rfr_compile_options_default();
  o.budget = run->settings->budget;
  o.recompute = run->settings->recompute;
  o.debug = run->options.debug;
  o.plan_only = run->options.plan_only;
  o.keep_traces = run->options.keep_traces || (run->folder && (run->options.programs & RFR_RUN_TRAIN));
  o.tune = run->settings->tune && (run->options.programs & RFR_RUN_TRAIN);
  RFI_GOTO(list_choices(run, &o, &choices));
  const double start = rfi_now();
  RFI_GOTO(rfr_compile(run->ctx, run->n_programs, (const rfr_trace *const *)traces, names, &o, &run->programs));
  if (o.tune && !o.plan_only) RFI_GOTO(keep_choices(run, rfi_now() - start));
  snprintf(message, sizeof message, "compiled %d program%s", run->n_programs, run->n_programs == 1 ? "" : "s");
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = rfi_now() - start});
  s = find_tensors(run);
fail:
  rfi_free(run->ctx, choices);
  for (int i = 0; i < N_KINDS; i++) rfr_trace_destroy(traces[i]);
  return s;
}

/* What opening leaves for the first use when it was asked for no data. */
rfr_status rfi_state_ready(rfr_run *run) {
  if (run->ready) return RFR_OK;
  if (run->options.plan_only) return rfi_fail(RFI_E_PROGRAM_PLAN_ONLY, "the run was opened with plan_only");
  RFI_TRY(rfi_state_init(run));
  RFI_TRY(rfr_programs_load(run->programs));
  if (!run->options.eager && !run->options.debug)
    for (int i = 0; i < run->n_programs; i++) RFI_TRY(rfr_program_capture(run->programs, i));
  run->ready = true;
  return RFR_OK;
}

/* ---- a run given in seconds ---- */

/* Mean seconds of a step, from replays that are thrown away. The first part warms a machine up that idled. */
static rfr_status time_steps(rfr_run *run, double *seconds) {
  const double time = run->settings->time, start = rfi_now();
  double warm = start, now = start;
  for (int i = 0, n = 0; n < 3 || now - start < 0.05 * time; i++) {
    RFI_TRY(rfr_run_step(run));
    now = rfi_now();
    if (i < 2 || now - start < 0.02 * time) warm = now;
    else *seconds = (now - warm) / ++n;
  }
  return RFR_OK;
}

/* Seconds of evaluating one of `all` windows, from a few. */
static rfr_status time_window(rfr_run *run, int64_t all, double *seconds) {
  const int64_t few = 4 * run->settings->eval_rows, windows = few < all ? few : all;
  rfr_evaluation e;
  *seconds = 0.0;
  for (int i = 0; i < 2 && windows > 0; i++) { /* the first warms up */
    RFI_TRY(rfi_evaluate(run, windows, &e));
    *seconds = e.seconds / (double)windows;
  }
  return RFR_OK;
}

/* How many steps fit into the run's time with their evaluations; the last evaluation is left half of it at most. */
static rfr_status count_steps(rfr_run *run, double *step, double *steps) {
  const rfi_settings *s = run->settings;
  const int64_t all = rfi_run_evaluates(run) ? rfi_dataset_get_stats(run->data)->windows[RFI_VALIDATION] : 0;
  const double some = (double)(s->evaluate_windows > 0 && s->evaluate_windows < all ? s->evaluate_windows : all);
  double window;
  RFI_TRY(rfi_state_ready(run));
  RFI_TRY(time_steps(run, step));
  RFI_TRY(time_window(run, all, &window));
  const double each = *step + (s->evaluate_every > 0 ? window * some / (double)s->evaluate_every : 0.0);
  *steps = fmin(fmax((s->time - fmin(window * (double)all, s->time / 2)) / each, 1.0), 1e9);
  return RFR_OK;
}

static rfr_status calibrate(rfr_run *run) {
  double seconds = 0.0, steps = 1.0;
  char message[128], number[32];
  const rfr_event_fn on_event = run->options.on_event;
  const int log = run->log;
  run->options.on_event = NULL; /* these steps are none of the run's */
  run->log = -1;
  const rfr_status s = count_steps(run, &seconds, &steps);
  run->options.on_event = on_event;
  run->log = log;
  RFI_TRY(s);
  RFI_TRY(rfi_settings_set_steps(run->settings, (int64_t)steps, "run.time"));
  run->steps = run->settings->steps;
  snprintf(message, sizeof message, "%lld steps in %s s", (long long)run->steps,
           rfi_format_double(number, run->settings->time));
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = seconds});
  rfr_programs_destroy(run->programs);
  rfi_host_forget(run);
  run->programs = NULL;
  run->ready = false;
  return compile(run); /* the state is filled anew when it is next needed */
}

/* ---- opening ---- */

static rfr_status check_options(const rfr_run_options *o, const char *config_text, const char *folder) {
  if (o->size != sizeof *o)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options: size %zu; start from the default", o->size);
  if (o->programs & ~RFR_RUN_ALL) return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options.programs is %d", o->programs);
  if (o->n_overrides < 0 || (o->n_overrides > 0 && !o->overrides))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options: %d overrides, and no list", o->n_overrides);
  if (!config_text && !folder) return rfi_fail(RFI_E_ARGUMENT, "neither a configuration nor a folder is given");
  return RFR_OK;
}

static rfr_status open_data(rfr_run *run) {
  const int programs = run->options.programs; /* 0: the data alone */
  if (run->options.no_data || (programs && !(programs & (RFR_RUN_TRAIN | RFR_RUN_EVALUATE)))) return RFR_OK;
  RFI_TRY(rfi_settings_open_data(run->settings, &run->data));
  rfi_hash_format(run->hash, rfi_dataset_get_stats(run->data)->hash);
  return RFR_OK;
}

/* Programs, calibrated if the run is given in seconds and new. */
static rfr_status make_programs(rfr_run *run) {
  if (run->options.programs == 0) return RFR_OK;
  RFI_TRY(compile(run));
  if (run->settings->steps > 0 || !(run->options.programs & RFR_RUN_TRAIN) || run->options.no_data) return RFR_OK;
  return calibrate(run);
}

static rfr_status load_or_start(rfr_run *run, const rfi_checkpoint *from) {
  if (run->options.no_data || run->options.programs == 0) return RFR_OK;
  RFI_TRY(rfi_state_ready(run));
  if (!from) return RFR_OK;
  RFI_TRY(rfi_state_load(run, from, (run->options.programs & RFR_RUN_TRAIN) != 0));
  return rfr_programs_load(run->programs);
}

static rfr_status write_config(rfr_run *run, const char *path) {
  rfi_string text = {.ctx = run->ctx};
  rfr_status s = rfi_settings_print(run->settings, false, &text);
  if (s == RFR_OK) s = rfi_file_write(run->ctx, path, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

/* After compile: what does not fit leaves no folder behind. */
static rfr_status open_folder(rfr_run *run) {
  char *path = NULL;
  RFI_TRY(rfi_dir_create(run->folder));
  RFI_TRY(rfi_path_join(run->ctx, run->folder, "log.jsonl", &path));
  rfr_status s = rfi_log_open(run, path);
  rfi_free(run->ctx, path);
  return s;
}

/* A folder without a configuration that is something else of ours: which, and where the run is. */
static rfr_status check_folder(rfr_ctx *ctx, const char *folder) {
  static const struct {
    const char *file, *what;
  } others[] = {{"MANIFEST.json", "is a checkpoint of a run: the run is the folder that it lies in"},
                {"config.json", "is a model's folder: `model:` in a configuration starts a run from it"}};
  for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
    char *path, kind;
    RFI_TRY(rfi_path_join(ctx, folder, others[i].file, &path));
    const rfr_status s = rfi_path_kind(path, &kind);
    rfi_free(ctx, path);
    RFI_TRY(s);
    if (kind) return rfi_fail(RFI_E_RUN_FOLDER, "%s %s", folder, others[i].what);
  }
  return RFR_OK;
}

static void warn_line(void *run, const char *line) { rfi_warn(run, "%s", line); }

rfr_status rfr_run_open(rfr_ctx *ctx, const char *config_text, const char *folder, const rfr_run_options *options,
                        rfr_run **out) {
  rfr_status s;
  rfr_run *run = NULL;
  rfi_checkpoint *from = NULL;
  char *config_path = NULL, *own = NULL;
  rfr_run_options o = options ? *options : rfr_run_options_default();
  o.no_data |= o.plan_only;
  const bool writes = folder && (o.programs & RFR_RUN_TRAIN) && !o.no_data;
  *out = NULL;
  RFI_TRY(check_options(&o, config_text, folder));
  RFI_GOTO(RFI_ALLOC(ctx, sizeof *run, &run));
  run->ctx = ctx;
  run->options = o;
  run->log = -1;
  atomic_init(&run->stop, 0);
  if (folder) {
    RFI_GOTO(rfi_path_join(ctx, folder, "config.yaml", &config_path));
    char exists;
    RFI_GOTO(rfi_path_kind(config_path, &exists));
    if (writes && exists && !o.resume) {
      s = rfi_fail_at(RFI_E_RUN_EXISTS, config_path, 0, "the folder holds a run already");
      goto fail;
    }
    if (!config_text && !exists) RFI_GOTO(check_folder(ctx, folder));
    if (!config_text || (writes && exists)) RFI_GOTO(rfi_file_read(ctx, config_path, &own, &(size_t){0}));
  }
  RFI_GOTO(rfi_host_info_read(ctx, &run->machine));
  if (!config_text) run->options.config_name = config_path;
  RFI_GOTO(
      rfi_settings_read(ctx, config_text ? config_text : own, &run->options, run->machine.bf16_fast, &run->settings));
  if (!o.no_data && o.programs) RFI_GOTO(rfi_settings_check_tokenizer(run->settings));
  /* Seconds became a number of steps when the run began: the folder knows it. */
  if (config_text && own && run->settings->steps == 0)
    RFI_GOTO(rfi_settings_take_steps(run->settings, own, config_path));
  run->options.overrides = NULL; /* the caller's, for the time of this call alone */
  run->options.config_name = NULL;
  run->steps = run->settings->steps;
  run->options.debug |= run->settings->debug;
  if (folder && ((writes && o.resume) || !(o.programs & RFR_RUN_TRAIN)))
    RFI_GOTO(rfi_checkpoint_latest(ctx, folder, &from, NULL));
  if (!from && o.programs != 0 && !o.no_data && !(o.programs & RFR_RUN_TRAIN)) {
    s = rfi_fail(RFI_E_CHECKPOINT, "%s: there is no checkpoint to read", folder ? folder : "no folder");
    goto fail;
  }
  if (from && writes && run->settings->tune) RFI_GOTO(rfi_state_tuned(run, from));
  RFI_GOTO(open_data(run));
  if (writes) {
    RFI_GOTO(RFI_ALLOC(ctx, strlen(folder) + 1, &run->folder));
    strcpy(run->folder, folder);
  }
  RFI_GOTO(make_programs(run));
  if (writes) RFI_GOTO(open_folder(run));
  rfi_settings_warn(run->settings, warn_line, run); /* the log is open */
  RFI_GOTO(load_or_start(run, from));
  if (writes) {
    RFI_GOTO(write_config(run, config_path));
    RFI_GOTO(write_traces(run));
  }
  rfi_emit(run, &(rfr_event){.kind = RFR_EVENT_START, .step = run->step, .message = run->checkpoint});
  *out = run;
  run = NULL;
  s = RFR_OK;
fail:
  rfi_checkpoint_close(from);
  rfi_free(ctx, config_path);
  rfi_free(ctx, own);
  rfr_run_close(run);
  return s;
}

void rfr_run_close(rfr_run *run) {
  if (!run) return;
  rfi_journal_close(run->log);
  rfr_programs_destroy(run->programs);
  rfi_host_forget(run);
  rfi_dataset_close(run->data);
  json_decref(run->tuned);
  rfi_settings_destroy(run->settings);
  rfi_free(run->ctx, run->folder);
  rfi_free(run->ctx, run);
}

/* Of one step as models are usually counted: two for each weight of a matrix and token that goes to it,
 * the same twice over for the gradients, and attention over half of each window. The
 * compiled program's own count takes attention over packed windows as if they were one. */
static double step_flops(const rfr_model_config *c, int64_t sequence, int64_t tokens) {
  double weights = (double)(c->vocab_size * c->hidden_size);
  for (int i = 0; i < rfr_model_parameter_count(c); i++) {
    rfr_parameter p;
    if (rfr_model_parameter(c, i, &p) != RFR_OK || p.rank < 2) continue;
    if (i == rfi_parameter_index(c, RFI_PARAM_TOKENS, 0) || i == rfi_parameter_index(c, RFI_PARAM_POSITIONS, 0) ||
        i == rfi_parameter_index(c, RFI_PARAM_HEAD, 0))
      continue; /* tables are looked up; the head is counted, tied or not */
    const double each = (double)(p.shape[p.rank - 2] * p.shape[p.rank - 1]);
    weights += p.rank > 2 ? each * (double)c->experts_per_token : each;
  }
  return (double)tokens * (6.0 * weights + 6.0 * (double)(c->layers * c->heads * c->head_dim * sequence));
}

void rfr_run_get_info(const rfr_run *run, rfr_run_info *out) {
  *out = (rfr_run_info){.size = sizeof *out};
  if (!run) return;
  const rfi_settings *s = run->settings;
  *out = (rfr_run_info){.size = sizeof *out,
                        .step = run->step,
                        .steps = run->steps,
                        .dtype = s->spec.model.dtype,
                        .tokens_per_step = s->spec.tokens * s->spec.microbatches,
                        .experts = s->spec.model.experts,
                        .expert_layers = rfr_model_expert_layers(&s->spec.model),
                        .expert_rows = s->spec.tokens * s->spec.model.experts_per_token,
                        .byte_tokens = rfi_settings_has_byte_tokens(s),
                        .data_hash = run->hash,
                        .checkpoint = run->checkpoint};
  int64_t block[RFI_STEP_N];
  if (run->block.data && rfr_programs_read(run->programs, &run->block, block) == RFR_OK)
    out->skipped = block[RFI_STEP_SKIPPED];
  out->flops_per_step = step_flops(&s->spec.model, s->sequence, out->tokens_per_step);
  if (run->data) {
    const rfi_dataset_stats *d = rfi_dataset_get_stats(run->data);
    out->train_files = d->files[RFI_TRAIN];
    out->train_bytes = d->bytes[RFI_TRAIN];
    out->validation_files = d->files[RFI_VALIDATION];
    out->validation_bytes = d->bytes[RFI_VALIDATION];
  }
  for (int i = 0; i < rfr_model_parameter_count(&s->spec.model); i++) {
    rfr_parameter p;
    if (rfr_model_parameter(&s->spec.model, i, &p) != RFR_OK) continue;
    int64_t n = 1;
    for (int d = 0; d < p.rank; d++) n *= p.shape[d];
    out->parameters += n;
    if (strstr(p.name, ".mlp.experts.")) out->expert_bytes += n * rfr_dtype_bits(s->spec.model.dtype) / 8;
    if (!rfi_step_rule(&s->spec, i).frozen) out->trainable_parameters += n;
  }
  if (out->expert_layers > 0) out->expert_bytes /= out->expert_layers; /* which are all alike */
}

const char *rfr_run_data_file(const rfr_run *run, int validation, int64_t i) {
  const rfi_split split = validation ? RFI_VALIDATION : RFI_TRAIN;
  if (!run || !run->data || i < 0 || i >= rfi_dataset_get_stats(run->data)->files[split]) return NULL;
  return rfi_dataset_file(run->data, split, (int)i, NULL);
}
