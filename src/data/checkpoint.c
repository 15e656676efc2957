/* SPDX-License-Identifier: Apache-2.0
 *
 * Checkpoint folders; checkpoint.h states the guarantees.
 *
 * The manifest is JSON: {"format": "refrain-checkpoint", "version": 1, "step": 123,
 * "files": {"model.safetensors": {"size": 10, "xxh3_128": "32 hex digits"}}}. Names are
 * plain, so that a manifest from elsewhere cannot make us read outside its folder.
 * Deleting goes through a rename to a temporary name first: an interrupted deletion leaves a folder that is recognized
 * as garbage, not half a checkpoint.
 */
#include "data/checkpoint.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/json_file.h"
#include "dist/agree.h"
#include "dist/comm.h"

#define MANIFEST "MANIFEST.json"
#define FORMAT "refrain-checkpoint"
enum { VERSION = 1, NO_STEP = -1 }; /* NO_STEP: a folder without manifest */

struct rfi_checkpoint_writer {
  rfr_ctx *ctx;
  rfr_comm *comm; /* NULL: one rank */
  char *run, *folder, *temporary;
  int64_t step;
  rfi_file *file; /* the file that is being written */
  char *name;     /* its name */
  json_t *files;  /* entries of the manifest; until it is written, those of this rank */
};

static bool leads(const rfi_checkpoint_writer *w) { return rfr_comm_rank(w->comm) <= 0; }

static bool plain_name(const char *name) {
  return name[0] != 0 && strchr(name, '/') == NULL && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
         strlen(name) < 200;
}

/* process 0: the checkpoint; else the temporary folder of that process. */
static rfr_status printed_path(rfr_ctx *ctx, char **out, const char *run, int64_t step, int64_t process) {
  rfi_string s = {.ctx = ctx};
  rfr_status status = rfi_string_printf(&s, "%s/step-%06lld", run, (long long)step);
  if (status == RFR_OK && process) status = rfi_string_printf(&s, ".tmp-%lld", (long long)process);
  if (status == RFR_OK) status = rfi_path_join(ctx, "", s.data, out);
  rfi_string_deinit(&s);
  return status;
}

/* ---- writing ---- */

/* Frees a writer; the temporary folder belongs to rank 0. */
static void free_writer(rfi_checkpoint_writer *w) {
  rfi_file_close(w->file);
  json_decref(w->files);
  rfi_free(w->ctx, w->name);
  rfi_free(w->ctx, w->run);
  rfi_free(w->ctx, w->folder);
  rfi_free(w->ctx, w->temporary);
  rfi_free(w->ctx, w);
}

static void discard(rfi_checkpoint_writer *w) {
  rfi_file_close(w->file); /* must precede removing its folder */
  w->file = NULL;
  if (leads(w) && w->temporary) rfi_tree_discard(w->temporary);
  free_writer(w);
}

/* Sends the process id of rank 0 to all ranks. */
static rfr_status find_leader(rfr_ctx *ctx, rfr_comm *comm, int64_t *process) {
  void *all;
  *process = getpid();
  if (rfr_comm_size(comm) < 2) return RFR_OK;
  RFI_TRY(rfi_comm_collect(ctx, comm, process, sizeof *process, &all));
  *process = *(int64_t *)all;
  rfi_free(ctx, all);
  return RFR_OK;
}

static rfr_status make_folder(const rfi_checkpoint_writer *w) {
  RFI_TRY(rfi_dir_create(w->run));
  RFI_TRY(rfi_tree_remove(w->ctx, w->temporary)); /* left by a dead process that had our process id */
  return rfi_dir_create(w->temporary);
}

static rfr_status check_folder(const rfi_checkpoint_writer *w) {
  char kind;
  RFI_TRY(rfi_path_kind(w->temporary, &kind));
  if (kind == 'd') return RFR_OK;
  return rfi_fail_at(RFI_E_FILE_WRITE, w->temporary, 0,
                     "rank 0 created this folder, but this rank does not see it: all ranks need the same file system");
}

