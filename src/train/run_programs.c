/* SPDX-License-Identifier: Apache-2.0
 *
 * Records and compiles the programs of a run, and launches them.
 */
#include "train/run_programs.h"

#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "base/json.h"
#include "train/events.h"
#include "train/host.h"
#include "train/parts.h"
#include "train/ramp.h"

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

/* Declares the gradients of the next step of a pipeline. */
static rfr_status run_pipeline(rfr_run *run) {
  const rfi_step_spec *s = &run->settings->spec;
  const int64_t at = run->launched % s->slots * s->microbatches, T = s->tokens;
  const rfi_stages_batch batch = {(const int32_t *)run->tokens.data + at * T,
                                  (const int32_t *)run->targets.data + at * T,
                                  (const int32_t *)run->offsets.data + at * (T + 1)};
  if (!run->stage_seconds) return rfi_stages_step(run->stages, &batch);
  RFI_TRY(rfi_stages_time(run->stages, &batch, run->stage_seconds));
  RFI_TRY(rfr_programs_wait(run->programs));
  run->update_start = rfi_now();
  return RFR_OK;
}

rfr_status rfi_launch_at(rfr_run *run, int i) {
  if (run->options.eager || run->options.debug) return rfr_program_run(run->programs, i);
  return rfr_program_replay(run->programs, i, NULL, 0);
}

int rfi_training_program(const rfr_run *run, int64_t step) { return run->phases[rfi_ramp_phase(run->settings, step)]; }

rfr_status rfi_launch(rfr_run *run, int program) {
  RFI_TRY(rfi_run_check(run, program));
  int i = program == RFR_RUN_TRAIN ? rfi_training_program(run, run->launched) : rfr_run_program_index(run, program);
  if (program == RFR_RUN_TRAIN && rfi_watches(run, run->launched)) i = run->watched;
  if (run->stages && program == RFR_RUN_TRAIN) RFI_TRY(run_pipeline(run));
  return rfi_launch_at(run, i);
}

/* ---- compile ---- */

/* Row i is the program of bit i of rfr_run_options.programs. */
static const struct {
  const char *name;
  rfr_status (*record)(rfr_ctx *, const rfi_step_spec *, rfr_trace **);
} kinds[] = {
#define KIND(bit, name) {#name, rfi_trace_##name},
    RFR_RUN_PROGRAMS(KIND)
#undef KIND
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0], MOST_PROGRAMS = sizeof((rfr_run *)NULL)->bits / sizeof(int) };
_Static_assert(RFR_RUN_ALL == (1 << N_KINDS) - 1, "a bit for each program");

/* Whether a stage of this rank takes the output of another stage. */
static bool has_input_stage(const rfr_run *run) {
  const rfi_pipeline_part *p = &run->settings->spec.pipeline;
  return run->settings->parallel.pipeline > 1 && (p->rank > 0 || rfi_pipeline_chunks(p) > 1);
}

/* Finds the tensors that the host writes and reads. */
static rfr_status find_tensors(rfr_run *run) {
  if (rfr_run_program_index(run, RFR_RUN_TRAIN) >= 0) {
    RFI_TRY(rfr_programs_tensor(run->programs, "step", &run->block));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TOKENS, &run->tokens));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_TARGETS, &run->targets));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_OFFSETS, &run->offsets));
    RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_METRICS, &run->metrics));
    if (run->settings->spec.preference) {
      RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_PAIRS, &run->pairs));
      RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_REFERENCE, &run->reference_ring));
    }
    if (run->settings->spec.timed) RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_LR_STEPS, &run->lr_steps));
    if (run->settings->parallel.ranks > 1) RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_STOP, &run->stop_ring));
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
    if (has_input_stage(run)) RFI_TRY(rfr_programs_tensor(run->programs, RFI_NAME_EVAL_X, &run->eval_x));
  }
  return RFR_OK;
}

