/* SPDX-License-Identifier: Apache-2.0
 *
 * The picture of a schedule, one SVG without scripts or other files: a lane for each rank, time to the right, a box
 * for each action, with the microbatch's number where it fits. The colour shows the op, paler in later stages of a
 * rank; white is idle time. Pointing at a box shows its action and times. The text next to a lane is the rank's idle
 * share and slots. Equal adjacent boxes of less than two pixels each are drawn as one box.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const struct look {
  const char *name, *fill, *ink;
} looks[RFR_ACTION_COUNT] = {
    [RFR_ACTION_F] = {"F forward", "#7fb2ea", "#12365c"},
    [RFR_ACTION_I] = {"I input gradient", "#f2a65a", "#5c3208"},
    [RFR_ACTION_W] = {"W weight gradients", "#7fc8a9", "#0f4a33"},
    [RFR_ACTION_B] = {"B = I + W", "#d9b36c", "#4d3a08"},
    [RFR_ACTION_OPT] = {"optimizer", "#b9a2d8", "#3a2560"},
    [RFR_ACTION_UNSHARD] = {"unshard", "#9ed3d6", "#12484b"},
    [RFR_ACTION_RESHARD] = {"reshard", "#c9e4e6", "#12484b"},
    [RFR_ACTION_REDUCE] = {"reduce", "#e2a3bd", "#5e1f3a"},
    [RFR_ACTION_SEND_F] = {"send output", "#c2c7cd", "#3a4048"},
    [RFR_ACTION_RECV_F] = {"receive input", "#d9dde2", "#3a4048"},
    [RFR_ACTION_SEND_B] = {"send gradient", "#c2c7cd", "#3a4048"},
    [RFR_ACTION_RECV_B] = {"receive gradient", "#d9dde2", "#3a4048"},
};

enum { LEFT = 70, RIGHT = 1040, WIDTH = 1200, TOP = 92, LANE = 30, BOX = 26 };

typedef struct picture {
  FILE *f;
  const schedule_run *s;
  double per; /* pixels of a second */
} picture;

static void put_head(const picture *q, const char *title, int height) {
  const schedule_run *s = q->s;
  fprintf(q->f,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"system-ui, 'DejaVu Sans', "
          "sans-serif\" font-size=\"12\" fill=\"#3a4048\">\n"
          "<!-- SPDX-License-Identifier: Apache-2.0; made by refrain schedule -->\n<title>",
          WIDTH, height);
  cli_put_xml(q->f, title);
  fputs("</title>\n<style>.b{stroke:#fff}.b:hover{stroke:#000;stroke-width:1.5}"
        ".m{text-anchor:middle;pointer-events:none}.r{text-anchor:end}</style>\n"
        "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
        "<text x=\"24\" y=\"32\" font-size=\"18\" font-weight=\"600\" fill=\"#1c2127\">",
        q->f);
  cli_put_xml(q->f, title);
  fprintf(q->f,
          "</text>\n<text x=\"24\" y=\"54\">%d stages on %d ranks, %d microbatches: makespan %.6g, bubble %.1f%%, "
          "%d slots</text>\n",
          s->info.stages, s->info.ranks, s->info.microbatches, s->result.makespan, 100 * s->result.bubble,
          s->result.slots);
}

static void put_legend(const picture *q) {
  bool there[RFR_ACTION_COUNT] = {false}, paler = false;
  double x = LEFT;
  for (int r = 0, k = 0, n; r < q->s->info.ranks; r++) {
    const rfr_action *a = rfr_schedule_actions(q->s->schedule, r, &n);
    int stages = 0;
    for (int i = 0; i < n; i++, k++) there[a[i].op] |= q->s->end[k] > q->s->start[k];
    for (int stage = 0; stage < q->s->info.stages; stage++) stages += rfr_schedule_rank(q->s->schedule, stage) == r;
    paler |= stages > 1;
  }
  for (int op = 0; op < RFR_ACTION_COUNT; op++) {
    if (!there[op]) continue;
    fprintf(q->f,
            "<rect x=\"%.0f\" y=\"66\" width=\"14\" height=\"12\" rx=\"2\" fill=\"%s\"/><text x=\"%.0f\" "
            "y=\"76\">%s</text>\n",
            x, looks[op].fill, x + 20, looks[op].name);
    x += 48 + 6.6 * (double)strlen(looks[op].name);
  }
  if (paler) fprintf(q->f, "<text x=\"%.0f\" y=\"76\">paler: a later stage of the rank</text>\n", x);
}

/* The number of stages that the rank has before this one. */
static int chunk_of(const picture *q, int r, int stage) {
  int c = 0;
  for (int i = 0; i < stage; i++) c += rfr_schedule_rank(q->s->schedule, i) == r;
  return c;
}

/* Whether actions i and j of a rank (the first one is number k) look the same and j starts when its predecessor
 * ends. */
