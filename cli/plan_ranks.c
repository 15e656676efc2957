/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain plan --ranks: what each kind of rank of a step over N ranks needs and sends. Ranks without a pipeline are
 * alike, so one is planned; with a pipeline every rank is planned, and equal ranks share a line. The plans are those of
 * a real run on that rank: only the communicator has no peers, and nothing is allocated or sent.
 *
 * With --costs the time of a step is estimated: measured times of layers, and bytes over the rate of the link.
 * Data-parallel ranks overlap collectives with compute, so their step takes at least the longer of the two, and at most
 * the sum; the schedule of a pipeline is simulated.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

enum { MOST_RANKS = 4096, MOST_KINDS = 32 };

typedef struct kind {
  int first, last; /* range of ranks */
  rfr_memory memory;
  int64_t gathered; /* bytes of gathered parameters at the peak */
  int64_t gradients;
  rfr_run_pipeline pipeline;
  int64_t total;
} kind;

typedef struct exchange {
  const char *name;
  int64_t bytes, count;
} exchange;

typedef struct scale {
  cli *c;
  rfr_run_info info;
  int64_t microbatches;
  kind *kinds;
  int n_kinds;
  exchange sent[MOST_KINDS]; /* messages of the first rank */
  int n_sent;
  double sent_bytes, extra; /* extra: recompute work, relative to the other work */
  int64_t budget;
} scale;

/* ---- plans ---- */

static void add_exchange(scale *s, const char *name, int64_t bytes, int64_t count) {
  int k = 0;
  while (k < s->n_sent && (s->sent[k].bytes != bytes || strcmp(s->sent[k].name, name) != 0)) k++;
  if (k == MOST_KINDS) k--; /* the last line collects the rest */
  if (k == s->n_sent) s->sent[s->n_sent++] = (exchange){name, bytes, 0};
  s->sent[k].count += count;
  s->sent_bytes += (double)bytes * (double)count;
}

static void read_ops(scale *s, const rfr_programs *p, int program) {
  rfr_plan_op op;
  for (int i = 0; rfr_program_op(p, program, i, &op) == RFR_OK; i++) {
    if (op.microbatch >= s->microbatches) s->microbatches = op.microbatch + 1;
    if (op.sent_bytes > 0) add_exchange(s, op.name, op.sent_bytes, 1);
  }
  const double extra = rfr_program_recomputed_flops(p, program), all = rfr_program_flops(p, program);
  s->extra = all > extra ? extra / (all - extra) : 0;
}

static bool ends_in(const char *name, const char *end) {
  const size_t n = strlen(name), m = strlen(end);
  return n >= m && strcmp(name + n - m, end) == 0;
}

/* Parameters that are gathered at the peak, and the gradients of a pipeline, which are inputs of its program. */
static rfr_status read_buffers(const rfr_programs *p, int program, kind *k) {
  rfr_plan_summary sum;
  rfr_plan_buffer b;
  rfr_plan_op op;
  rfr_status s = rfr_program_plan(p, program, &sum);
  k->gradients = k->memory.gradients;
  for (int i = 0; s == RFR_OK && i < sum.n_buffers; i++) {
    s = rfr_program_plan_buffer(p, program, i, &b);
    if (s == RFR_OK && strcmp(b.kind, "input") == 0 && ends_in(b.name, ".gradient")) k->gradients += b.bytes;
    if (s != RFR_OK || strcmp(b.kind, "activation") != 0 || b.first > k->memory.peak_op || b.last < k->memory.peak_op)
      continue;
    s = rfr_program_op(p, program, b.first, &op);
    if (s == RFR_OK && strcmp(op.name, "all_gather") == 0) k->gathered += b.bytes;
  }
  return s;
}

/* The callables of a pipeline and its programs share one step memory, so the row has the bytes of the largest of
 * them. */
static void take_slots(kind *k) {
  rfr_memory *m = &k->memory;
  const int64_t slots = k->pipeline.slot_bytes + k->pipeline.shared_bytes;
  if (slots <= m->activations + m->gradients + m->workspaces + m->outputs) return;
  k->gradients -= m->gradients;
  k->gathered = 0;
  m->activations = k->pipeline.slot_bytes;
  m->workspaces = k->pipeline.shared_bytes;
}