/* Passes the choices of an earlier compile to the next one: either all of them, or none, and then it measures. The
 * caller frees them. */
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
  rfr_status s = object ? RFR_OK : rfi_fail(RFI_E_NO_MEMORY, "the algorithms chosen");
  for (int i = 0; s == RFR_OK && rfr_programs_choice_at(run->programs, i, &c) == RFR_OK; i++)
    s = rfi_json_set(object, c.name, json_string(c.value));
  const size_t n = json_object_size(object);
  if (s == RFR_OK && n == 0 && !run->tuned)
    rfi_run_warn(run, "run.tune: there is nothing to choose on device %s", rfi_ctx_device(run->ctx));
  snprintf(message, sizeof message, "%s %zu algorithms", run->tuned ? "took the stored" : "chose by measuring", n);
  json_decref(run->tuned);
  run->tuned = object;
  if (s == RFR_OK && n > 0)
    rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = seconds});
  return s;
}

/* Warns of GEMMs that stay in 16 or 32 bits because of their shapes, although the configuration does not keep them. The
 * report of pass quantize has a line for each, and one with totals. */
static rfr_status check_recipe(rfr_run *run) {
  static const char left[] = "not quantized: ";
  const rfi_config *c = run->settings->config;
  const int program = rfr_run_program_index(run, RFR_RUN_TRAIN);
  int n = 0, quantized = 0, gemms = 0;
  char first[256] = "";
  if (run->settings->spec.recipe.kind == RFR_RECIPE_NONE || program < 0) return RFR_OK;
  for (const char *line = rfr_program_report(run->programs, program, "quantize"); line && *line;) {
    const char *end = strchr(line, '\n');
    const int length = (int)(end ? end - line : (ptrdiff_t)strlen(line));
    sscanf(line, "quantized: %d of %d GEMMs", &quantized, &gemms);
    if (strncmp(line, left, sizeof left - 1) == 0 && memmem(line, (size_t)length, "multiples of", 12) && n++ == 0)
      snprintf(first, sizeof first, "%.*s", length - (int)sizeof left + 1, line + sizeof left - 1);
    line = end ? end + 1 : NULL;
  }
  if (n > 0 && quantized == 0)
    return rfi_fail_at(RFI_E_RECIPE, c->file, c->source[RFI_CFG_precision_recipe].line,
                       "precision.recipe: it quantizes none of the %d GEMMs of linear layers; %s", gemms, first);
  if (n > 0)
    rfi_run_warn(run, "precision.recipe: %d of %d GEMMs of linear layers are not quantized; the first: %s", n, gemms,
                 first);
  return RFR_OK;
}

/* The programs also use `step`: the update and the evaluation run between the steps of the callables. */
static rfr_status make_pipeline(rfr_run *run, rfr_step_memory *step) {
  const rfi_settings *s = run->settings;
  rfr_plan_summary plan;
  RFI_TRY(rfr_program_plan(run->programs, 0, &plan));
  const rfi_stages_options o = {.comm = run->options.comm,
                                .fuse = true,
                                .eager = run->options.eager || run->options.debug,
                                .debug = run->options.debug,
                                .plan_only = run->options.plan_only,
                                .recompute = s->recompute,
                                .step_memory = step,
                                .budget = s->budget > 0 && s->budget <= plan.persistent_bytes
                                              ? 1
                                              : s->budget - (s->budget > 0 ? plan.persistent_bytes : 0)};
  const rfr_status status = rfi_stages_create(run->ctx, &s->spec, run->programs, &o, &run->stages);
  if (status == RFR_NO_FIT)
    rfi_fail_prefix("memory.budget less the %lld persistent bytes of the programs: ", (long long)plan.persistent_bytes);
  return status;
}

/* The evaluation of each stage of this rank of a pipeline. */
static rfr_status record_stages(rfr_run *run, rfr_trace **traces, const char **names) {
  static const char *const of_chunk[] = {"evaluate", "evaluate.1"};
  const rfi_step_spec *s = &run->settings->spec;
  for (int stage = 0, chunk = 0; stage < rfi_pipeline_stages(&s->pipeline); stage++) {
    if (rfi_pipeline_rank(&s->pipeline, stage) != s->pipeline.rank) continue;
    names[run->n_programs] = of_chunk[chunk++];
    run->bits[run->n_programs] = RFR_RUN_EVALUATE;
    RFI_TRY(rfi_trace_stage_evaluate(run->ctx, s, stage, &traces[run->n_programs]));
    run->n_programs++;
  }
  return RFR_OK;
}

