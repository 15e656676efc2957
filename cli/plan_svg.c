/* SPDX-License-Identifier: Apache-2.0
 *
 * The picture of a plan, one SVG without scripts or other files: op indices to the right, addresses upward, one
 * rectangle per buffer of the step, from its first op to its last use. Two rectangles never overlap; white areas
 * inside the frame are free. Persistent buffers are shown as bands below, not to scale. Pointing at a rectangle shows
 * its name, bytes, ops and reason.
 *
 * Rectangles of less than a pixel cannot be seen one by one, and a step of a large model has many thousands of them.
 * They are collected in a grid of pixels and drawn as bands of the kind that covers most of each pixel.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

#define PLAN_KINDS(X)                   \
  X("activation", "#8ab6e8", "#1d3f66") \
  X("gradient", "#f2a65a", "#5c3208")   \
  X("workspace", "#c2c7cd", "#3a4048")  \
  X("output", "#7fc8a9", "#0f4a33")     \
  X("load", "#9ed3d6", "#12484b")       \
  X("weight", "#b9a2d8", "#3a2560")     \
  X("state", "#e2a3bd", "#5e1f3a")      \
  X("input", "#d9cf87", "#4d4610")
static const struct {
  const char *name, *fill, *ink;
} kinds[] = {
#define X(name, fill, ink) {name, fill, ink},
    PLAN_KINDS(X)
#undef X
};
enum { N_KINDS = sizeof kinds / sizeof kinds[0] };

static const char *const phase_names[] = {
#define X(e, name) name,
    RFR_PHASES(X)
#undef X
};
static const char *const phase_fill[] = {"#9ed3d6", "#d5dbe1", "#bcd6f2", "#f6c48f", "#fbe3c8", "#cfc0e6"};

/* The frame of the step, in units of the drawing. */
enum { MANY = 2000 }; /* with more buffers, small ones do not get an element each */
enum { LEFT = 92, RIGHT = 1180, TOP = 134, BOTTOM = 720, WIDTH = 1200, ROW = 20 };

typedef struct picture {
  FILE *f;
  const rfr_programs *p;
  int program, n_ops;
  rfr_plan_summary sum;
  double most; /* bytes at the top of the frame */
  float *tiny; /* per pixel of the frame and kind: the fraction covered by tiny rectangles; NULL: there are none */
  int n_tiny;
} picture;

static int kind_index(const char *name) {
  for (int i = 0; i < N_KINDS; i++)
    if (strcmp(kinds[i].name, name) == 0) return i;
  return 0;
}
static double op_x(const picture *q, int op) {
  return LEFT + (double)(RIGHT - LEFT) * op / (q->n_ops > 0 ? q->n_ops : 1);
}
static double byte_y(const picture *q, double bytes) { return BOTTOM - (BOTTOM - TOP) * bytes / q->most; }

/* 12 345 678 */
static const char *digits(char buf[40], int64_t n) {
  char plain[32];
  int len = snprintf(plain, sizeof plain, "%lld", (long long)n), k = 0;
  for (int i = 0; i < len; i++) {
    if (i && (len - i) % 3 == 0) buf[k++] = ' ';
    buf[k++] = plain[i];
  }
  buf[k] = '\0';
  return buf;
}

static void put_head(const picture *q, const char *title, int height) {
  char a[32], b[32], c[32];
  const rfr_plan_summary *s = &q->sum;
  fprintf(q->f,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"system-ui, 'DejaVu Sans', "
          "sans-serif\" font-size=\"12\" fill=\"#3a4048\">\n"
          "<!-- SPDX-License-Identifier: Apache-2.0; made by refrain plan -->\n<title>plan of ",
          WIDTH, height);
  cli_put_xml(q->f, title);
  fprintf(q->f, "</title>\n<style>.b{stroke:#fff}.b:hover{stroke:#000;stroke-width:1.5}"
                ".c{stroke:#1d3f66;stroke-dasharray:3 2;stroke-width:.6}"
                ".t{pointer-events:none}.h{font-weight:600;stroke:#fff;stroke-width:3;paint-order:stroke}"
                ".r{text-anchor:end}.m{text-anchor:middle}</style>\n"
                "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
                "<text x=\"24\" y=\"32\" font-size=\"18\" font-weight=\"600\" fill=\"#1c2127\">");
  cli_put_xml(q->f, title);
  fprintf(q->f,
          ": every byte of a step, before it runs</text>\n<text x=\"24\" y=\"54\">peak %s = %s persistent + "
          "%s of the step; %d ops in list order, one rectangle per buffer from its first op to its last use</text>\n",
          cli_bytes(a, s->planned_bytes), cli_bytes(b, s->persistent_bytes), cli_bytes(c, s->transient_planned_bytes),
          q->n_ops);
}

