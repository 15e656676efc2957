/* SPDX-License-Identifier: Apache-2.0
 *
 * `report` and `top` on a run of `train`: the page in a file and served, the screen at a terminal.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <pty.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "support/program.h"

static void pause_shortly(void) { nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL); }

static json_t *data_of_page(void) {
  const char *from = strstr(rft_out, "id=\"data\">"), *to = from ? strstr(from, "</script>") : NULL;
  assert_non_null(to);
  from += strlen("id=\"data\">");
  json_t *v = json_loadb(from, (size_t)(to - from), JSON_REJECT_DUPLICATES, NULL);
  assert_non_null(v);
  return v;
}

static const char *text_at(const json_t *list, size_t i, size_t k) {
  return json_string_value(json_array_get(json_array_get(list, i), k));
}

/* The source of a key in the first run of a page. */
static const char *source_of(const json_t *page, const char *key) {
  const json_t *run = json_array_get(json_object_get(page, "runs"), 0), *config = json_object_get(run, "config");
  for (size_t i = 0; i < json_array_size(config); i++)
    if (strcmp(text_at(config, i, 0), key) == 0) return text_at(config, i, 2);
  fail_msg("no key %s", key);
  return NULL;
}

static void page(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--out", "a", "--quiet", "--set", "run.log_every=1"), 0);
  assert_int_equal(RUN("report", "a", "--out", "-"), 0);
  json_t *v = data_of_page();
  const json_t *run = json_array_get(json_object_get(v, "runs"), 0), *plan = json_object_get(run, "plan");
  assert_string_equal(json_string_value(json_object_get(run, "end")), "done");
  assert_int_equal(rft_number(run, "rows"), 20);
  assert_int_equal(rft_number(run, "steps"), 20);
  const json_t *memory = json_object_get(json_object_get(run, "series"), "resident_bytes");
  assert_true(json_number_value(json_array_get(json_array_get(memory, 1), 0)) > 1e6);
  assert_true(json_array_size(json_object_get(plan, "buffers")) > 50);
  assert_true(rft_number(plan, "persistent_bytes") < rft_number(plan, "planned_bytes"));
  assert_string_equal(source_of(v, "run.log_every"), "--set");
  assert_string_equal(source_of(v, "model.rope_theta"), "default");
  assert_non_null(strstr(source_of(v, "optimizer.lr"), "small.yaml:5"));
  json_decref(v);
  /* A resume reads the folder's own configuration; the sources of its keys are kept. */
  assert_int_equal(RUN("train", "a", "--resume", "--quiet", "--set", "run.steps=22"), 0);
  assert_int_equal(RUN("report", "a", "--out", "-"), 0);
  v = data_of_page();
  assert_non_null(strstr(source_of(v, "optimizer.lr"), "small.yaml:5"));
  assert_string_equal(source_of(v, "run.steps"), "--set");
  assert_int_equal(rft_number(json_array_get(json_object_get(v, "runs"), 0), "rows"), 22);
  json_decref(v);
  assert_int_equal(RUN("report", "a"), 0);
  assert_string_equal(rft_err, "wrote report.html\n");
  assert_int_equal(access("report.html", F_OK), 0);
  assert_int_equal(access("report.html.tmp", F_OK), -1);
  struct stat st;
  assert_int_equal(symlink("target.html", "link.html"), 0);
  assert_int_equal(RUN("report", "a", "--out", "link.html"), 0);
  assert_true(lstat("link.html", &st) == 0 && S_ISLNK(st.st_mode));
  assert_int_equal(access("target.html", F_OK), 0);
  assert_int_equal(RUN("report", "a", "--out", "/dev/full"), 4);
  rft_assert_says(rft_err, "/dev/full cannot be written");
}

/* The load of the step is the maximum over the layers. */
static void loads(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--out", "moe", "--quiet", "--set", "run.log_every=1", "--set",
                       "model.model_type=mixtral", "--set", "model.num_experts=4", "--set",
                       "model.num_hidden_layers=3"),
                   0);
  rft_slurp("moe/log.jsonl", rft_out, sizeof rft_out);
  int rows = 0;
  for (const char *line = rft_out; (line = strstr(line, "{\"event\": \"metrics\"")); line++, rows++) {
    json_t *v = json_loadb(line, strcspn(line, "\n"), 0, NULL);
    const json_t *layers = json_object_get(v, "layer_loads");
    double most = 0;
    assert_int_equal(json_array_size(layers), 3);
    for (size_t l = 0; l < 3; l++) {
      const double x = json_number_value(json_array_get(layers, l));
      assert_true(x >= 1.0 && x <= 2.0); /* two of four experts for each token */
      most = x > most ? x : most;
    }
    const double all = json_number_value(json_object_get(v, "most_load"));
    assert_true(most > 0.999 * all && most < 1.001 * all); /* the log has four digits */
    json_decref(v);
  }
  assert_int_equal(rows, 20);
  assert_int_equal(RUN("report", "moe", "--out", "-"), 0);
  json_t *page = data_of_page();
  const json_t *run = json_array_get(json_object_get(page, "runs"), 0);
  assert_int_equal(json_array_size(json_object_get(json_object_get(run, "loads"), "layers")), 3);
  json_decref(page);
}

