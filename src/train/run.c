/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens and closes a run. There are three ways to open: a new run, a run to resume, and a run to read. All of them read
 * the configuration, the data and then compile, so that an error is found before anything expensive happens.
 *
 * The folder is locked before anything in it is written, and its files (config.yaml, checkpoints) are checked again
 * under the lock: of two processes that start in one folder the second one is refused, whatever the order. A new run
 * takes the lock after the compile, so that a model that does not fit leaves no folder; a resumed run takes it first.
 *
 * Of several ranks only rank 0 writes the folder, and changes it only after all ranks have looked at it, compiled, and
 * agreed (handshake.h). The events until then are kept, so that a refused start logs nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "data/file.h"
#include "data/json_file.h"
#include "data/mixture.h"
#include "data/source_dataset.h"
#include "dist/agree.h"
#include "dist/comm.h"
#include "dist/watch.h"
#include "model/peft.h"
#include "train/describe.h"
#include "train/events.h"
#include "train/handshake.h"
#include "train/host.h"
#include "train/ramp.h"
#include "train/reference.h"
#include "train/run_programs.h"
#include "train/samples.h"
#include "train/state.h"

rfr_run_options rfr_run_options_default(void) {
  return (rfr_run_options){.size = sizeof(rfr_run_options), .programs = RFR_RUN_TRAIN | RFR_RUN_EVALUATE};
}

static rfr_status check_options(const rfr_run_options *o, const char *config_text, const char *folder) {
  if (o->size != sizeof *o)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options: size %zu; start from the default", o->size);
  if (o->texts < 0 || o->texts > 64)
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options.texts is %lld; it must be 1 to 64", (long long)o->texts);
  if (o->programs & ~RFR_RUN_ALL) return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options.programs is %d", o->programs);
  if (o->n_overrides < 0 || (o->n_overrides > 0 && !o->overrides))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options: %d overrides, but no list", o->n_overrides);
  if (o->ema && (o->programs & RFR_RUN_TRAIN))
    return rfi_fail(RFI_E_ARGUMENT, "rfr_run_options.ema is for reading; training continues with the trained weights");
  if (!config_text && !folder) return rfi_fail(RFI_E_ARGUMENT, "neither a configuration nor a folder is given");
  return RFR_OK;
}

/* ---- steps of opening ---- */

static rfi_clock_amount clock_amount(rfi_config_amount a) {
  return (rfi_clock_amount){a.percent ? a.value / 100.0 : a.value, a.percent};
}

/* `text` NULL: reads config.yaml of the folder. */
static rfr_status read_settings(rfr_run *run, const char *text, const char *config_path) {
  char *own = NULL;
  size_t n;
  rfr_status s = RFR_OK;
  RFI_TRY(rfi_host_info_read(run->ctx, &run->machine));
  if (!text) {
    RFI_TRY(rfi_file_read_limited(run->ctx, config_path, RFI_JSON_LIMIT, &own, &n));
    run->options.config_name = config_path;
    if (strlen(own) != n) s = rfi_fail_at(RFI_E_CONFIG_SYNTAX, config_path, 0, "the text contains a NUL byte");
  }
  if (s == RFR_OK)
    s = rfi_settings_read(run->ctx, text ? text : own, &run->options, run->machine.bf16_fast, &run->settings);
  rfi_free(run->ctx, own);
  RFI_TRY(s);
  const rfi_settings *settings = run->settings;
  if (run->options.programs & RFR_RUN_TRAIN) RFI_TRY(rfi_ramp_check_steps(settings));
  if (rfr_comm_size(run->options.comm) > 1)
    RFI_TRY(rfr_comm_set_timeout(run->options.comm, settings->parallel.timeout));
  if (settings->spec.preference && (run->options.programs & RFR_RUN_TRAIN))
    run->options.programs |= RFR_RUN_EVALUATE; /* it is needed for the reference */
  if (settings->sample_every > 0 && (run->options.programs & RFR_RUN_TRAIN)) run->options.programs |= RFR_RUN_GENERATE;
  if (!run->options.no_data) RFI_TRY(rfi_settings_open_text(run->settings));
  run->options.overrides = NULL; /* they belong to the caller and are valid only during this call */
  run->options.config_name = run->options.config_folder = NULL;
  run->options.debug |= settings->debug;
  run->steps = settings->steps > 0 ? settings->steps : 1; /* with run.time or run.epochs, set later */
  if (!settings->spec.timed) return RFR_OK;
  run->clock = (rfi_run_clock){.time = settings->time,
                               .warmup = clock_amount(settings->config->schedule_warmup),
                               .decay = clock_amount(settings->config->schedule_decay),
                               .decays = settings->spec.lr.kind == RFR_LR_WSD};
  rfi_run_clock_init(&run->clock);
  return RFR_OK;
}

