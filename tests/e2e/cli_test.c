/* SPDX-License-Identifier: Apache-2.0
 *
 * The command line: options, help, errors and their exit codes, JSON; commands that need no run.
 */
#include <fcntl.h>

#include "support/program.h"

static void usage(void **state) {
  (void)state;
  assert_int_equal(RUN("--help"), 0);
  rft_assert_says(rft_out, "usage: refrain");
  assert_int_equal(RUN("--version"), 0);
  rft_assert_says(rft_out, "refrain 0.");
  assert_int_equal(RUN("--version", "--json"), 0);
  json_t *v = rft_parsed();
  assert_int_equal(strncmp(json_string_value(json_object_get(v, "version")), "0.", 2), 0);
  json_decref(v);
  assert_int_equal(RUN("--version", "train"), 2);
  assert_int_equal(RUN("trian", "small.yaml"), 2);
  rft_assert_says(rft_err, "error: there is no command trian");
  rft_assert_says(rft_err, "help: did you mean train?");
  assert_int_equal(RUN("tokenizer", "notes"), 2);
  rft_assert_says(rft_err, "help: did you mean tokenize or tokenizer-train?");
  assert_int_equal(RUN("tokeniser-train", "notes"), 2);
  rft_assert_says(rft_err, "help: did you mean tokenizer-train?");
  assert_int_equal(RUN("t"), 2);
  rft_assert_says(rft_err, "help: refrain --help lists the commands");
  assert_int_equal(RUN("train"), 2);
  rft_assert_says(rft_err, "error: refrain train needs CONFIG|RUN");
  assert_int_equal(RUN("train", "small.yaml", "--resum"), 2);
  rft_assert_says(rft_err, "help: did you mean --resume?");
  assert_int_equal(RUN("train", "small.yaml", "--data", "x"), 2);
  rft_assert_says(rft_err, "help: refrain train --help lists the options");
  assert_int_equal(RUN("train", "small.yaml", "--top-k", "3"), 2);
  rft_assert_says(rft_err, "has no option --top-k");
  assert_int_equal(RUN("generate", "runs/x", "--tokens", "many"), 2);
  rft_assert_says(rft_err, "--tokens: \"many\" is not a number");
  assert_int_equal(RUN("generate", "a", "b"), 2);
  assert_int_equal(RUN("generate", "--help"), 0);
  rft_assert_says(rft_out, "--temperature");
  assert_null(strstr(rft_out, "--resume"));
}

/* `help COMMAND` prints the same as `COMMAND --help`: only that command's options. */
static void help(void **state) {
  (void)state;
  static const char *const commands[] = {"train", "generate", "eval",     "check",   "tokenize", "keys",
                                         "plan",  "trace",    "schedule", "profile", "bench",    "doctor"};
  for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
    static char first[1 << 14];
    assert_int_equal(RUN("help", commands[i]), 0);
    snprintf(first, sizeof first, "%s", rft_out);
    assert_int_equal(strncmp(first, "usage: refrain ", 15), 0);
    assert_int_equal(strncmp(first + 15, commands[i], strlen(commands[i])), 0);
    rft_assert_says(first, "--json");
    assert_int_equal(RUN(commands[i], "--help"), 0);
    assert_string_equal(first, rft_out);
    for (const char *line = rft_out; *line; line += strcspn(line, "\n") + 1)
      if (strcspn(line, "\n") > 80) fail_msg("more than 80 columns: %s", line);
  }
  assert_int_equal(RUN("help"), 0);
  rft_assert_says(rft_out, "usage: refrain COMMAND");
  assert_int_equal(RUN("help", "trian"), 2);
  rft_assert_says(rft_err, "help: did you mean train?");
}