static void usage_errors(void **state) {
  (void)state;
  assert_int_equal(RUN("report", "nowhere"), 4);
  rft_assert_says(rft_err, "nowhere: no such folder");
  assert_int_equal(RUN("report", "text"), 2);
  rft_assert_says(rft_err, "text has no log.jsonl [run.folder]");
  assert_int_equal(RUN("top", "small.yaml"), 2);
  rft_assert_says(rft_err, "small.yaml is a file");
  assert_int_equal(RUN("report", "a", "--out", "no/such/folder/x.html"), 4);
  rft_assert_says(rft_err, "no/such/folder/x.html cannot be written");
  assert_int_equal(RUN("report", "a", "--follow", "--out", "x"), 2);
  assert_int_equal(RUN("report", "a", "--wandb", "w", "--out", "x"), 2);
  assert_int_equal(RUN("report", "a", "--wandb", "w"), 0);
  rft_assert_says(rft_err, "upload: wandb sync w/offline-run-*");
  assert_int_equal(RUN("report", "a", "--wandb", "w"), 2);
  rft_assert_says(rft_err, ".wandb exists [export.exists]");
  assert_int_equal(RUN("report", "a", "--port", "80"), 2);
  assert_int_equal(RUN("report", "a", "--follow", "--port", "65536"), 2);
  rft_write_file("report.html", "old");
  rft_write_file("a/plan.json", "{");
  assert_int_equal(RUN("report", "a"), 2);
  rft_assert_says(rft_err, "a/plan.json");
  rft_slurp("report.html", rft_out, sizeof rft_out);
  assert_string_equal(rft_out, "old");
  assert_int_equal(remove("a/plan.json"), 0);
}

/* The exit codes of diff: for equal runs, another learning rate, and errors. */
static void compared(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--out", "p", "--quiet"), 0);
  assert_int_equal(RUN("train", "small.yaml", "--out", "q", "--quiet"), 0);
  assert_int_equal(RUN("diff", "p", "q"), 0);
  assert_int_equal(RUN("diff", "p/config.yaml", "q/config.yaml"), 0);
  assert_int_equal(RUN("train", "small.yaml", "--out", "n\xff", "--quiet"), 0); /* a name that is not valid UTF-8 */
  assert_int_equal(RUN("diff", "p", "n\xff"), 0);
  rft_assert_says(rft_out, "configuration: equal");
  rft_assert_says(rft_out, "the runs are equal");
  assert_int_equal(RUN("train", "small.yaml", "--out", "r", "--quiet", "--set", "optimizer.lr=0.002"), 0);
  assert_int_equal(RUN("diff", "p", "r", "--json"), 1);
  json_t *v = rft_parsed();
  const json_t *key = json_array_get(json_object_get(v, "config"), 0);
  assert_string_equal(json_string_value(json_object_get(key, "key")), "optimizer.lr");
  assert_string_equal(json_string_value(json_array_get(json_object_get(key, "sources"), 1)), "--set");
  const json_t *weights = json_object_get(v, "weights");
  assert_true(json_array_size(json_object_get(weights, "different")) > 5);
  assert_int_equal(json_array_size(json_object_get(weights, "missing")), 0);
  json_decref(v);
  assert_int_equal(RUN("diff", "p", "nowhere"), 2);
  rft_assert_says(rft_err, "nowhere: no such folder");
  assert_int_equal(RUN("diff", "p"), 2);
  rft_assert_says(rft_err, "refrain diff needs RUN RUN");
}

/* ---- served ---- */

static int connect_to(int port) {
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof at), 0);
  return fd;
}

