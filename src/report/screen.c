/* SPDX-License-Identifier: Apache-2.0
 *
 * One screen about a run for a terminal. A line never has more columns than the terminal, and texts of the run are
 * printable ASCII when they get here: a run's name or message cannot move the cursor or change the terminal.
 */
#include <math.h>
#include <string.h>

#include "report/report.h"

enum { CHART_ROWS = 6, LABEL = 9, EVENTS = 4, LAYERS = 64 };
enum { PLAIN = 0, BOLD = 1, RED = 31, GREEN = 32, BLUE = 34, GRAY = 90 };

typedef struct screen {
  rfi_string text;
  rfr_status status;
  int columns, used; /* columns of the current line */
  bool colour;
} screen;

/* ---- lines ---- */

static void append(screen *s, const char *text, size_t n) {
  if (s->status == RFR_OK) s->status = rfi_string_append(&s->text, text, n);
}

/* One column: a character of ASCII, or one of our own of three bytes. */
static void put_column(screen *s, const char *bytes, size_t n) {
  if (s->used >= s->columns) return;
  append(s, bytes, n);
  s->used++;
}

static void put_text(screen *s, const char *text) {
  for (; *text; text++) {
    const char c = *text >= 0x20 && *text < 0x7f ? *text : '?';
    put_column(s, &c, 1);
  }
}

static void put(screen *s, int colour, const char *format, ...) __attribute__((format(printf, 3, 4)));
static void put(screen *s, int colour, const char *format, ...) {
  char text[512], code[16];
  va_list args;
  va_start(args, format);
  rfi_vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (s->colour && colour) append(s, code, (size_t)rfi_snprintf(code, sizeof code, "\033[%dm", colour));
  put_text(s, text);
  if (s->colour && colour) append(s, "\033[0m", 4);
}

static void end_line(screen *s) {
  append(s, "\n", 1);
  s->used = 0;
}

static void put_label(screen *s, const char *label) { put(s, GRAY, "%-*s", LABEL, label); }

/* ---- numbers ---- */

static const char *format_time(char out[32], double seconds) {
  const int64_t t = seconds > 0 && seconds < 1e12 ? (int64_t)seconds : 0;
  if (t < 60) rfi_snprintf(out, 32, "%lld s", (long long)t);
  else if (t < 3600) rfi_snprintf(out, 32, "%lldm%02llds", (long long)(t / 60), (long long)(t % 60));
  else rfi_snprintf(out, 32, "%lldh%02lldm", (long long)(t / 3600), (long long)(t / 60 % 60));
  return out;
}

static const char *format_bytes(char out[32], double bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  int u = 0;
  while (bytes >= 1024.0 && u < 4) bytes /= 1024.0, u++;
  rfi_snprintf(out, 32, u ? "%.1f %s" : "%.0f %s", bytes, units[u]);
  return out;
}

static double last_of(const rfi_log_rows *rows, rfi_series series) {
  for (int64_t i = rows->n; i > 0; i--)
    if (!isnan(rows->items[i - 1].value[series])) return rows->items[i - 1].value[series];
  return NAN;
}

/* Mean of the last ten values. */
static double recent(const rfi_log_rows *rows, rfi_series series) {
  double sum = 0;
  int n = 0;
  for (int64_t i = rows->n; i > 0 && n < 10; i--)
    if (!isnan(rows->items[i - 1].value[series])) sum += rows->items[i - 1].value[series], n++;
  return n > 0 ? sum / n : NAN;
}

/* ---- parts ---- */

static void put_bar(screen *s, double share, int columns) {
  static const char *const full = "\xe2\x96\x88", *const empty = "\xe2\x96\x91";
  const int filled = (int)(share * columns + 0.5);
  for (int i = 0; i < columns; i++) put_column(s, i < filled ? full : empty, 3);
}

static void put_head(screen *s, const rfi_report_run *run, double now) {
  const rfi_run_log *log = &run->log;
  const char *end = rfi_run_log_end(log);
  char age[32];
  put(s, BOLD, "%.60s", run->folder);
  put(s, PLAIN, "  ");
  if (end) put(s, strcmp(end, "done") == 0 ? GREEN : strcmp(end, "stopped") == 0 ? BLUE : RED, "%s", end);
  else put(s, GREEN, "running");
  if (!end && now > 0 && log->written > 0 && now >= log->written)
    put(s, GRAY, ", last line %s ago", format_time(age, now - log->written));
  end_line(s);
}