/* folder NULL: that of the step. */
static rfr_status set_paths(rfi_checkpoint_writer *w, const char *run, const char *folder, int64_t process) {
  RFI_TRY(rfi_path_join(w->ctx, "", run, &w->run));
  w->files = json_object();
  if (!w->files) return rfi_fail(RFI_E_NO_MEMORY, "a checkpoint's manifest");
  if (!folder) {
    RFI_TRY(printed_path(w->ctx, &w->folder, run, w->step, 0));
    return printed_path(w->ctx, &w->temporary, run, w->step, process);
  }
  RFI_TRY(rfi_path_join(w->ctx, "", folder, &w->folder));
  return rfi_path_temporary(w->ctx, folder, &w->temporary);
}

static rfr_status begin(rfr_ctx *ctx, rfr_comm *comm, const char *run, const char *folder, int64_t step,
                        rfi_checkpoint_writer **out) {
  rfi_checkpoint_writer *w = NULL;
  int64_t process;
  *out = NULL;
  RFI_TRY(find_leader(ctx, comm, &process));
  rfr_status s = RFI_ALLOC(ctx, sizeof *w, &w);
  if (s == RFR_OK) {
    w->ctx = ctx;
    w->comm = comm;
    w->step = step;
    s = set_paths(w, run, folder, process);
    if (s == RFR_OK && leads(w)) s = make_folder(w);
  }
  s = rfi_comm_agree(ctx, comm, s);
  if (s == RFR_OK) s = rfi_comm_agree(ctx, comm, leads(w) ? RFR_OK : check_folder(w));
  if (s == RFR_OK) *out = w;
  else if (w) discard(w);
  return s;
}

rfr_status rfi_checkpoint_begin(rfr_ctx *ctx, rfr_comm *comm, const char *run, int64_t step,
                                rfi_checkpoint_writer **out) {
  *out = NULL;
  if (step < 0) return rfi_fail(RFI_E_ARGUMENT, "step is %lld; it must be at least 0", (long long)step);
  return begin(ctx, comm, run, NULL, step, out);
}

rfr_status rfi_checkpoint_begin_folder(rfr_ctx *ctx, const char *folder, rfi_checkpoint_writer **out) {
  char *parent;
  *out = NULL;
  RFI_TRY(rfi_path_parent(ctx, folder, &parent));
  const rfr_status s = begin(ctx, NULL, parent, folder, NO_STEP, out);
  rfi_free(ctx, parent);
  return s;
}

/* Makes the current file durable and adds its entry. */
static rfr_status finish_file(rfi_checkpoint_writer *w) {
  if (!w->file) return RFR_OK;
  rfi_hash hash;
  char text[33];
  rfi_file *file = w->file;
  json_int_t size = rfi_file_size(file);
  w->file = NULL;
  RFI_TRY(rfi_file_finish(file, &hash));
  rfi_hash_format(text, hash);
  return rfi_json_set(w->files, w->name, json_pack("{s:I, s:s}", "size", size, "xxh3_128", text));
}

rfr_status rfi_checkpoint_file(rfi_checkpoint_writer *w, const char *name, rfi_file **file) {
  *file = NULL;
  if (!plain_name(name) || strcmp(name, MANIFEST) == 0)
    return rfi_fail(RFI_E_ARGUMENT, "\"%s\" is not a valid file name in a checkpoint", name);
  RFI_TRY(finish_file(w));
  if (json_object_get(w->files, name))
    return rfi_fail(RFI_E_ARGUMENT, "the checkpoint already has a file \"%s\"", name);
  rfi_free(w->ctx, w->name);
  w->name = NULL;
  RFI_TRY(rfi_path_join(w->ctx, "", name, &w->name));
  char *path;
  RFI_TRY(rfi_path_join(w->ctx, w->temporary, name, &path));
  rfr_status s = rfi_file_create(w->ctx, path, &w->file);
  rfi_free(w->ctx, path);
  *file = w->file;
  return s;
}

rfr_status rfi_checkpoint_add(rfi_checkpoint_writer *w, const char *name, const void *data, size_t n) {
  rfi_file *file;
  RFI_TRY(rfi_checkpoint_file(w, name, &file));
  RFI_TRY(rfi_file_append(file, data, n));
  return finish_file(w);
}