static rfr_status plan_rank(scale *s, const char *text, rfr_comm *const *ends, int rank) {
  rfr_run *run = NULL;
  kind k = {.first = rank, .last = rank};
  s->c->comm = ends[rank];
  rfr_status status = cli_open_config(s->c, text, RFR_RUN_TRAIN, false, NULL, &run);
  rfr_programs *p = rfr_run_programs(run);
  const int program = rfr_run_program_index(run, RFR_RUN_TRAIN);
  if (status == RFR_OK) status = rfr_programs_memory(p, &k.memory);
  if (status == RFR_OK) status = read_buffers(p, program, &k);
  if (status == RFR_OK) {
    rfr_plan_summary sum;
    rfr_run_get_pipeline(run, &k.pipeline);
    k.total = k.memory.total + k.pipeline.planned_bytes;
    take_slots(&k);
    status = rfr_program_plan(p, program, &sum);
    s->budget = sum.budget;
  }
  if (status == RFR_OK && rank == 0) {
    rfr_run_get_info(run, &s->info);
    read_ops(s, p, program);
    if (k.pipeline.ranks > 1) s->microbatches = k.pipeline.microbatches;
    if (k.pipeline.ranks > 1) add_exchange(s, "message", k.pipeline.message_bytes, k.pipeline.messages);
  }
  rfr_run_close(run);
  s->c->comm = NULL;
  if (status != RFR_OK) return status;
  kind *last = s->n_kinds > 0 ? &s->kinds[s->n_kinds - 1] : NULL;
  if (last && last->total == k.total && last->memory.weights == k.memory.weights &&
      last->pipeline.slot_bytes == k.pipeline.slot_bytes)
    last->last = rank;
  else s->kinds[s->n_kinds++] = k;
  return RFR_OK;
}

static rfr_status plan_all(scale *s, const char *text) {
  const int n = (int)s->c->ranks;
  rfr_comm **ends = calloc((size_t)n, sizeof(rfr_comm *));
  s->kinds = calloc((size_t)n, sizeof *s->kinds);
  if (!ends || !s->kinds) return free(ends), RFR_NO_MEMORY;
  rfr_status status = rfr_comm_threads_create(s->c->ctx, n, 1, ends);
  if (status == RFR_OK) status = plan_rank(s, text, ends, 0);
  const bool alike = s->n_kinds > 0 && s->kinds[0].pipeline.ranks == 1;
  if (status == RFR_OK && alike) s->kinds[0].last = n - 1;
  for (int r = 1; status == RFR_OK && !alike && r < n; r++) status = plan_rank(s, text, ends, r);
  for (int r = 0; r < n; r++) rfr_comm_destroy(ends[r]);
  free(ends);
  return status;
}

/* ---- time ---- */

typedef struct estimate {
  double compute, communication, least, most, bubble;
} estimate;

/* Converts costs of an even split to those of the run's stages. */
static void move_layers(const rfr_layer_costs *costs, int64_t layers, const rfr_run_pipeline *p,
                        rfr_stage_costs *list) {
  static const int ops[3] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W};
  for (int i = 0; i < p->stages && p->stages > 1; i++) {
    const int64_t n = i == p->stages - 1 ? p->last_layers
                                         : rfr_stage_layers(layers - p->last_layers, p->stages - 1, i, NULL),
                  more = n - rfr_stage_layers(layers, p->stages, i, NULL);
    for (int k = 0; k < 3; k++) list[i].seconds[ops[k]] += costs->layer[k] * (double)more;
  }
}

