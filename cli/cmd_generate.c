/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain generate: continues a prompt. Each token goes to standard output at once; the speed goes to standard error.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

typedef struct text {
  char *data;
  size_t n, capacity;
  bool shown, failed;
  double first, last; /* times of the first and the last token */
  int64_t tokens;
} text;

static void take(const char *piece, size_t n, void *user) {
  text *t = user;
  t->last = cli_now();
  if (t->tokens++ == 0) t->first = t->last;
  if (t->shown) {
    fwrite(piece, 1, n, stdout);
    fflush(stdout);
    return;
  }
  if (t->n + n + 1 > t->capacity) {
    size_t capacity = 2 * (t->n + n + 1);
    char *data = realloc(t->data, capacity);
    if (!data) {
      t->failed = true;
      return;
    }
    t->data = data;
    t->capacity = capacity;
  }
  memcpy(t->data + t->n, piece, n);
  t->n += n;
  t->data[t->n] = '\0';
}

/* Without the first token, whose time is that of the prompt. */
static double tokens_per_second(const text *t) {
  return t->tokens > 1 && t->last > t->first ? (double)(t->tokens - 1) / (t->last - t->first) : 0.0;
}

rfr_status cli_generate(cli *c) {
  rfr_run *run = NULL;
  text made = {.shown = !c->json};
  double start = 0.0;
  const char *prompt = c->prompt ? c->prompt : "\n";
  if (!*prompt) return cli_usage("give at least one byte, or omit --prompt", "--prompt is empty");
  if (!(c->top_p > 0.0 && c->top_p <= 1.0))
    return cli_usage("give more than 0 and at most 1; 1 samples among all tokens", "--top-p %g is not a probability",
                     c->top_p);
  char *config = NULL;
  rfr_status s = cli_find_weights(c, &config);
  if (s != RFR_OK) return s;
  rfr_run_options o = cli_run_options(c);
  o.programs = RFR_RUN_GENERATE;
  o.on_event = warn;
  o.event_user = c;
  rfr_generate_options g = rfr_generate_options_default();
  g.tokens = c->tokens;
  g.temperature = c->temperature;
  g.top_k = c->top_k;
  g.top_p = c->top_p;
  g.seed = (uint64_t)c->seed;
  s = rfr_run_open(c->ctx, config, config ? NULL : c->operand, &o, &run);
  if (s == RFR_OK && !c->json) fputs(prompt, stdout);
  start = cli_now();
  if (s == RFR_OK) s = rfr_run_generate(run, prompt, strlen(prompt), &g, take, &made);
  if (s == RFR_OK && c->json && !made.failed) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "prompt", prompt);
    json_text(&j, "text", made.data ? made.data : "");
    json_int(&j, "tokens", made.tokens);
    json_double(&j, "prompt_seconds", made.tokens > 0 ? made.first - start : 0.0);
    json_double(&j, "tokens_per_second", tokens_per_second(&made));
    json_end(&j, '}');
  }
  if (s == RFR_OK) putchar('\n');
  fflush(stdout);
  if (s == RFR_OK && !c->json && !c->quiet && made.tokens > 1)
    fprintf(stderr, "prompt of %zu bytes in %.3f s, then %.0f tokens/s\n", strlen(prompt), made.first - start,
            tokens_per_second(&made));
  free(made.data);
  free(config);
  rfr_run_close(run);
  return made.failed ? RFR_NO_MEMORY : s;
}
