/* SPDX-License-Identifier: Apache-2.0
 *
 * The generated parts of docs/scale.md: `refrain plan --ranks` of the models of docs/scale, one line for each layout.
 */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "docs.h"

typedef struct layout {
  int ranks;
  const char *set; /* keys of the section parallel */
  int64_t tokens;
} layout;

static const layout layouts[] = {{8, "parallel.shard=full", 1 << 16},
                                 {64, "parallel.shard=full", 1 << 19},
                                 {1024, "parallel.shard=full", 1 << 23},
                                 {8, "parallel.pipeline=8", 1 << 17}};

/* The output of `plan --ranks`, allocated with malloc. NULL: it failed. */
static char *plan(rfr_ctx *ctx, const char *root, const char *model, const layout *l, bool as_json) {
  char path[1200], tokens[64], *text = NULL, *out = NULL;
  size_t size = 0;
  const char *sets[] = {tokens, l->set};
  cli c = {.ctx = ctx, .ranks = l->ranks, .json = as_json, .threads = -1, .sets = {sets, 2}, .operand = path};
  snprintf(path, sizeof path, "%s/docs/scale/%s.yaml", root, model);
  snprintf(tokens, sizeof tokens, "batch.tokens=%lld", (long long)l->tokens);
  if (cli_read_file(path, &text) != RFR_OK) return NULL;
  FILE *f = open_memstream(&out, &size);
  rfr_status s = f ? cli_plan_ranks(&c, text, f) : RFR_NO_MEMORY;
  if (f) fclose(f);
  free(text);
  if (s == RFR_OK) return out;
  free(out);
  return NULL;
}

static int64_t integer(const json_t *object, const char *key) {
  return json_integer_value(json_object_get(object, key));
}

static double gib(int64_t bytes) { return (double)bytes / 0x1p30; }

/* Finds the rank that needs the most memory. */
static const json_t *largest(const json_t *kinds) {
  const json_t *most = json_array_get(kinds, 0);
  for (size_t i = 1; i < json_array_size(kinds); i++)
    if (integer(json_array_get(kinds, i), "planned_bytes") > integer(most, "planned_bytes"))
      most = json_array_get(kinds, i);
  return most;
}

static rfr_status put_line(const layout *l, const char *text, rfi_string *s) {
  char name[32];
  json_t *v = json_loads(text, 0, NULL);
  if (!v) return RFR_INTERNAL;
  const json_t *k = largest(json_object_get(v, "kinds"));
  snprintf(name, sizeof name, "%d %s", l->ranks, json_string_value(json_object_get(v, "mode")));
  const rfr_status status =
      rfi_string_printf(s, "%-10s %12lld %11.1f %9.1f %9.1f %8.1f %11.1f %8.1f %9.1f\n", name,
                        (long long)integer(v, "microbatches"), gib(integer(k, "weights")), gib(integer(k, "optimizer")),
                        gib(integer(k, "gradients")), gib(integer(k, "gathered")), gib(integer(k, "activations")),
                        gib(integer(k, "planned_bytes")), json_number_value(json_object_get(v, "sent_bytes")) / 0x1p30);
  json_decref(v);
  return status;
}

rfr_status docs_scale_figures(rfr_ctx *ctx, const char *root, const char *model, rfi_string *s) {
  const bool experts = strstr(model, "qwen3") != NULL; /* a pipeline cannot train experts */
  rfr_status status =
      rfi_string_printf(s, "%-10s %12s %11s %9s %9s %8s %11s %8s %9s\n", "ranks", "microbatches", "parameters",
                        "optimizer", "gradients", "gathered", "activations", "total", "sent");
  for (size_t i = 0; status == RFR_OK && i < sizeof layouts / sizeof *layouts; i++) {
    layout l = layouts[i];
    if (experts && strstr(l.set, "pipeline")) continue;
    if (experts && l.ranks == 1024) l.ranks = 256, l.tokens = 1 << 21; /* the plan of 1,024 ranks takes half a minute */
    char *text = plan(ctx, root, model, &l, true);
    if (!text) return RFR_INVALID;
    status = put_line(&l, text, s);
    free(text);
  }
  return status;
}

rfr_status docs_scale_plan(rfr_ctx *ctx, const char *root, const char *model, const char *ranks, rfi_string *s) {
  for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
    if (atoi(ranks) != layouts[i].ranks ||
        (strstr(ranks, "pipeline") != NULL) != (strstr(layouts[i].set, "pipe") != NULL))
      continue;
    char *text = plan(ctx, root, model, &layouts[i], false);
    const rfr_status status = text ? rfi_string_append(s, text, strlen(text)) : RFR_INVALID;
    free(text);
    return status;
  }
  return RFR_INVALID;
}
