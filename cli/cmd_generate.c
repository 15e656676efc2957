/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain generate: continues a prompt, byte by byte to standard output as it is made.
 */
#include <stdlib.h>
#include <string.h>

#include "cli.h"

typedef struct text {
  char *data;
  size_t n, capacity;
  bool failed;
} text;

static void collect(const char *piece, size_t n, void *user) {
  text *t = user;
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

static void show(const char *piece, size_t n, void *user) {
  (void)user;
  fwrite(piece, 1, n, stdout);
  fflush(stdout);
}

rfr_status cli_generate(cli *c) {
  rfr_run *run = NULL;
  text made = {0};
  const char *prompt = c->prompt ? c->prompt : "\n";
  rfr_run_options o = cli_run_options(c);
  o.config_name = o.config_folder = NULL;
  o.programs = RFR_RUN_GENERATE;
  rfr_generate_options g = rfr_generate_options_default();
  g.tokens = c->tokens;
  g.temperature = c->temperature;
  g.top_k = c->top_k;
  g.top_p = c->top_p;
  g.seed = (uint64_t)c->seed;
  rfr_status s = rfr_run_open(c->ctx, NULL, c->operand, &o, &run);
  if (s == RFR_OK && !c->json) fputs(prompt, stdout);
  if (s == RFR_OK) s = rfr_run_generate(run, prompt, strlen(prompt), &g, c->json ? collect : show, &made);
  if (s == RFR_OK && c->json && !made.failed) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_string(&j, "prompt", prompt);
    json_string(&j, "text", made.data ? made.data : "");
    json_int(&j, "tokens", g.tokens);
    json_end(&j, '}');
  }
  if (s == RFR_OK) putchar('\n');
  free(made.data);
  rfr_run_close(run);
  return made.failed ? RFR_NO_MEMORY : s;
}
