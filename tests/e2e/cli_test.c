/* SPDX-License-Identifier: Apache-2.0
 *
 * The program as a user runs it: exit codes, error texts, JSON, signals.
 */
#include <fcntl.h>
#include <pty.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

static char root[64];
static char out[1 << 22], err[1 << 16];

static void slurp(const char *path, char *to, size_t size) {
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  size_t n = fread(to, 1, size - 1, f);
  to[n] = '\0';
  fclose(f);
}

static void write_file(const char *name, const char *text) {
  FILE *f = fopen(name, "wb");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

static pid_t start(const char *const *arguments) {
  const char *argv[24] = {RFT_BINARY_DIR "/refrain"};
  for (int i = 0; arguments[i]; i++) argv[i + 1] = arguments[i];
  pid_t child = fork();
  assert_true(child >= 0);
  if (child > 0) return child;
  if (!freopen("out", "wb", stdout) || !freopen("err", "wb", stderr)) _exit(126);
  execv(argv[0], (char *const *)argv);
  _exit(127);
}

static int finish(pid_t child) {
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  slurp("out", out, sizeof out);
  slurp("err", err, sizeof err);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

/* Runs the program in the test's folder; its exit code. */
#define RUN(...) finish(start((const char *const[]){__VA_ARGS__, NULL}))

static void assert_says(const char *where, const char *what) {
  if (!strstr(where, what)) fail_msg("\"%s\" is not in:\n%s", what, where);
}

static const char *const config =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [\"text/*.txt\"], validation: 30%, sequence: 16}\n"
    "batch: {tokens: 64, microbatch: 2}\n"
    "optimizer: {lr: 1e-2}\n"
    "precision: {dtype: f32}\n"
    "run: {steps: 20}\n";

static int set_up(void **state) {
  (void)state;
  snprintf(root, sizeof root, "%s/cli-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
  if (!mkdtemp(root) || chdir(root) != 0 || mkdir("text", 0777) != 0) return -1;
  for (int i = 0; i < 10; i++) {
    char name[32], text[600] = "";
    for (int k = 0; k < 20; k++) sprintf(text + strlen(text), "%d and %d make %d\n", i, k, i + k);
    snprintf(name, sizeof name, "text/%d.txt", i);
    write_file(name, text);
  }
  write_file("small.yaml", config);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", root);
  return chdir("/") != 0 || system(command) != 0;
}

static void usage(void **state) {
  (void)state;
  assert_int_equal(RUN("--help"), 0);
  assert_says(out, "usage: refrain");
  assert_int_equal(RUN("--version"), 0);
  assert_says(out, "refrain 0.");
  assert_int_equal(RUN("trian", "small.yaml"), 2);
  assert_says(err, "error: there is no command trian");
  assert_says(err, "help: did you mean train?");
  assert_int_equal(RUN("train"), 2);
  assert_says(err, "error: refrain train needs CONFIG|RUN");
  assert_int_equal(RUN("train", "small.yaml", "--resum"), 2);
  assert_says(err, "help: did you mean --resume?");
  assert_int_equal(RUN("train", "small.yaml", "--top-k", "3"), 2);
  assert_says(err, "has no option --top-k");
  assert_int_equal(RUN("generate", "runs/x", "--tokens", "many"), 2);
  assert_says(err, "--tokens: \"many\" is not a number");
  assert_int_equal(RUN("generate", "a", "b"), 2);
  assert_int_equal(RUN("generate", "--help"), 0);
  assert_says(out, "--temperature");
  assert_null(strstr(out, "--resume"));
}

static json_t *parsed(void) {
  json_error_t e;
  json_t *v = json_loads(out, JSON_REJECT_DUPLICATES, &e);
  if (!v) fail_msg("%s in:\n%s", e.text, out);
  return v;
}

static json_int_t number(const json_t *o, const char *key) {
  const json_t *v = json_object_get(o, key);
  if (!json_is_number(v)) fail_msg("%s is no number", key);
  return (json_int_t)json_number_value(v);
}

/* `help COMMAND` is `COMMAND --help`, with that command's options alone. */
static void help(void **state) {
  (void)state;
  static const char *const commands[] = {"train", "generate", "eval",    "check", "keys",  "plan",
                                         "trace", "schedule", "profile", "bench", "doctor"};
  for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
    static char first[1 << 14];
    assert_int_equal(RUN("help", commands[i]), 0);
    snprintf(first, sizeof first, "%s", out);
    assert_int_equal(strncmp(first, "usage: refrain ", 15), 0);
    assert_int_equal(strncmp(first + 15, commands[i], strlen(commands[i])), 0);
    assert_says(first, "--json");
    assert_int_equal(RUN(commands[i], "--help"), 0);
    assert_string_equal(first, out);
    for (const char *line = out; *line; line += strcspn(line, "\n") + 1)
      if (strcspn(line, "\n") > 80) fail_msg("more than 80 columns: %s", line);
  }
  assert_int_equal(RUN("help"), 0);
  assert_says(out, "usage: refrain COMMAND");
  assert_int_equal(RUN("help", "trian"), 2);
  assert_says(err, "help: did you mean train?");
}

static json_t *parsed_error(void) {
  json_error_t e;
  json_t *v = json_loads(err, JSON_REJECT_DUPLICATES, &e);
  if (!v) fail_msg("%s in:\n%s", e.text, err);
  return v;
}

/* With --json standard error has one object, for errors of the library and of the command line. */
static void json_errors(void **state) {
  (void)state;
  static const struct {
    const char *arguments[6], *status, *slug, *message;
    int code;
  } wrong[] = {
      {{"trian", "--json"}, "invalid", "usage", "there is no command trian", 2},
      {{"train", "small.yaml", "--resum", "--json"}, "invalid", "usage", "refrain train has no option --resum", 2},
      {{"train", "missing.yaml", "--json"}, "input or output", "usage", "missing.yaml: No such file or directory", 4},
      {{"check", "small.yaml", "--set", "optimizer.lrr=1", "--json"}, "invalid", "config.key", "optimizer.lrr", 2},
      {{"generate", "none", "--json"}, "input or output", "file", "none", 4},
      {{"plan", "small.yaml", "--svg", "none/x.svg"}, NULL, NULL, NULL, 4},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *const *a = wrong[i].arguments;
    assert_int_equal(RUN(a[0], a[1], a[2], a[3], a[4], a[5]), wrong[i].code);
    assert_string_equal(out, "");
    if (!wrong[i].status) continue;
    json_t *v = parsed_error();
    assert_string_equal(json_string_value(json_object_get(v, "status")), wrong[i].status);
    const char *slug = json_string_value(json_object_get(v, "slug"));
    assert_int_equal(strncmp(slug, wrong[i].slug, strlen(wrong[i].slug)), 0);
    assert_says(json_string_value(json_object_get(v, "message")), wrong[i].message);
    assert_true(*json_string_value(json_object_get(v, "next")) != '\0');
    json_decref(v);
  }
}

static void keys(void **state) {
  (void)state;
  assert_int_equal(RUN("keys"), 0);
  assert_says(out, "optimizer.lr\n");
  assert_says(out, "memory.recompute\n");
  assert_int_equal(RUN("keys", "RECOMPUTE", "--json"), 0);
  json_t *v = parsed();
  const json_t *rows = json_object_get(v, "keys");
  assert_true(json_array_size(rows) >= 1 && json_array_size(rows) < 10);
  bool found = false;
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const json_t *row = json_array_get(rows, i);
    found |= strcmp(json_string_value(json_object_get(row, "name")), "memory.recompute") == 0;
    assert_true(*json_string_value(json_object_get(row, "meaning")) != '\0');
    assert_true(json_is_boolean(json_object_get(row, "resume_may_change")));
  }
  assert_true(found);
  json_decref(v);
  assert_int_equal(RUN("keys", "nothing-like-it"), 2);
  assert_int_equal(RUN("keys", "warmpu"), 2);
  assert_says(err, "did you mean warmup?");
}

/* Runs `train` with standard error on a terminal of the given width; its text goes to `out`. */
static void run_at_terminal(const char *term, const char *folder, int columns) {
  const struct winsize size = {.ws_row = 24, .ws_col = (unsigned short)columns};
  int fd;
  size_t n = 0;
  const pid_t child = forkpty(&fd, NULL, NULL, &size);
  assert_true(child >= 0);
  if (child == 0) {
    setenv("TERM", term, 1);
    execl(RFT_BINARY_DIR "/refrain", "refrain", "train", "small.yaml", "--out", folder, "--set", "run.steps=3000",
          "--set", "run.evaluate_every=1000", (char *)NULL);
    _exit(127);
  }
  for (ssize_t got; (got = read(fd, out + n, sizeof out - 1 - n)) > 0;) n += (size_t)got; /* EIO at the end */
  out[n] = '\0';
  close(fd);
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* At a terminal the progress line fits its width, whatever that is; a dumb one gets no escapes. */
static void progress_fits(void **state) {
  (void)state;
  static const int widths[] = {120, 80, 40, 20};
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
    char folder[16];
    int rewritten = 0;
    snprintf(folder, sizeof folder, "tty%d", widths[i]);
    run_at_terminal("xterm", folder, widths[i]);
    for (const char *s = out; (s = strstr(s, "\rstep ")); s++) {
      const size_t length = strcspn(s + 1, "\r\n\033");
      if ((int)length >= widths[i]) fail_msg("%zu columns of %d: %.*s", length, widths[i], (int)length, s + 1);
      assert_int_equal(strncmp(s + 1 + length, "\033[K", 3), 0); /* clears the rest of a longer line before it */
      rewritten++;
    }
    assert_true(rewritten >= 2);
  }
  run_at_terminal("dumb", "dumb", 80);
  assert_null(strchr(out, '\033'));
  assert_null(strstr(out, "\rstep"));
  assert_says(out, "step 1/3000");
}

/* A closed standard stream does not lend its descriptor to a file of the run. */
static void closed_streams(void **state) {
  (void)state;
  const char *const arguments[] = {"train", "small.yaml", "--out", "closed", NULL};
  const pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) {
    const char *argv[8] = {RFT_BINARY_DIR "/refrain"};
    for (int i = 0; arguments[i]; i++) argv[i + 1] = arguments[i];
    close(STDIN_FILENO);
    close(STDOUT_FILENO);
    close(STDERR_FILENO);
    execv(argv[0], (char *const *)argv);
    _exit(127);
  }
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status)); /* output that cannot be written is exit code 4, as for any closed pipe */
  slurp("closed/log.jsonl", out, sizeof out);
  for (const char *line = out; *line; line += strcspn(line, "\n") + 1)
    if (*line != '{') fail_msg("not a log entry: %.80s", line);
}