static void warn_line(void *run, const char *line) { rfi_run_warn(run, "%s", line); }

/* Sets the steps of a run with run.epochs. */
static rfr_status count_steps(rfr_run *run) {
  rfi_settings *s = run->settings;
  RFI_TRY(rfi_dataset_windows(run->data, s->seed, s->epochs, &run->windows));
  if (run->windows == 0)
    return rfi_fail(RFI_E_DATA_EMPTY, "run.epochs: %g epochs of the data have no window", s->epochs);
  RFI_TRY(rfi_settings_set_steps(s, rfi_ramp_steps(s, run->windows, true)));
  run->steps = s->steps;
  return rfi_ramp_check_steps(s);
}

/* Opens data that the program provides: rfr_run_options.data. */
static rfr_status open_source(rfr_run *run) {
  const rfi_settings *s = run->settings;
  const rfr_data_source *source = run->options.data;
  const rfi_config_source *at = &s->config->source[RFI_CFG_data_train];
  run->own_data = source != NULL;
  if (run->own_data && run->settings->spec.preference)
    return rfi_fail(RFI_E_UNSUPPORTED, "data.format: preference needs files of rows (data.train)");
  if (!source)
    return rfi_fail_at(RFI_E_DATA_SOURCE, at->line ? at->from : s->config->file, at->line,
                       "data.train: the list is empty, and the program that opens the run gives no data");
  if (s->config->data_train.n > 0)
    return rfi_fail_at(RFI_E_DATA_SOURCE, at->line ? at->from : s->config->file, at->line,
                       "data.train has patterns, and the program gives data too");
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)(s->spec.slots + 1) * sizeof *run->positions, &run->positions));
  run->tokens_per_byte = 0.0; /* unknown source */
  return rfi_source_dataset_open(run->ctx, source, s->sequence, s->spec.model.vocab_size, &run->data);
}

/* The sources of a mixture have only `windows` windows, which are fewer than the run needs. */
static rfr_status fail_used_up(const rfr_run *run, int64_t windows) {
  const rfi_settings *s = run->settings;
  const rfi_config_source *at = &s->config->source[RFI_CFG_data_max_epochs];
  const char *file = at->line ? at->from : s->config->file;
  const int64_t most = rfi_ramp_steps(s, windows, false);
  if (most == 0)
    return rfi_fail_at(RFI_E_DATA_EMPTY, file, at->line,
                       "data.max_epochs: the sources have %lld windows, and the first step takes %lld; raise "
                       "data.max_epochs of a source, or lower batch.tokens",
                       (long long)windows, (long long)rfi_ramp_windows(s, 1));
  return rfi_fail_at(RFI_E_DATA_EMPTY, file, at->line,
                     "data.max_epochs: all sources are used up in step %lld of %lld; raise data.max_epochs of a "
                     "source, or set run.steps to %lld or less",
                     (long long)most + 1, (long long)s->steps, (long long)most);
}

