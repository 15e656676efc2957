/* SPDX-License-Identifier: Apache-2.0
 *
 * The commands plan, trace, bench and profile as a user runs them.
 */

#include "support/program.h"

/* A model too large for this machine can be planned, from the command line and as JSON, without memory for it. */
static void plan_large(void **state) {
  (void)state;
  static const char *const large[] = {"model.hidden_size=65536", "model.intermediate_size=212992",
                                      "model.num_attention_heads=512", "model.num_hidden_layers=12"};
#define LARGE "--set", large[0], "--set", large[1], "--set", large[2], "--set", large[3]
  assert_int_equal(RUN("plan", "small.yaml", LARGE), 3);
  rft_assert_says(rft_err, "[plan.over_budget]");
  rft_assert_says(rft_err, "but the memory available here is ");
  rft_assert_says(rft_out, "does NOT fit in ");
  rft_assert_says(rft_out, "settings that need less");
  assert_int_equal(RUN("plan", "small.yaml", LARGE, "--json"), 3);
  json_t *v = rft_parsed();
  assert_false(json_is_true(json_object_get(v, "fits")));
  const json_t *memory = json_object_get(v, "memory"), *settings = json_object_get(v, "settings");
  json_int_t sum = 0, weights = rft_number(memory, "weights");
  const char *key;
  json_t *value;
  json_object_foreach(json_object_get(v, "memory"), key, value) sum += json_integer_value(value);
  assert_int_equal(sum, rft_number(v, "planned_bytes"));
  assert_int_equal(rft_number(memory, "optimizer"), 2 * weights); /* two moments in f32 */
  assert_true(json_array_size(settings) >= 2);
  for (size_t i = 0; i < json_array_size(settings); i++) {
    const json_t *row = json_array_get(settings, i);
    assert_true(rft_number(row, "planned_bytes") < rft_number(v, "planned_bytes"));
    const char *set = json_string_value(json_array_get(json_object_get(row, "set"), 0));
    if (strcmp(set, "optimizer.state_dtype=bf16") != 0 || json_array_size(json_object_get(row, "set")) > 1) continue;
    assert_int_equal(rft_number(v, "planned_bytes") - rft_number(row, "planned_bytes"), weights);
  }
  json_decref(v);
  assert_int_equal(RUN("trace", "small.yaml", LARGE, "--phase", "load"), 0);
  assert_int_equal(RUN("check", "small.yaml", LARGE), 0);
#undef LARGE
}

/* The GPU demo must fit into 12 GB, since tools/demo uses it on GPUs with that much memory; in bf16, as there. */
static void plan_demo_gpu(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", RFT_SOURCE_DIR "/examples/demo-gpu.yaml", "--set", "precision.dtype=bf16", "--set",
                       "memory.budget=9GB", "--json"),
                   0);
  json_t *v = rft_parsed();
  assert_true(rft_number(v, "planned_bytes") > 1000000000);
  json_decref(v);
  assert_int_equal(RUN("plan", RFT_SOURCE_DIR "/examples/demo-gpu.yaml", "--set", "precision.dtype=bf16", "--set",
                       "memory.budget=1GB"),
                   3);
}

/* memory.recompute=auto meets each budget of the frontier. */
static void plan_frontier(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", "small.yaml", "--frontier", "--json"), 0);
  json_t *v = rft_parsed();
  const json_t *points = json_object_get(v, "frontier");
  size_t n = json_array_size(points);
  assert_true(n >= 3);
  json_int_t first = rft_number(json_array_get(points, 0), "planned_bytes"),
             last = rft_number(json_array_get(points, n - 1), "planned_bytes");
  assert_true(last < first);
  json_decref(v);
  for (int i = 0; i < 3; i++) {
    char budget[64];
    snprintf(budget, sizeof budget, "memory.budget=%lldB", (long long)(i < 2 ? (i ? last : first) : last - 1));
    assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.recompute=auto", "--set", budget, "--json"),
                     i < 2 ? 0 : 3);
    if (i == 2) break;
    v = rft_parsed();
    assert_true(rft_number(v, "planned_bytes") <= (i ? last : first));
    json_decref(v);
  }
  assert_int_equal(RUN("plan", "small.yaml", "--frontier"), 0);
  rft_assert_says(rft_out, "extra FLOPs");
  assert_int_equal(RUN("trace", "small.yaml", "--set", "memory.recompute=all", "--after", "recompute"), 0);
  rft_assert_says(rft_out, "recompute of %");
}