/* A report that cannot be written is exit code 4, also where the command flushed its output itself. */
static void full_device(void **state) {
  (void)state;
  const int full = open("/dev/full", O_WRONLY);
  if (full < 0) skip();
  close(full);
  static const char *const commands[] = {"plan", "check", "trace", "profile"};
  for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++) {
    char line[4400];
    snprintf(line, sizeof line, "'%s/refrain' %s small.yaml >/dev/full 2>full.txt", RFT_BINARY_DIR, commands[i]);
    const int status = system(line);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) != 4) fail_msg("%s: exit code %d", commands[i], WEXITSTATUS(status));
    slurp("full.txt", out, sizeof out);
    assert_says(out, "standard output cannot be written");
  }
}

static void bad_input(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "missing.yaml"), 4);
  assert_says(err, "error: missing.yaml");
  write_file("key.yaml", "refrain: 1\nmodle: {hidden_size: 16}\n");
  assert_int_equal(RUN("check", "key.yaml"), 2);
  assert_says(err, "key.yaml:2");
  assert_says(err, "did you mean \"model\"?");
  assert_says(err, "help: ");
  assert_int_equal(RUN("check", "small.yaml", "--set", "optimizer.lrr=1"), 2);
  assert_says(err, "did you mean \"lr\"?");
  assert_int_equal(RUN("train", "small.yaml", "--set", "data.train=[\"none/*.c\"]", "--out", "none"), 2);
  assert_says(err, "none/*.c");
  write_file("empty.txt", "");
  assert_int_equal(RUN("train", "small.yaml", "--set", "data.train=[empty.txt]", "--out", "none"), 2);
  assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.budget=1KiB"), 3);
  assert_says(err, "plan.over_budget");
  assert_says(err, "but memory.budget is 1024 bytes (1.0 KiB)");
  assert_says(err, "help: raise memory.budget, or use settings that the plan lists");
  assert_says(out, "optimizer states and master weights");
  assert_says(out, "optimizer moments in bf16: optimizer.state_dtype=bf16");
  assert_says(out, "recompute activations: memory.recompute=all");
  assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.budget=1KiB", "--set", "memory.recompute=all"), 3);
  assert_null(strstr(out, "recompute activations:")); /* nothing is left to gain from it */
  assert_int_equal(RUN("train", "small.yaml", "--set", "memory.budget=1KiB", "--out", "none"), 3);
  assert_int_equal(RUN("check", "small.yaml", "--set", "model.vocab_size=100"), 2);
  assert_int_equal(RUN("eval", "no-such-run"), 4);
  assert_int_equal(RUN("train", "text"), 4);
  assert_says(err, "text is a folder without config.yaml");
  assert_int_equal(RUN("plan", "text"), 4);
  assert_says(err, "text is a folder without config.yaml and without config.json");
  assert_int_equal(RUN("generate", "no-such-run", "--top-p", "2"), 2);
  assert_says(err, "error: --top-p 2 is not a probability\nhelp: give more than 0 and at most 1");
  assert_int_equal(RUN("generate", "no-such-run", "--top-p", "0"), 2);
  assert_int_equal(RUN("generate", "no-such-run", "--prompt", ""), 2);
  assert_says(err, "error: --prompt is empty\nhelp: give at least one byte");
  assert_int_equal(access("none", F_OK), -1); /* nothing was created */
  assert_int_equal(RUN("trace", "small.yaml", "--after", "lunch"), 2);
  assert_says(err, "error: --after: unknown value \"lunch\"\nhelp: choose from: record autodiff prune");
  assert_int_equal(RUN("bench", "nothing"), 2);
}

