/* SPDX-License-Identifier: Apache-2.0
 *
 * Progress of a run on standard error: at a terminal one line that is rewritten at most ten times a second and never
 * wraps, else a plain line at most every two seconds, so that a log file stays short. Standard output is for results.
 */
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "cli.h"

void progress_init(progress *p, cli *c) {
  const char *term = getenv("TERM");
  memset(p, 0, sizeof *p);
  p->quiet = c->quiet || c->json;
  p->terminal = isatty(STDERR_FILENO) == 1 && term && *term && strcmp(term, "dumb") != 0;
  c->progress = p;
}

void progress_close_line(progress *p) {
  if (p && p->open_line) fputc('\n', stderr), p->open_line = false;
}

void cli_warn(const cli *c, const char *message) {
  progress_close_line(c->progress);
  if (!c->json) {
    fprintf(stderr, "warning: %s\n", message);
    return;
  }
  json j = {.f = stderr};
  json_begin(&j, NULL, '{');
  json_text(&j, "warning", message);
  if (cli_has_ranks(c)) json_int(&j, "rank", c->launch.rank);
  json_end(&j, '}');
  fputc('\n', stderr);
}

static const char *duration(char buf[32], double seconds) {
  long s = (long)(seconds + 0.5);
  if (s < 60) snprintf(buf, 32, "%lds", s);
  else if (s < 3600) snprintf(buf, 32, "%ldm%02lds", s / 60, s % 60);
  else snprintf(buf, 32, "%ldh%02ldm", s / 3600, s / 60 % 60);
  return buf;
}

static int columns(void) {
  struct winsize w;
  const char *text = getenv("COLUMNS");
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0) return w.ws_col;
  const int n = text ? atoi(text) : 0;
  return n > 0 ? n : 80;
}

/* ---- a line of parts ---- */

enum { PARTS = 10, PART_SIZE = 64 };
typedef struct line {
  int n;
  struct part {
    int keep; /* of parts that do not fit, the one with the lowest goes first */
    char text[PART_SIZE];
  } part[PARTS];
} line;

