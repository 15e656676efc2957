/* SPDX-License-Identifier: Apache-2.0
 *
 * In the list of points the seeds vary fastest, then the last key of the grid.
 */
#include "sweep/grid.h"

#include <string.h>

#include "refrain/sweep.h"
#include "train/config_yaml.h"

enum { MOST_KEYS = 32 }; /* of a grid */

typedef struct axis {
  rfi_config_id id;
  const rfi_yaml *values; /* a list */
} axis;

typedef struct reader {
  rfr_ctx *ctx;
  rfi_arena *arena;
  rfi_grid *grid;
  axis axes[MOST_KEYS];
  int n_axes;
  const rfi_yaml *seeds; /* NULL: none */
  int capacity;
} reader;

#define BAD(r, line, ...) rfi_fail_at(RFI_E_SWEEP_GRID, (r)->grid->file, line, __VA_ARGS__)

/* ---- values as text after KEY= ---- */

static rfr_status put_quoted(rfi_string *out, const char *s) {
  RFI_TRY(rfi_string_append(out, "\"", 1));
  for (; *s; s++) {
    if ((unsigned char)*s < 0x20) RFI_TRY(rfi_string_printf(out, "\\x%02x", (unsigned char)*s));
    else RFI_TRY(rfi_string_printf(out, *s == '"' || *s == '\\' ? "\\%c" : "%c", *s));
  }
  return rfi_string_append(out, "\"", 1);
}

static rfr_status put_value(rfi_string *out, const rfi_yaml *node, bool inside) {
  if (node->kind == RFI_YAML_SCALAR) {
    if (node->null) return inside ? rfi_string_append(out, "null", 4) : RFR_OK;
    const bool plain = !inside && *node->text && !strchr("[{\"'", *node->text);
    return plain ? rfi_string_append(out, node->text, strlen(node->text)) : put_quoted(out, node->text);
  }
  const bool is_map = node->kind == RFI_YAML_MAP;
  RFI_TRY(rfi_string_append(out, is_map ? "{" : "[", 1));
  for (const rfi_yaml *item = node->first; item; item = item->next) {
    if (item != node->first) RFI_TRY(rfi_string_append(out, ", ", 2));
    if (is_map) RFI_TRY(put_quoted(out, item->key));
    if (is_map) RFI_TRY(rfi_string_append(out, ": ", 2));
    RFI_TRY(put_value(out, item, true));
  }
  return rfi_string_append(out, is_map ? "}" : "]", 1);
}

static rfr_status set_of(reader *r, rfi_config_id id, const rfi_yaml *value, const char **out) {
  rfi_string text = {.ctx = r->ctx};
  rfr_status s = rfi_string_printf(&text, "%s=", rfi_config_path(id));
  if (s == RFR_OK) s = put_value(&text, value, false);
  if (s == RFR_OK) s = (*out = rfi_arena_strdup(r->arena, text.data)) ? RFR_OK : RFR_NO_MEMORY;
  rfi_string_deinit(&text);
  return s;
}

/* ---- points ---- */

static rfr_status new_point(reader *r, int64_t line, int n, rfi_point **out) {
  rfi_grid *g = r->grid;
  if (g->n == RFR_SWEEP_RUNS) return BAD(r, line, "more than %d runs", RFR_SWEEP_RUNS);
  if (!rfi_arena_grow(r->arena, (void **)&g->points, &r->capacity, g->n + 1, sizeof *g->points)) return RFR_NO_MEMORY;
  rfi_point *p = &g->points[g->n++];
  *p = (rfi_point){.line = line};
  p->sets = rfi_arena_alloc(r->arena, ((size_t)n + 1) * sizeof *p->sets);
  p->keys = rfi_arena_alloc(r->arena, ((size_t)n + 1) * sizeof *p->keys);
  *out = p;
  return p->sets && p->keys ? RFR_OK : RFR_NO_MEMORY;
}

static rfr_status add_set(reader *r, rfi_point *p, rfi_config_id id, const rfi_yaml *value) {
  for (int i = 0; i < p->n; i++)
    if (p->keys[i] == id) return BAD(r, value->line, "%s is given twice for a run", rfi_config_path(id));
  RFI_TRY(set_of(r, id, value, &p->sets[p->n]));
  p->keys[p->n++] = id;
  return RFR_OK;
}

static const rfi_yaml *nth(const rfi_yaml *list, int64_t i) {
  const rfi_yaml *item = list->first;
  while (i-- > 0) item = item->next;
  return item;
}

