/* SPDX-License-Identifier: Apache-2.0
 *
 * A main for a fuzz target without libFuzzer: fuzz_X [--mutants N] FOLDER...
 *
 * Replays every file of the folders once, each in a block of exactly its size. Of a .json file it also replays every
 * copy in which one value is replaced by an extreme one. With --mutants it then replays N random mutants of the files;
 * the generator is seeded with a constant, so that a failure repeats. An empty or missing folder is a failure: it would
 * test nothing.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "json_text.h"

typedef struct input {
  char name[256];
  char *text; /* NUL-terminated */
  size_t n;
} input;

enum { MOST_INPUTS = 256, MOST_BYTES = 1 << 20, ENTRIES = 5000, MOST_PARSED = 8192, DEPTH = 3000 };
static input inputs[MOST_INPUTS];
static int n_inputs;
static int64_t n_replayed;

static void replay(const char *text, size_t n) {
  uint8_t *data = malloc(n ? n : 1);
  rft_fuzz_expect(data != NULL, "no memory");
  memcpy(data, text, n);
  LLVMFuzzerTestOneInput(data, n);
  free(data);
  n_replayed++;
}

static void read_input(const char *folder, const char *name) {
  char path[1024];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *f = fopen(path, "rb");
  if (!f) return;
  rft_fuzz_expect(n_inputs < MOST_INPUTS, "too many inputs");
  input *in = &inputs[n_inputs++];
  snprintf(in->name, sizeof in->name, "%s", name);
  in->text = calloc(1, MOST_BYTES + 1);
  rft_fuzz_expect(in->text != NULL, "no memory");
  in->n = fread(in->text, 1, MOST_BYTES, f);
  fclose(f);
}

static void read_folder(const char *folder) {
  DIR *dir = opendir(folder);
  if (!dir) return;
  for (struct dirent *e; (e = readdir(dir));)
    if (e->d_name[0] != '.') read_input(folder, e->d_name);
  closedir(dir);
}

/* ---- extremes ---- */

/* The common extremes, and long lists. */
static const char *extremes[RFT_EXTREMES + 3];
static int n_extremes;

static char *repeat(const char *before, const char *text, int times, const char *after) {
  const size_t n = strlen(text);
  char *out = malloc(strlen(before) + n * (size_t)times + strlen(after) + 1), *at = out;
  rft_fuzz_expect(out != NULL, "no memory");
  at = stpcpy(at, before);
  for (int i = 0; i < times; i++) at = stpcpy(at, text);
  strcpy(at, after);
  return out;
}

/* Long lists and deep nesting. */
static void make_extremes(void) {
  memcpy(extremes, rft_extremes, sizeof rft_extremes);
  n_extremes = RFT_EXTREMES;
  char *brackets = repeat("", "[", DEPTH, "");
  extremes[n_extremes++] = repeat("[", "\"full_attention\",", ENTRIES, "\"sliding_attention\"]");
  extremes[n_extremes++] = repeat("[", "2147483646,", ENTRIES, "0]");
  extremes[n_extremes++] = repeat(brackets, "]", DEPTH, "");
  free(brackets);
}

/* Replays the text with [at, end) replaced. */
static void replay_spliced(const input *in, const char *at, const char *end, const char *by, size_t n) {
  const size_t before = (size_t)(at - in->text), after = in->n - (size_t)(end - in->text);
  char *text = malloc(before + n + after + 1);
  rft_fuzz_expect(text != NULL, "no memory");
  memcpy(text, in->text, before);
  memcpy(text + before, by, n);
  memcpy(text + before + n, end, after);
  replay(text, before + n + after);
  free(text);
}

static void replay_extremes(const input *in) {
  const size_t length = strlen(in->name);
  if (length < 5 || strcmp(in->name + length - 5, ".json") != 0 || strlen(in->text) != in->n || in->n > MOST_PARSED)
    return;
  const char *end = in->text + in->n;
  for (const char *at = in->text; (at = rft_json_next_value(at, end, ":")); at++)
    for (int i = 0; i < n_extremes; i++)
      replay_spliced(in, at, rft_json_value_end(at, end), extremes[i], strlen(extremes[i]));
}

/* ---- mutants ---- */

static uint64_t random_state = 0x9E3779B97F4A7C15u;

static size_t draw(size_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return n ? (size_t)(random_state >> 20) % n : 0;
}

/* Makes one change: replaces a piece or a value by an extreme or by a piece of another input, or changes a byte. */
static input mutate(const input *in) {
  const input *other = &inputs[draw((size_t)n_inputs)];
  const char *at = in->text + draw(in->n + 1), *last = in->text + in->n;
  const char *value = draw(2) ? rft_json_next_value(at, last, ":") : NULL;
  const char *end = value ? rft_json_value_end(value, last) : at + draw(draw(4) ? 9 : 200);
  char byte = (char)draw(256);
  const char *by = &byte;
  size_t n = draw(3) != 0;
  if (value) at = value;
  if (end > last) end = last;
  if (draw(2)) {
    by = extremes[draw((size_t)n_extremes)];
    n = strlen(by);
  } else if (value || draw(3) == 0) {
    const size_t from = draw(other->n + 1);
    by = other->text + from;
    n = draw(other->n - from + 1);
    if (n > 200) n = 200;
  }
  input out = {.n = in->n - (size_t)(end - at) + n};
  out.text = calloc(1, out.n + 1);
  rft_fuzz_expect(out.text != NULL, "no memory");
  const size_t before = (size_t)(at - in->text);
  memcpy(out.text, in->text, before);
  memcpy(out.text + before, by, n);
  memcpy(out.text + before + n, end, (size_t)(last - end));
  return out;
}

static void replay_mutants(int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    input now = mutate(&inputs[draw((size_t)n_inputs)]);
    for (size_t k = draw(4); k > 0; k--) {
      input next = mutate(&now);
      free(now.text);
      now = next;
    }
    replay(now.text, now.n);
    free(now.text);
  }
}

int main(int argc, char **argv) {
  int64_t mutants = 0;
  for (int i = 1; i < argc; i++)
    if (strcmp(argv[i], "--mutants") == 0 && i + 1 < argc) mutants = atoll(argv[++i]);
    else read_folder(argv[i]);
  if (n_inputs < 5) return 1;
  for (int i = 0; i < n_inputs; i++) replay(inputs[i].text, inputs[i].n);
  make_extremes();
  for (int i = 0; i < n_inputs; i++) replay_extremes(&inputs[i]);
  const int64_t fixed = n_replayed;
  replay_mutants(mutants);
  printf("%d files, %lld with an extreme value, %lld mutants\n", n_inputs, (long long)(fixed - n_inputs),
         (long long)(n_replayed - fixed));
  for (int i = 0; i < n_inputs; i++) free(inputs[i].text);
  for (int i = RFT_EXTREMES; i < n_extremes; i++) free((char *)extremes[i]);
  rfr_ctx_destroy(rft_fuzz_ctx());
  return 0;
}
