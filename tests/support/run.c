/* SPDX-License-Identifier: Apache-2.0
 *
 * The folder and the events of tests of runs; see run.h.
 */
#include "support/run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "pass/watch_values.h"
#include "support/ranks.h"
#include "train/host.h"
#include "train/parts.h"

char rft_run_root[64];

void rft_write_text(const char *name, const char *text) {
  char path[128];
  snprintf(path, sizeof path, "%s/%s", rft_run_root, name);
  FILE *f = fopen(path, "wb");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

int rft_run_setup(void **state) {
  (void)state;
  snprintf(rft_run_root, sizeof rft_run_root, P_tmpdir "/refrain-run-XXXXXX");
  if (!mkdtemp(rft_run_root)) return -1;
  for (int i = 0; i < 10; i++) {
    char name[16], text[4096];
    int n = 0;
    for (int k = 0; k < 40 + 7 * i; k++)
      n += snprintf(text + n, sizeof text - (size_t)n, "line %d of %d: %d apples\n", k, i, k * k % 23);
    snprintf(name, sizeof name, "%d.txt", i);
    rft_write_text(name, text);
  }
  return 0;
}

int rft_run_teardown(void **state) {
  (void)state;
  rfr_ctx *ctx;
  if (rfr_ctx_create(NULL, &ctx) != RFR_OK) return -1;
  rfi_tree_remove(ctx, rft_run_root);
  rfr_ctx_destroy(ctx);
  return 0;
}

static void on_event(const rfr_event *e, void *user) {
  rft_record *r = user;
  switch (e->kind) {
    case RFR_EVENT_METRICS:
      if (e->step <= RFT_STEPS) r->loss[e->step] = e->loss, r->norm[e->step] = e->grad_norm;
      r->most_load = e->most_load, r->least_load = e->least_load;
      r->last = e->step;
      r->last_loss = e->loss, r->last_lr = e->lr;
      r->skipped += e->skipped;
      if (r->stop_at_5 && e->step == 5) rfr_run_request_stop(r->stop_at_5);
      break;
    case RFR_EVENT_WARNING:
      r->warnings++;
      snprintf(r->warning, sizeof r->warning, "%s", e->message);
      break;
    case RFR_EVENT_CHECKPOINT: r->checkpoints++; break;
    case RFR_EVENT_EVALUATION:
      r->evaluations++;
      r->bits = e->bits_per_byte;
      r->windows = e->windows, r->windows_held_out = e->windows_held_out;
      break;
    case RFR_EVENT_PROGRESS: r->progress++; break;
    case RFR_EVENT_SCHEDULE: r->schedules++; break;
    case RFR_EVENT_COMPILE: r->compiles++; break;
    default: break;
  }
}

rfr_ctx *rft_run_ctx(int threads) {
  rfr_ctx *ctx;
  rfr_ctx_options o = rfr_ctx_options_default();
  o.threads = threads;
  assert_int_equal(rfr_ctx_create(&o, &ctx), RFR_OK);
  return ctx;
}

rfr_run_options rft_run_options(rft_record *r) {
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  o.on_event = on_event;
  o.event_user = r;
  return o;
}

const char *rft_run_folder(const char *name) {
  static char folder[128];
  snprintf(folder, sizeof folder, "%s/%s", rft_run_root, name);
  return folder;
}

rfr_run *rft_run_open(rfr_ctx *ctx, const char *config, const char *name, const rfr_run_options *o) {
  rfr_run *run;
  rfr_status s = rfr_run_open(ctx, config, name ? rft_run_folder(name) : NULL, o, &run);
  if (s != RFR_OK) print_error("%s [%s]\n", rfr_last_error()->message, rfr_last_error()->slug);
  assert_int_equal(s, RFR_OK);
  return run;
}

void rft_run_steps(rfr_run *run, int n) {
  for (int i = 0; i < n; i++) {
    rfr_status s = rfr_run_step(run);
    if (s != RFR_OK) print_error("%s\n", rfr_last_error()->message);
    assert_int_equal(s, RFR_OK);
  }
}

rfr_status rft_hash_state(rfr_run *run, rfi_hash *out) {
  rfr_tensor x;
  rfi_hasher *h;
  rfr_status s = rfi_hasher_create(run->ctx, &h);
  for (int i = 0; s == RFR_OK && rfi_run_tensor_at(run, i, &x) == RFR_OK; i++) {
    void *host;
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0 || strcmp(x.name, RFI_WATCH_NAME) == 0)
      continue;
    s = rfi_host_open(run, &x, RFI_HOST_READ, &host);
    if (s != RFR_OK) break;
    rfi_hasher_add(h, x.name, strlen(x.name));
    rfi_hasher_add(h, host, (size_t)x.bytes);
    s = rfi_host_close(run, &x, RFI_HOST_READ, host, s);
  }
  *out = rfi_hasher_result(h);
  rfi_hasher_destroy(h);
  return s;
}