/* The picture has one rectangle per buffer of the step, and the reason of each recomputed one. */
static void plan_picture(void **state) {
  (void)state;
  int buffers = 0, rectangles = 0;
  const char *const whole = "memory.recompute=all";
  assert_int_equal(RUN("plan", "small.yaml", "--set", whole, "--json"), 0);
  json_t *v = rft_parsed();
  for (size_t i = 0; i < json_array_size(json_object_get(v, "buffers")); i++)
    buffers +=
        rft_number(json_array_get(json_object_get(v, "buffers"), i), "offset") >= rft_number(v, "persistent_bytes");
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml", "--set", whole, "--set", "memory.budget=1GiB", "--svg", "plan.svg"), 0);
  assert_string_equal(rft_out, "plan.svg written\n");
  rft_slurp("plan.svg", rft_out, sizeof rft_out);
  for (const char *s = rft_out; (s = strstr(s, "<rect class=\"b")); s++) rectangles++;
  assert_int_equal(rectangles, buffers + 1); /* plus those of the legend */
  assert_int_equal(strncmp(rft_out, "<svg ", 5), 0);
  assert_string_equal(rft_out + strlen(rft_out) - 7, "</svg>\n");
  rft_assert_says(rft_out, "lower bound:");
  rft_assert_says(rft_out, "budget 1.0 GiB");
  rft_assert_says(rft_out, "\nrecompute of op ");
  assert_int_equal(RUN("plan", "small.yaml", "--svg", "missing/plan.svg"), 4);
}

/* Checks that every stroke is thin compared with its rectangle, so that no rectangle is hidden by it. Returns the
 * number of rectangles. */
static int check_strokes(void) {
  int n = 0;
  for (const char *s = rft_out; (s = strstr(s, "<rect class=\"b\"")); s++) {
    double w, h, stroke;
    const char *at = strstr(s, "width="), *height = strstr(s, "height="), *width = strstr(s, "stroke-width=");
    assert_true(at && height && width && width < strchr(s, '>'));
    assert_int_equal(sscanf(at, "width=\"%lf", &w) + sscanf(height, "height=\"%lf", &h), 2);
    assert_int_equal(sscanf(width, "stroke-width=\"%lf", &stroke), 1);
    if (stroke > 0.21 * (w < h ? w : h)) fail_msg("%g x %g has a stroke of %g", w, h, stroke);
    n++;
  }
  return n;
}

/* Pictures of large steps: strokes scale, and tiny rectangles are merged to bands. */
static void large_pictures(void **state) {
  (void)state;
  int rectangles = 0;
  assert_int_equal(RUN("plan", "small.yaml", "--set", "model.num_hidden_layers=96", "--set", "batch.tokens=256",
                       "--svg", "large.svg"),
                   0);
  rft_slurp("large.svg", rft_out, sizeof rft_out);
  for (const char *s = rft_out; (s = strstr(s, "<rect")); s++) rectangles++;
  assert_true(rectangles > 100 && rectangles < 4000);
  rft_assert_says(rft_out, "several buffers, mostly activation");
  check_strokes();
  assert_int_equal(RUN("schedule", "--kind", "interleaved", "--stages", "8", "--microbatches", "64", "--svg", "-"), 0);
  assert_int_equal(check_strokes(), 8 * 64 * 2 * 2);
  assert_int_equal(RUN("schedule", "--kind", "gpipe", "--stages", "8", "--microbatches", "2048", "--svg", "-"), 0);
  assert_true(check_strokes() < 100);
}