static rfr_status write_manifest(rfi_checkpoint_writer *w) {
  json_t *manifest = json_pack("{s:s, s:i, s:I, s:O}", "format", FORMAT, "version", (int)VERSION, "step",
                               (json_int_t)w->step, "files", w->files);
  if (!manifest) return rfi_fail(RFI_E_NO_MEMORY, "a checkpoint's manifest");
  rfi_string text = {.ctx = w->ctx};
  char *path = NULL;
  rfi_file *file;
  rfr_status s = rfi_json_print(manifest, &text);
  json_decref(manifest);
  if (s == RFR_OK) s = rfi_path_join(w->ctx, w->temporary, MANIFEST, &path);
  if (s == RFR_OK) s = rfi_file_create(w->ctx, path, &file);
  if (s == RFR_OK) {
    s = rfi_file_append(file, text.data, text.n);
    if (s == RFR_OK) s = rfi_file_finish(file, NULL);
    else rfi_file_close(file);
  }
  rfi_free(w->ctx, path);
  rfi_string_deinit(&text);
  return s;
}

/* Adds the files of rank `from`, described in JSON, to the manifest. */
static rfr_status merge_files(rfi_checkpoint_writer *w, int from, const char *text) {
  json_t *files, *entry;
  const char *name;
  rfr_status s = RFR_OK;
  RFI_TRY(rfi_json_parse("a rank's files", text, strlen(text), &files));
  json_object_foreach(files, name, entry) {
    if (json_object_get(w->files, name)) s = rfi_fail(RFI_E_INTERNAL, "rank %d writes %s too", from, name);
    if (s == RFR_OK) s = rfi_json_set(w->files, name, json_incref(entry));
  }
  json_decref(files);
  return s;
}

/* Gathers the entries of all ranks on rank 0. */
static rfr_status gather_files(rfi_checkpoint_writer *w) {
  enum { MOST = RFI_EXCHANGE_BYTES };
  const int ranks = rfr_comm_size(w->comm);
  rfi_string text = {.ctx = w->ctx};
  char mine[MOST] = "{}", *all = NULL;
  if (ranks < 2) return RFR_OK;
  rfr_status s = rfi_json_print_compact(w->files, &text);
  if (s == RFR_OK && text.n >= MOST) s = rfi_fail(RFI_E_INTERNAL, "%zu bytes describe the files of a rank", text.n);
  if (s == RFR_OK) memcpy(mine, text.data, text.n), mine[text.n] = 0;
  rfi_string_deinit(&text);
  if (s == RFR_OK) s = RFI_ALLOC(w->ctx, (size_t)ranks * MOST, &all);
  s = rfi_comm_agree(w->ctx, w->comm, s);
  if (s == RFR_OK) s = rfi_comm_exchange(w->comm, mine, MOST, all);
  for (int r = 1; r < ranks && s == RFR_OK && leads(w); r++) s = merge_files(w, r, all + (int64_t)r * MOST);
  rfi_free(w->ctx, all);
  return s;
}

/* *shown: the checkpoint is visible under its name, so no failure may remove it. */
static rfr_status publish(rfi_checkpoint_writer *w, bool *shown) {
  bool exchanged;
  if (w->step != NO_STEP) RFI_TRY(write_manifest(w));
  RFI_TRY(rfi_dir_sync(w->temporary));
  RFI_TRY(rfi_dir_replace(w->temporary, w->folder, &exchanged));
  *shown = true;
  RFI_TRY(rfi_dir_sync(w->run));
  return exchanged ? rfi_tree_remove(w->ctx, w->temporary) : RFR_OK;
}

rfr_status rfi_checkpoint_finish(rfi_checkpoint_writer *w, rfr_status s) {
  bool shown = false;
  if (s == RFR_OK) s = finish_file(w);
  s = rfi_comm_agree(w->ctx, w->comm, s);
  if (s == RFR_OK) {
    s = gather_files(w);
    if (s == RFR_OK && leads(w)) s = publish(w, &shown);
    s = rfi_comm_agree(w->ctx, w->comm, s);
  }
  if (shown) free_writer(w);
  else discard(w);
  return s;
}

/* ---- reading ---- */

#define BAD(place, ...) rfi_fail_at(RFI_E_CHECKPOINT, place, 0, __VA_ARGS__)

