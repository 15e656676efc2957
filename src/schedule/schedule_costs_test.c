/* SPDX-License-Identifier: Apache-2.0
 *
 * Costs of stages: JSON and CSV with the same contents, and refused files.
 */
#include <string.h>

#include "base/base.h"
#include "refrain/schedule.h"
#include "support/context.h"

#define LAYER_COSTS(layers)                                                                                      \
  "{\"layers\": " layers ", \"tokens\": 64, \"layer\": {\"F\": 1, \"I\": 2, \"W\": 3}, \"first\": {\"F\": 0.5, " \
  "\"I\": 0, \"W\": 0.25}, \"last\": {\"F\": 4, \"I\": 5, \"W\": 6}, \"update\": 1e-9, \"SEND_F\": 0.125}"

static const rfr_stage_costs nothing = {.seconds = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1}};

static void test_forms(void **state) {
  (void)state;
  static const char *const texts[] = {
      "{\"F\": 1, \"I\": 2.5, \"SEND_F\": 1e-3, \"weight_bytes\": 9007199254740992,\n"
      "\"stages\": [{}, {\"F\": 3, \"activation_bytes\": 70, \"wgrad_bytes\": 30}, {\"gradient_bytes\": 5}]}",
      "# a comment\n\nstage, F, I, SEND_F, weight_bytes, activation_bytes, wgrad_bytes, gradient_bytes\r\n"
      " *, 1, 2.5, 1e-3, 9007199254740992,,,\n1,3,,,,70,30,\n2,,,,,,,5",
      "weight_bytes,F,gradient_bytes,I,stage,SEND_F,activation_bytes,wgrad_bytes\n"
      "9007199254740992,1,0,2.5,*,0.001,0,0\n,3,,,1,,70,30\n,,5,,2,,,\n",
  };
  for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
    rfr_stage_costs got[3], want[3];
    OK(rfr_schedule_costs_parse(ctx, "test", texts[i], strlen(texts[i]), 3, got));
    for (int k = 0; k < 3; k++) {
      want[k] = nothing;
      want[k].seconds[RFR_ACTION_F] = k == 1 ? 3 : 1;
      want[k].seconds[RFR_ACTION_I] = 2.5;
      want[k].seconds[RFR_ACTION_SEND_F] = 1e-3;
      want[k].weight_bytes = (int64_t)1 << 53;
      want[k].activation_bytes = k == 1 ? 70 : 0;
      want[k].wgrad_bytes = k == 1 ? 30 : 0;
      want[k].gradient_bytes = k == 2 ? 5 : 0;
      assert_memory_equal(&got[k], &want[k], sizeof got[k]);
    }
  }
}