static void put_progress(screen *s, const rfi_run_log *log) {
  char elapsed[32], left[32];
  const int64_t first = log->rows.n > 0 ? log->rows.items[0].step : 0, done = log->step - first;
  put_label(s, "step");
  if (log->steps > 0) {
    const double share = log->step < log->steps ? (double)log->step / (double)log->steps : 1.0;
    put_bar(s, share, s->columns > 70 ? 30 : 10);
    put(s, PLAIN, " %lld of %lld, %.1f%%", (long long)log->step, (long long)log->steps, 100 * share);
  } else {
    put(s, PLAIN, "%lld", (long long)log->step);
  }
  end_line(s);
  if (!(log->written > 0)) return;
  put_label(s, "time");
  put(s, PLAIN, "%s", format_time(elapsed, log->elapsed));
  if (!rfi_run_log_end(log) && log->steps > log->step && done > 0)
    put(s, PLAIN, ", %s left", format_time(left, log->elapsed / (double)done * (double)(log->steps - log->step)));
  end_line(s);
}

static void put_numbers(screen *s, const rfi_run_log *log) {
  const rfi_log_rows *rows = &log->rows;
  int64_t skipped = 0;
  for (int64_t i = 0; i < rows->n; i++) skipped += rows->items[i].skipped;
  put_label(s, "loss");
  put(s, BOLD, "%.4f", last_of(rows, RFI_SERIES_loss));
  const double bits = last_of(rows, RFI_SERIES_bits_per_byte), margin = last_of(rows, RFI_SERIES_margin);
  if (!isnan(bits)) put(s, PLAIN, "  %.3f bits/byte", bits);
  if (!isnan(margin)) put(s, PLAIN, "  margin %.3f", margin);
  put(s, PLAIN, "  grad norm %.3g  lr %.3g", last_of(rows, RFI_SERIES_grad_norm), last_of(rows, RFI_SERIES_lr));
  if (skipped > 0) put(s, RED, "  %lld skipped", (long long)skipped);
  end_line(s);
  put_label(s, "speed");
  put(s, PLAIN, "%.0f tokens/s, mean of the last lines %.0f", last_of(rows, RFI_SERIES_tokens_per_second),
      recent(rows, RFI_SERIES_tokens_per_second));
  end_line(s);
}

static void put_evaluations(screen *s, const rfi_run_log *log) {
  const rfi_log_rows *e = &log->evaluations;
  const rfi_log_row *best = NULL;
  if (e->n == 0) return;
  for (int64_t i = 0; i < e->n; i++)
    if (!best || e->items[i].value[RFI_SERIES_loss] < best->value[RFI_SERIES_loss]) best = &e->items[i];
  const rfi_log_row *last = &e->items[e->n - 1];
  put_label(s, "held out");
  put(s, BOLD, "%.4f", last->value[RFI_SERIES_loss]);
  put(s, PLAIN, " at step %lld, best %.4f at step %lld", (long long)last->step, best->value[RFI_SERIES_loss],
      (long long)best->step);
  end_line(s);
}

/* The mean of the rows in a column of the chart; NaN: none has a loss. */
static double column_mean(const rfi_log_rows *rows, int64_t column, int64_t columns) {
  double sum = 0;
  int64_t n = 0;
  const int64_t from = column * rows->n / columns, to = (column + 1) * rows->n / columns;
  for (int64_t i = from; i < (to > from ? to : from + 1); i++) /* a short run has columns between its rows */
    if (!isnan(rows->items[i].value[RFI_SERIES_loss])) sum += rows->items[i].value[RFI_SERIES_loss], n++;
  return n > 0 ? sum / (double)n : NAN;
}

