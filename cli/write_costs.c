/* SPDX-License-Identifier: Apache-2.0
 *
 * The costs of a layer, from the times of a profiled step, for `schedule --costs` and `plan --costs`. Ops of layers are
 * averaged over layers and microbatches; those before the first layer and after the last one are the ends. Ops without
 * a microbatch outside of forward and backward are the update.
 */
#include <stdlib.h>
#include <string.h>

#include "op_times.h"

enum { F, I, W, PARTS };

typedef struct sums {
  double layer[PARTS], first[PARTS], last[PARTS], update;
  int microbatches;
} sums;

static bool is_layer(const char *scope) {
  return strncmp(scope, "layer", 5) == 0 && scope[5] >= '0' && scope[5] <= '9';
}

static bool is_first(const char *scope) { return strncmp(scope, "embed", 5) == 0 || strcmp(scope, "inputs") == 0; }

static sums add_up(const op_times *t) {
  sums s = {.microbatches = 1};
  for (int i = 0; i < t->n; i++) {
    const rfr_plan_op *op = &t->what[i];
    const double seconds = t->op[i].seconds;
    const int part = op->phase == RFR_PHASE_FORWARD ? F : op->phase == RFR_PHASE_DGRAD ? I : W;
    if (op->microbatch >= s.microbatches) s.microbatches = op->microbatch + 1;
    if (op->phase == RFR_PHASE_OPTIM || op->phase == RFR_PHASE_SETUP) s.update += seconds;
    else if (op->phase == RFR_PHASE_LOAD) continue;
    else if (is_layer(op->scope)) s.layer[part] += seconds;
    else (is_first(op->scope) ? s.first : s.last)[part] += seconds;
  }
  return s;
}

static void put_part(json *j, const char *key, const double seconds[PARTS], double by) {
  static const char *const names[PARTS] = {"F", "I", "W"};
  json_begin(j, key, '{');
  for (int k = 0; k < PARTS; k++) json_double(j, names[k], seconds[k] / by);
  json_end(j, '}');
}

rfr_status write_costs(const char *path, const op_times *t, const rfr_run *run) {
  rfr_run_info info = {.size = sizeof info};
  const sums s = add_up(t);
  rfr_run_get_info(run, &info);
  FILE *f = fopen(path, "wb");
  if (!f) return cli_cannot_write(path);
  json j = {.f = f};
  json_begin(&j, NULL, '{');
  json_int(&j, "layers", info.layers);
  json_int(&j, "tokens", info.tokens_per_step / s.microbatches);
  put_part(&j, "layer", s.layer, (double)info.layers * s.microbatches);
  put_part(&j, "first", s.first, s.microbatches);
  put_part(&j, "last", s.last, s.microbatches);
  json_double(&j, "update", info.trainable_parameters > 0 ? s.update / (double)info.trainable_parameters : 0);
  json_end(&j, '}');
  fputc('\n', f);
  const bool failed = ferror(f);
  return fclose(f) != 0 || failed ? cli_cannot_write(path) : RFR_OK;
}