/* Sends a request and reads the answer; returns its status. */
static int ask(int port, const char *request) {
  const int fd = connect_to(port);
  assert_int_equal(write(fd, request, strlen(request)), strlen(request));
  size_t n = 0;
  for (ssize_t got; (got = read(fd, rft_out + n, sizeof rft_out - 1 - n)) > 0;) n += (size_t)got;
  rft_out[n] = 0;
  close(fd);
  return strncmp(rft_out, "HTTP/1.1 ", 9) == 0 ? atoi(rft_out + 9) : -1;
}

static int get(int port, const char *path) {
  char request[200];
  snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n", path, port);
  return ask(port, request);
}

/* A client that sends a byte a second does not keep others waiting. */
static void slow_client(int port) {
  const int fd = connect_to(port);
  const pid_t child = fork();
  if (child == 0)
    for (;; sleep(1))
      if (send(fd, "G", 1, MSG_NOSIGNAL) != 1) _exit(0);
  alarm(20); /* ends the test: the other client gets no answer */
  assert_int_equal(get(port, "/"), 200);
  alarm(0);
  close(fd);
  kill(child, SIGKILL);
  assert_int_equal(waitpid(child, NULL, 0), child);
}

static void follow(void **state) {
  (void)state;
  char text[200] = "";
  int port = 0;
  const pid_t child = START(((const char *const[]){"report", "a", "--follow", NULL}));
  for (int i = 0; i < 3000 && !strchr(text, '\n'); i++) pause_shortly(), rft_slurp("out", text, sizeof text);
  assert_int_equal(sscanf(text, "http://127.0.0.1:%d/", &port), 1);
  assert_int_equal(get(port, "/"), 200);
  rft_assert_says(rft_out, "connect-src 'self'");
  rft_assert_says(rft_out, "X-Frame-Options: DENY");
  assert_int_equal(get(port, "/data.json"), 200);
  json_t *v = json_loads(strstr(rft_out, "\r\n\r\n") + 4, 0, NULL);
  snprintf(text, sizeof text, "/data.json?%lld", (long long)rft_number(v, "bytes"));
  json_decref(v);
  assert_int_equal(get(port, text), 204); /* no new data */
  FILE *f = fopen("a/log.jsonl", "ab");
  fputs("{\"event\": \"warning\", \"step\": 22, \"message\": \"look here\"}\n", f);
  fclose(f);
  assert_int_equal(get(port, text), 200);
  rft_assert_says(rft_out, "look here");
  assert_int_equal(get(port, "/../a/log.jsonl"), 404);
  assert_int_equal(get(port, "/config.yaml"), 404);
  assert_int_equal(ask(port, "GET / HTTP/1.1\r\nHost: attacker.example\r\n\r\n"), 403);
  snprintf(text, sizeof text, "GET / HTTP/1.1\r\nHost: 128.0.0.1:%d\r\n\r\n", port);
  assert_int_equal(ask(port, text), 403);
  assert_int_equal(ask(port, "GET / HTTP/1.1\r\n\r\n"), 403);
  snprintf(text, sizeof text, "POST / HTTP/1.1\r\nHost: localhost:%d\r\n\r\n", port);
  assert_int_equal(ask(port, text), 405);
  slow_client(port);
  kill(child, SIGTERM);
  assert_int_equal(rft_finish(child), 0);
}

/* ---- at a terminal ---- */

static void screen(void **state) {
  (void)state;
  assert_int_equal(RUN("top", "a"), 0);
  rft_assert_says(rft_out, "22 of 22, 100.0%");
  assert_null(strchr(rft_out, '\033'));
  const struct winsize size = {.ws_row = 24, .ws_col = 80};
  int fd;
  size_t n = 0;
  bool stopped = false;
  const pid_t child = forkpty(&fd, NULL, NULL, &size);
  assert_true(child >= 0);
  if (child == 0) {
    setenv("TERM", "xterm", 1);
    execl(RFT_PROGRAM, "refrain", "top", "a", (char *)NULL);
    _exit(127);
  }
  for (ssize_t got; (got = read(fd, rft_out + n, sizeof rft_out - 1 - n)) > 0;) {
    rft_out[n += (size_t)got] = '\0';
    if (!stopped && strstr(rft_out, "\033[J")) stopped = kill(child, SIGINT) == 0;
  }
  int status;
  close(fd);
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  rft_assert_says(rft_out, "\033[?1049h");
  rft_assert_says(rft_out, "22 of 22, 100.0%\033[K");
  rft_assert_says(rft_out, "\033[?25h\033[?1049l"); /* the terminal settings are restored */
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(page),  cmocka_unit_test(follow),       cmocka_unit_test(screen),
      cmocka_unit_test(loads), cmocka_unit_test(usage_errors), cmocka_unit_test(compared),
  };
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