/* Checks that the sources of a mixture with limits last for all steps, if the number of steps is known. */
static rfr_status check_mixture(rfr_run *run) {
  const rfi_settings *s = run->settings;
  const int64_t wanted = rfi_ramp_windows(s, s->steps);
  const rfi_config_source *at = &s->config->source[RFI_CFG_data_shares];
  const int n = rfi_mixture_sources(run->data);
  int64_t *counts, total = 0;
  if (n == 0 || s->steps < 1) return RFR_OK;
  RFI_TRY(RFI_ALLOC(run->ctx, (size_t)n * sizeof *counts, &counts));
  rfr_status status = rfi_mixture_counts(run->data, s->seed, wanted, counts, &total);
  if (status == RFR_OK && total < wanted) status = fail_used_up(run, total);
  for (int i = 0; status == RFR_OK && i < n; i++)
    if (counts[i] == 0)
      status = rfi_fail_at(RFI_E_DATA_EMPTY, at->line ? at->from : s->config->file, at->line,
                           "data.shares: no window of %.200s is drawn in %lld steps; raise its share",
                           s->config->data_train.items[i], (long long)s->steps);
  rfi_free(run->ctx, counts);
  return status;
}

static rfr_status open_files(rfr_run *run, bool evaluates) {
  RFI_TRY(rfi_settings_open_data(run->settings, evaluates, warn_line, run, &run->data));
  const rfi_dataset_stats *d = rfi_dataset_get_stats(run->data);
  if (d->trained_bytes[RFI_TRAIN] > 0)
    run->tokens_per_byte = (double)d->trained[RFI_TRAIN] / (double)d->trained_bytes[RFI_TRAIN];
  if (d->token_files) run->tokens_per_byte = 0.0; /* unknown */
  if (run->options.programs & RFR_RUN_TRAIN) RFI_TRY(check_mixture(run));
  if (d->trained[RFI_TRAIN] > 0 || !(run->options.programs & RFR_RUN_TRAIN)) return RFR_OK;
  return rfi_fail(RFI_E_DATA_EMPTY,
                  "data.train: each of %d documents has one token, so there is no next token to predict",
                  d->documents[RFI_TRAIN]);
}

/* A phase with shorter sequences cuts windows; this is refused for rows and for windows of the program, which have
 * documents of their own. */
static rfr_status check_sequences(const rfr_run *run) {
  const rfi_settings *s = run->settings;
  const rfi_config_source *at = &s->config->source[RFI_CFG_batch_ramp];
  bool shorter = false;
  for (int i = 0; i < s->n_ramp; i++) shorter |= s->ramp[i].sequence < s->sequence;
  if (!shorter || (!run->own_data && !rfi_dataset_get_stats(run->data)->rows)) return RFR_OK;
  return rfi_fail_at(RFI_E_UNSUPPORTED, at->line ? at->from : s->config->file, at->line,
                     "batch.ramp: sequence: %s would be cut; give phases `tokens` alone",
                     run->own_data ? "windows of the program" : "rows");
}

static rfr_status open_data(rfr_run *run) {
  const int programs = run->options.programs; /* 0: only the data is opened */
  if (run->options.no_data || (programs && !(programs & (RFR_RUN_TRAIN | RFR_RUN_EVALUATE)))) return RFR_OK;
  const bool evaluates = programs && !(programs & RFR_RUN_TRAIN);
  if (run->options.data || run->settings->config->data_train.n == 0) RFI_TRY(open_source(run));
  else RFI_TRY(open_files(run, evaluates));
  RFI_TRY(check_sequences(run));
  rfi_hash_format(run->hash, rfi_dataset_get_stats(run->data)->hash);
  return run->settings->epochs > 0 && !evaluates ? count_steps(run) : RFR_OK;
}

static rfr_status compile(rfr_run *run) {
  RFI_TRY(rfi_run_compile(run));
  run->checkpoint_bytes = rfi_state_bytes(run);
  return RFR_OK;
}

/* Initializes the state of step 0 and, with preferences, computes the reference from it, also if the run resumes. */
static rfr_status prepare(rfr_run *run, bool resumes) {
  RFI_TRY(rfi_state_prepare(run, resumes && !run->settings->spec.preference));
  return rfi_reference_prepare(run);
}