/* Errors of files that are missing or not JSON become "checkpoint", because the checkpoint is damaged. */
static rfr_status as_damage(rfr_status s, const char *path) {
  if (s == RFR_OK || s == RFR_NO_MEMORY) return s;
  char text[512];
  snprintf(text, sizeof text, "%s", rfr_last_error()->message);
  size_t n = strlen(path); /* the message already begins with the path */
  const char *rest = strncmp(text, path, n) == 0 && text[n] == ':' ? text + n + 1 + (text[n + 1] == ' ') : text;
  return BAD(path, "%s", rest);
}

static rfr_status load_manifest(rfr_ctx *ctx, const char *folder, json_t **out) {
  char *path;
  *out = NULL;
  RFI_TRY(rfi_path_join(ctx, folder, MANIFEST, &path));
  int64_t version = 0, step = 0;
  const char *format = "";
  json_t *manifest;
  rfr_status s = as_damage(rfi_json_load(ctx, path, &manifest), path);
  if (s == RFR_OK) {
    s = rfi_json_get_string(manifest, path, "format", true, &format);
    if (s == RFR_OK) s = rfi_json_get_int(manifest, path, "version", true, 1, INT64_MAX, &version);
    if (s == RFR_OK) s = rfi_json_get_int(manifest, path, "step", true, 0, INT64_MAX, &step);
    s = as_damage(s, path);
    if (s == RFR_OK && strcmp(format, FORMAT) != 0) s = BAD(path, "\"%.40s\" is not the format %s", format, FORMAT);
    if (s == RFR_OK && version != VERSION)
      s = BAD(path, "version %lld, this library reads %d", (long long)version, VERSION);
    if (s == RFR_OK && !json_is_object(json_object_get(manifest, "files"))) s = BAD(path, "\"files\" is no object");
  }
  if (s == RFR_OK) *out = manifest;
  else json_decref(manifest);
  rfi_free(ctx, path);
  return s;
}

/* Checks one file against its entry; the hash only if `deep`. */
static rfr_status check_file(rfr_ctx *ctx, const char *path, const json_t *entry, bool deep) {
  int64_t size = 0, found = 0;
  const char *text = "";
  char actual[33];
  rfi_hash hash = {0, 0};
  rfi_file *file;
  RFI_TRY(as_damage(rfi_json_get_int(entry, path, "size", true, 0, INT64_MAX, &size), path));
  RFI_TRY(as_damage(rfi_json_get_string(entry, path, "xxh3_128", true, &text), path));
  RFI_TRY(as_damage(rfi_file_open(ctx, path, &file), path));
  found = rfi_file_size(file);
  rfi_file_close(file);
  if (found != size) return BAD(path, "has %lld bytes, the manifest says %lld", (long long)found, (long long)size);
  if (!deep) return RFR_OK;
  RFI_TRY(as_damage(rfi_file_hash(ctx, path, &found, &hash), path));
  if (strcmp(rfi_hash_format(actual, hash), text) != 0) return BAD(path, "its bytes are not those that were written");
  return RFR_OK;
}

static rfr_status check_named(rfr_ctx *ctx, const char *folder, const char *name, const json_t *entry, bool deep) {
  char *path;
  RFI_TRY(rfi_path_join(ctx, folder, name, &path));
  const rfr_status s = check_file(ctx, path, entry, deep);
  rfi_free(ctx, path);
  return s;
}

/* Checks only the sizes. */
static rfr_status check_sizes(rfr_ctx *ctx, const char *folder, json_t *files) {
  const char *name;
  json_t *entry;
  json_object_foreach(files, name, entry) {
    if (!plain_name(name)) return BAD(folder, "the manifest names a file \"%.200s\"", name);
    RFI_TRY(check_named(ctx, folder, name, entry, false));
  }
  return RFR_OK;
}

/* Lists all files and compares this rank's share with the manifest: a file is checked by the rank that has the fewest
 * bytes so far. */