static void check_sources(void **state) {
  (void)state;
  assert_int_equal(RUN("check", "small.yaml", "--set", "run.seed=7"), 0);
  assert_says(out, "seed: 7 # --set");
  assert_says(out, "hidden_size: 16 # small.yaml:2");
  assert_says(out, "# default");
  assert_int_equal(
      RUN("check", "small.yaml", "--json", "--set", "optimizer.groups=[{match: \"*norm*\", weight_decay: 0}]"), 0);
  json_t *v = parsed();
  assert_int_equal(number(json_object_get(v, "model.hidden_size"), "value"), 16);
  assert_string_equal(json_string_value(json_object_get(json_object_get(v, "model.hidden_size"), "source")),
                      "small.yaml:2");
  const json_t *betas = json_object_get(json_object_get(v, "optimizer.betas"), "value");
  assert_true(json_number_value(json_array_get(betas, 1)) == 0.95);
  const json_t *groups = json_object_get(json_object_get(v, "optimizer.groups"), "value");
  assert_string_equal(json_string_value(json_object_get(json_array_get(groups, 0), "match")), "*norm*");
  json_decref(v);
  assert_int_equal(RUN("check", "small.yaml", "--files", "train", "--json"), 0);
  v = parsed();
  assert_true(json_array_size(json_object_get(v, "files")) > 3);
  json_decref(v);
  assert_int_equal(RUN("check", "small.yaml", "--files", "validation"), 0);
  assert_says(out, ".txt\n");
  int held_out = 0;
  for (const char *s = out; (s = strchr(s, '\n')); s++) held_out++;
  assert_int_equal(RUN("check", "small.yaml", "--files", "train"), 0);
  int rest = 0;
  for (const char *s = out; (s = strchr(s, '\n')); s++) rest++;
  assert_true(held_out > 0 && rest > held_out);
  assert_int_equal(held_out + rest, 10);
}

/* A model that no machine here has room for is planned without memory for it, from the command line and as JSON. */
static void plan_large(void **state) {
  (void)state;
  static const char *const large[] = {"model.hidden_size=16384", "model.intermediate_size=53248",
                                      "model.num_attention_heads=128", "model.num_hidden_layers=126"};
#define LARGE "--set", large[0], "--set", large[1], "--set", large[2], "--set", large[3]
  assert_int_equal(RUN("plan", "small.yaml", LARGE), 3);
  assert_says(err, "[plan.over_budget]");
  assert_says(err, "but the memory available here is ");
  assert_says(out, "does NOT fit in ");
  assert_says(out, "settings that need less");
  assert_int_equal(RUN("plan", "small.yaml", LARGE, "--json"), 3);
  json_t *v = parsed();
  assert_false(json_is_true(json_object_get(v, "fits")));
  const json_t *memory = json_object_get(v, "memory"), *settings = json_object_get(v, "settings");
  json_int_t sum = 0, weights = number(memory, "weights");
  const char *key;
  json_t *value;
  json_object_foreach(json_object_get(v, "memory"), key, value) sum += json_integer_value(value);
  assert_int_equal(sum, number(v, "planned_bytes"));
  assert_int_equal(number(memory, "optimizer"), 2 * weights); /* two moments in f32 */
  assert_true(json_array_size(settings) >= 2);
  for (size_t i = 0; i < json_array_size(settings); i++) {
    const json_t *row = json_array_get(settings, i);
    assert_true(number(row, "planned_bytes") < number(v, "planned_bytes"));
    const char *set = json_string_value(json_array_get(json_object_get(row, "set"), 0));
    if (strcmp(set, "optimizer.state_dtype=bf16") != 0 || json_array_size(json_object_get(row, "set")) > 1) continue;
    assert_int_equal(number(v, "planned_bytes") - number(row, "planned_bytes"), weights);
  }
  json_decref(v);
  assert_int_equal(RUN("trace", "small.yaml", LARGE, "--phase", "load"), 0);
  assert_int_equal(RUN("check", "small.yaml", LARGE), 0);
#undef LARGE
}