/* Finds the newest checkpoint of a run's folder, the same on all ranks; NULL: there is none. *reason: why newer ones
 * were skipped, or "". `is_checkpoint`: the folder is itself a checkpoint. */
static rfr_status find_checkpoint(rfr_run *run, const char *folder, bool is_checkpoint, rfi_checkpoint **from,
                                  char reason[512]) {
  rfr_comm *comm = run->options.comm;
  int skipped = 0;
  reason[0] = 0;
  const rfr_status s = is_checkpoint ? rfi_checkpoint_open(run->ctx, comm, folder, from)
                                     : rfi_checkpoint_latest(run->ctx, comm, folder, from, &skipped);
  if (s != RFR_OK && rfr_comm_size(comm) > 1) run->met = run->refused = true; /* all ranks skip the handshake */
  if (s == RFR_OK && skipped > 0 && *from) snprintf(reason, 512, "%s", rfr_last_error()->message);
  return s;
}

static rfr_status load(rfr_run *run, const rfi_checkpoint *from, const char *reason) {
  if (*reason && rfr_comm_rank(run->options.comm) <= 0)
    rfi_run_warn(run, "%s; using the older checkpoint %s", reason, from->folder);
  RFI_TRY(prepare(run, true));
  RFI_TRY(rfi_state_load(run, from, (run->options.programs & RFR_RUN_TRAIN) != 0));
  if (run->clock.time > 0.0) run->steps = run->step + (int64_t)run->clock.steps_left;
  return rfr_programs_load(run->programs);
}

static rfr_status write_config(rfr_run *run, const char *path) {
  rfi_string text = {.ctx = run->ctx};
  rfr_status s = rfi_settings_print(run->settings, false, &text);
  if (s == RFR_OK) s = rfi_file_write(run->ctx, path, text.data, text.n);
  rfi_string_deinit(&text);
  return s;
}

/* ---- the folder ---- */

/* Describes a folder: whether it has a configuration of a run, and how many checkpoints, loadable or not. */
static rfr_status look(rfr_ctx *ctx, const char *folder, const char *config_path, bool *config, int *checkpoints) {
  char kind;
  *config = false;
  *checkpoints = 0;
  RFI_TRY(rfi_path_kind(config_path, &kind));
  *config = kind != 0;
  RFI_TRY(rfi_path_kind(folder, &kind));
  if (kind != 'd' && kind != 'l') return RFR_OK;
  rfi_paths names = {.ctx = ctx};
  const rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; s == RFR_OK && i < names.n; i++) {
    const char *name = names.items[i];
    const size_t digits = strncmp(name, "step-", 5) == 0 ? strspn(name + 5, "0123456789") : 0;
    *checkpoints += digits > 0 && name[5 + digits] == 0;
  }
  rfi_paths_deinit(&names);
  return s;
}

static rfr_status check_fresh(rfr_ctx *ctx, const char *folder, const char *config_path) {
  bool config;
  int checkpoints;
  RFI_TRY(look(ctx, folder, config_path, &config, &checkpoints));
  if (!config && !checkpoints) return RFR_OK;
  return rfi_fail_at(RFI_E_RUN_EXISTS, folder, 0,
                     config ? "the folder holds a run already" : "the folder holds checkpoints, but no config.yaml");
}

