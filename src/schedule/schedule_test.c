/* SPDX-License-Identifier: Apache-2.0
 *
 * Schedules that are accepted and refused, with rank, position and action in the error.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "schedule/schedule.h"
#include "support/context.h"
#include "support/text.h"

static rfr_schedule *parsed(const char *text) {
  rfr_schedule *s;
  OK(rfr_schedule_parse(ctx, "test", text, strlen(text), &s));
  return s;
}

static void test_lists(void **state) {
  (void)state;
  const rfr_action rank0[] = {{RFR_ACTION_F, 0, 0}, {RFR_ACTION_F, 0, 1}, {RFR_ACTION_I, 0, 0},
                              {RFR_ACTION_I, 0, 1}, {RFR_ACTION_W, 0, 0}, {RFR_ACTION_W, 0, 1}};
  const rfr_action rank1[] = {{RFR_ACTION_F, 1, 0}, {RFR_ACTION_B, 1, 0}, {RFR_ACTION_F, 1, 1}, {RFR_ACTION_B, 1, 1}};
  rfr_schedule *s;
  rfr_schedule_info info;
  rft_text text = {0};
  int n;
  OK(rfr_schedule_create(ctx, 2, (const rfr_action *const[]){rank0, rank1}, (const int[]){6, 4}, &s));
  OK(rfr_schedule_get_info(s, &info));
  assert_int_equal(info.ranks, 2);
  assert_int_equal(info.stages, 2);
  assert_int_equal(info.microbatches, 2);
  assert_int_equal(info.n_actions, 10);
  assert_true(info.training && !info.communication);
  assert_memory_equal(rfr_schedule_actions(s, 1, &n), rank1, sizeof rank1);
  assert_int_equal(n, 4);
  assert_null(rfr_schedule_actions(s, 2, &n));
  assert_int_equal(rfr_schedule_rank(s, 1), 1);
  assert_int_equal(rfr_schedule_rank(s, 2), -1);
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_W, 0, 1}), 5);
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_W, 1, 1}), 3); /* the B of the same microbatch */
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_B, 0, 1}), -1);
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_OPT, 0, -1}), -1);
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_F, 0, 2}), -1);
  assert_int_equal(rfr_schedule_slots(s, 0), 2);
  assert_int_equal(rfr_schedule_slots(s, 1), 1);
  assert_int_equal(rfr_schedule_layers(s, 1), 1);
  OK(rfr_schedule_set_layers(s, (const int[]){3, 2}, 2));
  assert_int_equal(rfr_schedule_layers(s, 1), 2);
  assert_int_equal(rfr_schedule_set_layers(s, (const int[]){3, 0}, 2), RFR_INVALID);
  assert_int_equal(rfr_schedule_set_layers(s, (const int[]){3, 1, 1}, 3), RFR_INVALID);
  assert_int_equal(rfr_schedule_layers(s, 0), 3);
  OK(rfr_schedule_print(s, rft_text_add, &text));
  assert_string_equal(text.data, "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1B0 1F1 1B1\n");
  free(text.data);
  rfr_schedule_destroy(s);
}

static void test_text(void **state) {
  (void)state;
  rfr_schedule *s = parsed("# two ranks\n\n 0UNSHARD 0F0  0SEND_F0 0RECV_B0\t0B0 0RESHARD 0REDUCE 0OPT \r\n"
                           "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1OPT");
  rfr_schedule_info info;
  OK(rfr_schedule_get_info(s, &info));
  assert_int_equal(info.communication, 1);
  assert_int_equal(rfr_schedule_find(s, (rfr_action){RFR_ACTION_OPT, 0, -1}), 7);
  assert_int_equal(rfr_schedule_slot(s, 1, 0), 0);
  rfr_schedule_destroy(s);
  s = parsed("0F0 0F1");
  OK(rfr_schedule_get_info(s, &info));
  assert_int_equal(info.training, 0);
  assert_int_equal(rfr_schedule_slots(s, 0), 1);
  rfr_schedule_destroy(s);
}

