/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain eval: loss and bits per byte of a run's newest checkpoint on its held-out data.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void on_event(const rfr_event *e, void *user) {
  cli *c = user;
  if (e->kind == RFR_EVENT_WARNING) cli_warn(c, e->message);
  else if (e->kind != RFR_EVENT_EVALUATION) progress_event(e, c->progress); /* standard output is for the result */
}

static void print_json(const rfr_run_info *info, const rfr_evaluation *e) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "checkpoint", info->checkpoint);
  json_int(&j, "step", info->step);
  json_double(&j, "loss", e->loss);
  if (info->byte_tokens) json_double(&j, "bits_per_byte", e->bits_per_byte);
  if (info->preference) {
    json_double(&j, "margin", e->margin);
    json_double(&j, "accuracy", e->accuracy);
    json_int(&j, "pairs", e->pairs);
  }
  json_int(&j, "tokens", e->tokens);
  json_int(&j, "bytes", e->bytes);
  json_double(&j, "seconds", e->seconds);
  json_end(&j, '}');
  putchar('\n');
}

/* A model has no data of its own, so the command line must name it. */
static rfr_status check_data(const cli *c) {
  for (int i = 0; i < c->sets.n; i++)
    if (strncmp(c->sets.items[i], "data.validation=", 16) == 0) return RFR_OK;
  return cli_usage("add --set data.validation=FILES, text files or .jsonl files", "%s is a model: it names no data",
                   c->operand);
}

rfr_status cli_eval(cli *c) {
  rfr_run *run = NULL;
  rfr_run_info info;
  rfr_evaluation e;
  progress p;
  progress_init(&p, c);
  char *config = NULL;
  rfr_status s = cli_find_weights(c, &config);
  if (s == RFR_OK && config) s = check_data(c);
  if (s != RFR_OK) {
    free(config);
    return s;
  }
  rfr_run_options o = cli_run_options(c);
  o.programs = RFR_RUN_EVALUATE;
  o.on_event = on_event;
  o.event_user = c;
  s = rfr_run_open(c->ctx, config, config ? NULL : c->operand, &o, &run);
  if (s == RFR_OK) s = rfr_run_evaluate(run, &e);
  progress_close_line(&p);
  if (s == RFR_OK) rfr_run_get_info(run, &info);
  if (s == RFR_OK && c->json) {
    print_json(&info, &e);
  } else if (s == RFR_OK) {
    if (info.byte_tokens) printf("validation: %.3f bits per byte\n", e.bits_per_byte);
    else if (info.preference)
      printf("validation: loss %.4f, margin %.3f, accuracy %.1f%%\n", e.loss, e.margin, 100.0 * e.accuracy);
    else printf("validation: loss %.4f\n", e.loss);
    if (!c->quiet && info.preference)
      fprintf(stderr, "%lld pairs, %lld tokens, %.1f s\n", (long long)e.pairs, (long long)e.tokens, e.seconds);
    else if (!c->quiet)
      fprintf(stderr, "loss %.4f nats per token, %lld tokens, %.1f s\n", e.loss, (long long)e.tokens, e.seconds);
  }
  free(config);
  rfr_run_close(run);
  c->progress = NULL;
  return s;
}
