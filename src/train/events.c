/* SPDX-License-Identifier: Apache-2.0
 *
 * Events: to the caller's callback and, as one line of JSON each, to the run's log.
 *
 * A line is built on the stack and appended in full or not at all. The log is not part of the run's state: if it
 * cannot be written, the run warns once and continues.
 *
 * The open log also locks the folder: a second run that writes checkpoints there would delete the unfinished ones of
 * the first. The lock is released when its process ends.
 */
#include "train/events.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"
#include "data/file.h"
#include "data/mixture.h"
#include "text/unicode.h"
#include "train/ramp.h"
#include "train/tensorboard.h"
#include "train/watched_log.h"

static const char *const names[] = {
#define EVENT_NAME(e, name) name,
    RFR_EVENTS(EVENT_NAME)
#undef EVENT_NAME
};

const char *rfr_event_name(rfr_event_kind kind) {
  return (unsigned)kind < sizeof names / sizeof names[0] ? names[kind] : "unknown";
}

typedef struct line {
  char text[8192];
  size_t n;
} line;

static void put(line *l, const char *s) {
  for (; *s && l->n < sizeof l->text - 8; s++) l->text[l->n++] = *s;
}

/* A path may have any bytes. Invalid UTF-8 is replaced by U+FFFD, so that the line is valid JSON. */
static void put_string(line *l, const char *key, const char *value) {
  char escape[8];
  put(l, ", \"");
  put(l, key);
  put(l, "\": \"");
  const size_t n = strlen(value);
  for (size_t i = 0; i < n && l->n < sizeof l->text - 32;) {
    const char *s = value + i;
    const int length = rfi_utf8_length(s, n - i);
    if (length < 0) snprintf(escape, sizeof escape, "\\ufffd");
    else if (*s == '"' || *s == '\\') snprintf(escape, sizeof escape, "\\%c", *s);
    else if ((unsigned char)*s < 0x20) snprintf(escape, sizeof escape, "\\u%04x", (unsigned)*s);
    else snprintf(escape, sizeof escape, "%.*s", length, s);
    put(l, escape);
    i += (size_t)abs(length);
  }
  put(l, "\"");
}

static void put_number(line *l, const char *key, double x) {
  char number[32];
  put(l, ", \"");
  put(l, key);
  put(l, "\": ");
  put(l, isfinite(x) ? rfi_format_double(number, x) : "null");
}

/* Seconds since 1970, to the millisecond. */
static double wall_time(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (double)t.tv_sec + 1e-3 * (double)(t.tv_nsec / 1000000);
}

/* The resident memory of this process in bytes; 0: unknown. */
static double resident_bytes(void) {
  char text[64] = "";
  const int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  const ssize_t n = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
  if (fd >= 0) close(fd);
  char *rest;
  strtoll(n > 0 ? text : "", &rest, 10); /* the first number is the size of the address space */
  return (double)strtoll(rest, NULL, 10) * (double)sysconf(_SC_PAGESIZE);
}

static void put_memory(line *l, const rfr_run *run) {
  rfr_memory_use use;
  const double resident = resident_bytes();
  if (resident > 0.0) put_number(l, "resident_bytes", resident);
  if (run->programs && rfr_programs_memory_use(run->programs, &use) == RFR_OK && use.taken > 0)
    put_number(l, "device_bytes", (double)use.taken);
}

/* Writes as many layers as fit into the line: more than a thousand. */
static void put_loads(line *l, const double *loads, int64_t layers) {
  char number[32];
  put(l, ", \"layer_loads\": [");
  for (int64_t i = 0; i < layers && l->n < sizeof l->text - 160; i++) {
    if (i > 0) put(l, ", ");
    rfi_snprintf(number, sizeof number, "%.4g", loads[i]);
    put(l, number);
  }
  put(l, "]");
}

/* The tokens of each source of a mixture up to this step. */
static void put_sources(line *l, rfr_run *run, int64_t step) {
  const rfi_settings *s = run->settings;
  const int n = rfi_mixture_sources(run->data);
  int64_t *counts, total;
  char number[32];
  if (n == 0 || RFI_ALLOC(run->ctx, (size_t)n * sizeof *counts, &counts) != RFR_OK) return;
  if (rfi_mixture_counts(run->data, s->seed, rfi_ramp_windows(s, step), counts, &total) == RFR_OK) {
    put(l, ", \"source_tokens\": [");
    for (int i = 0; i < n && l->n < sizeof l->text - 160; i++) {
      rfi_snprintf(number, sizeof number, "%s%lld", i > 0 ? ", " : "", (long long)(counts[i] * s->sequence));
      put(l, number);
    }
    put(l, "]");
  }
  rfi_free(run->ctx, counts);
}