/* `help --json` has the same commands and options; `help` lists each command once. */
static void help_as_json(void **state) {
  (void)state;
  static char list[1 << 13];
  assert_int_equal(RUN("help"), 0);
  snprintf(list, sizeof list, "%s", rft_out);
  assert_int_equal(RUN("help", "--json"), 0);
  json_t *all = rft_parsed();
  const json_t *commands = json_object_get(all, "commands");
  assert_true(json_array_size(commands) >= 11);
  for (size_t i = 0; i < json_array_size(commands); i++) {
    const json_t *c = json_array_get(commands, i), *options = json_object_get(c, "options");
    const char *name = json_string_value(json_object_get(c, "name"));
    bool help = false;
    char line[64];
    snprintf(line, sizeof line, "\n  %s ", name);
    const char *first = strstr(list, line);
    assert_true(first && !strstr(first + 1, line));
    assert_int_equal(RUN(name, "--help"), 0);
    for (size_t k = 0; k < json_array_size(options); k++) {
      char text[64];
      const char *option = json_string_value(json_object_get(json_array_get(options, k), "name"));
      snprintf(text, sizeof text, "\n  --%s", option);
      rft_assert_says(rft_out, text);
      help |= strcmp(option, "help") == 0;
    }
    assert_true(help);
    assert_int_equal(RUN("help", name, "--json"), 0);
    json_t *one = rft_parsed();
    assert_true(json_equal(one, (json_t *)c));
    json_decref(one);
  }
  json_decref(all);
  assert_int_equal(RUN("help", "train", "plan"), 2);
  assert_int_equal(RUN("plan", "--help"), 0);
  rft_assert_says(rft_out, "operands:\n  CONFIG ");
}

/* With --json standard error contains one object, for errors of the library and of the command line. */
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
      {{"generate", "none", "--json"}, "input or output", "usage", "none: No such file or directory", 4},
      {{"report", "none", "--json"}, "input or output", "file.open", "none: no such folder", 4},
      {{"plan", "small.yaml", "--svg", "none/x.svg"}, NULL, NULL, NULL, 4},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *const *a = wrong[i].arguments;
    assert_int_equal(RUN(a[0], a[1], a[2], a[3], a[4], a[5]), wrong[i].code);
    assert_string_equal(rft_out, "");
    if (!wrong[i].status) continue;
    json_t *v = rft_parsed_error();
    assert_string_equal(json_string_value(json_object_get(v, "status")), wrong[i].status);
    const char *slug = json_string_value(json_object_get(v, "slug"));
    assert_int_equal(strncmp(slug, wrong[i].slug, strlen(wrong[i].slug)), 0);
    rft_assert_says(json_string_value(json_object_get(v, "message")), wrong[i].message);
    assert_true(*json_string_value(json_object_get(v, "next")) != '\0');
    json_decref(v);
  }
}

static void keys(void **state) {
  (void)state;
  assert_int_equal(RUN("keys"), 0);
  rft_assert_says(rft_out, "optimizer.lr\n");
  rft_assert_says(rft_out, "memory.recompute\n");
  assert_int_equal(RUN("keys", "RECOMPUTE", "--json"), 0);
  json_t *v = rft_parsed();
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
  rft_assert_says(rft_err, "did you mean warmup?");
}

/* A report that cannot be written gives exit code 4, even if the command flushed its output itself. */
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
    rft_slurp("full.txt", rft_out, sizeof rft_out);
    rft_assert_says(rft_out, "standard output cannot be written");
  }
}