static void put_legend(const picture *q, const int64_t *count, bool recomputed) {
  double x = 24;
  for (int k = 0; k < N_KINDS; k++) {
    if (count[k] == 0) continue;
    fprintf(q->f,
            "<rect x=\"%.0f\" y=\"69\" width=\"14\" height=\"12\" rx=\"2\" fill=\"%s\"/><text x=\"%.0f\" "
            "y=\"79\">%s</text>\n",
            x, kinds[k].fill, x + 20, kinds[k].name);
    x += 48 + 6.6 * (double)strlen(kinds[k].name);
  }
  if (recomputed)
    fprintf(q->f,
            "<rect class=\"b c\" x=\"%.0f\" y=\"69\" width=\"14\" height=\"12\" fill=\"#fff\"/><text x=\"%.0f\" "
            "y=\"79\">recomputed</text>\n",
            x, x + 20);
}

/* The name of the stage for the label above the frame: dgrad and wgrad are both backward. */
static const char *stage_of(const rfr_plan_op *op) {
  return op->phase == RFR_PHASE_DGRAD || op->phase == RFR_PHASE_WGRAD ? "backward" : phase_names[op->phase];
}

/* Draws the phases in colour. A pixel with several ops gets the colour of the phase with most of them. */
static rfr_status put_phase_strip(const picture *q) {
  enum { N_PHASES = sizeof phase_names / sizeof phase_names[0] };
  const int pixels = RIGHT - LEFT, n = q->n_ops < pixels ? q->n_ops : pixels; /* n pieces */
  int from = 0, phase = -1;
  for (int i = 0; i <= n; i++) {
    int count[N_PHASES] = {0}, most = -1;
    for (int k = (int)((int64_t)q->n_ops * i / n); i < n && k < (int)((int64_t)q->n_ops * (i + 1) / n); k++) {
      rfr_plan_op op;
      const rfr_status s = rfr_program_op(q->p, q->program, k, &op);
      if (s != RFR_OK) return s;
      count[op.phase]++;
    }
    for (int k = 0; i < n && k < N_PHASES; k++)
      if (most < 0 || count[k] > count[most]) most = k;
    if (most == phase) continue;
    const int first = (int)((int64_t)q->n_ops * from / n), end = (int)((int64_t)q->n_ops * i / n);
    if (phase >= 0)
      fprintf(q->f,
              "<rect x=\"%.1f\" y=\"116\" width=\"%.1f\" height=\"9\" fill=\"%s\"><title>%s: ops "
              "%d-%d</title></rect>\n",
              op_x(q, first), op_x(q, end) - op_x(q, first), phase_fill[phase], phase_names[phase], first, end - 1);
    from = i;
    phase = most;
  }
  return RFR_OK;
}

static rfr_status put_phases(const picture *q) {
  for (int i = 0; i < q->n_ops;) { /* stages, named */
    rfr_plan_op op, other;
    rfr_status s = rfr_program_op(q->p, q->program, i, &op);
    int end = i + 1;
    for (; s == RFR_OK && end < q->n_ops; end++) {
      s = rfr_program_op(q->p, q->program, end, &other);
      if (s != RFR_OK || strcmp(stage_of(&op), stage_of(&other)) != 0 || op.microbatch != other.microbatch) break;
    }
    if (s != RFR_OK) return s;
    const double x = op_x(q, i), w = op_x(q, end) - x;
    char label[48];
    snprintf(label, sizeof label, op.microbatch >= 0 ? "%s %d" : "%s", stage_of(&op), op.microbatch);
    if (w > 7.0 * (double)strlen(label))
      fprintf(q->f, "<text class=\"m\" x=\"%.1f\" y=\"108\">%s</text>\n", x + w / 2, label);
    if (i > 0 && w >= 4)
      fprintf(q->f, "<path d=\"M%.1f 98V%d\" stroke=\"#e1e5ea\" stroke-dasharray=\"2 3\"/>\n", x, BOTTOM);
    i = end;
  }
  return put_phase_strip(q);
}