/* If memory for a line is missing while the run opens, rfi_run_log_opened returns the error. */
static void write_lines(rfr_run *run, const char *lines, size_t n) {
  if (run->opening) {
    run->pending_lost |= rfi_string_append(&run->pending, lines, n) != RFR_OK;
    return;
  }
  const char *wrong = rfi_journal_append(run->log, lines, n);
  if (!wrong) return;
  rfi_journal_close(run->log);
  run->log = -1;
  rfi_run_warn(run, "log.jsonl cannot be written (%s); the run continues without a log", wrong);
}

rfr_status rfi_run_log_opened(rfr_run *run) {
  run->opening = false;
  if (run->pending_lost) return rfi_fail(RFI_E_NO_MEMORY, "the first lines of log.jsonl");
  if (run->pending.n > 0) write_lines(run, run->pending.data, run->pending.n);
  rfi_string_deinit(&run->pending);
  return RFR_OK;
}

static void append_log(rfr_run *run, const rfr_event *e, double time) {
  line l = {.n = 0};
  put(&l, "{\"event\": \"");
  put(&l, rfr_event_name(e->kind));
  put(&l, "\"");
  put_number(&l, "step", (double)e->step);
  put_number(&l, "steps", (double)e->steps);
  put_number(&l, "time", time);
  if (*e->message) put_string(&l, "message", e->message);
  if (e->kind == RFR_EVENT_METRICS || e->kind == RFR_EVENT_EVALUATION) {
    put_number(&l, "loss", e->loss);
    if (run->settings->spec.preference) {
      put_number(&l, "margin", e->margin);
      put_number(&l, "accuracy", e->accuracy);
    } else {
      put_number(&l, "bits_per_byte", e->bits_per_byte);
    }
    put_number(&l, "tokens", (double)e->tokens);
  }
  if (e->kind == RFR_EVENT_EVALUATION) {
    put_number(&l, "windows", (double)e->windows);
    put_number(&l, "windows_held_out", (double)e->windows_held_out);
  }
  if (e->kind == RFR_EVENT_METRICS) {
    put_number(&l, "grad_norm", e->grad_norm);
    put_number(&l, "lr", e->lr);
    put_number(&l, "skipped", e->skipped);
    if (e->most_load > 0.0) {
      put_number(&l, "most_load", e->most_load);
      put_number(&l, "least_load", e->least_load);
      put_loads(&l, e->layer_loads, e->layers);
    }
    put_sources(&l, run, e->step);
    put_memory(&l, run);
  }
  if (e->seconds > 0.0) put_number(&l, "seconds", e->seconds);
  put(&l, "}");
  l.text[l.n++] = '\n';
  write_lines(run, l.text, l.n);
}

void rfi_run_emit(rfr_run *run, rfr_event *e) {
  const int rank = rfr_comm_rank(run->options.comm);
  e->size = sizeof *e;
  e->steps = run->steps;
  e->rank = rank > 0 ? rank : 0;
  if (!e->message) e->message = "";
  const bool rare = e->kind == RFR_EVENT_METRICS && !e->skipped && e->step != 1 && e->step != run->steps &&
                    e->step % run->settings->log_every != 0;
  if (run->log >= 0 && !rare && e->kind != RFR_EVENT_PROGRESS) {
    const double time = wall_time();
    if (e->kind == RFR_EVENT_WATCH) rfi_watched_write(run, e, time);
    else append_log(run, e, time);
    rfi_tensorboard_event(run, e, time);
  }
  if (run->options.on_event) run->options.on_event(e, run->options.event_user);
}

void rfi_run_warn(rfr_run *run, const char *format, ...) {
  char text[512];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  rfi_run_emit(run, &(rfr_event){.kind = RFR_EVENT_WARNING, .message = text, .step = run->step});
}

bool rfi_run_append(const rfr_run *run, const char *file, const char *lines, size_t n, char wrong[256]) {
  char *path = NULL;
  int fd = -1;
  bool taken = false;
  rfr_status s = rfi_path_join(run->ctx, run->folder, file, &path);
  if (s == RFR_OK) s = rfi_journal_open(path, &fd, &taken);
  rfi_free(run->ctx, path);
  const char *why = s != RFR_OK ? rfr_last_error()->message
                    : taken     ? "another process has it open"
                                : rfi_journal_append(fd, lines, n);
  snprintf(wrong, 256, "%s", why ? why : "");
  rfi_journal_close(fd);
  return !why;
}

rfr_status rfi_log_open(rfr_run *run, const char *folder) {
  bool taken = false;
  char *path;
  RFI_TRY(rfi_path_join(run->ctx, folder, "log.jsonl", &path));
  rfr_status s = rfi_journal_open(path, &run->log, &taken);
  rfi_free(run->ctx, path);
  if (s == RFR_OK && taken) s = rfi_fail_at(RFI_E_RUN_BUSY, folder, 0, "another process is training in this folder");
  return s;
}