/* The number of points: the product over all axes. */
static rfr_status add_product(reader *r, int64_t line) {
  int64_t total = 1;
  for (int a = 0; a < r->n_axes; a++) {
    total *= r->axes[a].values->n;
    if (total > RFR_SWEEP_RUNS)
      return BAD(r, line, "the grid has more than %d runs; give fewer values", RFR_SWEEP_RUNS);
  }
  for (int64_t i = 0; i < total; i++) {
    rfi_point *p;
    int64_t rest = i;
    int64_t digits[MOST_KEYS];
    for (int a = r->n_axes; a-- > 0; rest /= r->axes[a].values->n) digits[a] = rest % r->axes[a].values->n;
    RFI_TRY(new_point(r, line, r->n_axes, &p));
    for (int a = 0; a < r->n_axes; a++) {
      const rfi_yaml *value = nth(r->axes[a].values, digits[a]);
      RFI_TRY(add_set(r, p, r->axes[a].id, value));
      p->line = value->line;
    }
  }
  return RFR_OK;
}

static rfr_status add_axis(reader *r, rfi_config_id id, const rfi_yaml *values, int64_t line) {
  if (values->kind != RFI_YAML_LIST || values->n == 0)
    return BAD(r, line, "%s: a list of values is needed, as [1, 2]", rfi_config_path(id));
  if (r->n_axes == MOST_KEYS) return BAD(r, line, "more than %d keys", MOST_KEYS);
  r->axes[r->n_axes++] = (axis){id, values};
  return RFR_OK;
}

static rfr_status read_product(reader *r, const rfi_yaml *grid) {
  if (grid && grid->kind != RFI_YAML_MAP) return BAD(r, grid->line, "grid: keys with lists of values are needed");
  for (const rfi_yaml *item = grid ? grid->first : NULL; item; item = item->next) {
    rfi_config_id id;
    RFI_TRY(rfi_config_find(r->grid->file, item->line, item->key, &id));
    RFI_TRY(add_axis(r, id, item, item->line));
  }
  if (r->seeds) RFI_TRY(add_axis(r, RFI_CFG_run_seed, r->seeds, r->seeds->line));
  return add_product(r, grid ? grid->line : r->seeds->line);
}

/* A run of the list, once for each seed. */
static rfr_status read_run(reader *r, const rfi_yaml *run) {
  if (run->kind != RFI_YAML_MAP) return BAD(r, run->line, "runs: a run is a map of keys to values");
  const rfi_yaml *seed = r->seeds ? r->seeds->first : NULL;
  do {
    rfi_point *p;
    RFI_TRY(new_point(r, run->line, run->n + 1, &p));
    for (const rfi_yaml *item = run->first; item; item = item->next) {
      rfi_config_id id;
      RFI_TRY(rfi_config_find(r->grid->file, item->line, item->key, &id));
      RFI_TRY(add_set(r, p, id, item));
    }
    if (seed) RFI_TRY(add_set(r, p, RFI_CFG_run_seed, seed));
    seed = seed ? seed->next : NULL;
  } while (seed);
  return RFR_OK;
}

rfr_status rfi_grid_read(rfr_ctx *ctx, rfi_arena *arena, const char *file, const char *text, size_t n, rfi_grid *out) {
  reader r = {.ctx = ctx, .arena = arena, .grid = out};
  rfi_yaml *root;
  const rfi_yaml *version = NULL, *config = NULL, *grid = NULL, *runs = NULL;
  *out = (rfi_grid){.file = file};
  RFI_TRY(rfi_yaml_parse(arena, file, text, n, &root));
  if (!root || root->kind != RFI_YAML_MAP)
    return BAD(&r, 0, "the file needs the keys refrain, config and grid or runs");
  for (const rfi_yaml *item = root->first; item; item = item->next) {
    if (strcmp(item->key, "refrain") == 0) version = item;
    else if (strcmp(item->key, "config") == 0) config = item;
    else if (strcmp(item->key, "grid") == 0) grid = item;
    else if (strcmp(item->key, "runs") == 0) runs = item;
    else if (strcmp(item->key, "seeds") == 0) r.seeds = item;
    else
      return BAD(&r, item->line, "unknown key \"%.100s\"; a sweep has refrain, config, grid, seeds and runs",
                 item->key);
  }
  if (!version || version->kind != RFI_YAML_SCALAR || strcmp(version->text, "1") != 0)
    return BAD(&r, version ? version->line : 0, "refrain: 1 is needed, the version of this format");
  if (!config || config->kind != RFI_YAML_SCALAR || config->null)
    return BAD(&r, config ? config->line : 0, "config: the path of a configuration is needed");
  if (!grid && !runs && !r.seeds) return BAD(&r, 0, "there is no grid, and no seeds or runs");
  if (runs && (runs->kind != RFI_YAML_LIST || runs->n == 0))
    return BAD(&r, runs->line, "runs: a list of runs is needed");
  if (r.seeds && (r.seeds->kind != RFI_YAML_LIST || r.seeds->n == 0))
    return BAD(&r, r.seeds->line, "seeds: a list of numbers is needed");
  out->config = config->text;
  if (grid || !runs) RFI_TRY(read_product(&r, grid));
  for (const rfi_yaml *run = runs ? runs->first : NULL; run; run = run->next) RFI_TRY(read_run(&r, run));
  return RFR_OK;
}