/* The name of a phase's program. */
static const char *const phase_names[] = {"train.1", "train.2", "train.3", "train.4",
                                          "train.5", "train.6", "train.7", "train.8"};
_Static_assert(sizeof phase_names / sizeof *phase_names == RFI_RAMP_MOST, "a name for each phase before the last");

/* Records the training programs of the phases before the last. They follow all other programs. */
static rfr_status record_phases(rfr_run *run, rfr_trace **traces, const char **names) {
  const rfi_settings *s = run->settings;
  run->phases[s->n_ramp] = rfr_run_program_index(run, RFR_RUN_TRAIN);
  for (int p = 0; p < s->n_ramp && run->phases[s->n_ramp] >= 0; p++) {
    const rfi_step_spec spec = rfi_ramp_spec(s, p);
    run->phases[p] = run->n_programs;
    names[run->n_programs] = phase_names[p];
    run->bits[run->n_programs] = RFR_RUN_TRAIN;
    RFI_TRY(rfi_trace_train(run->ctx, &spec, &traces[run->n_programs]));
    run->n_programs++;
  }
  return RFR_OK;
}

/* Records a second training program for the steps in which values are watched, so that other steps run without the ops
 * that watch. */
static rfr_status record_watched(rfr_run *run, rfr_trace **traces, const char **names, rfr_watch_options *watch,
                                 rfr_compile_options *o) {
  const rfi_settings *s = run->settings;
  const rfi_config_list *patterns = &s->config->run_watch;
  const rfi_config_source *at = &s->config->source[RFI_CFG_run_watch];
  run->watched = -1;
  if (patterns->n == 0 || !(run->options.programs & RFR_RUN_TRAIN)) return RFR_OK;
  if (s->parallel.pipeline > 1)
    return rfi_fail_at(RFI_E_UNSUPPORTED, at->line ? at->from : s->config->file, at->line,
                       "run.watch: a pipeline has no program of the whole step; set parallel.pipeline to 1");
  run->watched = run->n_programs++;
  names[run->watched] = "watched";
  run->bits[run->watched] = 0;
  *watch = rfr_watch_options_default();
  watch->patterns = (const char *const *)patterns->items;
  watch->n = patterns->n;
  watch->program = run->watched;
  watch->slots = s->spec.slots;
  o->watch = watch;
  return rfi_trace_train(run->ctx, &s->spec, &traces[run->watched]);
}

/* Adds the place of a pattern that matches nothing to the error of a compile. */
static rfr_status name_pattern(const rfr_run *run, rfr_status s) {
  const rfi_config *c = run->settings->config;
  const rfi_config_source *at = &c->source[RFI_CFG_run_watch];
  char message[1024];
  if (s == RFR_OK || strcmp(rfr_last_error()->slug, "watch.name") != 0) return s;
  snprintf(message, sizeof message, "%s", rfr_last_error()->message);
  const char *text = strstr(message, "the pattern");
  return rfi_fail_at(RFI_E_WATCH_NAME, at->line ? at->from : c->file, at->line, "run.watch: %s", text ? text : message);
}

