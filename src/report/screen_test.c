/* SPDX-License-Identifier: Apache-2.0
 *
 * Screens fit their terminal, show the numbers of the log, and contain no control character of a run's texts.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "refrain/report.h"
#include "support/folder.h"

static char screen[65536];
static size_t length;
static void collect(const char *text, size_t n, void *user) {
  (void)user;
  assert_true(length + n < sizeof screen);
  memcpy(screen + length, text, n);
  screen[length += n] = 0;
}

static void draw(rft_folder *f, const char *name, int columns, int colour, double now) {
  char path[1024];
  const char *folder = strcpy(path, rft_path(f, name));
  rfr_report *r;
  length = 0;
  assert_int_equal(rfr_report_open(f->ctx, &folder, 1, &r), RFR_OK);
  assert_int_equal(rfr_report_screen(r, 0, columns, colour, now, collect, NULL), RFR_OK);
  rfr_report_close(r);
}

static void says(const char *what) {
  if (!strstr(screen, what)) fail_msg("\"%s\" is not in:\n%s", what, screen);
}

/* The width of the widest line; escape sequences have no width, a UTF-8 character counts as one. */
static int widest(void) {
  int most = 0, n = 0;
  for (const char *s = screen; *s; s++) {
    if (*s == '\033') s += strcspn(s, "m");
    else if (*s == '\n') n = 0;
    else if ((*s & 0xC0) != 0x80) n++;
    if (n > most) most = n;
  }
  return most;
}

static void write_log(rft_folder *f, int steps, const char *last) {
  char *text = malloc(1 << 20), *at = text;
  at += sprintf(at, "{\"event\": \"start\", \"step\": 0, \"steps\": 400, \"time\": 1000}\n");
  for (int i = 1; i <= steps; i++)
    at += sprintf(
        at,
        "{\"event\": \"metrics\", \"step\": %d, \"steps\": 400, \"time\": %d, \"loss\": %.4f, \"tokens\": 100, "
        "\"seconds\": 2, \"lr\": 0.001, \"grad_norm\": 1.5, \"skipped\": %d, \"most_load\": 2.5, \"least_load\": 0, "
        "\"resident_bytes\": 1073741824, \"layer_loads\": [1, 2, 3]}\n",
        i, 1000 + i, 5.0 - 0.01 * i, i == 7);
  at += sprintf(at, "{\"event\": \"evaluation\", \"step\": 50, \"loss\": 3.25}\n");
  at += sprintf(at, "{\"event\": \"evaluation\", \"step\": 100, \"loss\": 3.5}\n%s", last);
  rft_write(f, "run/log.jsonl", text, strlen(text));
  free(text);
}

static void test_numbers(void **state) {
  rft_folder *f = *state;
  write_log(f, 100, "");
  draw(f, "run", 80, 0, 1112);
  says("running, last line 12 s ago");
  says("100 of 400, 25.0%");
  says("1m40s, 5m03s left"); /* 99 steps in the 100 seconds */
  says("loss     4.0000  grad norm 1.5  lr 0.001  1 skipped");
  says("speed    100 tokens/s, mean of the last lines 100"); /* by the times of the lines */
  says("held out 3.5000 at step 100, best 3.2500 at step 50");
  says("fullest 2.50, emptiest 0.00 of the mean  by layer \xe2\x96\x81\xe2\x96\x85\xe2\x96\x88");
  says("1.0 GiB of the host\n");
  write_log(f, 100, "{\"event\": \"end\", \"step\": 100, \"message\": \"run.diverged\"}\n");
  draw(f, "run", 80, 0, 0);
  says("run  run.diverged");
  assert_null(strstr(screen, " left"));
  assert_null(strchr(screen, '\033'));
  write_log(f, 100, /* a resume that was refused after it had compiled */
            "{\"event\": \"end\", \"step\": 100, \"time\": 1100, \"message\": \"done\"}\n"
            "{\"event\": \"compile\", \"step\": 0, \"time\": 5000, \"message\": \"compiled 2 programs\"}\n");
  draw(f, "run", 80, 0, 0);
  says("run  done");
  says("100 of 400, 25.0%");
  says("time     1m40s\n");
}

/* Tests every width, with few and many rows. */
static void test_widths(void **state) {
  rft_folder *f = *state;
  static const int rows[] = {0, 1, 2, 39, 3000};
  char event[600] = "{\"event\": \"warning\", \"step\": 3, \"message\": \"";
  memset(event + strlen(event), 'x', 400);
  strcpy(event + strlen(event), "\"}\n");
  for (int i = 0; i < 5; i++) {
    write_log(f, rows[i], event);
    for (int columns = 40; columns <= 400; columns += columns < 100 ? 1 : 75) {
      draw(f, "run", columns, columns % 2, 0);
      if (widest() > columns) fail_msg("%d of %d columns:\n%s", widest(), columns, screen);
    }
  }
  assert_int_equal(widest() == 400, 1);
}

static void test_inert(void **state) {
  rft_folder *f = *state;
  static const char *const name = "r\033]0;x\007\nn\xc3\xa4";
  char path[64];
  snprintf(path, sizeof path, "%s/log.jsonl", name);
  static const char log[] =
      "{\"event\": \"warn\\u001b[2J\", \"step\": 0, \"message\": \"\\u001b[31m\\r\\n\\u009b1m\"}\n";
  rft_write(f, path, log, strlen(log));
  draw(f, name, 200, 0, 0);
  for (const char *s = screen; *s; s++)
    if ((*s < 0x20 && *s != '\n') || *s == 0x7f) fail_msg("byte %d in:\n%s", *s, screen);
  int lines = 0;
  for (const char *s = screen; *s; s++) lines += *s == '\n';
  assert_int_equal(lines, 3); /* name, step, event */
}

static void test_refused(void **state) {
  rft_folder *f = *state;
  const char *folder = rft_path(f, "run");
  rfr_report *r;
  write_log(f, 1, "");
  assert_int_equal(rfr_report_open(f->ctx, &folder, 1, &r), RFR_OK);
  static const int bad[][2] = {{-1, 80}, {1, 80}, {0, 39}, {0, 401}};
  for (int i = 0; i < 4; i++)
    assert_int_equal(rfr_report_screen(r, bad[i][0], bad[i][1], 0, 0, collect, NULL), RFR_INVALID);
  rfr_report_close(r);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      rft_folder_test(test_numbers),
      rft_folder_test(test_widths),
      rft_folder_test(test_inert),
      rft_folder_test(test_refused),
  };
  return cmocka_run_group_tests_name("screen", tests, NULL, NULL);
}
