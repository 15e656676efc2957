/* SPDX-License-Identifier: Apache-2.0
 *
 * A complete run in which one thing fails: every allocation of the context, every one of jansson and of libyaml, and
 * every system call on a file, each once (and, for a disk that stays full, from then on).
 *
 * After each failure: the status has a slug and a next step and is not an internal error; no block and no descriptor is
 * left; the earlier checkpoint is intact and has the same hashes; any newer checkpoint is bitwise equal to that of a
 * run in which nothing failed. Faults that a run survives (a file of ours that does not close) may end in RFR_OK, and
 * then the result must be the undisturbed one. The log has only complete lines.
 *
 * The k-th thing fails for k = 1, 2, ... until nothing failed any more. `faults_test all` tries every k (make
 * check-faults); without the word it tries every STRIDE-th k after the first DENSE ones, which still covers every phase
 * of a run in a few seconds. `faults_test random [FAULTS [SEED]]` draws FAULTS values of k, an eighth of them for each
 * of the eight pairs of a kind of fault and a start of the run.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "data/checkpoint.h"
#include "data/dataset.h"
#include "refrain/train.h"
#include "support/context.h"
#include "support/folder.h"

#ifdef RFT_SANITIZED
enum { STRIDE = 23 };
#else
enum { STRIDE = 7 };
#endif
enum { DENSE = 24, SHOWN = 3, LAST = 5 };

static bool every_k;    /* set in main */
static int64_t faults;  /* random ones of each test; 0: one fault after the other */
static uint64_t chance; /* state of the generator */

