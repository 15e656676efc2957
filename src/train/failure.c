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

static rfr_status describe(const rfr_run *run, const rfr_error *e, rfi_string *line) {
  const rfi_parallel *p = &run->settings->parallel;
  json_t *o = json_pack("{s:I, s:i, s:i, s:I, s:s, s:s, s:s}", "time", (json_int_t)time(NULL), "rank", p->rank, "ranks",
                        p->ranks, "step", (json_int_t)run->step, "error", e->slug, "message", e->message, "checkpoint",
                        run->checkpoint);
  if (!o) return rfi_fail(RFI_E_NO_MEMORY, "describing a failure");
  rfr_status s = rfi_json_print_compact(o, line);
  if (s == RFR_OK) s = rfi_string_printf(line, "\n");
  json_decref(o);
  return s;
}

void rfi_run_record_failure(rfr_run *run) {
  char *path = NULL, slug[64], message[2048];
  rfi_string line = {.ctx = run->ctx};
  if (!run->folder) return;
  snprintf(slug, sizeof slug, "%s", rfr_last_error()->slug);
  snprintf(message, sizeof message, "%s", rfr_last_error()->message);
  const rfr_error kept = {.slug = slug, .message = message};
  if (describe(run, &kept, &line) == RFR_OK &&
      rfi_path_join(run->ctx, run->folder, "failures.jsonl", &path) == RFR_OK) {
    const int fd = open_journal(path);
    if (fd >= 0) rfi_journal_append(fd, line.data, line.n);
    rfi_journal_close(fd);
  }
  rfi_free(run->ctx, path);
  rfi_string_deinit(&line);
  rfi_fail_slug(slug, "%s", message);
}