static void plan_and_trace(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", "small.yaml", "--json"), 0);
  json_t *v = rft_parsed();
  assert_int_equal(rft_number(v, "planned_bytes"),
                   rft_number(v, "persistent_bytes") + rft_number(v, "transient_planned_bytes"));
  assert_true(rft_number(v, "transient_lower_bound_bytes") <= rft_number(v, "transient_planned_bytes"));
  const json_t *buffers = json_object_get(v, "buffers");
  assert_true(json_array_size(buffers) > 20);
  bool found = false;
  for (size_t i = 0; i < json_array_size(buffers); i++) {
    const json_t *b = json_array_get(buffers, i);
    assert_true(rft_number(b, "offset") + rft_number(b, "bytes") <= rft_number(v, "planned_bytes"));
    if (strcmp(json_string_value(json_object_get(b, "name")), "model.layers.0.mlp.up_proj.weight") != 0) continue;
    found = true;
    assert_int_equal(rft_number(b, "bytes"), 32 * 16 * 4);
  }
  assert_true(found);
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml"), 0);
  rft_assert_says(rft_out, "fits in");
  assert_true(strstr(rft_out, "cache.") == NULL); /* training needs no caches */
  for (int i = 0; i < 2; i++) {
    assert_int_equal(RUN("plan", "small.yaml", "--program", i ? "decode" : "prefill"), 0);
    rft_assert_says(rft_out, "cache.*.k");
    rft_assert_says(rft_out, "cache.*.v");
    rft_assert_says(rft_out, "attention_cached");
  }
  assert_int_equal(RUN("plan", "small.yaml", "--program", "generate"), 2);
  assert_int_equal(RUN("trace", "small.yaml", "--after", "autodiff", "--json"), 0);
  v = rft_parsed();
  rft_assert_says(json_string_value(json_object_get(v, "trace")), "model.layers.0.mlp.down_proj.weight");
  json_decref(v);
  assert_int_equal(RUN("trace", "small.yaml", "--after", "autodiff", "--flat"), 0);
  assert_int_equal(strncmp(rft_out, "refrain-trace 1", 15), 0);
  for (int i = 0; i < 2; i++) { /* logits are f32 with weights of either type */
    const char *dtype = i ? "precision.dtype=bf16" : "precision.dtype=f32";
    assert_int_equal(RUN("trace", "small.yaml", "--after", "fuse", "--flat", "--set", dtype), 0);
    rft_assert_says(rft_out, " = linear_cross_entropy(");
  }
}

/* The shares must sum to 1, and the calls to `calls`. */
static void check_rows(const json_t *rows, int64_t calls) {
  double share = 0;
  assert_true(json_is_array(rows) && json_array_size(rows) > 1);
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const json_t *row = json_array_get(rows, i);
    share += json_number_value(json_object_get(row, "share"));
    calls -= rft_number(row, "calls");
    assert_true(json_number_value(json_object_get(row, "roofline")) >= 0);
  }
  assert_true(share > 0.999 && share < 1.001);
  assert_int_equal(calls, 0);
}