/* memory.recompute=auto keeps each budget of the frontier. */
static void plan_frontier(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", "small.yaml", "--frontier", "--json"), 0);
  json_t *v = parsed();
  const json_t *points = json_object_get(v, "frontier");
  size_t n = json_array_size(points);
  assert_true(n >= 3);
  json_int_t first = number(json_array_get(points, 0), "planned_bytes"),
             last = number(json_array_get(points, n - 1), "planned_bytes");
  assert_true(last < first);
  json_decref(v);
  for (int i = 0; i < 3; i++) {
    char budget[64];
    snprintf(budget, sizeof budget, "memory.budget=%lldB", (long long)(i < 2 ? (i ? last : first) : last - 1));
    assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.recompute=auto", "--set", budget, "--json"),
                     i < 2 ? 0 : 3);
    if (i == 2) break;
    v = parsed();
    assert_true(number(v, "planned_bytes") <= (i ? last : first));
    json_decref(v);
  }
  assert_int_equal(RUN("plan", "small.yaml", "--frontier"), 0);
  assert_says(out, "extra FLOPs");
  assert_int_equal(RUN("trace", "small.yaml", "--set", "memory.recompute=all", "--after", "recompute"), 0);
  assert_says(out, "recompute of %");
}

/* The picture has one rectangle per buffer of the step, and the reason of each recomputed one. */
static void plan_picture(void **state) {
  (void)state;
  int buffers = 0, rectangles = 0;
  const char *const whole = "memory.recompute=all";
  assert_int_equal(RUN("plan", "small.yaml", "--set", whole, "--json"), 0);
  json_t *v = parsed();
  for (size_t i = 0; i < json_array_size(json_object_get(v, "buffers")); i++)
    buffers += number(json_array_get(json_object_get(v, "buffers"), i), "offset") >= number(v, "persistent_bytes");
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml", "--set", whole, "--set", "memory.budget=1GiB", "--svg", "plan.svg"), 0);
  slurp("plan.svg", out, sizeof out);
  for (const char *s = out; (s = strstr(s, "<rect class=\"b")); s++) rectangles++;
  assert_int_equal(rectangles, buffers + 1); /* and the legend's */
  assert_int_equal(strncmp(out, "<svg ", 5), 0);
  assert_string_equal(out + strlen(out) - 7, "</svg>\n");
  assert_says(out, "lower bound:");
  assert_says(out, "budget 1.0 GiB");
  assert_says(out, "\nrecompute of op ");
  assert_int_equal(RUN("plan", "small.yaml", "--svg", "missing/plan.svg"), 4);
}