static rfr_status simulate(const scale *s, const rfr_layer_costs *costs, double link, double update, estimate *e) {
  const rfr_run_pipeline *p = &s->kinds[0].pipeline;
  rfr_schedule_options o = rfr_schedule_options_default();
  rfr_schedule *schedule = NULL;
  rfr_schedule_result result;
  rfr_stage_costs *list = calloc((size_t)p->stages, sizeof *list);
  if (!list) return RFR_NO_MEMORY;
  /* a recomputed forward is part of I; the total work is three times that of a forward */
  const double forward = s->info.flops_per_step / 3 / (double)s->microbatches / p->ranks;
  const double again = forward > 0 && p->recomputed_flops < forward ? p->recomputed_flops / forward : 1;
  rfr_status status = rfr_layer_costs_stages(costs, s->info.layers, p->stages, list);
  if (status == RFR_OK) move_layers(costs, s->info.layers, p, list);
  for (int i = 0; status == RFR_OK && i < p->stages; i++) {
    list[i].seconds[RFR_ACTION_I] += again * list[i].seconds[RFR_ACTION_F];
    list[i].seconds[RFR_ACTION_SEND_F] = list[i].seconds[RFR_ACTION_SEND_B] = (double)p->message_bytes / link;
  }
  o.kind = p->schedule;
  o.ranks = p->ranks;
  o.microbatches = (int)p->microbatches;
  if (status == RFR_OK) status = rfr_schedule_generate(s->c->ctx, &o, &schedule);
  if (status == RFR_OK) status = rfr_schedule_simulate(schedule, list, p->stages, &result, NULL, NULL, NULL);
  if (status == RFR_OK) {
    e->bubble = result.bubble;
    e->compute = result.makespan * (1 - result.bubble) + update;
    e->communication = s->sent_bytes / link;
    e->least = e->most = result.makespan + update;
  }
  rfr_schedule_destroy(schedule);
  free(list);
  return status;
}

static rfr_status estimate_time(const scale *s, estimate *e) {
  char *text;
  rfr_layer_costs costs;
  rfr_stage_costs all;
  const double link = 1e9 * (s->c->link > 0 ? s->c->link : 50.0);
  rfr_status status = cli_read_file(s->c->costs, &text);
  if (status != RFR_OK) return status;
  status = rfr_layer_costs_parse(s->c->ctx, s->c->costs, text, strlen(text), &costs);
  free(text);
  if (status != RFR_OK) return status;
  const int ranks = s->info.ranks, pipeline = s->kinds[0].pipeline.ranks;
  const int64_t tokens = s->info.tokens_per_step / (s->microbatches * (pipeline > 1 ? 1 : ranks));
  if (tokens != costs.tokens)
    return cli_usage("measure a microbatch of the same size", "%s has costs of %lld tokens, a microbatch has %lld",
                     s->c->costs, (long long)costs.tokens, (long long)tokens);
  const double update = costs.update * (double)s->info.trainable_parameters;
  if (pipeline > 1) return simulate(s, &costs, link, update / pipeline, e);
  status = rfr_layer_costs_stages(&costs, s->info.layers, 1, &all);
  if (status != RFR_OK) return status;
  const double microbatch = all.seconds[RFR_ACTION_F] + all.seconds[RFR_ACTION_I] + all.seconds[RFR_ACTION_W];
  e->compute =
      (double)s->microbatches * microbatch * (1 + s->extra) + update / (s->info.shard == RFR_SHARD_NONE ? 1 : ranks);
  e->communication = s->sent_bytes / link;
  e->least = e->compute > e->communication ? e->compute : e->communication;
  e->most = e->compute + e->communication;
  return RFR_OK;
}

/* ---- output ---- */

static const char *mode(const scale *s) {
  const rfr_run_pipeline *p = &s->kinds[0].pipeline;
  return p->ranks > 1 ? rfr_schedule_kind_name(p->schedule) : rfr_shard_name(s->info.shard);
}

static void print_kind(const kind *k, FILE *f) {
  const rfr_memory *m = &k->memory;
  const int64_t parts[] = {m->weights,   m->optimizer, k->gradients, k->gathered, m->activations - k->gathered,
                           m->workspaces};
  char ranks[32], text[32];
  int64_t rest = k->total;
  if (k->first == k->last) snprintf(ranks, sizeof ranks, "%d", k->first);
  else snprintf(ranks, sizeof ranks, "%d-%d", k->first, k->last);
  fprintf(f, "%-10s", ranks);
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    rest -= parts[i];
    fprintf(f, " %11s", cli_bytes(text, parts[i]));
  }
  fprintf(f, " %11s", cli_bytes(text, rest));
  fprintf(f, " %11s\n", cli_bytes(text, k->total));
}