static void put_axes(const picture *q) {
  static const double steps[] = {1, 2, 5};
  double unit = 1, tick = 1;
  char text[32];
  while (unit * 1024 * 2 < q->most) unit *= 1024;
  for (int k = 0; q->most / tick > 6; k++) {
    double scale = unit;
    for (int i = 0; i < k / 3; i++) scale *= 10;
    tick = steps[k % 3] * scale;
  }
  for (double b = 0; b <= q->most; b += tick)
    fprintf(q->f, "<path d=\"M%d %.1fH%d\" stroke=\"#eef0f3\"/><text class=\"r\" x=\"%d\" y=\"%.1f\">%s</text>\n", LEFT,
            byte_y(q, b), RIGHT, LEFT - 8, byte_y(q, b) + 4, cli_bytes(text, (int64_t)b));
  int every = 1;
  for (int k = 1; q->n_ops / every > 12; k++) {
    every = (int)steps[k % 3];
    for (int i = 0; i < k / 3; i++) every *= 10;
  }
  for (int i = 0; i <= q->n_ops; i += every)
    fprintf(q->f, "<text class=\"m\" x=\"%.1f\" y=\"%d\" font-size=\"11\" fill=\"#7b848e\">%d</text>\n", op_x(q, i),
            BOTTOM + 16, i);
  fprintf(q->f,
          "<text class=\"m\" transform=\"translate(20 %d) rotate(-90)\">offset in the arena, step-scoped "
          "part</text>\n<text class=\"r\" x=\"%d\" y=\"%d\" font-size=\"11\" fill=\"#7b848e\">op</text>\n",
          (TOP + BOTTOM) / 2, LEFT - 8, BOTTOM + 16);
}

/* ---- tiny rectangles ---- */

enum { GRID_W = RIGHT - LEFT, GRID_H = BOTTOM - TOP };

static float *cell(const picture *q, int x, int y) { return q->tiny + ((size_t)y * GRID_W + (size_t)x) * N_KINDS; }

/* Adds the rectangle's coverage to every pixel that it touches. */
static rfr_status add_tiny(picture *q, int kind, double x, double y, double w, double h) {
  if (!q->tiny) q->tiny = calloc((size_t)GRID_W * GRID_H * N_KINDS, sizeof *q->tiny);
  if (!q->tiny) return RFR_NO_MEMORY;
  x -= LEFT, y -= TOP;
  q->n_tiny++;
  for (int j = (int)fmax(y, 0); j < y + h && j < GRID_H; j++)
    for (int i = (int)fmax(x, 0); i < x + w && i < GRID_W; i++)
      cell(q, i, j)[kind] += (float)((fmin(x + w, i + 1) - fmax(x, i)) * (fmin(y + h, j + 1) - fmax(y, j)));
  return RFR_OK;
}

/* The kind to draw in a pixel: the one with the largest coverage, if all kinds together cover half of it; -1: none. */
static int kind_of_cell(const picture *q, int x, int y) {
  const float *c = cell(q, x, y);
  float sum = 0;
  int most = 0;
  for (int k = 0; k < N_KINDS; k++) {
    sum += c[k];
    if (c[k] > c[most]) most = k;
  }
  return sum >= 0.5f ? most : -1;
}

/* Draws the pixels as rectangles: each extends over equal pixels first to the right, then down. */
static void put_tiny(picture *q) {
  if (!q->tiny) return;
  for (int y = 0; y < GRID_H; y++)
    for (int x = 0; x < GRID_W; x++) {
      const int kind = kind_of_cell(q, x, y);
      int w = 1, h = 1;
      if (kind < 0) continue;
      while (x + w < GRID_W && kind_of_cell(q, x + w, y) == kind) w++;
      for (bool same = true; same && y + h < GRID_H;) {
        for (int i = 0; i < w; i++) same &= kind_of_cell(q, x + i, y + h) == kind;
        h += same;
      }
      for (int j = 0; j < h; j++)
        for (int i = 0; i < w; i++) memset(cell(q, x + i, y + j), 0, N_KINDS * sizeof(float));
      fprintf(q->f,
              "<rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"><title>several buffers, mostly %s"
              "</title></rect>\n",
              LEFT + x, TOP + y, w, h, kinds[kind].fill, kinds[kind].name);
    }
  free(q->tiny);
  q->tiny = NULL;
}