static rfr_status check_share(rfr_ctx *ctx, rfr_comm *comm, const char *folder, json_t *files, rfi_paths *names) {
  const int ranks = rfr_comm_size(comm) > 1 ? rfr_comm_size(comm) : 1, own = ranks > 1 ? rfr_comm_rank(comm) : 0;
  const char *name;
  json_t *entry;
  rfr_status s = RFR_OK;
  int64_t *bytes;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)ranks * sizeof *bytes, &bytes));
  json_object_foreach(files, name, entry) {
    int least = 0;
    for (int r = 1; r < ranks; r++)
      if (bytes[r] < bytes[least]) least = r;
    const json_int_t size = json_integer_value(json_object_get(entry, "size"));
    if (size > 0 && size <= INT64_MAX - bytes[least]) bytes[least] += size;
    if (!plain_name(name)) s = BAD(folder, "the manifest names a file \"%.200s\"", name);
    else if (least == own) s = check_named(ctx, folder, name, entry, true);
    if (s == RFR_OK) s = rfi_paths_add(names, name, strlen(name));
    if (s != RFR_OK) break;
  }
  rfi_free(ctx, bytes);
  rfi_paths_sort(names);
  return s;
}

/* Whether loading reads a file, in addition to safetensors files. */
static bool is_loaded(const char *name) {
  static const char *const names[] = {"config.json", "state.json", "model.safetensors.index.json",
                                      "adapter_config.json"};
  static const char suffix[] = ".safetensors";
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (strcmp(name, names[i]) == 0) return true;
  const size_t n = strlen(name);
  return n >= sizeof suffix && strcmp(name + n - (sizeof suffix - 1), suffix) == 0;
}

/* Checks that every file of the folder that loading reads has an entry. */
static rfr_status check_listed(rfr_ctx *ctx, const char *folder, const json_t *files) {
  rfi_paths names = {.ctx = ctx};
  rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; i < names.n && s == RFR_OK; i++)
    if (is_loaded(names.items[i]) && !json_object_get(files, names.items[i]))
      s = BAD(folder, "%s is in the folder and has no entry in " MANIFEST, names.items[i]);
  rfi_paths_deinit(&names);
  return s;
}

static rfr_status open_share(rfr_ctx *ctx, rfr_comm *comm, const char *folder, rfi_checkpoint **out) {
  rfr_status s;
  rfi_checkpoint *c;
  json_t *manifest = NULL;
  *out = NULL;
  RFI_TRY(RFI_ALLOC(ctx, sizeof *c, &c));
  c->ctx = c->files.ctx = ctx;
  RFI_GOTO(rfi_path_join(ctx, "", folder, &c->folder));
  RFI_GOTO(load_manifest(ctx, folder, &manifest));
  c->step = json_integer_value(json_object_get(manifest, "step"));
  RFI_GOTO(check_listed(ctx, folder, json_object_get(manifest, "files")));
  RFI_GOTO(check_share(ctx, comm, folder, json_object_get(manifest, "files"), &c->files));
  json_decref(manifest);
  *out = c;
  return RFR_OK;
fail:
  json_decref(manifest);
  rfi_checkpoint_close(c);
  return s;
}

/* Either all ranks get an open checkpoint, or none. `s`: the status of this rank's share. */
static rfr_status agree_on(rfr_ctx *ctx, rfr_comm *comm, rfr_status s, rfi_checkpoint **out) {
  s = rfi_comm_agree(ctx, comm, s);
  if (s == RFR_OK) return RFR_OK;
  rfi_checkpoint_close(*out);
  *out = NULL;
  return s;
}

rfr_status rfi_checkpoint_open(rfr_ctx *ctx, rfr_comm *comm, const char *folder, rfi_checkpoint **out) {
  *out = NULL;
  RFI_TRY(rfi_comm_agree(ctx, comm, RFR_OK));
  return agree_on(ctx, comm, open_share(ctx, comm, folder, out), out);
}

void rfi_checkpoint_close(rfi_checkpoint *c) {
  if (!c) return;
  rfi_paths_deinit(&c->files);
  rfi_free(c->ctx, c->folder);
  rfi_free(c->ctx, c);
}

rfr_status rfi_checkpoint_path(const rfi_checkpoint *c, const char *name, char **out) {
  *out = NULL;
  for (int i = 0; i < c->files.n; i++)
    if (strcmp(c->files.items[i], name) == 0) return rfi_path_join(c->ctx, c->folder, name, out);
  return BAD(c->folder, "the checkpoint has no file \"%s\"", name);
}

