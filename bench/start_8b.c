/* SPDX-License-Identifier: Apache-2.0
 *
 * Measures the time from the start of a command to its first training step, for bench/start_8b.
 *
 *   start_8b make FOLDER LAYERS HIDDEN INTERMEDIATE VOCAB   a Llama folder with random bf16 weights, a tokenizer
 *                                                           of bytes, and rows.jsonl
 *   start_8b run COMMAND...                                 runs the command; at its line "step 1/" prints the seconds,
 *                                                           the bytes that it has read and its largest memory
 *
 * The weights repeat one block of random numbers; for the reader this makes no difference.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, ROWS = 400, MOST = 16 };
#define SHARD 4000000000LL /* bytes; a new file begins at a layer */

typedef struct shape {
  const char *name;
  int64_t rows, columns; /* columns 0: a vector */
} shape;

static void die(const char *what) {
  fprintf(stderr, "start_8b: %s: %s\n", what, strerror(errno));
  exit(1);
}

static FILE *create(const char *folder, const char *name) {
  char path[4200];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *f = fopen(path, "wb");
  if (!f) die(path);
  return f;
}

static void finish(FILE *f) {
  if (fclose(f) != 0) die("writing");
}

static int64_t bytes_of(const shape *s) { return 2 * s->rows * (s->columns > 0 ? s->columns : 1); }

/* ---- the folder ---- */

static void write_config(const char *folder, int layers, int64_t hidden, int64_t inner, int64_t vocab) {
  FILE *f = create(folder, "config.json");
  fprintf(f,
          "{\"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"llama\", \"hidden_size\": %lld,\n"
          " \"intermediate_size\": %lld, \"num_hidden_layers\": %d, \"num_attention_heads\": %lld,\n"
          " \"num_key_value_heads\": %lld, \"vocab_size\": %lld, \"max_position_embeddings\": 8192, \"rms_norm_eps\": "
          "1e-05,\n"
          " \"rope_theta\": 500000.0, \"hidden_act\": \"silu\", \"tie_word_embeddings\": false, \"torch_dtype\": "
          "\"bfloat16\"}\n",
          (long long)hidden, (long long)inner, layers, (long long)hidden / 128, (long long)hidden / 512,
          (long long)vocab);
  finish(f);
}

/* The characters that stand for bytes in byte-level BPE: printable ones for themselves, the others from U+0100. */
static int character_of(int byte, int *next) {
  const int printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
  return printable ? byte : 256 + (*next)++;
}

static void write_tokenizer(const char *folder) {
  FILE *f = create(folder, "tokenizer.json");
  int next = 0;
  fputs("{\"version\": \"1.0\", \"added_tokens\": [], \"normalizer\": null, \"post_processor\": null,\n"
        " \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, "
        "\"use_regex\": "
        "true},\n"
        " \"decoder\": {\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, \"use_regex\": "
        "true},\n"
        " \"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {",
        f);
  for (int byte = 0; byte < 256; byte++)
    fprintf(f, "%s\"\\u%04x\": %d", byte ? ", " : "", (unsigned)character_of(byte, &next), byte);
  fputs("}}}\n", f);
  finish(f);
}

static void write_rows(const char *folder) {
  FILE *f = create(folder, "rows.jsonl");
  for (int i = 0; i < ROWS; i++)
    fprintf(f, "{\"prompt\": \"What is %d times %d? \", \"completion\": \"It is %d.\"}\n", i, i + 1, i * (i + 1));
  finish(f);
}

static void write_shard(const char *folder, const char *name, const shape *list, int n, const char *block) {
  char *header = NULL;
  size_t size = 0;
  int64_t at = 0;
  FILE *text = open_memstream(&header, &size);
  if (!text) die("memory");
  for (int i = 0; i < n; i++) {
    fprintf(text, "%s\"%s\": {\"dtype\": \"BF16\", \"shape\": [%lld", i ? ", " : "{", list[i].name,
            (long long)list[i].rows);
    if (list[i].columns > 0) fprintf(text, ", %lld", (long long)list[i].columns);
    fprintf(text, "], \"data_offsets\": [%lld, %lld]}", (long long)at, (long long)(at + bytes_of(&list[i])));
    at += bytes_of(&list[i]);
  }
  fputc('}', text);
  fflush(text);
  while (size % 8) fputc(' ', text), fflush(text);
  finish(text);
  FILE *f = create(folder, name);
  const uint64_t length = size;
  fwrite(&length, 8, 1, f); /* little-endian, as this machine */
  fwrite(header, 1, size, f);
  for (; at > 0; at -= BLOCK) fwrite(block, 1, at < BLOCK ? (size_t)at : BLOCK, f);
  finish(f);
  free(header);
}