/* Every stroke is thin beside its rectangle, so that no rectangle vanishes below it; how many rectangles there are. */
static int check_strokes(void) {
  int n = 0;
  for (const char *s = out; (s = strstr(s, "<rect class=\"b\"")); s++) {
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

/* Pictures of large steps: strokes scale, and tiny rectangles become bands. */
static void large_pictures(void **state) {
  (void)state;
  int rectangles = 0;
  assert_int_equal(RUN("plan", "small.yaml", "--set", "model.num_hidden_layers=96", "--set", "batch.tokens=256",
                       "--svg", "large.svg"),
                   0);
  slurp("large.svg", out, sizeof out);
  for (const char *s = out; (s = strstr(s, "<rect")); s++) rectangles++;
  assert_true(rectangles > 100 && rectangles < 4000);
  assert_says(out, "several buffers, mostly activation");
  check_strokes();
  assert_int_equal(RUN("schedule", "--kind", "interleaved", "--stages", "8", "--microbatches", "64", "--svg", "-"), 0);
  assert_int_equal(check_strokes(), 8 * 64 * 2 * 2);
  assert_int_equal(RUN("schedule", "--kind", "gpipe", "--stages", "8", "--microbatches", "2048", "--svg", "-"), 0);
  assert_true(check_strokes() < 100);
}

static void plan_and_trace(void **state) {
  (void)state;
  assert_int_equal(RUN("plan", "small.yaml", "--json"), 0);
  json_t *v = parsed();
  assert_int_equal(number(v, "planned_bytes"), number(v, "persistent_bytes") + number(v, "transient_planned_bytes"));
  assert_true(number(v, "transient_lower_bound_bytes") <= number(v, "transient_planned_bytes"));
  const json_t *buffers = json_object_get(v, "buffers");
  assert_true(json_array_size(buffers) > 20);
  bool found = false;
  for (size_t i = 0; i < json_array_size(buffers); i++) {
    const json_t *b = json_array_get(buffers, i);
    assert_true(number(b, "offset") + number(b, "bytes") <= number(v, "planned_bytes"));
    if (strcmp(json_string_value(json_object_get(b, "name")), "model.layers.0.mlp.up_proj.weight") != 0) continue;
    found = true;
    assert_int_equal(number(b, "bytes"), 32 * 16 * 4);
  }
  assert_true(found);
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml"), 0);
  assert_says(out, "fits in");
  assert_true(strstr(out, "cache.") == NULL); /* training has no caches */
  for (int i = 0; i < 2; i++) {
    assert_int_equal(RUN("plan", "small.yaml", "--program", i ? "decode" : "prefill"), 0);
    assert_says(out, "cache.*.k");
    assert_says(out, "cache.*.v");
    assert_says(out, "attention_cached");
  }
  assert_int_equal(RUN("plan", "small.yaml", "--program", "generate"), 2);
  assert_int_equal(RUN("trace", "small.yaml", "--after", "autodiff", "--json"), 0);
  v = parsed();
  assert_says(json_string_value(json_object_get(v, "trace")), "model.layers.0.mlp.down_proj.weight");
  json_decref(v);
  assert_int_equal(RUN("trace", "small.yaml", "--after", "autodiff", "--flat"), 0);
  assert_int_equal(strncmp(out, "refrain-trace 1", 15), 0);
  for (int i = 0; i < 2; i++) { /* logits are f32 beside weights of either type */
    const char *dtype = i ? "precision.dtype=bf16" : "precision.dtype=f32";
    assert_int_equal(RUN("trace", "small.yaml", "--after", "fuse", "--flat", "--set", dtype), 0);
    assert_says(out, " = linear_cross_entropy(");
  }
}

/* A mixture of experts: its plan, its load during training, and text from the trained model. */
static void experts(void **state) {
  (void)state;
  static const char *const sets[] = {"model.model_type=mixtral", "model.num_experts=4", "run.steps=3"};
#define SETS "--set", sets[0], "--set", sets[1], "--set", sets[2]
  assert_int_equal(RUN("plan", "small.yaml", SETS), 0);
  assert_says(out, "experts                   4 in a layer  layers 1, each with weights of 24576 bytes");
  assert_says(out, "64 rows of a microbatch, whatever the routing");
  assert_says(out, "model.layers.*.mlp.experts.gate_up_proj");
  assert_int_equal(RUN("train", "small.yaml", "--out", "experts", SETS), 0);
  assert_says(err, "  experts ");
  assert_int_equal(RUN("generate", "experts", "--prompt", "1 and", "--tokens", "5"), 0);
  assert_int_equal(RUN("check", "small.yaml", "--set", "model.num_experts=4"), 2);
  assert_says(err, "model_type mixtral and qwen3_moe have");
#undef SETS
}

/* The shares add up to 1 and the calls to `calls`. */
static void check_rows(const json_t *rows, int64_t calls) {
  double share = 0;
  assert_true(json_is_array(rows) && json_array_size(rows) > 1);
  for (size_t i = 0; i < json_array_size(rows); i++) {
    const json_t *row = json_array_get(rows, i);
    share += json_number_value(json_object_get(row, "share"));
    calls -= number(row, "calls");
    assert_true(json_number_value(json_object_get(row, "roofline")) >= 0);
  }
  assert_true(share > 0.999 && share < 1.001);
  assert_int_equal(calls, 0);
}

/* `auto` prints its choice; a named device is never replaced. */
static void devices(void **state) {
  (void)state;
  assert_int_equal(RUN("doctor", "--json"), 0);
  json_t *v = parsed();
  const bool has_cuda = number(v, "has_cuda") != 0;
  const json_t *pieces = json_object_get(v, "cuda_pieces");
  assert_true(json_array_size(pieces) > 0);
  for (size_t i = 0; i < json_array_size(pieces); i++)
    assert_true(*json_string_value(json_object_get(json_array_get(pieces, i), "costs")) != '\0');
  if (has_cuda) assert_int_equal(number(json_array_get(pieces, 1), "missing"), 0); /* the driver */
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml", "--device", "auto"), 0);
  assert_says(err, has_cuda ? "device: cuda: " : "device: cpu: ");
  assert_int_equal(RUN("plan", "small.yaml", "--device", "auto", "--quiet"), 0);
  assert_string_equal(err, "");
  if (!has_cuda) assert_int_equal(RUN("train", "small.yaml", "--device", "cuda", "--out", "nowhere"), 3);
  assert_int_equal(RUN("plan", "small.yaml", "--device", "gpu"), 2);
  /* options override the environment */
  setenv("REFRAIN_DEVICE", "auto", 1);
  setenv("REFRAIN_THREADS", "none", 1);
  assert_int_equal(RUN("plan", "small.yaml"), 2);
  assert_says(err, "REFRAIN_THREADS");
  assert_int_equal(RUN("plan", "small.yaml", "--threads", "0"), 0);
  assert_says(err, has_cuda ? "device: cuda: " : "device: cpu: ");
  assert_int_equal(RUN("plan", "small.yaml", "--threads", "0", "--device", "cpu"), 0);
  assert_string_equal(err, "");
  unsetenv("REFRAIN_DEVICE");
  unsetenv("REFRAIN_THREADS");
}

/* A missing piece is printed with its cost. Measuring is slow under a sanitizer, so doctor runs once. */
static void doctor(void **state) {
  (void)state;
  setenv("REFRAIN_ONEDNN", "0", 1);
  const int code = RUN("doctor");
  unsetenv("REFRAIN_ONEDNN");
  assert_int_equal(code, 0);
  assert_says(out, "none (turned off)");
  if (!strstr(out, "missing      CUDA module: no GPU is used")) assert_says(out, "for GPUs     CUDA module");
  assert_says(out, "missing      oneDNN: GEMMs run on the portable kernel");
}

static void bench(void **state) {
  (void)state;
  assert_int_equal(
      RUN("bench", "demo", "--steps", "2", "--json", "--dtype", "f32", "--set", "model.num_hidden_layers=1"), 0);
  json_t *v = parsed();
  assert_string_equal(json_string_value(json_object_get(v, "dtype")), "f32");
  assert_int_equal(number(v, "profiled_steps"), 2);
  assert_true(json_number_value(json_object_get(v, "ms_per_step")) > 0.0);
  assert_true(number(v, "tokens_per_second") > 0);
  assert_true(number(v, "touched_bytes") <= number(v, "planned_bytes"));
  assert_true(number(v, "ops") > 50);
  assert_true(json_number_value(json_object_get(v, "compile_us_per_op")) > 0.0);
  const json_t *ceilings = json_object_get(v, "ceilings"), *kinds = json_object_get(v, "kinds");
  assert_true(json_number_value(json_object_get(ceilings, "flops_per_second")) > 0);
  assert_true(json_number_value(json_object_get(ceilings, "bytes_per_second")) > 0);
  check_rows(kinds, number(v, "profiled_ops"));
  bool attention = false;
  for (size_t i = 0; i < json_array_size(kinds); i++) {
    const json_t *row = json_array_get(kinds, i);
    if (strcmp(json_string_value(json_object_get(row, "name")), "attention") != 0) continue;
    attention = true; /* documents of 256 bytes, of which each sees 128: examples/demo.yaml */
    assert_true(json_number_value(json_object_get(row, "flops")) == 2.0 * 2 * 4 * (128 * 129 / 2 + 128 * 128) * 128);
  }
  assert_true(attention);
  json_decref(v);
  assert_int_equal(RUN("bench", "demo", "--dtype", "f31"), 2);
  assert_says(err, "dtype");
  assert_int_equal(RUN("bench", "replay", "--json"), 0);
  v = parsed();
  assert_int_equal(number(v, "ops"), 1000);
  json_decref(v);
  assert_int_equal(RUN("bench", "graphs", "--json"), 0);
  v = parsed();
  assert_int_equal(number(v, "callables"), 64);
  assert_true(json_number_value(json_object_get(v, "launch_us")) > 0.0);
  json_decref(v);
  assert_int_equal(RUN("bench", "small", "--json", "--dtype", "f32"), 0);
  v = parsed();
  assert_true(number(v, "ops") > 20);
  assert_true(json_number_value(json_object_get(v, "one_us")) > 0.0);
  assert_true(json_number_value(json_object_get(v, "in_a_row_us")) > 0.0);
  json_decref(v);
  assert_int_equal(RUN("bench", "compile", "--json", "--steps", "1"), 0);
  v = parsed();
  const json_t *cases = json_object_get(v, "cases");
  assert_int_equal(json_array_size(cases), 4);
  for (size_t i = 0; i < 4; i++) assert_true(number(json_array_get(cases, i), "ops") > (i % 2 ? 4000 : 400));
  json_decref(v);
}

static void profile(void **state) {
  (void)state;
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "3", "--json", "--trace", "trace.json"), 0);
  json_t *v = parsed();
  assert_int_equal(number(v, "profiled_steps"), 3);
  const json_int_t ops = number(v, "profiled_ops");
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
    if (number(e, "tid") == 0) {
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
  assert_says(out, "roofline");
  assert_int_equal(RUN("profile", "small.yaml", "--steps", "1", "--trace", "none/trace.json"), 4);
  assert_says(err, "none/trace.json");
  assert_int_equal(RUN("profile", "small", "--steps", "1"), 0);
  assert_says(out, "attention");
  assert_int_equal(RUN("profile", "missing"), 4);
  assert_int_equal(RUN("profile", "graphs"), 2);
  assert_says(err, "error: the benchmark graphs has no step to profile; refrain bench graphs times it");
  assert_says(err, "help: give a configuration, or one of small, demo, gpt2-124m, ");
}

/* An option that a command does not use is refused, with the commands that use it. */
static void unused_options(void **state) {
  (void)state;
  static const struct {
    const char *arguments[8], *says, *help;
  } wrong[] = {
      {{"bench", "graphs", "--set", "run.steps=3"}, "refrain bench graphs does not use --set", "these use it: demo, "},
      {{"bench", "graphs", "--dtype", "bf16"},
       "refrain bench graphs does not use --dtype",
       "compile, small, kernels\n"},
      {{"bench", "small", "--eager"}, "refrain bench small does not use --eager", "qwen3-moe\n"},
      {{"bench", "small", "--steps", "3"}, "does not use --steps", "qwen3-moe, compile\n"},
      {{"bench", "replay", "--steps=3"}, "does not use --steps", "these use it"},
      {{"bench", "graphs", "--threads", "2"}, "refrain bench graphs does not use --threads", "small, kernels\n"},
      {{"profile", "small", "--set", "run.seed=3"}, "small has no configuration", "give a configuration"},
      {{"keys", "lr", "--quiet"}, "refrain keys has no option --quiet", "lists"},
      {{"doctor", "--quiet"}, "refrain doctor has no option --quiet", "lists"},
      {{"bench", "compile", "--eager"}, "does not use --eager", "these use it"},
      {{"bench", "--dtype", "f32"}, "not every benchmark uses --dtype: name one", "these use it"},
      {{"bench", "small", "--dtype", "f31"}, "--dtype: unknown value \"f31\"", "did you mean f32?"},
      {{"plan", "small.yaml", "--svg", "x.svg", "--json"}, "different forms of output", "omit one"},
      {{"plan", "small.yaml", "--svg", "x.svg", "--frontier"}, "different forms of output", "omit one"},
      {{"plan", "small.yaml", "--all", "--json"}, "--all is for the table of buffers", "omit --all"},
      {{"plan", "small.yaml", "--all", "--frontier"}, "--all is for the table of buffers", "omit --all"},
      {{"trace", "small.yaml", "--diff", "--flat"}, "--diff prints what the pass changed", "omit one"},
      {{"trace", "small.yaml", "--diff", "--phase", "wgrad"}, "--diff prints what the pass changed", "omit one"},
      {{"train", "small.yaml", "--strict"}, "--strict is for --resume", "add --resume"},
      {{"schedule", "--order", "1,-1", "--svg", "x.svg", "--json"}, "two forms of output", "omit one"},
      {{"schedule", "--order", "1,-1", "--threads", "2"}, "refrain schedule has no option --threads", "lists"},
      {{"schedule", "--order", "1,-1", "--device", "cuda"}, "refrain schedule has no option --device", "lists"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *const *a = wrong[i].arguments;
    assert_int_equal(RUN(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]), 2);
    assert_string_equal(out, "");
    assert_says(err, wrong[i].says);
    assert_says(err, wrong[i].help);
  }
  assert_int_equal(access("x.svg", F_OK), -1);
}

static void train_and_use(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--json", "--quiet"), 0);
  json_t *v = parsed();
  assert_string_equal(json_string_value(json_object_get(v, "folder")), "runs/small");
  assert_int_equal(number(v, "step"), 20);
  /* a library's scratch may have bytes that it leaves alone */
  assert_true(number(v, "touched_bytes") <= number(v, "planned_bytes"));
  assert_true((double)number(v, "touched_bytes") > 0.99 * (double)number(v, "planned_bytes"));
  const double bits = json_number_value(json_object_get(v, "validation_bits_per_byte"));
  json_decref(v);
  assert_string_equal(err, "");
  assert_int_equal(RUN("check", "small.yaml", "--threads", "99999"), 2); /* not silently fewer */
  assert_says(err, "threads");
  assert_says(err, "help: refrain check --help explains the options");
  assert_int_equal(RUN("train", "small.yaml"), 2);
  assert_says(err, "run.exists");
  assert_says(err, "help: add --resume to continue it");
  assert_int_equal(RUN("eval", "runs/small", "--json"), 0);
  v = parsed();
  assert_true(json_number_value(json_object_get(v, "bits_per_byte")) == bits);
  json_decref(v);
  assert_int_equal(RUN("eval", "runs/small"), 0);
  assert_int_equal(strncmp(out, "validation: ", 12), 0);
  assert_says(out, " bits per byte\n");
  assert_int_equal(RUN("eval", "runs/small", "--set", "data.validation=0%"), 2);
  assert_says(err, "error: data.validation holds out nothing to evaluate on: 0 of 10 files, 0 bytes [data.held_out]");
  assert_says(err, "help: set data.validation to a share");
  /* A checkpoint is a model's folder: its text is that of the run. */
  assert_int_equal(RUN("generate", "runs/small/step-000020", "--prompt", "1 and ", "--tokens", "8", "--json"), 0);
  v = parsed();
  char text[64];
  snprintf(text, sizeof text, "%s", json_string_value(json_object_get(v, "text")));
  json_decref(v);
  assert_int_equal(RUN("generate", "runs/small", "--prompt", "1 and ", "--tokens", "8", "--json"), 0);
  v = parsed();
  assert_string_equal(json_string_value(json_object_get(v, "text")), text);
  json_decref(v);
  assert_int_equal(RUN("eval", "runs/small/step-000020"), 2);
  assert_says(err, "data.validation");
  assert_int_equal(RUN("eval", "runs/small/step-000020", "--set", "data.validation=[text/1.txt]", "--json"), 0);
  v = parsed();
  assert_true(number(v, "tokens") > 100);
  json_decref(v);
  assert_int_equal(RUN("generate", "text"), 4);
  assert_int_equal(RUN("generate", "runs/small", "--prompt", "1 and ", "--tokens", "8"), 0);
  assert_int_equal(strncmp(out, "1 and ", 6), 0);
  assert_int_equal(strlen(out), 6 + 8 + 1);
  assert_says(err, "prompt of 6 bytes in ");
  assert_says(err, " tokens/s\n");
  assert_int_equal(RUN("generate", "runs/small", "--tokens", "40", "--json"), 0); /* more than the window */
  v = parsed();
  assert_int_equal(number(v, "tokens"), 40);
  assert_true(json_number_value(json_object_get(v, "tokens_per_second")) > 0);
  json_decref(v);
  /* another model does not go on from it */
  assert_int_equal(RUN("train", "small.yaml", "--resume", "--set", "model.hidden_size=32"), 2);
  assert_says(err, "resume.mismatch");
  /* more steps do */
  assert_int_equal(RUN("train", "small.yaml", "--resume", "--set", "run.steps=25"), 0);
  assert_says(out, "25 of 25 steps");
  assert_says(err, "step 25/25");
}

static void wait_for(const char *path, const char *what) {
  for (int i = 0; i < 2000; i++) {
    nanosleep(&(struct timespec){.tv_nsec = 10 * 1000 * 1000}, NULL);
    if (access(path, F_OK) != 0) continue;
    slurp(path, out, sizeof out);
    if (strstr(out, what)) return;
  }
  fail_msg("%s never says %s", path, what);
}

/* The command that the program printed after "to continue: ", split at spaces into c. */
static void read_command(char *text, const char **c) {
  char *at = strstr(text, "to continue: refrain ");
  if (!at) fail_msg("no command to continue with in:\n%s", text);
  at += strlen("to continue: refrain ");
  at[strcspn(at, "\n")] = '\0';
  for (char *word = strtok(at, " "); word; word = strtok(NULL, " ")) *c++ = word;
  *c = NULL;
}

static void interrupted(void **state) {
  (void)state;
  const char *const arguments[] = {"train", "small.yaml",         "--out", "long", "--threads", "1",
                                   "--set", "run.steps=10000000", NULL};
  pid_t child = start(arguments);
  wait_for("long/log.jsonl", "\"metrics\"");
  kill(child, SIGINT);
  assert_int_equal(finish(child), 5);
  assert_says(err, "stopped after step");
  assert_says(err, "to continue: refrain train long --resume --threads 1\n");
  assert_int_equal(RUN("generate", "long", "--tokens", "1"), 0); /* the checkpoint is there */
  /* The printed command continues the run; the rest of the command line is in the run's configuration. */
  child = start((const char *const[]){"train", "long", "--resume", "--threads", "1", NULL});
  wait_for("err", "loss ");
  kill(child, SIGINT);
  assert_int_equal(finish(child), 5);
  const char *command[12];
  read_command(err, command);
  assert_string_equal(command[1], "long");
}

/* The folder of a run, and its configuration, name the run. */
static void resume_by_folder(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "small.yaml", "--out", "again", "--set", "run.steps=4"), 0);
  assert_int_equal(RUN("train", "again"), 2);
  assert_says(err, "again is a run");
  assert_says(err, "--resume continues it");
  assert_int_equal(RUN("train", "again/config.yaml"), 2);
  assert_says(err, "again is a run");
  assert_int_equal(RUN("train", "again/", "--resume", "--set", "run.steps=6"), 0);
  assert_says(out, "6 of 6 steps");
  assert_int_equal(RUN("train", "again/config.yaml", "--resume", "--set", "run.steps=8"), 0);
  assert_says(out, "8 of 8 steps");
  assert_says(out, "again/step-000008");
  assert_int_equal(access("runs/config", F_OK), -1);
  assert_int_equal(RUN("train", "again", "--resume", "--out", "other"), 2);
  assert_says(err, "--out is for a new run");
  assert_int_equal(RUN("train", "again", "--resume", "--set", "run.steps=3"), 0);
  assert_null(strstr(out, "8 of 3"));
  assert_int_equal(RUN("plan", "again"), 0);
  FILE *f = fopen("again/config.yaml", "ab"); /* text after a NUL is not ignored */
  assert_non_null(f);
  assert_int_equal(fwrite("\0more", 1, 5, f), 5);
  fclose(f);
  static const char *const commands[] = {"eval", "generate", "plan", "check"};
  for (int i = 0; i < 4; i++) {
    assert_int_equal(RUN(commands[i], "again"), 2);
    assert_says(err, "NUL byte");
  }
  assert_int_equal(RUN("train", "again", "--resume"), 2);
  assert_says(err, "NUL byte");
  slurp("again/config.yaml", out, sizeof out); /* up to the NUL */
  write_file("again/config.yaml", out);
  assert_int_equal(RUN("check", "again"), 0);
  assert_says(out, "again/config.yaml:");
  assert_int_equal(RUN("plan", "again/step-000008"), 0); /* a checkpoint is a model's folder */
  assert_int_equal(RUN("train", "again/step-000008"), 2);
  assert_says(err, "write a configuration with `model: again/step-000008`");
}