static void put_part(line *l, int keep, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put_part(line *l, int keep, const char *format, ...) {
  va_list args;
  if (l->n == PARTS) return;
  struct part *p = &l->part[l->n++];
  p->keep = keep;
  va_start(args, format);
  vsnprintf(p->text, sizeof p->text, format, args);
  va_end(args);
}

static int width_of(const line *l) {
  int width = 0;
  for (int i = 0; i < l->n; i++) width += (int)strlen(l->part[i].text) + (i > 0 ? 2 : 0);
  return width;
}

/* Drops parts until the line is at most `most` wide; cuts the last part. */
static void fit(line *l, int most) {
  while (l->n > 1 && width_of(l) > most) {
    int least = 0;
    for (int i = 1; i < l->n; i++)
      if (l->part[i].keep <= l->part[least].keep) least = i;
    memmove(&l->part[least], &l->part[least + 1], (size_t)(l->n - least - 1) * sizeof l->part[0]);
    l->n--;
  }
  if (width_of(l) > most) l->part[0].text[most > 0 ? most : 0] = '\0';
}

static void print_line(progress *p, line *l) {
  if (p->terminal) fit(l, columns() - 1); /* not the last column, where the cursor may wrap */
  if (p->terminal) fputc('\r', stderr);
  for (int i = 0; i < l->n; i++) fprintf(stderr, "%s%s", i > 0 ? "  " : "", l->part[i].text);
  fputs(p->terminal ? "\033[K" : "\n", stderr);
  fflush(stderr);
  p->open_line = p->terminal;
  p->evaluating_line = false;
  p->last = cli_now();
}

/* Smoothed over about ten steps, so that a single slow step does not make the estimate jump. */
static void count(progress *p, const rfr_event *e) {
  if (p->first_step > 0) p->timed_tokens += (double)p->tokens, p->timed_flops += p->flops, p->seconds += e->seconds;
  if (p->first_step == 0) p->first_step = e->step;
  p->rate = p->rate == 0.0 ? e->seconds : p->rate + 0.1 * (e->seconds - p->rate);
}

static bool is_due(const progress *p) { return cli_now() - p->last >= (p->terminal ? 0.1 : 2.0); }

/* ---- events ---- */

static void metrics(progress *p, const rfr_event *e) {
  char left[32];
  line l = {0};
  if (e->step != p->first_step && e->step != e->steps && !is_due(p)) return;
  put_part(&l, 9, "step %lld/%lld", (long long)e->step, (long long)e->steps);
  put_part(&l, 8, "loss %.4f", e->loss);
  if (p->bytes) put_part(&l, 5, "%.3f bits/byte", e->bits_per_byte);
  if (p->preference) put_part(&l, 5, "margin %.3f", e->margin);
  if (p->preference) put_part(&l, 5, "accuracy %.0f%%", 100.0 * e->accuracy);
  if (p->rate > 0.0) put_part(&l, 6, "%.0f tok/s", (double)p->tokens / p->rate);
  /* Omitted if above 100: other programs used the cores while the peak was measured, so the share is meaningless. */
  const double share = p->peak > 0.0 && p->rate > 0.0 ? 100.0 * p->flops / p->rate / p->peak : 0.0;
  if (share > 0.0 && share <= 100.0) put_part(&l, 2, share < 1.0 ? "%.1f%% of peak" : "%.0f%% of peak", share);
  if (e->most_load > 0.0) put_part(&l, 3, "experts %.2f-%.2f", e->least_load, e->most_load);
  const double seconds = e->seconds_left > 0.0 ? e->seconds_left : p->rate * (double)(e->steps - e->step);
  if (e->steps > e->step) put_part(&l, 7, "%s left", duration(left, seconds));
  if (e->skipped) put_part(&l, 8, "skipped");
  print_line(p, &l);
}

static void evaluating(progress *p, const rfr_event *e) {
  line l = {0};
  if (!is_due(p)) return;
  if (!p->evaluating_line) progress_close_line(p);
  put_part(&l, 9, "evaluating");
  put_part(&l, 8, "%lld of %lld windows", (long long)e->windows, (long long)e->windows_planned);
  print_line(p, &l);
  p->evaluating_line = p->terminal;
}

static void evaluation(progress *p, const rfr_event *e) {
  if (p->evaluating_line)
    fputs("\r\033[K", stderr), p->open_line = p->evaluating_line = false; /* the result replaces it */
  progress_close_line(p);
  fprintf(stderr, "step %lld  validation loss %.4f", (long long)e->step, e->loss);
  if (p->bytes) fprintf(stderr, "  %.3f bits/byte", e->bits_per_byte);
  if (p->preference) fprintf(stderr, "  margin %.3f  accuracy %.1f%%", e->margin, 100.0 * e->accuracy);
  fprintf(stderr, "  %lld tokens", (long long)e->tokens);
  if (e->windows_planned < e->windows_held_out)
    fprintf(stderr, " in %lld of %lld windows", (long long)e->windows_planned, (long long)e->windows_held_out);
  fprintf(stderr, "  %.1f s\n", e->seconds);
}

void progress_set_tokens(progress *p, int64_t tokens) {
  if (tokens <= 0 || tokens == p->tokens) return;
  p->flops *= (double)tokens / (double)p->tokens;
  p->tokens = tokens;
  p->rate = 0.0;
}

void progress_event(const rfr_event *e, void *user) {
  progress *p = user;
  if (e->kind == RFR_EVENT_EVALUATION) {
    p->evaluated = true;
    p->loss = e->loss;
    p->bits = e->bits_per_byte;
    p->margin = e->margin;
    p->accuracy = e->accuracy;
  }
  if (p->quiet && e->kind == RFR_EVENT_SCHEDULE) progress_set_tokens(p, e->tokens);
  if (p->quiet && e->kind != RFR_EVENT_METRICS) return;
  switch (e->kind) {
    case RFR_EVENT_PROGRESS: evaluating(p, e); return;
    case RFR_EVENT_SCHEDULE:
      progress_set_tokens(p, e->tokens);
      progress_close_line(p);
      fprintf(stderr, "%s\n", e->message);
      return;
    case RFR_EVENT_COMPILE:
      progress_close_line(p);
      fprintf(stderr, "%s\n", e->message);
      return;
    case RFR_EVENT_METRICS:
      count(p, e);
      if (!p->quiet) metrics(p, e);
      return;
    case RFR_EVENT_EVALUATION: evaluation(p, e); return;
    case RFR_EVENT_CHECKPOINT:
      progress_close_line(p);
      fprintf(stderr, "wrote %s\n", e->message);
      return;
    default: return;
  }
}