static void make_block(uint16_t *block) {
  uint64_t x = 88172645463325252ULL;
  for (int i = 0; i < BLOCK / 2; i++) {
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    block[i] = (uint16_t)((x & 0x80ff) | 0x3c00); /* bf16 of magnitude 2^-7 to 2^-5 */
  }
}

static void make(const char *folder, int layers, int64_t hidden, int64_t inner, int64_t vocab) {
  static const char *const kinds[] = {
      "input_layernorm",  "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
      "self_attn.v_proj", "self_attn.o_proj",         "mlp.gate_proj",    "mlp.up_proj",
      "mlp.down_proj"};
  const int64_t sizes[][2] = {{hidden, 0},          {hidden, 0},          {hidden, hidden},
                              {hidden / 4, hidden}, {hidden / 4, hidden}, {hidden, hidden},
                              {inner, hidden},      {inner, hidden},      {hidden, inner}};
  static uint16_t block[BLOCK / 2];
  static char names[MOST * 64][96];
  shape list[MOST * 64];
  char shard[64];
  int n = 0, files = 0;
  int64_t bytes = 0;
  if (mkdir(folder, 0777) != 0 && errno != EEXIST) die(folder);
  write_config(folder, layers, hidden, inner, vocab);
  write_tokenizer(folder);
  write_rows(folder);
  make_block(block);
  FILE *index = create(folder, "model.safetensors.index.json");
  fputs("{\"weight_map\": {", index);
  for (int l = -1; l <= layers; l++) {
    const int first = n, outer = l < 0 || l == layers;
    if (l < 0) list[n++] = (shape){"model.embed_tokens.weight", vocab, hidden};
    if (l == layers) {
      list[n++] = (shape){"model.norm.weight", hidden, 0};
      list[n++] = (shape){"lm_head.weight", vocab, hidden};
    }
    for (int k = 0; !outer && k < 9; k++) {
      snprintf(names[n], sizeof names[n], "model.layers.%d.%s.weight", l, kinds[k]);
      list[n] = (shape){names[n], sizes[k][0], sizes[k][1]};
      n++;
    }
    for (int i = first; i < n; i++) {
      fprintf(index, "%s\"%s\": \"model-%05d.safetensors\"", l < 0 ? "" : ", ", list[i].name, files);
      bytes += bytes_of(&list[i]);
    }
    if (bytes < SHARD && l < layers) continue;
    snprintf(shard, sizeof shard, "model-%05d.safetensors", files++);
    write_shard(folder, shard, list, n, (const char *)block);
    n = 0;
    bytes = 0;
  }
  fputs("}}\n", index);
  finish(index);
}

/* ---- the run ---- */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The number after `key` in a file of /proc/PID. */
static long long number_of(pid_t pid, const char *file, const char *key) {
  char path[64], line[256];
  long long value = 0;
  snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
  FILE *f = fopen(path, "r");
  while (f && fgets(line, sizeof line, f))
    if (strncmp(line, key, strlen(key)) == 0) value = atoll(line + strlen(key));
  if (f) fclose(f);
  return value;
}

static int run(char **command) {
  int ends[2], status;
  char line[4096];
  if (pipe(ends) != 0) die("pipe");
  const double start = now();
  const pid_t pid = fork();
  if (pid < 0) die("fork");
  if (pid == 0) {
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    execvp(command[0], command);
    die(command[0]);
  }
  close(ends[1]);
  FILE *f = fdopen(ends[0], "r");
  while (f && fgets(line, sizeof line, f)) {
    fprintf(stderr, "%7.2f s  %s", now() - start, line);
    if (strncmp(line, "step 1/", 7) != 0) continue;
    printf("first step after %.2f s; %.3f GB read, %.3f GB of memory at most\n", now() - start,
           1e-9 * (double)number_of(pid, "io", "rchar:"), 1.024e-6 * (double)number_of(pid, "status", "VmHWM:"));
    fflush(stdout);
  }
  if (f) fclose(f);
  waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int main(int argc, char **argv) {
  if (argc == 7 && strcmp(argv[1], "make") == 0) {
    make(argv[2], atoi(argv[3]), atoll(argv[4]), atoll(argv[5]), atoll(argv[6]));
    return 0;
  }
  if (argc > 2 && strcmp(argv[1], "run") == 0) return run(argv + 2);
  fprintf(stderr, "usage: start_8b make FOLDER LAYERS HIDDEN INTERMEDIATE VOCAB | start_8b run COMMAND...\n");
  return 2;
}
