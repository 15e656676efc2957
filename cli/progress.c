/* SPDX-License-Identifier: Apache-2.0
 *
 * Progress of a run on standard error: at a terminal one line that is rewritten at most
 * ten times a second, else a plain line at most every two seconds, so that a log file
 * stays short. Standard output belongs to results.
 */
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

void progress_init(progress *p, const cli *c) {
  memset(p, 0, sizeof *p);
  p->quiet = c->quiet;
  p->json = c->json;
  p->terminal = isatty(STDERR_FILENO) == 1;
}

void progress_close_line(progress *p) {
  if (p->open_line) fputc('\n', stderr);
  p->open_line = false;
}

static const char *duration(char buf[32], double seconds) {
  long s = (long)(seconds + 0.5);
  if (s < 60) snprintf(buf, 32, "%lds", s);
  else if (s < 3600) snprintf(buf, 32, "%ldm%02lds", s / 60, s % 60);
  else snprintf(buf, 32, "%ldh%02ldm", s / 3600, s / 60 % 60);
  return buf;
}

static void metrics(progress *p, const rfr_event *e) {
  if (p->started == 0.0) {
    p->started = cli_now();
    p->first_step = e->step;
  }
  p->last_step = e->step;
  /* Smoothed over about ten steps: a single slow step does not make the estimate jump. */
  p->rate = p->rate == 0.0 ? e->seconds : p->rate + 0.1 * (e->seconds - p->rate);
  const double now = cli_now();
  const bool edge = e->step == p->first_step || e->step == e->steps;
  if (!edge && now - p->last < (p->terminal ? 0.1 : 2.0)) return;
  p->last = now;
  char left[32], peak[32] = "", load[48] = "";
  if (p->peak > 0.0 && p->flops > 0.0 && p->rate > 0.0)
    snprintf(peak, sizeof peak, "  %.0f%% of peak", 100.0 * p->flops / p->rate / p->peak);
  if (e->most_load > 0.0) snprintf(load, sizeof load, "  experts %.2f-%.2f", e->least_load, e->most_load);
  fprintf(stderr, "%sstep %lld/%lld  loss %.4f  %.3f bits/byte  %.0f tok/s%s%s  %s left%s%s",
          p->terminal ? "\r\033[K" : "", (long long)e->step, (long long)e->steps, e->loss, e->bits_per_byte,
          p->rate > 0.0 ? (double)p->tokens / p->rate : 0.0, peak, load,
          duration(left, p->rate * (double)(e->steps - e->step)), e->skipped ? "  skipped: gradient not finite" : "",
          p->terminal ? "" : "\n");
  fflush(stderr);
  p->open_line = p->terminal;
}

void progress_event(const rfr_event *e, void *user) {
  progress *p = user;
  if (e->kind == RFR_EVENT_WARNING && !p->quiet) {
    progress_close_line(p);
    fprintf(stderr, "warning: %s\n", e->message);
    return;
  }
  if (e->kind == RFR_EVENT_EVALUATION) p->bits = e->bits_per_byte;
  if (p->quiet) return;
  switch (e->kind) {
    case RFR_EVENT_COMPILE:
      progress_close_line(p);
      fprintf(stderr, "%s\n", e->message);
      return;
    case RFR_EVENT_METRICS: metrics(p, e); return;
    case RFR_EVENT_EVALUATION:
      progress_close_line(p);
      fprintf(stderr, "step %lld  validation %.3f bits/byte over %lld tokens, %.1f s\n", (long long)e->step,
              e->bits_per_byte, (long long)e->tokens, e->seconds);
      return;
    case RFR_EVENT_CHECKPOINT:
      progress_close_line(p);
      fprintf(stderr, "wrote %s\n", e->message);
      return;
    default: return;
  }
}