/* Draws the loss as bars with a resolution of an eighth of a row. */
static void put_chart(screen *s, const rfi_log_rows *rows) {
  static const char *const eighths[] = {" ",
                                        "\xe2\x96\x81",
                                        "\xe2\x96\x82",
                                        "\xe2\x96\x83",
                                        "\xe2\x96\x84",
                                        "\xe2\x96\x85",
                                        "\xe2\x96\x86",
                                        "\xe2\x96\x87",
                                        "\xe2\x96\x88"};
  const int64_t columns = s->columns - LABEL - 1;
  double low = INFINITY, high = -INFINITY;
  for (int64_t c = 0; c < columns; c++) {
    const double y = column_mean(rows, c, columns);
    if (y < low) low = y;
    if (y > high) high = y;
  }
  if (!(high > low)) return;
  for (int row = CHART_ROWS - 1; row >= 0; row--) {
    if (row == CHART_ROWS - 1 || row == 0) put(s, GRAY, "%*.4g ", LABEL - 1, row ? high : low);
    else put(s, PLAIN, "%*s", LABEL, "");
    if (s->colour) append(s, "\033[34m", 5);
    for (int64_t c = 0; c < columns; c++) {
      const double y = column_mean(rows, c, columns), share = isnan(y) ? 0 : (y - low) / (high - low);
      const double level = share * (8 * CHART_ROWS - 1) + 1 - 8 * row;
      const int k = isnan(y) || level <= 0 ? 0 : level >= 8 ? 8 : (int)level;
      put_column(s, eighths[k], strlen(eighths[k]));
    }
    if (s->colour) append(s, "\033[0m", 4);
    end_line(s);
  }
}

static void put_experts(screen *s, const rfi_run_log *log) {
  static const char *const levels[] = {"\xe2\x96\x81", "\xe2\x96\x82", "\xe2\x96\x83", "\xe2\x96\x84",
                                       "\xe2\x96\x85", "\xe2\x96\x86", "\xe2\x96\x87", "\xe2\x96\x88"};
  const double most = last_of(&log->rows, RFI_SERIES_most_load), least = last_of(&log->rows, RFI_SERIES_least_load);
  if (isnan(most)) return;
  put_label(s, "experts");
  put(s, least > 0 ? PLAIN : RED, "fullest %.2f, emptiest %.2f of the mean", most, least);
  if (log->layers > 0) {
    put(s, GRAY, "  by layer ");
    const float *row = log->loads + (log->rows.n - 1) * log->layers;
    for (int l = 0; l < log->layers && l < LAYERS; l++) { /* full height: three times the mean */
      const double share = isnan(row[l]) ? 0.0 : (row[l] - 1.0) / 2.0;
      put_column(s, levels[share >= 1.0 ? 7 : share > 0.0 ? (int)(8 * share) : 0], 3);
    }
  }
  end_line(s);
}

static void put_memory(screen *s, const rfi_run_log *log) {
  const double host = last_of(&log->rows, RFI_SERIES_resident_bytes);
  const double device = last_of(&log->rows, RFI_SERIES_device_bytes);
  char text[32];
  if (isnan(host) && isnan(device)) return;
  put_label(s, "memory");
  if (!isnan(host)) put(s, PLAIN, "%s of the host", format_bytes(text, host));
  if (!isnan(device)) put(s, PLAIN, "%s%s of the device", isnan(host) ? "" : "  ", format_bytes(text, device));
  end_line(s);
}

static void put_events(screen *s, const rfi_run_log *log) {
  const int64_t from = log->n_events > EVENTS ? log->n_events - EVENTS : 0;
  for (int64_t i = from; i < log->n_events; i++) {
    const rfi_log_event *e = &log->events[i];
    put_label(s, i == from ? "events" : "");
    put(s, GRAY, "%lld ", (long long)e->step);
    put(s, strcmp(e->kind, "warning") == 0 ? RED : PLAIN, "%s %s", e->kind, e->text);
    end_line(s);
  }
}

rfr_status rfr_report_screen(rfr_report *r, int run, int columns, int colour, double now, rfr_write_fn write,
                             void *user) {
  RFI_TRY(rfi_check_handle(r, "rfr_report"));
  screen s = {.text = {.ctx = r->ctx}, .columns = columns, .colour = colour != 0};
  if (run < 0 || run >= r->n) return rfi_fail(RFI_E_ARGUMENT, "run %d of %d", run, r->n);
  if (columns < 40 || columns > 400) return rfi_fail(RFI_E_ARGUMENT, "%d columns; a screen has 40 to 400", columns);
  const rfi_run_log *log = &r->runs[run].log;
  put_head(&s, &r->runs[run], now);
  put_progress(&s, log);
  if (log->rows.n > 0) {
    put_numbers(&s, log);
    put_evaluations(&s, log);
    put_chart(&s, &log->rows);
    put_experts(&s, log);
    put_memory(&s, log);
  }
  put_events(&s, log);
  if (s.status == RFR_OK) write(s.text.data, s.text.n, user);
  rfi_string_deinit(&s.text);
  return s.status;
}