rfr_status rfi_run_compile(rfr_run *run) {
  rfr_status s = RFR_OK;
  rfr_choice *choices = NULL;
  rfr_trace *traces[MOST_PROGRAMS] = {NULL};
  const char *names[MOST_PROGRAMS];
  char message[128];
  run->n_programs = 0;
  run->settings->spec.texts = run->options.texts;
  const bool pipeline = run->settings->parallel.pipeline > 1;
  rfr_compile_options o = rfr_compile_options_default();
  if (pipeline) RFI_TRY(rfi_pipeline_check(&run->settings->spec));
  if (pipeline) RFI_TRY(rfr_step_memory_create(run->ctx, 0, &o.step_memory));
  for (int i = 0; i < N_KINDS; i++) {
    if (!(run->options.programs >> i & 1)) continue;
    if (pipeline && 1 << i == RFR_RUN_EVALUATE) {
      RFI_GOTO(record_stages(run, traces, names));
      continue;
    }
    names[run->n_programs] = kinds[i].name;
    run->bits[run->n_programs] = 1 << i;
    RFI_GOTO(kinds[i].record(run->ctx, &run->settings->spec, &traces[run->n_programs]));
    run->n_programs++;
  }
  RFI_GOTO(record_phases(run, traces, names));
  rfr_watch_options watch;
  RFI_GOTO(record_watched(run, traces, names, &watch, &o));
  o.budget = run->settings->budget;
  o.recompute = run->settings->recompute;
  o.debug = run->options.debug;
  o.plan_only = run->options.plan_only;
  o.keep_traces = run->options.keep_traces || (run->folder && (run->options.programs & RFR_RUN_TRAIN));
  o.comm = run->options.comm;
  o.shard = run->settings->parallel.shard;
  o.tune = run->settings->tune && (run->options.programs & RFR_RUN_TRAIN);
  RFI_GOTO(list_choices(run, &o, &choices));
  const double start = rfi_now();
  s = rfr_compile(run->ctx, run->n_programs, (const rfr_trace *const *)traces, names, &o, &run->programs);
  RFI_GOTO(name_pattern(run, s));
  RFI_GOTO(rfi_parts_keep(run, run->n_programs, (const rfr_trace *const *)traces));
  if (o.tune && !o.plan_only) RFI_GOTO(keep_choices(run, rfi_now() - start));
  snprintf(message, sizeof message, "compiled %d program%s", run->n_programs, run->n_programs == 1 ? "" : "s");
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_COMPILE, .message = message, .seconds = rfi_now() - start});
  RFI_GOTO(check_recipe(run));
  if (pipeline) RFI_GOTO(make_pipeline(run, o.step_memory));
  s = find_tensors(run);
fail:
  rfi_free(run->ctx, choices);
  rfr_step_memory_destroy(o.step_memory); /* programs and callables still reference it */
  for (int i = 0; i < MOST_PROGRAMS; i++) rfr_trace_destroy(traces[i]);
  return s;
}

/* ---- printed traces ---- */

typedef struct printed {
  rfi_string text;
  rfr_status status; /* status of the first append that failed */
} printed;

static void print_to_string(const char *text, size_t n, void *user) {
  printed *p = user;
  if (p->status == RFR_OK) p->status = rfi_string_append(&p->text, text, n);
}

#define PASS_NAME(name) , #name
static const char *const passes[] = {"record" RFR_PASSES(PASS_NAME)};
#undef PASS_NAME

static rfr_status write_trace(rfr_run *run, int program, const char *pass, const char *folder) {
  rfr_status s;
  char *path = NULL, name[64];
  printed out = {.text.ctx = run->ctx};
  const rfr_trace *t = rfr_program_trace(run->programs, program, pass);
  if (!t) return RFR_OK;
  const char *kind = "watched";
  if (program != run->watched) {
    int which = 0, phase = 0;
    while (run->bits[program] >> which != 1) which++;
    while (phase < run->settings->n_ramp && run->phases[phase] != program) phase++;
    kind = phase < run->settings->n_ramp ? phase_names[phase] : kinds[which].name;
  }
  snprintf(name, sizeof name, "%s-%s.txt", kind, pass);
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

rfr_status rfi_run_write_traces(rfr_run *run) {
  char *folder = NULL;
  RFI_TRY(rfi_path_join(run->ctx, run->folder, "traces", &folder));
  rfr_status s = rfi_dir_create(folder);
  for (int p = 0; s == RFR_OK && p < run->n_programs; p++)
    for (size_t i = 0; s == RFR_OK && i < sizeof passes / sizeof passes[0]; i++)
      s = write_trace(run, p, passes[i], folder);
  rfi_free(run->ctx, folder);
  return s;
}