static void bad_input(void **state) {
  (void)state;
  assert_int_equal(RUN("train", "missing.yaml"), 4);
  rft_assert_says(rft_err, "error: missing.yaml");
  rft_write_file("key.yaml", "refrain: 1\nmodle: {hidden_size: 16}\n");
  assert_int_equal(RUN("check", "key.yaml"), 2);
  rft_assert_says(rft_err, "key.yaml:2");
  rft_assert_says(rft_err, "did you mean \"model\"?");
  rft_assert_says(rft_err, "help: ");
  assert_int_equal(RUN("check", "small.yaml", "--set", "optimizer.lrr=1"), 2);
  rft_assert_says(rft_err, "did you mean \"optimizer.lr\"?");
  assert_int_equal(RUN("train", "small.yaml", "--set", "data.train=[\"none/*.c\"]", "--out", "none"), 2);
  rft_assert_says(rft_err, "none/*.c");
  rft_write_file("empty.txt", "");
  assert_int_equal(RUN("train", "small.yaml", "--set", "data.train=[empty.txt]", "--out", "none"), 2);
  assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.budget=1KiB"), 3);
  rft_assert_says(rft_err, "plan.over_budget");
  rft_assert_says(rft_err, "but memory.budget is 1024 bytes (1.0 KiB)");
  rft_assert_says(rft_err, "help: raise memory.budget, or use settings that the plan lists");
  rft_assert_says(rft_out, "optimizer states and master weights");
  rft_assert_says(rft_out, "optimizer moments in bf16: optimizer.state_dtype=bf16");
  rft_assert_says(rft_out, "recompute activations: memory.recompute=all");
  assert_int_equal(RUN("plan", "small.yaml", "--set", "memory.budget=1KiB", "--set", "memory.recompute=all"), 3);
  assert_null(strstr(rft_out, "recompute activations:")); /* it is already enabled, so it is not suggested */
  assert_int_equal(RUN("train", "small.yaml", "--set", "memory.budget=1KiB", "--out", "none"), 3);
  rft_assert_says(rft_err, "[plan.over_budget]"); /* lists the bytes of each kind, as `plan` does */
  rft_assert_says(rft_err, "optimizer states and master weights");
  rft_assert_says(rft_err, "optimizer moments in bf16: optimizer.state_dtype=bf16");
  assert_int_equal(RUN("train", "small.yaml", "--set", "memory.budget=1KiB", "--out", "none", "--json"), 3);
  json_t *v = rft_parsed();
  assert_true(rft_number(json_object_get(v, "memory"), "weights") > 0);
  json_decref(v);
  assert_int_equal(RUN("check", "small.yaml", "--set", "model.vocab_size=100"), 2);
  assert_int_equal(RUN("eval", "no-such-run"), 4);
  rft_assert_says(rft_err, "error: no-such-run: No such file or directory\nhelp: give the folder of a run");
  assert_int_equal(RUN("train", "text"), 4);
  rft_assert_says(rft_err, "text is a folder without config.yaml");
  assert_int_equal(RUN("plan", "text"), 4);
  rft_assert_says(rft_err, "text is a folder without config.yaml and without config.json");
  assert_int_equal(RUN("generate", "text"), 4);
  rft_assert_says(rft_err, "text is a folder without config.yaml and without config.json");
  assert_int_equal(RUN("generate", "no-such-run", "--top-p", "2"), 2);
  rft_assert_says(rft_err, "error: --top-p 2 is not a probability\nhelp: give more than 0 and at most 1");
  assert_int_equal(RUN("generate", "no-such-run", "--top-p", "0"), 2);
  assert_int_equal(RUN("generate", "no-such-run", "--prompt", ""), 2);
  rft_assert_says(rft_err, "error: --prompt is empty\nhelp: give at least one byte");
  assert_int_equal(access("none", F_OK), -1); /* nothing was created */
  assert_int_equal(RUN("trace", "small.yaml", "--after", "lunch"), 2);
  rft_assert_says(rft_err,
                  "error: --after: unknown value \"lunch\"\nhelp: choose from: record autodiff quantize prune");
  assert_int_equal(RUN("bench", "nothing"), 2);
}

static void check_sources(void **state) {
  (void)state;
  assert_int_equal(RUN("check", "small.yaml", "--set", "run.seed=7"), 0);
  rft_assert_says(rft_out, "seed: 7 # --set");
  rft_assert_says(rft_out, "hidden_size: 16 # small.yaml:2");
  rft_assert_says(rft_out, "# default");
  assert_int_equal(
      RUN("check", "small.yaml", "--json", "--set", "optimizer.groups=[{match: \"*norm*\", weight_decay: 0}]"), 0);
  json_t *v = rft_parsed();
  assert_int_equal(rft_number(json_object_get(v, "model.hidden_size"), "value"), 16);
  assert_string_equal(json_string_value(json_object_get(json_object_get(v, "model.hidden_size"), "source")),
                      "small.yaml:2");
  const json_t *betas = json_object_get(json_object_get(v, "optimizer.betas"), "value");
  assert_true(json_number_value(json_array_get(betas, 1)) == 0.95);
  const json_t *groups = json_object_get(json_object_get(v, "optimizer.groups"), "value");
  assert_string_equal(json_string_value(json_object_get(json_array_get(groups, 0), "match")), "*norm*");
  json_decref(v);
  assert_int_equal(RUN("check", "small.yaml", "--files", "train", "--json"), 0);
  v = rft_parsed();
  assert_true(json_array_size(json_object_get(v, "files")) > 3);
  json_decref(v);
  assert_int_equal(RUN("check", "small.yaml", "--files", "validation"), 0);
  rft_assert_says(rft_out, ".txt\n");
  int held_out = 0;
  for (const char *s = rft_out; (s = strchr(s, '\n')); s++) held_out++;
  assert_int_equal(RUN("check", "small.yaml", "--files", "train"), 0);
  int rest = 0;
  for (const char *s = rft_out; (s = strchr(s, '\n')); s++) rest++;
  assert_true(held_out > 0 && rest > held_out);
  assert_int_equal(held_out + rest, 10);
  assert_int_equal(RUN("check", "small.yaml", "--files", "validation", "--set", "data.validation=0%"), 2);
  rft_assert_says(rft_err, "data.validation holds out no file");
  assert_int_equal(RUN("check", "small.yaml", "--files", "train", "--set", "data.root=missing"), 4);
  rft_assert_says(rft_err, "data.root: ");
  rft_assert_says(rft_err, "missing: No such file");
}