/* ---- buffers ---- */

static rfr_status put_buffer(picture *q, const rfr_plan_buffer *b) {
  rfr_plan_op op;
  char bytes[32], exact[40];
  const int k = kind_index(b->kind), first = b->first < q->n_ops ? b->first : q->n_ops - 1;
  const int last = b->last < q->n_ops ? b->last : q->n_ops - 1;
  const double offset = (double)(b->offset - q->sum.persistent_bytes), x = op_x(q, first), w = op_x(q, last + 1) - x;
  const double y = byte_y(q, offset + (double)b->bytes), h = byte_y(q, offset) - y;
  rfr_status s = rfr_program_op(q->p, q->program, first, &op);
  if (s != RFR_OK) return s;
  if (w < 1 || (h < 1 && q->sum.n_buffers > MANY)) return add_tiny(q, k, x, y, w, h);
  const double thin = fmin(w, h), stroke = thin < 4 ? 0.15 * thin : 0.6; /* the stroke must not hide the rectangle */
  fprintf(q->f, "<rect class=\"%s\" x=\"%.1f\" y=\"%.2f\" width=\"%.1f\" height=\"%.2f\" fill=\"%s\"",
          op.recompute_of >= 0 && thin >= 4 ? "b c" : "b", x, y, w, h < 0.3 ? 0.3 : h, kinds[k].fill);
  if (op.recompute_of < 0 || thin < 4) fprintf(q->f, " stroke-width=\"%.2g\"", stroke);
  fputs("><title>", q->f);
  cli_put_xml(q->f, b->name);
  fprintf(q->f, ": %s, %s bytes (%s)\nops %d-%d, made by ", b->kind, digits(exact, b->bytes),
          cli_bytes(bytes, b->bytes), first, last);
  cli_put_xml(q->f, op.name);
  if (op.scope[0]) {
    fputs(" in ", q->f);
    cli_put_xml(q->f, op.scope);
  }
  fprintf(q->f, ", %s", phase_names[op.phase]);
  if (op.recompute_of >= 0) fprintf(q->f, "\nrecompute of op %d", op.recompute_of);
  if (op.reason[0]) {
    fputs("\n", q->f);
    cli_put_xml(q->f, op.reason);
  }
  fputs("</title></rect>\n", q->f);
  char label[128];
  const bool nameless = strcmp(b->name, op.name) == 0 && op.scope[0];
  snprintf(label, sizeof label, "%s%s%s", nameless ? op.scope : "", nameless ? " " : "", b->name);
  const double size = h < 11 ? h - 1 : 10;
  if (size >= 7 && w >= 0.62 * size * (double)strlen(label) + 8) {
    fprintf(q->f, "<text class=\"t\" x=\"%.1f\" y=\"%.1f\" font-size=\"%.1f\" fill=\"%s\">", x + 4,
            y + h / 2 + 0.35 * size, size, kinds[k].ink);
    cli_put_xml(q->f, label);
    fputs("</text>\n", q->f);
  }
  return RFR_OK;
}

/* A horizontal line over the frame, with its name at one end, above or below. */
static void put_line(const picture *q, double bytes, const char *style, const char *name, bool right, bool above) {
  char text[32];
  const double y = byte_y(q, bytes);
  fprintf(q->f, "<path d=\"M%d %.1fH%d\" style=\"stroke:%s\" stroke-width=\"1.4\" fill=\"none\"/>\n", LEFT, y, RIGHT,
          style);
  fprintf(q->f, "<text class=\"h%s\" x=\"%d\" y=\"%.1f\">%s %s</text>\n", right ? " r" : "",
          right ? RIGHT - 4 : LEFT + 4, above ? y - 5 : y + 14, name, cli_bytes(text, (int64_t)bytes));
}