static void test_refused(void **state) {
  (void)state;
  static const struct {
    const char *text, *slug, *message;
  } rows[] = {
      {"", "schedule.parse", "test: there is no action"},
      {"# nothing\n", "schedule.parse", "there is no action"},
      {"0F0 1X0", "schedule.parse", "test:1: rank 0, action 1: \"1X0\" is not an action"},
      {"0F0\n\n1F00", "schedule.parse", "test:3: rank 1, action 0: \"1F00\""},
      {"0F0,0B0", "schedule.parse", "\"0F0,0B0\""},
      {"-1F0", "schedule.parse", "\"-1F0\""},
      {"0F2147483647", "schedule.parse", "\"0F2147483647\""},
      {"99999999999F0", "schedule.parse", "\"99999999999F0\""},
      {"0OPT0", "schedule.parse", "\"0OPT0\""},
      {"0F", "schedule.parse", "\"0F\""},
      {"0SEND_F0 0send_b0", "schedule.parse", "action 1: \"0send_b0\""},
      {"0UNSHARD", "schedule.count", "there is no action of a microbatch"},
      {"2000000000F2000000000", "schedule.count", "need 4000000004000000001 forwards, but there are 1 actions"},
      {"0F0 0F0", "schedule.count", "rank 0, action 1 (0F0): 0F0 was done before, by rank 0, action 0 (0F0)"},
      {"0F0 0B0 0W0", "schedule.count", "action 2 (0W0): 0W0 was done before, by rank 0, action 1 (0B0)"},
      {"0F0 0B0 0F1 0I1", "schedule.count", "0W1 is missing: stage 0 has 1 of its 2"},
      {"0F0 0B0 0B1", "schedule.count", "0F1 is missing"},
      {"0F0 0B0\n2F0 2B0", "schedule.count", "1F0 is missing: stage 1 has 0 of its 1"},
      {"0F0 1F0 0B0 1B0", "schedule.order", "rank 0, action 2 (0B0): comes before rank 0, action 3 (1B0)"},
      {"1F0 0F0 1B0 0B0", "schedule.order", "action 0 (1F0): comes before rank 0, action 1 (0F0), which it needs"},
      {"0I0 0F0 0W0", "schedule.order", "action 0 (0I0): comes before rank 0, action 1 (0F0)"},
      {"0F0 0W0 0I0", "schedule.order", "action 1 (0W0): comes before rank 0, action 2 (0I0)"},
      {"0F0 0B0\n1F0 1B0 0F1 0B1 1F1 1B1", "schedule.action", "rank 1, action 2 (0F1): stage 0 lies on rank 0"},
      {"0F0 0SEND_F0 0B0\n1F0 1B0", "schedule.count", "action 1 (0SEND_F0): 1RECV_F0 is missing"},
      {"0F0 0B0\n1RECV_F0 1F0 1B0", "schedule.count", "rank 1, action 0 (1RECV_F0): 0SEND_F0 is missing"},
      {"0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0", "schedule.action", "stages 0 and 1 lie on one rank"},
      {"0F0 0SEND_F0 0B0", "schedule.action", "action 1 (0SEND_F0): there is no stage on the other end"},
      {"0RECV_F0 0F0 0B0", "schedule.action", "(0RECV_F0): there is no stage on the other end"},
      {"0F0 0RECV_B0 0B0", "schedule.action", "(0RECV_B0): there is no stage on the other end"},
      {"0F0 0B0 0SEND_B0", "schedule.action", "(0SEND_B0): there is no stage on the other end"},
      {"0SEND_F0 0F0 0B0\n1RECV_F0 1F0 1B0", "schedule.order", "action 0 (0SEND_F0): comes before rank 0, action 1"},
      {"0F0 0SEND_F0 0B0\n1F0 1RECV_F0 1B0", "schedule.order", "rank 1, action 0 (1F0): comes before rank 1, action 1"},
      {"0F0 0B0 0RECV_B0\n1F0 1B0 1SEND_B0", "schedule.order", "(0B0): comes before rank 0, action 2 (0RECV_B0)"},
      {"0RECV_B0 0F0 0B0\n1F0 1B0 1SEND_B0", "schedule.order", "(0RECV_B0): comes before rank 0, action 1 (0F0)"},
      {"0F0 0B0\n1F0 1SEND_B0 1B0", "schedule.count", "0RECV_B0 is missing"},
      {"0F0 0RECV_B0 0B0\n1F0 1SEND_B0 1B0", "schedule.order", "(1SEND_B0): comes before rank 1, action 2 (1B0)"},
      {"0F0 0SEND_B0", "schedule.count", "0I0 is missing"},
      {"0F0 0F1 0SEND_F0 0SEND_F1 0B0 0B1\n1RECV_F1 1RECV_F0 1F0 1B0 1F1 1B1", "schedule.order",
       "rank 1, action 1 (1RECV_F0): receives a message that was sent before the last one received from the same "
       "rank, by rank 0, action 3"},
      {"0UNSHARD 0UNSHARD 0F0", "schedule.order", "action 1 (0UNSHARD): the stage's weights are gathered already"},
      {"0F0 0RESHARD", "schedule.order", "action 0 (0F0): the stage's weights are not gathered here; put 0UNSHARD"},
      {"0UNSHARD 0F0 0RESHARD 0I0 0W0", "schedule.order", "action 3 (0I0): the stage's weights are not gathered"},
      {"0F0 0REDUCE 0B0", "schedule.order", "action 1 (0REDUCE): no W of the stage comes before it"},
      {"0F0 0F1 0B0 0REDUCE 0B1", "schedule.order", "action 3 (0REDUCE): comes before rank 0, action 4 (0B1)"},
      {"0F0 0F1 0B0 0OPT 0B1", "schedule.order", "action 4 (0B1): is after rank 0, action 3 (0OPT)"},
      {"0F0 0B0 0OPT 0REDUCE", "schedule.order", "action 3 (0REDUCE): is after rank 0, action 2 (0OPT)"},
      {"0F0 0B0 0OPT 0OPT", "schedule.count", "action 3 (0OPT): was done before, by rank 0, action 2 (0OPT)"},
      {"0F0 0OPT", "schedule.count", "0I0 is missing"},
      {"0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0", "schedule.deadlock",
       "2 ranks wait for each other: rank 0, action 1 (0B0) waits for 1B0 -> rank 1, action 0 (1F1) waits for 0F1 -> "
       "rank 0"},
      {"0F0 3F0 3B0 0B0\n1F0 2F0 1B0 2B0", "schedule.order", "(1B0): comes before rank 1, action 3 (2B0)"},
      {"0F0 2F1 0F1 2F0 2B0 2B1 0B0 0B1\n1F0 1F1 1B0 1B1", "schedule.deadlock",
       "2 ranks wait for each other: rank 0, action 1 (2F1) waits for 1F1 -> rank 1, action 1 (1F1) waits for 0F1"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_schedule *s = (rfr_schedule *)&state;
    if (rfr_schedule_parse(ctx, "test", rows[i].text, strlen(rows[i].text), &s) == RFR_OK)
      fail_msg("%s: taken", rows[i].text);
    assert_null(s);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, rows[i].slug) != 0 || !strstr(e->message, rows[i].message))
      fail_msg("%s\n  gives [%s] %s\n  wanted [%s] %s", rows[i].text, e->slug, e->message, rows[i].slug,
               rows[i].message);
  }
}

