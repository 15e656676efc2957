/* SPDX-License-Identifier: Apache-2.0 */
#include "support/program.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>

char rft_out[RFT_OUT_BYTES], rft_err[RFT_ERR_BYTES];
static char root[64];

void rft_slurp(const char *path, char *to, size_t size) {
  FILE *f = fopen(path, "rb");
  assert_non_null(f);
  size_t n = fread(to, 1, size - 1, f);
  to[n] = '\0';
  fclose(f);
}

void rft_write_file(const char *name, const char *text) {
  FILE *f = fopen(name, "wb");
  assert_non_null(f);
  fputs(text, f);
  fclose(f);
}

pid_t rft_start(const char *program, const char *input, const char *const *arguments) {
  const char *argv[32] = {program};
  for (int i = 0; arguments[i]; i++) argv[i + 1] = arguments[i];
  if (input) rft_write_file("in", input);
  pid_t child = fork();
  assert_true(child >= 0);
  if (child > 0) return child;
  if (input && !freopen("in", "rb", stdin)) _exit(126);
  if (!freopen("out", "wb", stdout) || !freopen("err", "wb", stderr)) _exit(126);
  execv(argv[0], (char *const *)argv);
  _exit(127);
}

int rft_finish(pid_t child) {
  int status;
  assert_int_equal(waitpid(child, &status, 0), child);
  rft_slurp("out", rft_out, sizeof rft_out);
  rft_slurp("err", rft_err, sizeof rft_err);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

void rft_assert_says(const char *where, const char *what) {
  if (!strstr(where, what)) fail_msg("\"%s\" is not in:\n%s", what, where);
}

static json_t *parse(const char *text) {
  json_error_t e;
  json_t *v = json_loads(text, JSON_REJECT_DUPLICATES, &e);
  if (!v) fail_msg("%s in:\n%s", e.text, text);
  return v;
}
json_t *rft_parsed(void) { return parse(rft_out); }
json_t *rft_parsed_error(void) { return parse(rft_err); }

json_int_t rft_number(const json_t *o, const char *key) {
  const json_t *v = json_object_get(o, key);
  if (!json_is_number(v)) fail_msg("%s is not a number", key);
  return (json_int_t)json_number_value(v);
}

static const char *const config =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}\n"
    "data: {train: [\"text/*.txt\"], validation: 30%, sequence: 16}\n"
    "batch: {tokens: 64, microbatch: 2}\n"
    "optimizer: {lr: 1e-2}\n"
    "precision: {dtype: f32}\n"
    "run: {steps: 20}\n";

int rft_program_set_up(void **state) {
  (void)state;
  snprintf(root, sizeof root, "%s/cli-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
  if (!mkdtemp(root) || chdir(root) != 0 || mkdir("text", 0777) != 0) return -1;
  for (int i = 0; i < 10; i++) {
    char name[32], text[600] = "";
    for (int k = 0; k < 20; k++) sprintf(text + strlen(text), "%d and %d make %d\n", i, k, i + k);
    snprintf(name, sizeof name, "text/%d.txt", i);
    rft_write_file(name, text);
  }
  rft_write_file("small.yaml", config);
  return 0;
}

int rft_program_tear_down(void **state) {
  (void)state;
  char command[128];
  snprintf(command, sizeof command, "rm -rf '%s'", root);
  return chdir("/") != 0 || system(command) != 0;
}