static void put_lines(const picture *q) {
  const rfr_plan_summary *s = &q->sum;
  char text[32];
  const double ratio = s->transient_lower_bound_bytes > 0
                           ? (double)s->transient_planned_bytes / (double)s->transient_lower_bound_bytes
                           : 1.0;
  char name[64];
  snprintf(name, sizeof name, "planned, %.3f of the bound:", ratio);
  put_line(q, (double)s->transient_planned_bytes, "#1c2127", name, true, true);
  put_line(q, (double)s->transient_lower_bound_bytes, "#35b58a;stroke-dasharray:6 4", "lower bound:", true, false);
  if (s->budget <= 0) return;
  const double room = (double)(s->budget - s->persistent_bytes);
  if (room <= q->most) put_line(q, room, "#c0392b;stroke-dasharray:2 3", "budget of the step:", false, true);
  else
    fprintf(q->f,
            "<text class=\"r\" x=\"%d\" y=\"79\" fill=\"#c0392b\" font-weight=\"600\">budget %s, above the "
            "picture</text>\n",
            RIGHT - 4, cli_bytes(text, s->budget));
}

static void put_band(const picture *q, const int64_t *bytes, const int64_t *count) {
  char text[32], exact[40];
  double y = BOTTOM + 52;
  fprintf(q->f, "<text x=\"%d\" y=\"%.0f\">persistent, not to scale: %s (%s bytes)</text>\n", LEFT, y - 8,
          cli_bytes(text, q->sum.persistent_bytes), digits(exact, q->sum.persistent_bytes));
  for (int k = 0; k < N_KINDS; k++) {
    if (bytes[k] == 0) continue;
    fprintf(q->f,
            "<rect x=\"%d\" y=\"%.0f\" width=\"%d\" height=\"%d\" fill=\"%s\"/><text x=\"%d\" y=\"%.0f\" "
            "fill=\"%s\">%s: %lld buffers, %s (%s bytes)</text>\n",
            LEFT, y, RIGHT - LEFT, ROW - 2, kinds[k].fill, LEFT + 8, y + 13, kinds[k].ink, kinds[k].name,
            (long long)count[k], cli_bytes(text, bytes[k]), digits(exact, bytes[k]));
    y += ROW;
  }
}

rfr_status cli_plan_svg(const rfr_programs *p, int program, const char *title, FILE *f) {
  picture q = {.f = f, .p = p, .program = program};
  int64_t count[N_KINDS] = {0}, always[N_KINDS] = {0}, always_count[N_KINDS] = {0};
  int rows = 0;
  rfr_plan_buffer b;
  rfr_status s = rfr_program_plan(p, program, &q.sum);
  if (s != RFR_OK) return s;
  q.n_ops = rfr_trace_op_count(rfr_program_trace(p, program, "lower"));
  q.most = (double)q.sum.transient_planned_bytes;
  const double room = (double)(q.sum.budget - q.sum.persistent_bytes);
  if (room > q.most && room < 1.5 * q.most) q.most = room;
  q.most = q.most > 0 ? 1.06 * q.most : 1;
  for (int i = 0; i < q.sum.n_buffers && s == RFR_OK; i++) {
    s = rfr_program_plan_buffer(p, program, i, &b);
    if (s != RFR_OK) return s;
    const int k = kind_index(b.kind);
    count[k]++;
    if (b.offset >= q.sum.persistent_bytes) continue;
    rows += always_count[k] == 0;
    always[k] += b.bytes;
    always_count[k]++;
  }
  put_head(&q, title, BOTTOM + 64 + rows * ROW);
  bool recomputed = false;
  for (int i = 0; i < q.n_ops && !recomputed; i++) {
    rfr_plan_op op;
    s = rfr_program_op(p, program, i, &op);
    if (s != RFR_OK) return s;
    recomputed = op.recompute_of >= 0;
  }
  put_legend(&q, count, recomputed);
  put_axes(&q);
  s = put_phases(&q);
  for (int i = 0; i < q.sum.n_buffers && s == RFR_OK; i++) {
    s = rfr_program_plan_buffer(p, program, i, &b);
    if (s == RFR_OK && b.offset >= q.sum.persistent_bytes) s = put_buffer(&q, &b);
  }
  put_tiny(&q);
  put_lines(&q);
  put_band(&q, always, always_count);
  fputs("</svg>\n", f);
  return s;
}