static void test_lists_refused(void **state) {
  (void)state;
  static const struct {
    rfr_action action;
    const char *slug, *message;
  } rows[] = {{{-1, 0, 0}, "schedule.action", "rank 1, action 1: there is no op -1"},
              {{RFR_ACTION_COUNT, 0, 0}, "schedule.action", "rank 1, action 1: there is no op 12"},
              {{RFR_ACTION_I, -1, 0}, "schedule.action", "rank 1, action 1 (-1I0): there is no stage -1"},
              {{RFR_ACTION_I, 1, -1}, "schedule.action", "(1I-1): there is no microbatch -1"},
              {{RFR_ACTION_OPT, 1, 0}, "schedule.action", "(1OPT): microbatch is 0, but the op is for the stage"},
              {{RFR_ACTION_I, INT32_MAX, INT32_MAX}, "schedule.count", "need 4611686018427387904 forwards"}};
  const rfr_action rank0[] = {{RFR_ACTION_F, 0, 0}};
  rfr_action rank1[] = {{RFR_ACTION_F, 1, 0}, {0}};
  rfr_schedule *s;
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rank1[1] = rows[i].action;
    assert_int_equal(rfr_schedule_create(ctx, 2, (const rfr_action *const[]){rank0, rank1}, (const int[]){1, 2}, &s),
                     RFR_INVALID);
    assert_null(s);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, rows[i].slug) != 0 || !strstr(e->message, rows[i].message))
      fail_msg("row %zu gives [%s] %s", i, e->slug, e->message);
  }
  assert_int_equal(rfr_schedule_create(ctx, 0, (const rfr_action *const[]){rank0}, (const int[]){1}, &s), RFR_INVALID);
  assert_int_equal(rfr_schedule_create(ctx, 1, (const rfr_action *const[]){NULL}, (const int[]){1}, &s), RFR_INVALID);
  assert_int_equal(rfr_schedule_create(ctx, 1, (const rfr_action *const[]){NULL}, (const int[]){0}, &s), RFR_INVALID);
  assert_string_equal(rfr_last_error()->message, "rank 0 has no action");
  assert_int_equal(rfr_schedule_create(ctx, 1, (const rfr_action *const[]){rank0}, (const int[]){-1}, &s), RFR_INVALID);
}

