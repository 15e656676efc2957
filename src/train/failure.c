/* SPDX-License-Identifier: Apache-2.0 */
#include "train/failure.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "base/json.h"
#include "data/file.h"

/* The journal is locked while another rank writes its line. */
static int open_journal(const char *path) {
  enum { TRIES = 200, PAUSE_US = 5000 };
  for (int i = 0; i < TRIES; i++) {
    int fd;
    bool taken;
    if (rfi_journal_open(path, &fd, &taken) != RFR_OK) return -1;
    if (!taken) return fd;
    usleep(PAUSE_US);
  }
  return -1;
}

static rfr_status describe(const rfr_failure *f, rfi_string *line) {
  json_t *o = json_object();
  rfr_status s = rfi_json_set(o, "time", json_integer((json_int_t)time(NULL)));
  if (s == RFR_OK) s = rfi_json_set(o, "rank", json_integer(f->rank));
  if (s == RFR_OK) s = rfi_json_set(o, "ranks", json_integer(f->ranks));
  if (s == RFR_OK && f->step >= 0) s = rfi_json_set(o, "step", json_integer(f->step));
  if (s == RFR_OK) s = rfi_json_set(o, "error", json_string(f->error));
  if (s == RFR_OK) s = rfi_json_set(o, "message", json_string(f->message));
  if (s == RFR_OK && f->checkpoint) s = rfi_json_set(o, "checkpoint", json_string(f->checkpoint));
  if (s == RFR_OK) s = rfi_json_print_compact(o, line);
  if (s == RFR_OK) s = rfi_string_printf(line, "\n");
  json_decref(o);
  return s;
}

static rfr_status append(const char *path, const rfi_string *line) {
  const int fd = open_journal(path);
  const char *wrong =
      fd < 0 ? "it cannot be opened, or another process has it open" : rfi_journal_append(fd, line->data, line->n);
  rfi_journal_close(fd);
  return wrong ? rfi_fail_at(RFI_E_FILE_WRITE, path, 0, "%s", wrong) : RFR_OK;
}

rfr_failure rfr_failure_default(void) {
  return (rfr_failure){.size = sizeof(rfr_failure), .ranks = 1, .step = -1, .error = "", .message = ""};
}

rfr_status rfr_failure_append(rfr_ctx *ctx, const char *folder, const rfr_failure *failure) {
  rfr_status s;
  char *path = NULL;
  rfi_string line = {.ctx = ctx};
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  RFI_TRY(rfi_check_handle(folder, "folder of a run"));
  RFI_TRY(rfi_check_handle(failure, "rfr_failure"));
  RFI_TRY(rfi_check_options("rfr_failure", failure, failure->size, sizeof *failure));
  if (!failure->error || !failure->message) return rfi_fail(RFI_E_ARGUMENT, "rfr_failure: no error, or no message");
  RFI_GOTO(describe(failure, &line));
  RFI_GOTO(rfi_path_join(ctx, folder, "failures.jsonl", &path));
  s = append(path, &line);
fail:
  rfi_free(ctx, path);
  rfi_string_deinit(&line);
  return s;
}

void rfi_run_record_failure(rfr_run *run) {
  char slug[64], message[2048];
  rfr_failure f = rfr_failure_default();
  if (!run->folder) return;
  snprintf(slug, sizeof slug, "%s", rfr_last_error()->slug);
  snprintf(message, sizeof message, "%s", rfr_last_error()->message);
  f.rank = run->settings->parallel.rank, f.ranks = run->settings->parallel.ranks;
  f.step = run->step;
  f.error = slug, f.message = message;
  f.checkpoint = run->checkpoint;
  rfr_failure_append(run->ctx, run->folder, &f); /* an error of the journal must not replace the error of the run */
  rfi_fail_slug(slug, "%s", message);
}