static bool is_same_look(const picture *q, int k, const rfr_action *a, int i, int j, const int *chunk) {
  const double gap = q->per * (q->s->start[k + j] - q->s->end[k + j - 1]);
  return a[j].op == a[i].op && chunk[a[j].stage] == chunk[a[i].stage] && gap < 0.01 &&
         q->per * (q->s->end[k + j] - q->s->start[k + j]) < 2;
}

static void put_lane(const picture *q, int r, int k, const int *chunk) {
  int n;
  char text[RFR_ACTION_TEXT];
  const double y = TOP + (double)r * LANE;
  const rfr_rank_result *result = &q->s->ranks[r];
  const rfr_action *a = rfr_schedule_actions(q->s->schedule, r, &n);
  fprintf(q->f,
          "<text class=\"r\" x=\"%d\" y=\"%.0f\">rank %d</text><rect x=\"%d\" y=\"%.0f\" width=\"%d\" height=\"%d\" "
          "fill=\"#f6f7f9\"/>\n",
          LEFT - 8, y + 17, r, LEFT, y, RIGHT - LEFT, BOX);
  for (int i = 0, next; i < n; i = next) {
    const double x = LEFT + q->per * q->s->start[k + i];
    double w = q->per * (q->s->end[k + i] - q->s->start[k + i]);
    next = i + 1;
    if (w <= 0) continue;
    const struct look *l = &looks[a[i].op];
    const int c = chunk[a[i].stage];
    while (w < 2 && next < n && is_same_look(q, k, a, i, next, chunk)) next++;
    w = q->per * (q->s->end[k + next - 1] - q->s->start[k + i]);
    fprintf(q->f, "<rect class=\"b\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"%d\" fill=\"%s\"", x, y, w, BOX,
            l->fill);
    fprintf(q->f, " stroke-width=\"%.2g\"", w < 6 ? 0.13 * w : 0.8); /* a border would hide the colour of thin boxes */
    if (c) fprintf(q->f, " fill-opacity=\"%.2f\"", c > 2 ? 0.3 : 1 - 0.35 * c);
    fprintf(q->f, "><title>%s", rfr_action_print(a[i], text));
    if (next > i + 1) fprintf(q->f, " to %s", rfr_action_print(a[next - 1], text));
    fprintf(q->f, ": %.6g to %.6g</title></rect>", q->s->start[k + i], q->s->end[k + next - 1]);
    if (next > i + 1) continue;
    char number[16];
    const int digits = snprintf(number, sizeof number, "%d", a[i].microbatch);
    if (a[i].microbatch >= 0 && w > 6.8 * digits + 1)
      fprintf(q->f, "<text class=\"m\" x=\"%.2f\" y=\"%.0f\" font-size=\"11\" fill=\"%s\">%s</text>", x + w / 2, y + 17,
              l->ink, number);
    fputc('\n', q->f);
  }
  fprintf(q->f, "<text x=\"%d\" y=\"%.0f\">idle %.1f%%, %d slots</text>\n", RIGHT + 12, y + 17,
          q->s->result.makespan > 0 ? 100 * result->idle / q->s->result.makespan : 0.0, result->slots);
}

static void put_axis(const picture *q, double bottom) {
  static const double steps[] = {1, 2, 5};
  const double span = q->s->result.makespan;
  if (span <= 0) return;
  double power = pow(10, floor(log10(span / 12))), tick = power;
  for (int i = 0; i < 3 && span / tick > 12; i++) tick = i < 2 ? steps[i + 1] * power : 10 * power;
  for (int i = 0; i * tick <= span * (1 + 1e-9); i++)
    fprintf(q->f, "<path d=\"M%.1f %.0fv5\" stroke=\"#9aa2ac\"/><text class=\"m\" x=\"%.1f\" y=\"%.0f\">%.6g</text>\n",
            LEFT + q->per * i * tick, bottom, LEFT + q->per * i * tick, bottom + 18, i * tick);
}

void schedule_run_svg(const schedule_run *s, const char *title, FILE *f) {
  const picture q = {.f = f, .s = s, .per = s->result.makespan > 0 ? (RIGHT - LEFT) / s->result.makespan : 0};
  const int bottom = TOP + s->info.ranks * LANE;
  int *chunk = calloc((size_t)s->info.stages, sizeof *chunk);
  for (int i = 0; chunk && i < s->info.stages; i++) chunk[i] = chunk_of(&q, rfr_schedule_rank(s->schedule, i), i);
  put_head(&q, title, bottom + 32);
  put_legend(&q);
  for (int r = 0, k = 0, n; chunk && r < s->info.ranks; r++, k += n) {
    rfr_schedule_actions(s->schedule, r, &n);
    put_lane(&q, r, k, chunk);
  }
  put_axis(&q, bottom);
  fputs("</svg>\n", f);
  free(chunk);
}