static const char config[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 8, intermediate_size: 12, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [\"text/*.txt\"], validation: 40%, sequence: 8}\n"
    "batch: {tokens: 32, microbatch: 2}\n"
    "optimizer: {lr: 1e-2, clip: 1}\n"
    "precision: {dtype: f32}\n"
    "run: {steps: 5, keep: 3, log_every: 1}\n";

/* Allocations of jansson and libyaml. */
static struct {
  int64_t left; /* number of allocations until one fails; 0: none fails */
  int64_t live;
  bool parsing; /* jansson is */
} theirs;

static void *their_alloc(void *old, size_t bytes) {
  /* jansson's lexer does not check whether its buffer grew, and reads past its end. So allocations of these sizes never
   * fail during parsing. */
  const bool growth = theirs.parsing && bytes >= 32 && (bytes & (bytes - 1)) == 0;
  if (!growth && theirs.left > 0 && --theirs.left == 0) return NULL;
  void *p = realloc(old, bytes ? bytes : 1);
  theirs.live += p && !old;
  return p;
}

static void *their_new(size_t bytes) { return their_alloc(NULL, bytes); }
static void their_free(void *p) {
  theirs.live -= p != NULL;
  free(p);
}

/* Replaces libyaml's own functions: the dynamic linker finds these first. */
#define EXPORTED __attribute__((visibility("default")))
EXPORTED void *yaml_malloc(size_t bytes);
EXPORTED void *yaml_realloc(void *p, size_t bytes);
EXPORTED void yaml_free(void *p);
EXPORTED unsigned char *yaml_strdup(const unsigned char *s);
void *yaml_malloc(size_t bytes) { return their_new(bytes); }
void *yaml_realloc(void *p, size_t bytes) { return their_alloc(p, bytes); }
void yaml_free(void *p) { their_free(p); }
unsigned char *yaml_strdup(const unsigned char *s) {
  if (!s) return NULL;
  const size_t n = strlen((const char *)s) + 1;
  unsigned char *copy = their_new(n);
  return copy ? memcpy(copy, s, n) : NULL;
}

EXPORTED json_t *json_loadb(const char *text, size_t n, size_t flags, json_error_t *error) {
  json_t *(*real)(const char *, size_t, size_t, json_error_t *);
  *(void **)&real = dlsym(RTLD_NEXT, "json_loadb");
  theirs.parsing = true;
  json_t *value = real(text, n, flags, error);
  theirs.parsing = false;
  return value;
}

static int64_t next_k(int64_t k) { return every_k || k < DENSE ? k + 1 : k + STRIDE; }

static int descriptors(void) {
  int n = 0;
  DIR *dir = opendir("/proc/self/fd");
  assert_non_null(dir);
  while (readdir(dir)) n++;
  closedir(dir);
  return n;
}

/* Opens the run (resuming if it exists), trains up to `to`, evaluates and saves. */
static rfr_status whole_run(rfr_ctx *ctx, const char *root, const char *folder, int to) {
  rfr_run *run;
  rfr_evaluation e;
  rfr_run_info info;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = root;
  o.resume = 1;
  rfr_status s = rfr_run_open(ctx, config, folder, &o, &run);
  if (s != RFR_OK) return s;
  rfr_run_get_info(run, &info);
  for (int64_t i = info.step; s == RFR_OK && i < to; i++) s = rfr_run_step(run);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &e);
  if (s == RFR_OK) s = rfr_run_save(run);
  rfr_run_close(run);
  return s;
}

/* A run's folder and its expected checkpoints. */
typedef struct scene {
  rft_folder *f;
  rfr_ctx *ctx;
  const char *folder; /* of the run */
  bool resumed;       /* it already has a checkpoint of step SHOWN */
  int blocks, fds;
  int64_t theirs;
  rfi_hash shown, last; /* hashes of the weights of an undisturbed run at steps SHOWN and LAST */
} scene;

static void weights(scene *c, const char *run, int step, rfi_hash *hash) {
  char name[96];
  int64_t size;
  snprintf(name, sizeof name, "%s/step-%06d/model.safetensors", run, step);
  assert_int_equal(rfi_file_hash(c->f->ctx, rft_path(c->f, name), &size, hash), RFR_OK);
}

/* Makes the undisturbed run and, with `resumed`, the folder from which the disturbed ones start. */
static void set_scene(scene *c, rft_folder *f, bool resumed) {
  *c = (scene){.f = f, .ctx = rft_one_thread(), .resumed = resumed};
  rft_write_texts(f);
  assert_int_equal(whole_run(c->ctx, f->path, rft_path(f, "calm"), SHOWN), RFR_OK);
  assert_int_equal(whole_run(c->ctx, f->path, rft_path(f, "calm"), LAST), RFR_OK);
  weights(c, "calm", SHOWN, &c->shown);
  weights(c, "calm", LAST, &c->last);
  if (resumed) assert_int_equal(whole_run(c->ctx, f->path, rft_path(f, "run"), SHOWN), RFR_OK);
  c->blocks = (int)rfr_ctx_get_stats(c->ctx).live_blocks;
  c->fds = descriptors();
  c->theirs = theirs.live;
}

/* The folder that a disturbed run starts from. */
static void renew(scene *c) {
  if (!c->resumed) assert_int_equal(rfi_tree_remove(c->f->ctx, rft_path(c->f, "run")), RFR_OK);
}

static rfr_status disturbed(scene *c) {
  return whole_run(c->ctx, c->f->path, rft_path(c->f, "run"), c->resumed ? LAST : SHOWN);
}

static void assert_checkpoint(scene *c, int step) {
  char name[64];
  rfi_checkpoint *checkpoint;
  rfi_hash hash;
  snprintf(name, sizeof name, "run/step-%06d", step);
  rfr_status s = rfi_checkpoint_open(c->f->ctx, NULL, rft_path(c->f, name), &checkpoint);
  if (s != RFR_OK) fail_msg("%s", rfr_last_error()->message);
  rfi_checkpoint_close(checkpoint);
  weights(c, "run", step, &hash);
  assert_memory_equal(&hash, step == SHOWN ? &c->shown : &c->last, sizeof hash);
}

/* Checks that every line of the log is complete and a JSON object. */
static void assert_log(scene *c, int64_t k) {
  size_t n;
  if (access(rft_path(c->f, "run/log.jsonl"), F_OK) != 0) return;
  char *text = rft_read(c->f, "run/log.jsonl", &n);
  for (char *line = text, *end; *line; line = end + 1) {
    json_t *event;
    end = strchr(line, '\n');
    if (!end) fail_msg("k %lld: the log ends with %s", (long long)k, line);
    assert_int_equal(rfi_json_parse("log.jsonl", line, (size_t)(end - line), &event), RFR_OK);
    json_decref(event);
  }
  free(text);
}

/* Checks the invariants after any failure; restores the folder. */
static void check_scene(scene *c, rfr_status s, int64_t k) {
  const rfr_error *e = rfr_last_error();
  if (s != RFR_OK && (s == RFR_INTERNAL || !*e->slug || !*e->next || !*e->message || e->status != s))
    fail_msg("k %lld: status %d, %s [%s]", (long long)k, (int)s, e->message, e->slug);
  if (rfr_ctx_get_stats(c->ctx).live_blocks != c->blocks)
    fail_msg("k %lld: %lld blocks are left", (long long)k, (long long)rfr_ctx_get_stats(c->ctx).live_blocks);
  if (theirs.live != c->theirs) fail_msg("k %lld: %lld foreign blocks", (long long)k, (long long)theirs.live);
  assert_log(c, k);
  if (descriptors() != c->fds) fail_msg("k %lld: %d descriptors, %d before", (long long)k, descriptors(), c->fds);
  char name[64];
  snprintf(name, sizeof name, "run/step-%06d", LAST);
  if (c->resumed) {
    assert_checkpoint(c, SHOWN);
    if (s == RFR_OK || access(rft_path(c->f, name), F_OK) == 0) assert_checkpoint(c, LAST);
    assert_int_equal(rfi_tree_remove(c->f->ctx, rft_path(c->f, name)), RFR_OK);
    return;
  }
  snprintf(name, sizeof name, "run/step-%06d", SHOWN);
  if (s == RFR_OK || access(rft_path(c->f, name), F_OK) == 0) assert_checkpoint(c, SHOWN);
}

static void end_scene(scene *c) {
  renew(c);
  assert_int_equal(disturbed(c), RFR_OK); /* leftovers must not prevent a later run */
  rfr_ctx_destroy(c->ctx);
}

/* jansson reports some failed allocations as syntax errors, and returns no value of a text for two reasons. */
static bool tells_of_memory(rfr_status s, const char *slug) {
  if (s == RFR_NO_MEMORY) return strcmp(slug, "memory.alloc") == 0;
  return s == RFR_INVALID && (strcmp(slug, "json") == 0 || strcmp(slug, "checkpoint") == 0);
}

typedef enum kind { ALLOCATION, THEIR_ALLOCATION, CALL, CALLS, KINDS } kind;
enum { SCENES = 2 * KINDS }; /* fresh and resumed, the first tests of main */

/* A run whose k-th call of `what` fails (with CALLS all later ones do, too), and all checks after it. Returns how many
 * such calls there were until the end of the run, and in *s the status of the run. */
static int64_t strike(scene *c, kind what, int64_t k, rfr_status *s) {
  rfi_io_fault fault = {.fail_at = k, .error = EIO};
  if (what == CALLS) fault = (rfi_io_fault){.fail_at = k, .error = ENOSPC, .sticky = true, .max_transfer = 150};
  const int64_t before = rfr_ctx_get_stats(c->ctx).alloc_calls;
  renew(c);
  if (what == ALLOCATION) rfr_ctx_fail_alloc(c->ctx, k);
  if (what == THEIR_ALLOCATION) theirs.left = k;
  if (what == CALL || what == CALLS) rfi_io_set_fault(&fault);
  *s = disturbed(c);
  rfr_ctx_fail_alloc(c->ctx, 0);
  rfi_io_set_fault(NULL);
  const int64_t allocations = rfr_ctx_get_stats(c->ctx).alloc_calls - before, left = theirs.left;
  theirs.left = 0;
  const char *slug = rfr_last_error()->slug;
  if (*s != RFR_OK && ((what == ALLOCATION && (*s != RFR_NO_MEMORY || strcmp(slug, "memory.alloc") != 0)) ||
                       (what == THEIR_ALLOCATION && !tells_of_memory(*s, slug))))
    fail_msg("k %lld: status %d, %s", (long long)k, (int)*s, slug);
  check_scene(c, *s, k);
  const int64_t n = what == ALLOCATION ? allocations : what == THEIR_ALLOCATION ? k - left : fault.calls;
  if (n < k) assert_int_equal(*s, RFR_OK);
  return n;
}

/* A number from 1 to n (splitmix64). */
static int64_t draw(int64_t n) {
  uint64_t x = chance += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return 1 + (int64_t)((x ^ (x >> 31)) % (uint64_t)n);
}

/* Every k from 1 on, or a part of them, until nothing fails any more; or random ones. */
static void each(rft_folder *f, kind what, bool resumed) {
  static const char *const names[KINDS] = {"allocations", "allocations of libraries", "calls",
                                           "calls and all after them"};
  scene c;
  set_scene(&c, f, resumed);
  int64_t failed = 0, n = 0;
  bool yaml = false;
  rfr_status s;
  const int64_t all = faults ? strike(&c, what, INT64_MAX, &s) : 0;
  for (int64_t k = 1; !faults || n < faults; n++) {
    if (faults) k = draw(all);
    if (strike(&c, what, k, &s) < k) break;
    failed += s != RFR_OK;
    yaml |= s != RFR_OK && strstr(rfr_last_error()->message, "YAML");
    k = what == THEIR_ALLOCATION && !every_k ? next_k(next_k(next_k(k))) : next_k(k);
  }
  assert_true(n > 20 && failed > n / 2);
  assert_true(!faults || n == faults);
  assert_true(what != ALLOCATION || failed == n);
  if (what == THEIR_ALLOCATION && !yaml && !faults) print_message("libyaml keeps its allocator to itself here\n");
  print_message("%lld %s failed, %lld of them ended the run\n", (long long)n, names[what], (long long)failed);
  end_scene(&c);
}

static void allocations_fresh(void **state) { each(*state, ALLOCATION, false); }
static void allocations_resumed(void **state) { each(*state, ALLOCATION, true); }
static void foreign_fresh(void **state) { each(*state, THEIR_ALLOCATION, false); }
static void foreign_resumed(void **state) { each(*state, THEIR_ALLOCATION, true); }
static void calls_fresh_once(void **state) { each(*state, CALL, false); }
static void calls_resumed_once(void **state) { each(*state, CALL, true); }
static void calls_fresh_full(void **state) { each(*state, CALLS, false); }
static void calls_resumed_full(void **state) { each(*state, CALLS, true); }

static json_t *nested(void) {
  return json_pack("{s:i, s:{s:s, s:[f, b, n]}, s:s, s:{}}", "a key", 1, "another", "inner", "some text to print",
                   "list", 0.5, 1, "last", "a longer text that makes the string grow once more, and once more", "none");
}

/* Printing gives a complete text or an error, although jansson itself continues after some failed allocations. */
static void json_prints(void **state) {
  rft_folder *f = *state;
  json_t *value = nested();
  rfi_string whole = {.ctx = f->ctx};
  assert_non_null(value);
  assert_int_equal(rfi_json_print(value, &whole), RFR_OK);
  for (size_t used = 1; used <= 128; used++) { /* so that the string grows for each piece */
    rfr_status s = RFR_NO_MEMORY;
    for (int k = 1; s != RFR_OK; k++) {
      rfi_string text = {.ctx = f->ctx};
      for (size_t i = 0; i < used; i++) assert_int_equal(rfi_string_append(&text, " ", 1), RFR_OK);
      rfr_ctx_fail_alloc(f->ctx, k);
      s = rfi_json_print(value, &text);
      rfr_ctx_fail_alloc(f->ctx, 0);
      if (s == RFR_OK) assert_string_equal(text.data + used, whole.data);
      else assert_int_equal(s, RFR_NO_MEMORY);
      rfi_string_deinit(&text);
    }
  }
  rfi_string_deinit(&whole);
  json_decref(value);
}

/* Interrupts and short transfers are not failures: the result has the same bytes. */
static void short_transfers(void **state) {
  scene c;
  set_scene(&c, *state, true);
  rfi_io_fault fault = {.max_transfer = 7, .interrupt = true};
  rfi_io_set_fault(&fault);
  rfr_status s = disturbed(&c);
  rfi_io_set_fault(NULL);
  assert_int_equal(s, RFR_OK);
  check_scene(&c, s, 0);
  end_scene(&c);
}

static void cut_texts(const char *root) {
  for (int i = 0; i < 6; i++) {
    char path[600];
    snprintf(path, sizeof path, "%s/text/%d.txt", root, i);
    assert_int_equal(truncate(path, 29), 0);
  }
}

/* An open run owns its data: truncating the files does not change its results. */
static void data_cut_while_training(void **state) {
  rft_folder *f = *state;
  scene c;
  rfr_run *run;
  set_scene(&c, f, true);
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = f->path;
  o.resume = 1;
  assert_int_equal(rfr_run_open(c.ctx, config, rft_path(f, "run"), &o, &run), RFR_OK);
  cut_texts(f->path);
  for (int i = SHOWN; i < LAST; i++) assert_int_equal(rfr_run_step(run), RFR_OK);
  assert_int_equal(rfr_run_save(run), RFR_OK);
  rfr_run_close(run);
  rft_write_texts(f);
  check_scene(&c, RFR_OK, 0);
  end_scene(&c);
}

/* Truncates the files at its k-th allocation, which is a reproducible moment while the run opens. */
typedef struct cutter {
  int64_t left;
  const char *root;
} cutter;

static void *cutting_alloc(size_t bytes, size_t alignment, void *user) {
  cutter *c = user;
  if (--c->left == 0) cut_texts(c->root);
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void plain_free(void *memory, size_t bytes, void *user) {
  (void)bytes, (void)user;
  free(memory);
}

/* Opening reads each file twice. If a file is truncated in between, the error names the file and where it ended. */
static void data_cut_while_opening(void **state) {
  rft_folder *f = *state;
  cutter cut = {.root = f->path};
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.alloc = cutting_alloc;
  o.free = plain_free;
  o.alloc_user = &cut;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  const int64_t blocks = rfr_ctx_get_stats(ctx).live_blocks;
  const int fds = descriptors();
  const char *const patterns[] = {"text/*.txt"};
  const rfi_dataset_options options = {.root = f->path, .sequence = 8};
  int refused = 0;
  bool done = false;
  for (int64_t k = 1; !done; k++) {
    rfi_dataset *data;
    rft_write_texts(f);
    cut.left = k;
    rfr_status s = rfi_dataset_open(ctx, patterns, 1, &options, &data);
    done = cut.left > 0;
    rfi_dataset_close(data);
    if (s != RFR_OK) {
      assert_int_equal(s, RFR_IO);
      assert_string_equal(rfr_last_error()->slug, "file.read");
      assert_non_null(strstr(rfr_last_error()->message, ".txt"));
      refused++;
    }
    assert_int_equal(rfr_ctx_get_stats(ctx).live_blocks, blocks);
    assert_int_equal(descriptors(), fds);
  }
  assert_true(refused > 3);
  rfr_ctx_destroy(ctx);
}

int main(int argc, char **argv) {
  json_set_alloc_funcs(their_new, their_free);
  const struct CMUnitTest tests[] = {
      rft_folder_test(allocations_fresh),
      rft_folder_test(allocations_resumed),
      rft_folder_test(foreign_fresh),
      rft_folder_test(foreign_resumed),
      rft_folder_test(calls_fresh_once),
      rft_folder_test(calls_resumed_once),
      rft_folder_test(calls_fresh_full),
      rft_folder_test(calls_resumed_full),
      rft_folder_test(short_transfers),
      rft_folder_test(data_cut_while_training),
      rft_folder_test(data_cut_while_opening),
      rft_folder_test(json_prints),
  };
  every_k = argc > 1 && strcmp(argv[1], "all") == 0;
  if (argc > 1 && strcmp(argv[1], "random") == 0) {
    faults = argc > 2 ? atoll(argv[2]) / SCENES : 125;
    chance = argc > 3 ? strtoull(argv[3], NULL, 10) : 1;
    if (faults < 21) return fputs("faults_test random [FAULTS [SEED]]: at least 168\n", stderr), 2;
    return _cmocka_run_group_tests("random", tests, SCENES, NULL, NULL);
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