static void test_refused(void **state) {
  (void)state;
  static const struct {
    const char *text, *slug, *message;
  } rows[] = {
      {"", "schedule.parse", "test: there are no costs"},
      {"\n# none\n", "schedule.parse", "there are no costs"},
      {"{", "json", "test:1: column 1"},
      {"[]", "schedule.parse", "the costs are not an object"},
      {"{\"F\": 1, \"F\": 1}", "json", "duplicate"},
      {"{\"f\": 1}", "schedule.parse", "there is no key \"f\"; keys are stage (stages), an action's op (F, I, W"},
      {"{\"F\": \"1\"}", "schedule.parse", "F is not a number"},
      {"{\"F\": -1}", "schedule.parse", "F is -1; seconds must be 0 or more"},
      {"{\"F\": 1e300}", "schedule.parse", "F is 1e+300"},
      {"{\"weight_bytes\": 1.5}", "schedule.parse", "weight_bytes is 1.5; bytes must be a whole number"},
      {"{\"weight_bytes\": 1e17}", "schedule.parse", "weight_bytes is 1e+17"},
      {"{\"stages\": {}}", "schedule.parse", "\"stages\" is not a list of 2 objects"},
      {"{\"stages\": [{}]}", "schedule.parse", "\"stages\" is not a list of 2 objects"},
      {"{\"stages\": [{}, 3]}", "schedule.parse", "stage 1 is not an object"},
      {"{\"stages\": [{}, {\"stages\": []}]}", "schedule.parse", "there is no key \"stages\""},
      {"{\"layer\": 3}", "schedule.parse", "layer is missing, or is not an object of F, I and W"},
      {LAYER_COSTS("1"), "schedule.parse", "the costs are of 1 layers, but the schedule has 2 stages"},
      {LAYER_COSTS("0"), "json", "layers"},
      {"stage,F\n0,1\n2,1\n", "schedule.parse", "test:3: there is no stage 2; stages are 0 to 1, or * for all"},
      {"stage,F\n-1,1\n", "schedule.parse", "test:2: there is no stage -1"},
      {"stage,F\n0.5,1\n", "schedule.parse", "test:2: there is no stage 0.5"},
      {"stage,F\n,1\n", "schedule.parse", "test:2: there is no stage ; stages are"},
      {"stage,F\n0,x\n", "schedule.parse", "test:2: F: \"x\" is not a number"},
      {"stage,F\n0,nan\n", "schedule.parse", "test:2: F: \"nan\" is not a number"},
      {"stage,F\n0,0x1\n", "schedule.parse", "\"0x1\" is not a number"},
      {"stage,F\n0,1,2\n", "schedule.parse", "test:2: the row has 3 cells, but there are 2 columns"},
      {"stage,F\n0\n", "schedule.parse", "test:2: the row has 1 cells, but there are 2 columns"},
      {"stage,F,F\n", "schedule.parse", "test:1: the column F is given twice"},
      {"stage,stage\n", "schedule.parse", "the column stage is given twice"},
      {"F,I\n1,2\n", "schedule.parse", "test:1: there is no column \"stage\""},
      {"stage,G\n", "schedule.parse", "test:1: there is no key \"G\""},
      {"stage;F\n", "schedule.parse", "there is no key \"stage;F\""},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_stage_costs costs[2];
    if (rfr_schedule_costs_parse(ctx, "test", rows[i].text, strlen(rows[i].text), 2, costs) == RFR_OK)
      fail_msg("%s: accepted", rows[i].text);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, rows[i].slug) != 0 || !strstr(e->message, rows[i].message))
      fail_msg("%s\n  gives [%s] %s\n  wanted %s", rows[i].text, e->slug, e->message, rows[i].message);
  }
  rfr_stage_costs costs[1];
  assert_int_equal(rfr_schedule_costs_parse(ctx, "test", "{}", 2, 0, costs), RFR_INVALID);
}

/* Layers are split evenly, the later stages having one more; the ends are with the first and the last stage. */
static void test_layers(void **state) {
  (void)state;
  static const char text[] = LAYER_COSTS("8");
  static const double wanted[3][3] = {{2.5, 4, 6.25}, {3, 6, 9}, {7, 11, 15}};
  static const int ops[3] = {RFR_ACTION_F, RFR_ACTION_I, RFR_ACTION_W};
  rfr_stage_costs costs[3];
  rfr_layer_costs layered;
  OK(rfr_schedule_costs_parse(ctx, "test", text, strlen(text), 3, costs));
  for (int i = 0; i < 3; i++) {
    for (int k = 0; k < 3; k++) assert_true(costs[i].seconds[ops[k]] == wanted[i][k]);
    assert_true(costs[i].seconds[RFR_ACTION_SEND_F] == 0.125 && costs[i].seconds[RFR_ACTION_B] == -1);
  }
  OK(rfr_layer_costs_parse(ctx, "test", text, strlen(text), &layered));
  assert_int_equal(layered.tokens, 64);
  assert_true(layered.update == 1e-9);
  OK(rfr_layer_costs_stages(&layered, 100, 1, costs));
  assert_true(costs[0].seconds[RFR_ACTION_W] == 306.25);
  assert_int_equal(rfr_layer_costs_stages(&layered, 2, 3, costs), RFR_INVALID);
  for (int64_t layers = 3; layers < 9; layers++) {
    int64_t first, end = 0;
    for (int i = 0; i < 3; i++) {
      const int64_t n = rfr_stage_layers(layers, 3, i, &first);
      assert_true(first == end && n >= layers / 3 && n <= (layers + 2) / 3);
      end = first + n;
    }
    assert_int_equal(end, layers);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_forms), rft_context_test(test_layers),
                                     rft_context_test(test_refused)};
  return cmocka_run_group_tests_name("schedule_costs", tests, NULL, NULL);
}