static void print_table(const scale *s, const estimate *e, FILE *f) {
  const bool pipeline = s->kinds[0].pipeline.ranks > 1;
  char text[32];
  fprintf(f, "%d rank%s, %s %s, %lld microbatch%s per rank, %lld tokens per step\n\n", s->info.ranks,
          s->info.ranks == 1 ? "" : "s", pipeline ? "pipeline" : "shard", mode(s), (long long)s->microbatches,
          s->microbatches == 1 ? "" : "es", (long long)s->info.tokens_per_step);
  fprintf(f, "%-10s %11s %11s %11s %11s %11s %11s %11s %11s\n", "rank", "parameters", "optimizer", "gradients",
          "gathered", "activations", "workspaces", "other", "total");
  for (int i = 0; i < s->n_kinds; i++) print_kind(&s->kinds[i], f);
  fprintf(f, "\n%-16s %8s %13s %13s\n", "sent by rank 0", "count", "bytes each", "all");
  for (int i = 0; i < s->n_sent; i++) {
    const exchange *x = &s->sent[i];
    fprintf(f, "%-16s %8lld %13s", x->name, (long long)x->count, cli_bytes(text, x->bytes));
    fprintf(f, " %13s\n", cli_bytes(text, x->bytes * x->count));
  }
  if (s->budget > 0)
    for (int i = 0; i < s->n_kinds; i++)
      if (s->kinds[i].total > s->budget || i == s->n_kinds - 1) {
        fprintf(f, "\n%s %s of memory.budget\n", s->kinds[i].total > s->budget ? "does NOT fit in" : "fits in",
                cli_bytes(text, s->budget));
        break;
      }
  if (!s->c->costs) return;
  fprintf(f, "\ncompute %.3f s, communication %.3f s", e->compute, e->communication);
  if (pipeline) fprintf(f, ", bubble %.1f%%: a step takes %.3f s, ", 100 * e->bubble, e->least);
  else fprintf(f, ": a step takes %.3f s if all communication is hidden, %.3f s if none is, ", e->least, e->most);
  fprintf(f, "%.0f tokens/s per rank\n", (double)s->info.tokens_per_step / e->least / s->info.ranks);
}

static void print_json(const scale *s, const estimate *e, FILE *f) {
  json j = {.f = f};
  json_begin(&j, NULL, '{');
  json_int(&j, "ranks", s->info.ranks);
  json_text(&j, "mode", mode(s));
  json_int(&j, "microbatches", s->microbatches);
  json_int(&j, "tokens_per_step", s->info.tokens_per_step);
  json_begin(&j, "kinds", '[');
  for (int i = 0; i < s->n_kinds; i++) {
    const kind *k = &s->kinds[i];
    json_begin(&j, NULL, '{');
    json_int(&j, "first", k->first);
    json_int(&j, "last", k->last);
    json_int(&j, "planned_bytes", k->total);
    json_int(&j, "weights", k->memory.weights);
    json_int(&j, "optimizer", k->memory.optimizer);
    json_int(&j, "gradients", k->gradients);
    json_int(&j, "gathered", k->gathered);
    json_int(&j, "activations", k->memory.activations - k->gathered);
    json_int(&j, "slots", k->pipeline.slots);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_begin(&j, "sent", '[');
  for (int i = 0; i < s->n_sent; i++) {
    json_begin(&j, NULL, '{');
    json_text(&j, "op", s->sent[i].name);
    json_int(&j, "bytes", s->sent[i].bytes);
    json_int(&j, "count", s->sent[i].count);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_double(&j, "sent_bytes", s->sent_bytes);
  if (s->c->costs) {
    json_double(&j, "compute_seconds", e->compute);
    json_double(&j, "communication_seconds", e->communication);
    json_double(&j, "least_seconds", e->least);
    json_double(&j, "most_seconds", e->most);
    json_double(&j, "bubble", e->bubble);
  }
  json_end(&j, '}');
  fputc('\n', f);
}

rfr_status cli_plan_ranks(cli *c, const char *text, FILE *f) {
  scale s = {.c = c};
  estimate e = {0};
  if (c->ranks < 1 || c->ranks > MOST_RANKS) return cli_usage("give 1 to 4096", "--ranks %lld", (long long)c->ranks);
  rfr_status status = plan_all(&s, text);
  if (status == RFR_OK && c->costs) status = estimate_time(&s, &e);
  if (status == RFR_OK && c->json) print_json(&s, &e, f);
  else if (status == RFR_OK) print_table(&s, &e, f);
  fflush(f);
  free(s.kinds);
  return status;
}