/* For a folder of ours without a configuration: reports what it is, and the path of the run. */
static rfr_status check_folder(rfr_ctx *ctx, const char *folder) {
  static const struct {
    const char *file, *what;
  } others[] = {{"MANIFEST.json", "is a checkpoint: give the folder above it, which is the run's"},
                {"config.json", "is a model's folder: `model:` in a configuration starts a run from it"},
                {RFI_PEFT_CONFIG, "is an adapter without its base: give the base's folder, and the adapter with "
                                  "--set adapter.from=FOLDER"}};
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

/* The config.yaml of the run to which the checkpoint in `folder` belongs; NULL: it is not a checkpoint of a run. */
static rfr_status find_run_config(rfr_ctx *ctx, const char *folder, char **out) {
  rfr_status s;
  char *manifest = NULL, *above = NULL, *path = NULL, kind;
  *out = NULL;
  RFI_GOTO(rfi_path_join(ctx, folder, "MANIFEST.json", &manifest));
  RFI_GOTO(rfi_path_kind(manifest, &kind));
  if (!kind) goto fail;
  RFI_GOTO(rfi_path_join(ctx, folder, "..", &above));
  RFI_GOTO(rfi_path_join(ctx, above, "config.yaml", &path));
  RFI_GOTO(rfi_path_kind(path, &kind));
  if (kind) *out = path, path = NULL;
fail:
  rfi_free(ctx, manifest);
  rfi_free(ctx, above);
  rfi_free(ctx, path);
  return s;
}

/* Checks the disk space for checkpoints: run.keep of them, and one more because a checkpoint is complete before an
 * older one is deleted, less the existing ones. Bytes that remove_leftovers will free count as free. */
static rfr_status check_space(const rfr_run *run, const char *config_path) {
  const rfi_settings *settings = run->settings;
  const int64_t every = settings->checkpoint_every, steps = settings->steps;
  bool config;
  int existing;
  RFI_TRY(look(run->ctx, run->folder, config_path, &config, &existing));
  int64_t most = every > 0 ? settings->keep + 1 : 1;
  if (every > 0 && steps > 0 && (steps - 1) / every + 1 < most) most = (steps - 1) / every + 1;
  const int64_t need = run->checkpoint_bytes * (most > existing ? most - existing : 1);
  int64_t there;
  rfi_leftovers left;
  RFI_TRY(rfi_dir_space(run->folder, &there));
  RFI_TRY(rfi_checkpoint_leftovers(run->ctx, run->folder, false, &left));
  if (there >= need - left.bytes) return RFR_OK;
  return rfi_fail_at(RFI_E_FILE_SPACE, run->folder, 0, "checkpoints need %lld bytes, but %lld are free",
                     (long long)need, (long long)there);
}

/* Under the lock of the run. */
static rfr_status remove_leftovers(rfr_run *run) {
  rfi_leftovers left;
  RFI_TRY(rfi_checkpoint_leftovers(run->ctx, run->folder, true, &left));
  if (left.n > 0)
    rfi_run_warn(run, "removed %d unfinished checkpoint%s of a process that was killed, %lld bytes: %s%s", left.n,
                 left.n == 1 ? "" : "s", (long long)left.bytes, left.first, left.n == 1 ? "" : ", ...");
  return RFR_OK;
}

static rfr_status lock_folder(rfr_run *run) {
  RFI_TRY(rfi_dir_create(run->folder));
  return rfi_log_open(run, run->folder);
}

/* Only the first rank writes the folder. */
static bool writes(const rfr_run *run) { return run->folder && rfr_comm_rank(run->options.comm) <= 0; }

static rfr_status set_folder(rfr_run *run, const char *folder) {
  RFI_TRY(RFI_ALLOC(run->ctx, strlen(folder) + 1, &run->folder));
  strcpy(run->folder, folder);
  return writes(run) ? rfi_dir_check_writable(folder) : RFR_OK;
}

/* ---- opening: a plan, a new or resumed run, a reader ---- */

static rfr_status open_new(rfr_run *run, const char *text, const char *folder, const char *config_path) {
  rfi_checkpoint *from = NULL;
  char reason[512];
  if (folder) {
    RFI_TRY(check_fresh(run->ctx, folder, config_path));
    if (!text) RFI_TRY(check_folder(run->ctx, folder));
    RFI_TRY(set_folder(run, folder));
  }
  RFI_TRY(read_settings(run, text, config_path));
  /* all ranks find it together */
  if (folder && run->options.resume) RFI_TRY(find_checkpoint(run, folder, false, &from, reason));
  rfi_checkpoint_close(from);
  RFI_TRY(open_data(run));
  if (folder) RFI_TRY(rfi_samples_check(run));
  if (run->options.programs) RFI_TRY(compile(run));
  if (writes(run)) RFI_TRY(check_space(run, config_path));
  RFI_TRY(rfi_handshake(run, -1, RFR_OK));
  if (writes(run)) {
    RFI_TRY(lock_folder(run));
    RFI_TRY(check_fresh(run->ctx, folder, config_path));
  }
  rfi_settings_warn(run->settings, warn_line, run); /* the log is open now */
  if (run->options.programs && !run->options.no_data) RFI_TRY(prepare(run, false));
  if (!writes(run)) return RFR_OK;
  RFI_TRY(write_config(run, config_path));
  RFI_TRY(rfi_run_write_description(run, config_path));
  return rfi_run_write_traces(run);
}

static rfr_status open_resumed(rfr_run *run, const char *text, const char *folder, const char *config_path) {
  rfi_checkpoint *from = NULL;
  char reason[512];
  rfr_status s;
  RFI_TRY(set_folder(run, folder));
  /* locks before reading anything that another process could change */
  if (writes(run)) RFI_TRY(rfi_log_open(run, folder));
  RFI_TRY(read_settings(run, text, config_path));
  RFI_TRY(find_checkpoint(run, folder, false, &from, reason));
  if (from && run->settings->tune) RFI_GOTO(rfi_state_load_tuned(run, from));
  RFI_GOTO(open_data(run));
  RFI_GOTO(rfi_samples_check(run));
  RFI_GOTO(compile(run));
  if (writes(run)) RFI_GOTO(check_space(run, config_path));
  RFI_GOTO(rfi_handshake(run, from ? from->step : -1, RFR_OK));
  rfi_settings_warn(run->settings, warn_line, run);
  RFI_GOTO(from ? load(run, from, reason) : prepare(run, false));
  if (writes(run)) RFI_GOTO(remove_leftovers(run));
  if (writes(run)) RFI_GOTO(write_config(run, config_path));
  if (writes(run)) RFI_GOTO(rfi_run_write_description(run, config_path));
  if (writes(run)) RFI_GOTO(rfi_run_write_traces(run));
fail:
  rfi_checkpoint_close(from);
  return s;
}

/* `folder`: a run, whose newest checkpoint is read, or one checkpoint of a run. */
static rfr_status open_reader(rfr_run *run, const char *text, const char *folder, const char *config_path,
                              bool is_checkpoint) {
  rfi_checkpoint *from = NULL;
  char reason[512] = "";
  rfr_status s;
  RFI_TRY(read_settings(run, text, config_path));
  if (folder) RFI_TRY(find_checkpoint(run, folder, is_checkpoint, &from, reason));
  const bool from_model = !folder && run->settings->weights; /* weights of the model that the configuration names */
  if (!from && !from_model)
    return rfi_fail(RFI_E_CHECKPOINT, "%s: there is no checkpoint to read", folder ? folder : "no folder");
  if (!from && run->options.ema)
    RFI_GOTO(rfi_fail(RFI_E_RUN_EMA, "%s is a model: only a checkpoint has averaged weights", run->settings->weights));
  RFI_GOTO(open_data(run));
  RFI_GOTO(compile(run));
  RFI_GOTO(rfi_handshake(run, from ? from->step : -1, RFR_OK));
  rfi_settings_warn(run->settings, warn_line, run);
  if (from) RFI_GOTO(load(run, from, reason));
  else RFI_GOTO(prepare(run, false));
  s = from ? RFR_OK : rfr_programs_load(run->programs);
fail:
  rfi_checkpoint_close(from);
  return s;
}

static rfr_status open_run(rfr_run *run, const char *text, const char *folder, const char *config_path) {
  const rfr_run_options *o = &run->options;
  const bool trains = (o->programs & RFR_RUN_TRAIN) != 0;
  bool config = false;
  int checkpoints = 0;
  if (folder) RFI_TRY(look(run->ctx, folder, config_path, &config, &checkpoints));
  if (folder && !config && !text) {
    char *above = NULL;
    if (!trains && !o->no_data && o->programs) RFI_TRY(find_run_config(run->ctx, folder, &above));
    if (above) {
      const rfr_status s = open_reader(run, NULL, folder, above, true);
      rfi_free(run->ctx, above);
      return s;
    }
    RFI_TRY(check_folder(run->ctx, folder));
    /* keeps the error of the missing file */
    return rfi_file_read(run->ctx, config_path, &(char *){NULL}, &(size_t){0});
  }
  if (o->no_data || o->programs == 0) return open_new(run, text, NULL, config_path);
  if (!trains) return open_reader(run, text, folder, config_path, false);
  if (folder && o->resume && (config || checkpoints)) return open_resumed(run, text, folder, config_path);
  return open_new(run, text, folder, config_path);
}

/* Called after an error; keeps it as the last error. */
static void leave_watch(rfr_comm *comm) {
  char slug[64], message[2048];
  if (!comm || !comm->watch) return;
  snprintf(slug, sizeof slug, "%s", rfr_last_error()->slug);
  snprintf(message, sizeof message, "%s", rfr_last_error()->message);
  rfi_comm_unwatch(comm);
  rfi_fail_slug(slug, "%s", message);
}

rfr_status rfr_run_open(rfr_ctx *ctx, const char *config_text, const char *folder, const rfr_run_options *options,
                        rfr_run **out) {
  rfr_status s;
  rfr_run *run = NULL;
  char *config_path = NULL;
  rfr_run_options o = options ? *options : rfr_run_options_default();
  o.no_data |= o.plan_only;
  *out = NULL;
  RFI_TRY(check_options(&o, config_text, folder));
  RFI_TRY(RFI_ALLOC(ctx, sizeof *run, &run));
  run->ctx = ctx;
  run->options = o;
  run->log = run->event_file = run->watched = -1;
  run->tokens_per_byte = 1.0;
  atomic_init(&run->stop, 0);
  if (folder) RFI_GOTO(rfi_path_join(ctx, folder, "config.yaml", &config_path));
  run->pending = (rfi_string){.ctx = ctx};
  run->opening = true;
  if (!o.plan_only) RFI_GOTO(rfi_comm_watch(ctx, o.comm));
  s = open_run(run, config_text, folder, config_path);
  if (o.plan_only) {                                   /* a plan does not connect to other ranks */
  } else if (!run->met) s = rfi_handshake(run, -1, s); /* the other ranks wait for this one in the handshake */
  else if (!run->refused) s = rfi_comm_agree(ctx, o.comm, s);
  if (s != RFR_OK) goto fail;
  RFI_GOTO(rfi_comm_unwatch(o.comm));
  RFI_GOTO(rfi_run_log_opened(run));
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_START, .step = run->step, .message = run->checkpoint});
  *out = run;
  run = NULL;
fail:
  leave_watch(o.comm);
  rfi_free(ctx, config_path);
  rfr_run_close(run);
  return s;
}

void rfr_run_close(rfr_run *run) {
  if (!run) return;
  rfi_journal_close(run->log);
  rfi_journal_close(run->event_file);
  rfi_string_deinit(&run->pending);
  rfi_stages_destroy(run->stages);
  rfr_programs_destroy(run->programs);
  rfi_host_forget(run);
  rfi_free(run->ctx, run->reference[RFI_TRAIN]); /* one allocation for both splits */
  rfi_dataset_close(run->data);
  rfi_free(run->ctx, run->positions);
  rfi_free(run->ctx, run->full);
  json_decref(run->tuned);
  rfi_settings_destroy(run->settings);
  rfi_free(run->ctx, run->folder);
  rfi_free(run->ctx, run);
}