/* The lists of one rank as text, with chunks numbered as in order lists. */
static void test_orders(void **state) {
  (void)state;
  static const struct {
    const char *order, *text;
  } rows[] = {
      {"[1,1,-1,-1,-1.5,-1.5]", "0F0 0F1 0I0 0I1 0W0 0W1\n"},
      {"1 2 1 2 -2 -1 1 2 -2 -1 -2 -1", "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 1B2 0B2\n"},
      {"[1, 2,-2,-2.5, -1 ]\r\n", "0F0 1F0 1I0 1W0 0B0\n"}, /* one chunk has separate W, the other does not */
      {"1,1", "0F0 0F1\n"},
      {"1,2,-2,-1;[1,2,-2,-1]", "0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0\n"},
      {"\n1 -1\n\n1 -1", "0F0 0B0\n1F0 1B0\n"},
      {"1 2 3 1 -3 -3.5 -2 -2.5 -1 -1.5 2 3 -3 -2 -1 -3.5 -2.5 -1.5",
       "0F0 1F0 2F0 0F1 2I0 2W0 1I0 1W0 0I0 0W0 1F1 2F1 2I1 1I1 0I1 2W1 1W1 0W1\n"},
  };
  static const struct {
    const char *order, *slug, *message;
  } wrong[] = {
      {"", "schedule.parse", "there is no list"},
      {"[]", "schedule.parse", "test:1: list 0: an empty list"},
      {"1,-1,", "schedule.parse", "a number expected after the comma"},
      {"[1,]", "schedule.parse", "a number expected at \"]\""},
      {"[1,-1", "schedule.parse", "] expected"},
      {"1,-1]", "schedule.parse", "a number expected at \"]\""},
      {"[1,-1] [1,-1]", "schedule.parse", "a list begins on a line of its own"},
      {"1,,-1", "schedule.parse", "a number expected at \",-1\""},
      {"1 -1.25", "schedule.parse", "only halves are known (-c-0.5: weight gradients of chunk c) at \"-1.25\""},
      {"1 -1.", "schedule.parse", "only halves"},
      {"1 -1.55", "schedule.parse", "a number expected at \"-1.55\""},
      {"1.5 -1", "schedule.parse", "a forward has no half at \"1.5 -1\""},
      {"1 -1 0", "schedule.parse", "chunks count from 1 at \"0\""},
      {"1 -1 -0.5", "schedule.parse", "chunks count from 1 at \"-0.5\""},
      {"1 -1\nx", "schedule.parse", "test:2: list 1: a number expected at \"x\""},
      {"1 --1", "schedule.parse", "a number expected"},
      {"99999999999 1", "schedule.parse", "chunks count from 1"},
      {"2000000000 -2000000000", "schedule.count", "there is a chunk 2000000000, but there are only 2 numbers"},
      {"1 1 -1", "schedule.count", "test:1: list 0: chunk 1 has 2 forwards, 1 backwards and 0 weight gradients"},
      {"1 1 -1 -1 -1.5", "schedule.count", "chunk 1 has 2 forwards, 2 backwards and 1 weight gradients"},
      {"1 2 -2 -2.5 -2.5 -1", "schedule.count", "chunk 2 has 1 forwards, 1 backwards and 2 weight gradients"},
      {"1 2 1 -1 -1 -2", "schedule.count", "1F1 is missing"},
      {"1 3 -3 -1", "schedule.count", "1F0 is missing"},
      {"1 2 -1 -2", "schedule.order", "rank 0, action 2 (0B0): comes before rank 0, action 3 (1B0)"},
      {"1 -1.5 -1", "schedule.order", "action 1 (0W0): comes before rank 0, action 2 (0I0)"},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    rfr_schedule *s;
    rft_text text = {0};
    OK(rfr_schedule_parse_order(ctx, "test", rows[i].order, strlen(rows[i].order), NULL, 0, &s));
    OK(rfr_schedule_print(s, rft_text_add, &text));
    assert_string_equal(text.data, rows[i].text);
    free(text.data);
    rfr_schedule_destroy(s);
  }
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    rfr_schedule *s;
    if (rfr_schedule_parse_order(ctx, "test", wrong[i].order, strlen(wrong[i].order), NULL, 0, &s) == RFR_OK)
      fail_msg("%s: taken", wrong[i].order);
    assert_null(s);
    const rfr_error *e = rfr_last_error();
    if (strcmp(e->slug, wrong[i].slug) != 0 || !strstr(e->message, wrong[i].message))
      fail_msg("%s\n  gives [%s] %s\n  wanted %s", wrong[i].order, e->slug, e->message, wrong[i].message);
  }
}