/* ---- the checkpoints of a run ---- */

/* The step of "step-DIGITS" or "step-DIGITS.tmp-..."; -1 for other names. */
static int64_t parse_name(const char *name, bool *temporary) {
  int64_t step = 0;
  if (strncmp(name, "step-", 5) != 0) return -1;
  const char *p = name + 5;
  for (; *p >= '0' && *p <= '9'; p++)
    if (__builtin_mul_overflow(step, 10, &step) || __builtin_add_overflow(step, *p - '0', &step)) return -1;
  *temporary = strncmp(p, ".tmp-", 5) == 0;
  return p == name + 5 || (*p && !*temporary) ? -1 : step;
}

/* Lists the names in a run's folder; none if the run has not started. */
static rfr_status list_run(rfr_ctx *ctx, const char *run, rfi_paths *names) {
  char kind;
  *names = (rfi_paths){.ctx = ctx};
  RFI_TRY(rfi_path_kind(run, &kind));
  return kind ? rfi_dir_list(run, names) : RFR_OK;
}

/* The newest checkpoint before step `below`, compared as numbers, because a step of more than six digits sorts before
 * smaller ones as text. -1: there is none. */
static int64_t newest_below(const rfi_paths *names, int64_t below, const char **name) {
  int64_t step = -1;
  for (int i = 0; i < names->n; i++) {
    bool temporary;
    const int64_t n = parse_name(names->items[i], &temporary);
    if (n > step && n < below && !temporary) step = n, *name = names->items[i];
  }
  return step;
}

/* All ranks must use the same checkpoint. */
static rfr_status check_same_step(rfr_ctx *ctx, rfr_comm *comm, int64_t step) {
  void *all;
  rfr_status s = RFR_OK;
  if (rfr_comm_size(comm) < 2) return RFR_OK;
  RFI_TRY(rfi_comm_collect(ctx, comm, &step, sizeof step, &all));
  const int64_t *steps = all;
  for (int r = 1; r < rfr_comm_size(comm) && s == RFR_OK; r++)
    if (steps[r] != steps[0])
      s = rfi_fail(RFI_E_DIST_RUN,
                   "the newest checkpoint is step %lld for rank 0, and step %lld for rank %d (-1: none)",
                   (long long)steps[0], (long long)steps[r], r);
  rfi_free(ctx, all);
  return s;
}

static rfr_status open_named(rfr_ctx *ctx, rfr_comm *comm, const char *run, const char *name, rfi_checkpoint **out) {
  char *folder = NULL;
  *out = NULL;
  rfr_status s = rfi_path_join(ctx, run, name, &folder);
  if (s == RFR_OK) s = open_share(ctx, comm, folder, out);
  rfi_free(ctx, folder);
  return agree_on(ctx, comm, s, out);
}

rfr_status rfi_checkpoint_latest(rfr_ctx *ctx, rfr_comm *comm, const char *run, rfi_checkpoint **out, int *skipped) {
  rfi_paths names;
  const char *name = NULL;
  int damaged = 0;
  *out = NULL;
  rfr_status s = rfi_comm_agree(ctx, comm, list_run(ctx, run, &names));
  for (int64_t step = INT64_MAX; s == RFR_OK && !*out;) {
    step = newest_below(&names, step, &name);
    s = check_same_step(ctx, comm, step);
    if (s != RFR_OK || step < 0) break;
    s = open_named(ctx, comm, run, name, out);
    if (s == RFR_OK || s == RFR_NO_MEMORY || strncmp(rfr_last_error()->slug, "dist.", 5) == 0) break;
    damaged++;
    if (rfr_comm_rank(comm) <= 0)
      rfi_log(ctx, RFR_LOG_WARNING, "skipping a damaged checkpoint: %s", rfr_last_error()->message);
    s = RFR_OK;
  }
  rfi_paths_deinit(&names);
  if (skipped) *skipped = damaged;
  if (s == RFR_OK && !*out && damaged > 0)
    return rfi_fail_prefix("%d checkpoints, none is complete; the oldest: ", damaged);
  return s;
}