static void schedules(void **state) {
  (void)state;
  static const char *const needed[] = {"bubble", "slots", "peak_bytes", "actions"};
  assert_int_equal(RUN("schedule", "--kind", "1f1b", "--stages", "4", "--microbatches", "8"), 0);
  assert_says(out, "   0  0F0 0F1 0F2 0F3 ....");
  assert_says(out, "makespan 33, bubble 27.3%");
  assert_int_equal(RUN("schedule", "--kind", "zb-h1", "--stages", "64", "--microbatches", "512"), 0);
  assert_says(out, "   0  FFF");
  assert_int_equal(RUN("schedule", "--order", "[1,1,-1,-1,-1.5,-1.5]"), 0);
  assert_says(out, "   0  0F0 0F1 0I0 0I1 0W0 0W1");
  assert_int_equal(RUN("schedule", "--order", "1,2,-2,-1", "--layers", "3,2"), 0);
  write_file("mine.txt", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n");
  write_file("costs.json", "{\"F\": 1.5, \"B\": 2, \"SEND_F\": 0.25, \"activation_bytes\": 100, \"weight_bytes\": 7}");
  write_file("costs.csv", "stage,F,B,SEND_F,activation_bytes,weight_bytes\n*,1.5,2,0.25,100,7\n");
  for (int i = 0; i < 2; i++) {
    assert_int_equal(RUN("schedule", "--file", "mine.txt", "--costs", i ? "costs.csv" : "costs.json", "--json"), 0);
    json_t *j = json_loads(out, JSON_REJECT_DUPLICATES, NULL);
    assert_non_null(j);
    assert_int_equal(json_object_size(j), 4);
    for (int k = 0; k < 4; k++) assert_non_null(json_object_get(j, needed[k]));
    /* rank 1 begins at 1.75, its two microbatches take 7, and rank 0 ends 2 later */
    const double bubble = json_real_value(json_object_get(j, "bubble"));
    assert_true(bubble > 0.34883 && bubble < 0.34884); /* 3.75 / 10.75 */
    assert_int_equal(json_integer_value(json_array_get(json_object_get(j, "peak_bytes"), 0)), 207);
    assert_int_equal(json_integer_value(json_array_get(json_array_get(json_object_get(j, "slots"), 1), 0)), 1);
    const json_t *a = json_array_get(json_array_get(json_object_get(j, "actions"), 1), 1);
    assert_string_equal(json_string_value(json_object_get(a, "op")), "B");
    assert_true(json_number_value(json_object_get(a, "start")) == 3.25);
    assert_true(json_number_value(json_object_get(a, "end")) == 5.25);
    json_decref(j);
  }
  assert_int_equal(RUN("schedule", "--file", "mine.txt", "--communication", "--svg", "mine.svg"), 0);
  slurp("mine.svg", out, sizeof out);
  assert_says(out, "<title>0B1: ");
  assert_int_equal(RUN("schedule", "--file", "mine.txt", "--svg", "missing/x.svg"), 4);
  static const struct {
    const char *arguments[8], *says, *help;
  } wrong[] = {
      {{0}, "takes one of --kind, --order and --file", "as refrain schedule --kind 1f1b"},
      {{"--kind", "1f1b", "--order", "1"}, "takes one of --kind", "as refrain"},
      {{"--kind", "1f1b"}, "--kind needs --stages and --microbatches", "as --stages 4"},
      {{"--kind", "1f1p", "--stages", "1", "--microbatches", "1"},
       "--kind: unknown value \"1f1p\"",
       "did you mean 1f1b?"},
      {{"--kind", "dualpipe"}, "--kind: unknown value \"dualpipe\"", "choose from: gpipe 1f1b"},
      {{"--kind", "1f1b", "--stages", "99999999999", "--microbatches", "1"}, "--stages 99999999999", "smaller"},
      {{"--kind", "zb-v", "--stages", "2", "--microbatches", "1", "--chunks", "3"},
       "zb-v has 2 chunks",
       "refrain schedule --help"},
      {{"--kind", "gpipe", "--stages", "99999", "--microbatches", "99999"}, "are more than", "smaller shapes"},
      {{"--order", "1,-1", "--stages", "2"}, "are for --kind", "omit them"},
      {{"--kind", "gpipe", "--layers", "2"}, "--layers is for --order", "omit it"},
      {{"--order", "1,-1", "--layers", "2,"}, "--layers: \"\" is not a count", "give a count for each chunk"},
      {{"--order", "1,-1", "--layers", "0"}, "--layers: \"0\" is not a count", "give a count"},
      {{"--order", "1,-1", "--layers", "1,1"}, "2 counts of layers for 1 chunks", "refrain schedule --help"},
      {{"--order", "1,2,-1,-2"}, "--order:1: rank 0, action 2 (0B0): comes before rank 0, action 3 (1B0)", "move"},
      {{"--file", "small.yaml"}, "small.yaml:1: rank 0, action 0: \"refrain:\" is no action", "docs/schedules.md"},
      {{"--file", "mine.txt", "--costs", "small.yaml"}, "small.yaml:1: there is no key \"refrain: 1\"", "docs/sched"},
      {{"--kind", "1f1b", "--stage", "3"}, "has no option --stage", "did you mean --stages?"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *const *a = wrong[i].arguments;
    assert_int_equal(RUN("schedule", a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]), 2);
    assert_says(err, wrong[i].says);
    assert_says(err, wrong[i].help);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(usage),
      cmocka_unit_test(help),
      cmocka_unit_test(json_errors),
      cmocka_unit_test(keys),
      cmocka_unit_test(closed_streams),
      cmocka_unit_test(full_device),
      cmocka_unit_test(progress_fits),
      cmocka_unit_test(resume_by_folder),
      cmocka_unit_test(bad_input),
      cmocka_unit_test(check_sources),
      cmocka_unit_test(plan_and_trace),
      cmocka_unit_test(plan_large),
      cmocka_unit_test(large_pictures),
      cmocka_unit_test(plan_frontier),
      cmocka_unit_test(plan_picture),
      cmocka_unit_test(experts),
      cmocka_unit_test(devices),
      cmocka_unit_test(doctor),
      cmocka_unit_test(bench),
      cmocka_unit_test(profile),
      cmocka_unit_test(unused_options),
      cmocka_unit_test(train_and_use),
      cmocka_unit_test(interrupted),
      cmocka_unit_test(schedules),
  };
  return cmocka_run_group_tests(tests, set_up, tear_down);
}