void rft_assert_same_state(rfr_run *a, rfr_run *b) {
  rfr_tensor x, y;
  int n = 0;
  for (int i = 0; rfr_programs_tensor_at(rfr_run_programs(a), i, &x) == RFR_OK; i++) {
    if (x.role == RFR_ROLE_INPUT || strcmp(x.name, RFI_NAME_METRICS) == 0 || strcmp(x.name, RFI_WATCH_NAME) == 0)
      continue;
    assert_int_equal(rfr_programs_tensor(rfr_run_programs(b), x.name, &y), RFR_OK);
    assert_int_equal(x.bytes, y.bytes);
    if (memcmp(x.data, y.data, (size_t)x.bytes) != 0) fail_msg("%s differs", x.name);
    n++;
  }
  assert_true(n > 20);
}

void rft_assert_eager_and_resumed(rfr_run *a, const char *config, const char *name, int steps) {
  enum { SAVED = 6, LOST = 2 };
  rft_record eager = {0}, resumed = {0};
  rfr_run_options o = rft_run_options(&eager);
  o.eager = 1;
  rfr_run *b = rft_run_open(a->ctx, config, NULL, &o);
  rft_run_steps(b, steps);
  rft_assert_same_state(a, b);
  rfr_run_close(b);
  o = rft_run_options(&resumed);
  b = rft_run_open(a->ctx, config, name, &o);
  rft_run_steps(b, SAVED);
  assert_int_equal(rfr_run_save(b), RFR_OK);
  rft_run_steps(b, LOST);
  rfr_run_close(b);
  o.resume = o.strict = 1;
  b = rft_run_open(a->ctx, config, name, &o);
  rft_run_steps(b, steps - SAVED);
  rft_assert_same_state(a, b);
  assert_int_equal(resumed.warnings, 0);
  rfr_run_close(b);
}

rft_record rft_assert_same_bits(const char *config, const char *name, int steps) {
  rfr_ctx *ctx = rft_run_ctx(2);
  rft_record r = {0};
  const rfr_run_options o = rft_run_options(&r);
  rfr_run *run = rft_run_open(ctx, config, NULL, &o);
  rft_run_steps(run, steps);
  rft_assert_eager_and_resumed(run, config, name, steps);
  rfr_run_close(run);
  rfr_ctx_destroy(ctx);
  return r;
}

void rft_assert_same_losses(const rft_record *a, const rft_record *b) {
  for (int i = 1; i <= RFT_STEPS; i++) {
    if (a->loss[i] != b->loss[i]) fail_msg("step %d: %.17g and %.17g", i, a->loss[i], b->loss[i]);
    assert_true(a->norm[i] == b->norm[i]);
  }
}

bool rft_run_has(const char *folder, const char *name) {
  char path[256];
  snprintf(path, sizeof path, "%s/%s", rft_run_folder(folder), name);
  return access(path, F_OK) == 0;
}

typedef struct flip_rank {
  const rft_flip *flip;
  const char *folder;
  rfr_status status;
  char slug[48], message[512];
} flip_rank;

static rfr_status train_and_flip(void *rank, int number, rfr_comm *comm, rfr_ctx *own) {
  flip_rank *r = rank;
  rfr_run *run;
  rfr_tensor x;
  rfr_run_options o = rfr_run_options_default();
  o.config_folder = rft_run_root;
  o.overrides = &r->flip->set, o.n_overrides = 1;
  o.comm = comm;
  RFI_TRY(rfr_run_open(own, r->flip->config, r->folder, &o, &run));
  rfr_status s = RFR_OK;
  for (int i = 0; i < r->flip->steps && s == RFR_OK; i++) s = rfr_run_step(run);
  if (s == RFR_OK && number == r->flip->rank) {
    s = rfr_programs_tensor(rfr_run_programs(run), r->flip->tensor, &x);
    if (s == RFR_OK) ((uint8_t *)x.data)[2] ^= 1;
  }
  if (s == RFR_OK) r->status = rfr_run_save(run);
  snprintf(r->slug, sizeof r->slug, "%s", rfr_last_error()->slug);
  snprintf(r->message, sizeof r->message, "%s", rfr_last_error()->message);
  rfr_run_close(run);
  return s;
}

void rft_assert_flip_is_found(const rft_flip *f, const char *name) {
  flip_rank all[RFT_MOST_RANKS];
  char folder[160], checkpoint[32];
  snprintf(folder, sizeof folder, "%s", rft_run_folder(name));
  for (int r = 0; r < f->ranks; r++) all[r] = (flip_rank){.flip = f, .folder = folder};
  rft_run_ranks(f->ranks, all, sizeof *all, train_and_flip);
  for (int r = 0; r < f->ranks; r++) {
    assert_int_equal(all[r].status, RFR_NUMERIC);
    assert_string_equal(all[r].slug, "dist.diverged");
    assert_string_equal(all[r].message, f->says);
  }
  snprintf(checkpoint, sizeof checkpoint, "step-%06d", f->steps);
  assert_false(rft_run_has(name, checkpoint));
}