/* Deletes a checkpoint, unless it is damaged or among the newest `keep`, which are counted. */
static rfr_status delete_beyond(rfr_ctx *ctx, const char *folder, int keep, int *seen) {
  json_t *manifest;
  rfr_status s = load_manifest(ctx, folder, &manifest);
  if (s == RFR_OK) s = check_sizes(ctx, folder, json_object_get(manifest, "files"));
  json_decref(manifest);
  if (s == RFR_NO_MEMORY) return s;
  if (s != RFR_OK || (*seen)++ < keep) return RFR_OK;
  rfi_string rubbish = {.ctx = ctx};
  bool exchanged;
  s = rfi_string_printf(&rubbish, "%s.tmp-%ld", folder, (long)getpid());
  if (s == RFR_OK) s = rfi_tree_remove(ctx, rubbish.data);
  if (s == RFR_OK) s = rfi_dir_replace(folder, rubbish.data, &exchanged);
  if (s == RFR_OK) s = rfi_tree_remove(ctx, rubbish.data);
  rfi_string_deinit(&rubbish);
  return s;
}

/* ---- leftovers of killed processes ---- */

/* Whether the process in the name has ended, as far as this machine knows. Our own process has no open writer here. */
static bool has_ended(const char *name) {
  const char *number = strstr(name, ".tmp-") + 5;
  char *end;
  const long process = strtol(number, &end, 10);
  if (end == number || *end || process < 1) return false;
  return process == getpid() || (kill((pid_t)process, 0) != 0 && errno == ESRCH);
}

static rfr_status count_bytes(rfr_ctx *ctx, const char *folder, int64_t *bytes) {
  rfi_paths names = {.ctx = ctx};
  rfr_status s = rfi_dir_list(folder, &names);
  for (int i = 0; i < names.n && s == RFR_OK; i++) {
    char *path;
    rfi_file *file;
    s = rfi_path_join(ctx, folder, names.items[i], &path);
    if (s == RFR_OK && rfi_file_open(ctx, path, &file) == RFR_OK) {
      *bytes += rfi_file_size(file);
      rfi_file_close(file);
    }
    rfi_free(ctx, path);
  }
  rfi_paths_deinit(&names);
  return s;
}

/* Visits the unfinished files of killed processes. `out` NULL: those of all processes, without counting. */
static rfr_status visit_unfinished(rfr_ctx *ctx, const char *run, bool remove, rfi_leftovers *out) {
  rfi_paths names;
  rfr_status s = list_run(ctx, run, &names);
  for (int i = 0; i < names.n && s == RFR_OK; i++) {
    bool temporary;
    char *path;
    const char *name = names.items[i];
    if (parse_name(name, &temporary) < 0 || !temporary || (out && !has_ended(name))) continue;
    s = rfi_path_join(ctx, run, name, &path);
    if (s == RFR_OK && out) s = count_bytes(ctx, path, &out->bytes);
    if (s == RFR_OK && remove) s = rfi_tree_remove(ctx, path);
    if (s == RFR_OK && out && out->n++ == 0) rfi_snprintf(out->first, sizeof out->first, "%s", name);
    rfi_free(ctx, path);
  }
  rfi_paths_deinit(&names);
  return s;
}

rfr_status rfi_checkpoint_leftovers(rfr_ctx *ctx, const char *run, bool remove, rfi_leftovers *out) {
  *out = (rfi_leftovers){0};
  return visit_unfinished(ctx, run, remove, out);
}

rfr_status rfi_checkpoint_retain(rfr_ctx *ctx, const char *run, int keep) {
  rfi_paths names;
  const char *name = NULL;
  int seen = 0;
  if (keep < 1) return rfi_fail(RFI_E_ARGUMENT, "keep is %d; at least 1 checkpoint must be kept", keep);
  rfr_status s = list_run(ctx, run, &names);
  for (int64_t step = INT64_MAX; s == RFR_OK && (step = newest_below(&names, step, &name)) >= 0;) {
    char *folder;
    s = rfi_path_join(ctx, run, name, &folder);
    if (s == RFR_OK) s = delete_beyond(ctx, folder, keep, &seen);
    rfi_free(ctx, folder);
  }
  rfi_paths_deinit(&names);
  return s == RFR_OK ? visit_unfinished(ctx, run, true, NULL) : s;
}
