/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain schedule: simulates a pipeline schedule of a known kind, an order list or a file of actions. Prints a table,
 * with --svg a picture, with --json one object of four keys.
 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static const char *kind_name(int i) { return rfr_schedule_kind_name((rfr_schedule_kind)i); }

static rfr_status read_count(const char *option, int64_t value, int *out) {
  if (value > INT_MAX) return cli_usage("give a smaller number", "--%s %lld is too large", option, (long long)value);
  *out = (int)value;
  return RFR_OK;
}

static rfr_status generate(const cli *c, rfr_schedule **out) {
  enum { KINDS = RFR_SCHEDULE_ZB_V + 1 };
  rfr_schedule_options o = rfr_schedule_options_default();
  int kind = 0;
  while (kind < KINDS - 1 && strcmp(kind_name(kind), c->kind) != 0) kind++;
  if (c->stages == 0 || c->microbatches == 0)
    return cli_usage("as --stages 4 --microbatches 8", "--kind needs --stages and --microbatches, at least 1 each");
  o.kind = (rfr_schedule_kind)kind;
  rfr_status s = read_count("stages", c->stages, &o.ranks);
  if (s == RFR_OK) s = read_count("microbatches", c->microbatches, &o.microbatches);
  if (s == RFR_OK) s = read_count("chunks", c->chunks, &o.chunks);
  if (s == RFR_OK) s = read_count("group", c->group, &o.group);
  return s == RFR_OK ? rfr_schedule_generate(c->ctx, &o, out) : s;
}

static rfr_status read_order(const cli *c, rfr_schedule **out) {
  enum { MOST = 4096 };
  int *layers = NULL, n = 0;
  const char *p = c->layers;
  if (p) layers = calloc(MOST, sizeof *layers);
  if (p && !layers) return RFR_NO_MEMORY;
  for (bool more = p != NULL; more; p += more) {
    char *end;
    errno = 0;
    const long count = strtol(p, &end, 10);
    const bool bad = end == p || errno || count < 1 || count > INT_MAX || n == MOST || (*end != ',' && *end);
    if (bad) free(layers);
    if (bad)
      return cli_usage("give a count for each chunk, as 3,2, or one for all", "--layers: \"%s\" is not a count", p);
    layers[n++] = (int)count;
    more = *end == ',';
    p = end;
  }
  const rfr_status s = rfr_schedule_parse_order(c->ctx, "--order", c->order, strlen(c->order), layers, n, out);
  free(layers);
  return s;
}

static rfr_status make_schedule(const cli *c, rfr_schedule **out) {
  *out = NULL;
  if ((c->kind != NULL) + (c->order != NULL) + (c->file != NULL) != 1)
    return cli_usage("as refrain schedule --kind 1f1b --stages 4 --microbatches 8",
                     "refrain schedule takes one of --kind, --order and --file");
  if (!c->kind && (c->stages || c->microbatches || c->chunks || c->group))
    return cli_usage("omit them: the actions determine these numbers",
                     "--stages, --microbatches, --chunks and --group are for --kind");
  if (!c->order && c->layers) return cli_usage("omit it", "--layers is for --order");
  if (c->svg && c->json) return cli_usage("omit one of them", "--svg and --json are two forms of output");
  if (c->kind) return generate(c, out);
  if (c->order) return read_order(c, out);
  char *text;
  rfr_status s = cli_read_file(c->file, &text);
  if (s == RFR_OK) s = rfr_schedule_parse(c->ctx, c->file, text, strlen(text), out);
  free(text);
  return s;
}

static rfr_status with_communication(const cli *c, rfr_schedule **schedule) {
  rfr_schedule *with;
  if (!c->communication) return RFR_OK;
  const rfr_status s = rfr_schedule_add_communication(*schedule, &with);
  if (s != RFR_OK) return s;
  rfr_schedule_destroy(*schedule);
  *schedule = with;
  return RFR_OK;
}

static rfr_status read_costs(const cli *c, const rfr_schedule *schedule, rfr_stage_costs **out) {
  rfr_schedule_info info;
  char *text = NULL;
  rfr_status s = rfr_schedule_get_info(schedule, &info);
  *out = NULL;
  if (s == RFR_OK) *out = calloc((size_t)info.stages, sizeof **out);
  if (s == RFR_OK && !*out) s = RFR_NO_MEMORY;
  for (int i = 0; s == RFR_OK && i < info.stages; i++) (*out)[i] = rfr_stage_costs_default();
  if (s == RFR_OK && c->costs) s = cli_read_file(c->costs, &text);
  if (s == RFR_OK && c->costs) s = rfr_schedule_costs_parse(c->ctx, c->costs, text, strlen(text), info.stages, *out);
  free(text);
  return s;
}

static void print_json(const schedule_run *s) {
  static const char *const names[] = {
#define NAME(name, microbatch, what) #name,
      RFR_ACTIONS(NAME)
#undef NAME
  };
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_double(&j, "bubble", s->result.bubble);
  json_begin(&j, "slots", '[');
  for (int r = 0; r < s->info.ranks; r++) {
    json_begin(&j, NULL, '[');
    for (int stage = 0; stage < s->info.stages; stage++)
      if (rfr_schedule_rank(s->schedule, stage) == r) json_int(&j, NULL, rfr_schedule_slots(s->schedule, stage));
    json_end(&j, ']');
  }
  json_end(&j, ']');
  json_begin(&j, "peak_bytes", '[');
  for (int r = 0; r < s->info.ranks; r++) json_int(&j, NULL, s->ranks[r].slot_bytes);
  json_end(&j, ']');
  json_begin(&j, "actions", '[');
  for (int r = 0, k = 0, n; r < s->info.ranks; r++) {
    const rfr_action *a = rfr_schedule_actions(s->schedule, r, &n);
    json_begin(&j, NULL, '[');
    for (int i = 0; i < n; i++, k++) {
      json_begin(&j, NULL, '{');
      json_text(&j, "op", names[a[i].op]);
      json_int(&j, "stage", a[i].stage);
      json_int(&j, "microbatch", a[i].microbatch);
      json_double(&j, "start", s->start[k]);
      json_double(&j, "end", s->end[k]);
      json_end(&j, '}');
    }
    json_end(&j, ']');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

static rfr_status draw(const cli *c, const schedule_run *s) {
  char title[160];
  FILE *f = strcmp(c->svg, "-") == 0 ? stdout : fopen(c->svg, "wb");
  snprintf(title, sizeof title, "%s", c->kind ? c->kind : c->order ? c->order : c->file);
  if (f) schedule_run_svg(s, title, f);
  bool failed = !f || fflush(f) != 0 || ferror(f);
  if (f && f != stdout && fclose(f) != 0) failed = true;
  if (failed) return cli_cannot_write(c->svg);
  if (f != stdout) printf("%s written\n", c->svg);
  return RFR_OK;
}

rfr_status cli_schedule(cli *c) {
  rfr_schedule *schedule;
  rfr_stage_costs *costs = NULL;
  schedule_run run = {0};
  rfr_status s = make_schedule(c, &schedule);
  if (s == RFR_OK) s = with_communication(c, &schedule);
  if (s == RFR_OK) s = read_costs(c, schedule, &costs);
  if (s == RFR_OK) s = schedule_run_make(schedule, costs, &run);
  if (s == RFR_OK && c->svg) s = draw(c, &run);
  else if (s == RFR_OK && c->json) print_json(&run);
  else if (s == RFR_OK) schedule_run_table(&run, stdout);
  schedule_run_deinit(&run);
  free(costs);
  rfr_schedule_destroy(schedule);
  return s;
}