static void bench(void **state) {
  (void)state;
  assert_int_equal(
      RUN("bench", "demo", "--steps", "2", "--json", "--dtype", "f32", "--set", "model.num_hidden_layers=1"), 0);
  json_t *v = rft_parsed();
  assert_string_equal(json_string_value(json_object_get(v, "dtype")), "f32");
  assert_int_equal(rft_number(v, "profiled_steps"), 2);
  assert_true(json_number_value(json_object_get(v, "ms_per_step")) > 0.0);
  assert_true(rft_number(v, "tokens_per_second") > 0);
  assert_true(rft_number(v, "touched_bytes") <= rft_number(v, "planned_bytes"));
  assert_true(rft_number(v, "ops") > 50);
  assert_true(json_number_value(json_object_get(v, "compile_us_per_op")) > 0.0);
  const json_t *ceilings = json_object_get(v, "ceilings"), *kinds = json_object_get(v, "kinds");
  assert_true(json_number_value(json_object_get(ceilings, "flops_per_second")) > 0);
  assert_true(json_number_value(json_object_get(ceilings, "bytes_per_second")) > 0);
  assert_null(json_object_get(ceilings, "flops_per_second_fp8"));
  check_rows(kinds, rft_number(v, "profiled_ops"));
  bool attention = false;
  for (size_t i = 0; i < json_array_size(kinds); i++) {
    const json_t *row = json_array_get(kinds, i);
    if (strcmp(json_string_value(json_object_get(row, "name")), "attention") != 0) continue;
    attention = true; /* documents of 256 bytes with a window of 128: examples/demo.yaml */
    assert_true(json_number_value(json_object_get(row, "flops")) == 2.0 * 2 * 4 * (128 * 129 / 2 + 128 * 128) * 128);
  }
  assert_true(attention);
  json_decref(v);
  assert_int_equal(RUN("bench", "demo", "--steps", "1", "--json", "--dtype", "f32", "--set",
                       "model.num_hidden_layers=1", "--set", "precision.recipe=fp8_current", "--set",
                       "precision.keep=[]"),
                   0);
  v = rft_parsed(); /* FP8 has a separate ceiling */
  assert_true(json_number_value(json_object_get(json_object_get(v, "ceilings"), "flops_per_second_fp8")) > 0);
  json_decref(v);
  assert_int_equal(RUN("bench", "demo", "--dtype", "f31"), 2);
  rft_assert_says(rft_err, "dtype");
  assert_int_equal(RUN("bench", "replay", "--json"), 0);
  v = rft_parsed();
  assert_int_equal(rft_number(v, "ops"), 1000);
  json_decref(v);
  assert_int_equal(RUN("bench", "graphs", "--json"), 0);
  v = rft_parsed();
  assert_int_equal(rft_number(v, "callables"), 64);
  assert_true(json_number_value(json_object_get(v, "launch_us")) > 0.0);
  json_decref(v);
  assert_int_equal(RUN("bench", "small", "--json", "--dtype", "f32"), 0);
  v = rft_parsed();
  assert_true(rft_number(v, "ops") > 20);
  assert_true(json_number_value(json_object_get(v, "one_us")) > 0.0);
  assert_true(json_number_value(json_object_get(v, "in_a_row_us")) > 0.0);
  json_decref(v);
  assert_int_equal(RUN("bench", "compile", "--json", "--steps", "1"), 0);
  v = rft_parsed();
  const json_t *cases = json_object_get(v, "cases");
  assert_int_equal(json_array_size(cases), 4);
  for (size_t i = 0; i < 4; i++) assert_true(rft_number(json_array_get(cases, i), "ops") > (i % 2 ? 4000 : 400));
  json_decref(v);
}

static void profile(void **state) {
  (void)state;
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "3", "--json", "--trace", "trace.json"), 0);
  json_t *v = rft_parsed();
  assert_int_equal(rft_number(v, "profiled_steps"), 3);
  const json_int_t ops = rft_number(v, "profiled_ops");
  static const char *const tables[] = {"ops", "kinds", "layers", "phases"};
  for (int i = 0; i < 4; i++) check_rows(json_object_get(v, tables[i]), ops);
  json_decref(v);
  v = json_load_file("trace.json", JSON_REJECT_DUPLICATES, NULL);
  const json_t *events = json_object_get(v, "traceEvents");
  assert_true(json_is_array(events));
  json_int_t seen = 0;
  double step = 0, sum = 0, end = 0, flops = 0;
  for (size_t i = 0; i < json_array_size(events); i++) {
    const json_t *e = json_array_get(events, i), *args = json_object_get(e, "args");
    if (strcmp(json_string_value(json_object_get(e, "ph")), "X") != 0) continue;
    const double ts = json_number_value(json_object_get(e, "ts")), dur = json_number_value(json_object_get(e, "dur"));
    if (rft_number(e, "tid") == 0) {
      step = dur;
      continue;
    }
    seen++;
    assert_true(ts >= end - 0.002 && dur >= 0); /* printed to nine digits */
    end = ts + dur;
    sum += dur;
    flops += json_number_value(json_object_get(args, "flops"));
    assert_true(json_is_string(json_object_get(args, "kernel")));
    assert_true(json_is_number(json_object_get(args, "bytes")));
  }
  json_decref(v);
  assert_int_equal(seen, ops);
  assert_true(flops > 0 && sum > 0 && sum <= step + 0.002 * (double)ops && end <= step + 0.002);
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "1"), 0);
  /* The first step after a ramp. */
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "2", "--set", "batch.ramp=[{until: 1, tokens: 32}]"), 0);
  rft_assert_says(rft_out, "roofline");
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "1", "--trace", "none/trace.json"), 4);
  rft_assert_says(rft_err, "none/trace.json");
  assert_int_equal(
      RUN("profile", "small.yaml", "--steps", "3", "--set", "model.num_hidden_layers=3", "--write-costs", "costs.json"),
      0);
  v = json_load_file("costs.json", 0, NULL);
  assert_int_equal(rft_number(v, "layers"), 3);
  assert_true(rft_number(v, "tokens") > 0);
  static const char *const parts[] = {"F", "I", "W"};
  for (int i = 0; i < 3; i++)
    assert_true(json_number_value(json_object_get(json_object_get(v, "layer"), parts[i])) > 0);
  assert_true(json_number_value(json_object_get(json_object_get(v, "last"), "F")) > 0);
  json_decref(v);
  assert_int_equal(RUN("schedule", "--kind", "zb-h1", "--stages", "3", "--microbatches", "4", "--costs", "costs.json"),
                   0);
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "1", "--write-costs", "none/costs.json"), 4);
  assert_int_equal(RUN("profile", "small", "--steps", "1", "--write-costs", "costs.json"), 2);
  assert_int_equal(RUN("profile", "small", "--steps", "1"), 0);
  rft_assert_says(rft_out, "attention");
  assert_int_equal(RUN("profile", "missing"), 4);
  assert_int_equal(RUN("profile", "graphs"), 2);
  rft_assert_says(rft_err, "error: the benchmark graphs has no step to profile; refrain bench graphs times it");
  rft_assert_says(rft_err, "help: give a configuration, or one of small, demo, gpt2-124m, ");
}