static void test_order_layers(void **state) {
  (void)state;
  static const char order[] = "1,2,-2,-1;1,2,-2,-1";
  rfr_schedule *s;
  OK(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, (const int[]){3, 5}, 2, &s));
  for (int i = 0; i < 4; i++) assert_int_equal(rfr_schedule_layers(s, i), i < 2 ? 3 : 5);
  rfr_schedule_destroy(s);
  OK(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, (const int[]){7}, 1, &s));
  assert_int_equal(rfr_schedule_layers(s, 3), 7);
  rfr_schedule_destroy(s);
  assert_int_equal(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, (const int[]){3, 5, 1}, 3, &s),
                   RFR_INVALID);
  assert_non_null(strstr(rfr_last_error()->message, "3 counts of layers for 2 chunks"));
  assert_int_equal(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, (const int[]){3, 0}, 2, &s),
                   RFR_INVALID);
  assert_null(s);
  assert_int_equal(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, NULL, 2, &s), RFR_INVALID);
  assert_int_equal(rfr_schedule_parse_order(ctx, "test", order, sizeof order - 1, NULL, -1, &s), RFR_INVALID);
}

int main(void) {
  const struct CMUnitTest tests[] = {rft_context_test(test_lists),   rft_context_test(test_text),
                                     rft_context_test(test_refused), rft_context_test(test_lists_refused),
                                     rft_context_test(test_orders),  rft_context_test(test_order_layers)};
  return cmocka_run_group_tests_name("schedule", tests, NULL, NULL);
}