/* `auto` prints its choice; a named device is never replaced by another one. */
static void devices(void **state) {
  (void)state;
  assert_int_equal(RUN("doctor", "--json"), 0);
  json_t *v = rft_parsed();
  const bool has_cuda = rft_number(v, "has_cuda") != 0;
  const json_t *pieces = json_object_get(v, "cuda_pieces");
  assert_true(json_array_size(pieces) > 0);
  for (size_t i = 0; i < json_array_size(pieces); i++)
    assert_true(*json_string_value(json_object_get(json_array_get(pieces, i), "costs")) != '\0');
  /* the message names the driver */
  if (has_cuda) assert_int_equal(rft_number(json_array_get(pieces, 1), "missing"), 0);
  json_decref(v);
  assert_int_equal(RUN("plan", "small.yaml", "--device", "auto"), 0);
  rft_assert_says(rft_err, has_cuda ? "device: cuda: " : "device: cpu: ");
  assert_int_equal(RUN("plan", "small.yaml", "--device", "auto", "--quiet"), 0);
  assert_string_equal(rft_err, "");
  if (!has_cuda) assert_int_equal(RUN("train", "small.yaml", "--device", "cuda", "--out", "nowhere"), 3);
  assert_int_equal(RUN("plan", "small.yaml", "--device", "gpu"), 2);
  /* options override the environment */
  setenv("REFRAIN_DEVICE", "auto", 1);
  setenv("REFRAIN_THREADS", "none", 1);
  assert_int_equal(RUN("plan", "small.yaml"), 2);
  rft_assert_says(rft_err, "REFRAIN_THREADS");
  assert_int_equal(RUN("plan", "small.yaml", "--threads", "0"), 0);
  rft_assert_says(rft_err, has_cuda ? "device: cuda: " : "device: cpu: ");
  assert_int_equal(RUN("plan", "small.yaml", "--threads", "0", "--device", "cpu"), 0);
  assert_string_equal(rft_err, "");
  unsetenv("REFRAIN_DEVICE");
  unsetenv("REFRAIN_THREADS");
}

/* A missing piece is printed with the consequence. Measuring is slow under a sanitizer, so doctor runs once. */
static void doctor(void **state) {
  (void)state;
  setenv("REFRAIN_ONEDNN", "0", 1);
  const int code = RUN("doctor");
  unsetenv("REFRAIN_ONEDNN");
  assert_int_equal(code, 0);
  rft_assert_says(rft_out, "none (turned off)");
  if (!strstr(rft_out, "missing      CUDA module: no GPU is used"))
    rft_assert_says(rft_out, "for GPUs     CUDA module");
  rft_assert_says(rft_out, "missing      oneDNN: GEMMs run on the portable kernel");
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
      {{"bench", "small", "--eager"}, "refrain bench small does not use --eager", "lora-8b\n"},
      {{"bench", "small", "--steps", "3"}, "does not use --steps", "lora-8b, compile\n"},
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
    assert_string_equal(rft_out, "");
    rft_assert_says(rft_err, wrong[i].says);
    rft_assert_says(rft_err, wrong[i].help);
  }
  assert_int_equal(access("x.svg", F_OK), -1);
}