/* The command plan --ranks. run_stages_test compares its numbers with real runs. */
static void plan_ranks(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "2", "--json"), 0);
  json_t *v = rft_parsed();
  const json_int_t none = rft_number(json_array_get(json_object_get(v, "kinds"), 0), "optimizer");
  assert_int_equal(rft_number(v, "ranks"), 2);
  assert_int_equal(json_array_size(json_object_get(v, "kinds")), 1);
  assert_true(json_number_value(json_object_get(v, "sent_bytes")) > 0);
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "2", "--set", "parallel.shard=full", "--json"), 0);
  v = rft_parsed();
  const json_t *kind = json_array_get(json_object_get(v, "kinds"), 0);
  assert_true(rft_number(kind, "optimizer") < none && rft_number(kind, "last") == 1);
  json_decref(v);
#define DEEP "--set", "model.num_hidden_layers=4", "--set", "parallel.pipeline=4"
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "4", DEEP, "--json"), 0);
  v = rft_parsed();
  assert_true(json_array_size(json_object_get(v, "kinds")) >= 3);
  assert_string_equal(json_string_value(json_object_get(v, "mode")), "1f1b");
  json_decref(v);
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "3", "--write-costs", "costs.json"), 0);
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "4", DEEP, "--costs", "costs.json"), 0);
  rft_assert_says(rft_out, "bubble");
  rft_assert_says(rft_out, "message");
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "2", "--costs", "costs.json", "--link", "10"), 0);
  rft_assert_says(rft_out, "if all communication is hidden");
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "2", "--set", "data.sequence=8", "--costs", "costs.json"), 2);
  rft_assert_says(rft_err, "costs.json has costs of ");
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "3", DEEP), 2);
  rft_assert_says(rft_err, "parallel.pipeline: 4 does not divide the 3 ranks");
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "5000"), 2);
  assert_int_equal(RUN("plan", "small.yaml", "--link", "5"), 2);
  assert_int_equal(RUN("plan", "small.yaml", "--ranks", "2", "--all"), 2);
#undef DEEP
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(plan_large),   cmocka_unit_test(plan_demo_gpu),  cmocka_unit_test(plan_frontier),
      cmocka_unit_test(plan_picture), cmocka_unit_test(large_pictures), cmocka_unit_test(plan_and_trace),
      cmocka_unit_test(bench),        cmocka_unit_test(profile),        cmocka_unit_test(plan_ranks),
  };
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