static void tokenizes(void **state) {
  (void)state;
  rft_write_file(
      "tokenizer.json",
      "{\"added_tokens\":[{\"id\":0,\"content\":\"<s>\",\"special\":true}],"
      "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\"}},"
      "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"<s>\":{\"ids\":[0]}}},\"decoder\":{\"type\":\"Fuse\"},"
      "\"model\":{\"type\":\"BPE\",\"vocab\":{\"<s>\":0,\"a\":1,\"b\":2,\"ab\":3},\"merges\":[\"a b\"]}}");
  rft_write_file("text.txt", "ab<s>ba");
  assert_int_equal(RUN("tokenize", "tokenizer.json", "text.txt"), 0);
  assert_string_equal(rft_out, "3\n0\n2\n1\n");
  rft_assert_says(rft_err, "4 tokens, 7 bytes");
  rft_write_file("ids.txt", rft_out);
  assert_int_equal(RUN("tokenize", ".", "ids.txt", "--decode"), 0);
  assert_string_equal(rft_out, "ab<s>ba");
  assert_int_equal(RUN("tokenize", "tokenizer.json", "text.txt", "--special", "--quiet"), 0);
  assert_string_equal(rft_out, "0\n3\n0\n2\n1\n");
  assert_string_equal(rft_err, "");
  assert_int_equal(RUN("tokenize", "tokenizer.json", "text.txt", "--json"), 0);
  json_t *j = json_loads(rft_out, JSON_REJECT_DUPLICATES, NULL);
  const json_t *second = json_array_get(json_object_get(j, "tokens"), 1);
  assert_int_equal(json_integer_value(json_object_get(j, "n")), 4);
  assert_int_equal(json_integer_value(json_object_get(second, "begin")), 2);
  assert_string_equal(json_string_value(json_object_get(second, "token")), "<s>");
  json_decref(j);
  rft_write_file("ids.txt", "1 2\n9");
  assert_int_equal(RUN("tokenize", ".", "ids.txt", "--decode"), 2);
  rft_assert_says(rft_err, "the vocabulary has no id 9 (byte 4 of the input)");
  assert_int_equal(RUN("tokenize", ".", "ids.txt", "--decode", "--json"), 2);
  assert_int_equal(RUN("tokenize", ".", "none.txt"), 4);
  assert_int_equal(RUN("tokenize", "text.txt", "text.txt"), 2);
  rft_assert_says(rft_err, "text.txt:1: column");
}

static void schedules(void **state) {
  (void)state;
  static const char *const needed[] = {"bubble", "slots", "peak_bytes", "actions"};
  assert_int_equal(RUN("schedule", "--kind", "1f1b", "--stages", "4", "--microbatches", "8"), 0);
  rft_assert_says(rft_out, "   0  0F0 0F1 0F2 0F3 ....");
  rft_assert_says(rft_out, "makespan 33, bubble 27.3%");
  assert_int_equal(RUN("schedule", "--kind", "zb-h1", "--stages", "64", "--microbatches", "512"), 0);
  rft_assert_says(rft_out, "   0  FFF");
  assert_int_equal(RUN("schedule", "--order", "[1,1,-1,-1,-1.5,-1.5]"), 0);
  rft_assert_says(rft_out, "   0  0F0 0F1 0I0 0I1 0W0 0W1");
  assert_int_equal(RUN("schedule", "--order", "1,2,-2,-1", "--layers", "3,2"), 0);
  rft_write_file("mine.txt", "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n");
  rft_write_file("costs.json",
                 "{\"F\": 1.5, \"B\": 2, \"SEND_F\": 0.25, \"activation_bytes\": 100, \"weight_bytes\": 7}");
  rft_write_file("costs.csv", "stage,F,B,SEND_F,activation_bytes,weight_bytes\n*,1.5,2,0.25,100,7\n");
  for (int i = 0; i < 2; i++) {
    assert_int_equal(RUN("schedule", "--file", "mine.txt", "--costs", i ? "costs.csv" : "costs.json", "--json"), 0);
    json_t *j = json_loads(rft_out, JSON_REJECT_DUPLICATES, NULL);
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
  rft_slurp("mine.svg", rft_out, sizeof rft_out);
  rft_assert_says(rft_out, "<title>0B1: ");
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
      {{"--file", "small.yaml"}, "small.yaml:1: rank 0, action 0: \"refrain:\" is not an action", "docs/schedules.md"},
      {{"--file", "mine.txt", "--costs", "small.yaml"}, "small.yaml:1: there is no key \"refrain: 1\"", "docs/sched"},
      {{"--kind", "1f1b", "--stage", "3"}, "has no option --stage", "did you mean --stages?"},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    const char *const *a = wrong[i].arguments;
    assert_int_equal(RUN("schedule", a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]), 2);
    rft_assert_says(rft_err, wrong[i].says);
    rft_assert_says(rft_err, wrong[i].help);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(usage),       cmocka_unit_test(help),           cmocka_unit_test(help_as_json),
      cmocka_unit_test(json_errors), cmocka_unit_test(keys),           cmocka_unit_test(full_device),
      cmocka_unit_test(bad_input),   cmocka_unit_test(check_sources),  cmocka_unit_test(devices),
      cmocka_unit_test(doctor),      cmocka_unit_test(unused_options), cmocka_unit_test(schedules),
      cmocka_unit_test(tokenizes),
  };
  return cmocka_run_group_tests(tests, rft_program_set_up, rft_program_tear_down);
}
