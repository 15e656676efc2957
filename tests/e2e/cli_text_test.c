/* SPDX-License-Identifier: Apache-2.0
 *
 * Fine-tuning and chat as a user runs them: finetune, check with data, chat and generate, on a tiny model with a
 * tokenizer of single characters.
 */
#include <glob.h>
#include <stdlib.h>

#include "support/program.h"

/* tests/models/llama with a tokenizer in which token N is the character N; tokens 1 and 2 begin and end a turn. */
static int set_up(void **state) {
  static char text[1 << 14];
  size_t n = 0;
  if (rft_program_set_up(state) != 0) return -1;
  if (system("cp -r '" RFT_SOURCE_DIR "/tests/models/llama' model && rm -f model/reference*") != 0) return -1;
  n += (size_t)sprintf(text + n, "{\"version\": \"1.0\", \"added_tokens\": [");
  for (int i = 1; i < 3; i++)
    n += (size_t)sprintf(text + n,
                         "%s{\"id\": %d, \"content\": \"<|im_%s|>\", \"single_word\": false, \"lstrip\": false, "
                         "\"rstrip\": false, \"normalized\": false, \"special\": true}",
                         i > 1 ? ", " : "", i, i == 1 ? "start" : "end");
  n += (size_t)sprintf(text + n,
                       "], \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", \"add_prefix_space\": "
                       "false, \"trim_offsets\": true, \"use_regex\": true}, \"post_processor\": null, \"decoder\": "
                       "{\"type\": \"ByteLevel\", \"add_prefix_space\": true, \"trim_offsets\": true, \"use_regex\": "
                       "true}, \"model\": {\"type\": \"BPE\", \"dropout\": null, \"unk_token\": null, "
                       "\"continuing_subword_prefix\": null, \"end_of_word_suffix\": null, \"fuse_unk\": false, "
                       "\"byte_fallback\": false, \"vocab\": {");
  for (int i = 0; i < 256; i++) {
    const char *comma = i > 0 ? ", " : "";
    if (i == 1 || i == 2) n += (size_t)sprintf(text + n, "%s\"<|im_%s|>\": %d", comma, i == 1 ? "start" : "end", i);
    else if (i == ' ') n += (size_t)sprintf(text + n, "%s\"\\u0120\": %d", comma, i);
    else if (i == '\n') n += (size_t)sprintf(text + n, "%s\"\\u010a\": %d", comma, i);
    else if (i > ' ' && i < 127) n += (size_t)sprintf(text + n, "%s\"\\u%04x\": %d", comma, (unsigned)i, i);
    else n += (size_t)sprintf(text + n, "%s\"unused%d\": %d", comma, i, i);
  }
  sprintf(text + n, "}, \"merges\": []}}");
  rft_write_file("model/tokenizer.json", text);
  rft_write_file("model/tokenizer_config.json", "{\"eos_token\": \"<|im_end|>\"}");
  n = 0;
  for (int i = 0; i < 40; i++)
    n += (size_t)sprintf(text + n,
                         "{\"messages\": [{\"role\": \"user\", \"content\": \"%d\"}, {\"role\": \"assistant\", "
                         "\"content\": \"a%d\"}]}\n",
                         i, i);
  rft_write_file("chat.jsonl", text);
  return 0;
}

#define TEMPLATE "--set", "data.template=chatml"
#define SMALL "--set", "precision.dtype=f32", "--set", "data.sequence=64", "--set", "batch.tokens=128"

/* The row as the model reads it. A special token in the user's text is tokenized as characters. */
static void check_data(void **state) {
  (void)state;
  rft_write_file("odd.jsonl",
                 "{\"messages\": [{\"role\": \"user\", \"content\": \"<|im_end|>\"}, {\"role\": \"assistant\", "
                 "\"content\": \"yes\"}]}\n");
  assert_int_equal(RUN("check", "model", "chat.jsonl", TEMPLATE, SMALL), 0);
  rft_assert_says(rft_out, "<|im_start|>assistant\n[[a");
  rft_assert_says(rft_out, "<|im_end|>]]");
  rft_assert_says(rft_out, "trained tokens\n");
  rft_assert_says(rft_out, "optimizer states and master weights");
  assert_int_equal(RUN("check", "model", "chat.jsonl", "odd.jsonl", TEMPLATE, SMALL, "--json", "--set",
                       "data.validation=[odd.jsonl]"),
                   0);
  json_t *v = rft_parsed();
  assert_int_equal(rft_number(v, "train_rows"), 40);
  assert_int_equal(rft_number(v, "validation_rows"), 1);
  assert_int_equal(rft_number(v, "trained_tokens"), 10 * 3 + 30 * 4); /* a, the digits, and the end of the turn */
  assert_int_equal(rft_number(v, "truncated_rows"), 0);
  assert_true(rft_number(v, "planned_bytes") > 0);
  char text[2][256] = {"", ""};
  const json_t *sample = json_object_get(v, "sample");
  for (size_t i = 0; i < json_array_size(sample); i++) {
    const json_t *piece = json_array_get(sample, i);
    strcat(text[json_is_true(json_object_get(piece, "trained"))], json_string_value(json_object_get(piece, "text")));
  }
  assert_string_equal(text[1], "a0<|im_end|>");
  json_decref(v);
  assert_int_equal(RUN("check", "model", "chat.jsonl", TEMPLATE, "--set", "precision.recipe=fp8_current", "--set",
                       "precision.keep=[]", "--set", "precision.dtype=f32"),
                   0); /* every sequence length that check tries is valid for a recipe */
  assert_int_equal(RUN("check", "model", "chat.jsonl", "--files", "train"), 2);
  assert_int_equal(RUN("finetune", "model"), 2);
  rft_assert_says(rft_err, "refrain finetune needs MODEL DATA...");
  assert_int_equal(RUN("finetune", "missing", "chat.jsonl"), 4);
}

/* The run has a configuration that `train` can continue; its base is frozen. */
static void finetune(void **state) {
  (void)state;
  assert_int_equal(RUN("finetune", "model", "chat.jsonl", TEMPLATE, SMALL, "--set", "run.epochs=2", "--json"), 0);
  json_t *v = rft_parsed();
  assert_string_equal(json_string_value(json_object_get(v, "folder")), "runs/chat");
  assert_true(rft_number(v, "step") > 3);
  json_decref(v);
  rft_slurp("runs/chat/config.yaml", rft_out, sizeof rft_out);
  rft_assert_says(rft_out, "type: lora");
  rft_assert_says(rft_out, "lr: 0.0002");
  assert_int_equal(RUN("train", "runs/chat", "--resume", "--set", "run.epochs=3"), 0);
  rft_assert_says(rft_err, " trainable");
  assert_int_equal(RUN("eval", "runs/chat", "--json"), 0);
  assert_int_equal(RUN("eval", "runs/chat", "--json", "--set", "data.validation=[odd.jsonl]"), 0);
  rft_write_file("rows.json", "[{}]");
  assert_int_equal(RUN("check", "model", "rows.json"), 2);
  rft_assert_says(rft_err, "rows.json is a JSON document; write one row per line into a .jsonl file");
  assert_int_equal(RUN("eval", "model"), 2);
  rft_assert_says(rft_err, "model is a model: it names no data");
  assert_int_equal(RUN("eval", "model", "--json", TEMPLATE, SMALL, "--set", "data.validation=[odd.jsonl]"), 0);
  v = rft_parsed();
  assert_true(rft_number(v, "tokens") > 0);
  json_decref(v);
  assert_int_equal(RUN("finetune", "model", "chat.jsonl", TEMPLATE, SMALL, "--out", "runs/all", "--set",
                       "adapter.type=none", "--set", "run.epochs=1"),
                   0);
  assert_int_equal(RUN("finetune", "model", "chat.jsonl", TEMPLATE, SMALL), 2); /* the run exists */
  rft_assert_says(rft_err, "run.exists");
}

/* Trains all weights of the model on `data` into `out`. */
static void train_on(const char *name, const char *data, char *out, size_t size) {
  char config[512], path[64];
  snprintf(config, sizeof config,
           "refrain: 1\nmodel: model\ndata: {%s, sequence: 32}\nbatch: {tokens: 128, microbatch: 2}\n"
           "optimizer: {lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 6}\n",
           data);
  snprintf(path, sizeof path, "%s.yaml", name);
  rft_write_file(path, config);
  if (RUN("train", path) != 0) fail_msg("%s", rft_err);
  snprintf(path, sizeof path, "runs/%s/step-000006/model.safetensors", name);
  memset(out, 0, size);
  rft_slurp(path, out, size);
}

/* Training on a token file of Megatron is bitwise equal to training on the text; the other formats train as one
 * stream. */
static void token_files(void **state) {
  (void)state;
  enum { BYTES = 1 << 20 };
  char *want = malloc(BYTES), *got = malloc(BYTES), text[2048];
  assert_int_equal(system("mkdir -p corpus/a corpus/b"), 0);
  for (int i = 0; i < 6; i++) {
    size_t n = 0;
    for (int k = 0; k < 40 + 30 * i; k++) n += (size_t)sprintf(text + n, "%d%c ", i * k, 'a' + (i + k) % 26);
    snprintf(got, 64, "corpus/%c/%d.txt", i < 5 ? 'a' : 'b', i);
    rft_write_file(got, text);
  }
  train_on("text", "train: [corpus/a], validation: [corpus/b]", want, BYTES);
  assert_int_equal(RUN("tokenize", "model", "corpus/a/0.txt", "corpus/a/1.txt", "corpus/a/2.txt", "corpus/a/3.txt",
                       "corpus/a/4.txt", "--out", "a.bin", "--json"),
                   0);
  json_t *v = rft_parsed();
  const json_int_t tokens = rft_number(v, "tokens");
  assert_int_equal(rft_number(v, "documents"), 5);
  json_decref(v);
  assert_int_equal(RUN("tokenize", "model", "corpus/b/5.txt", "--out", "b.bin", "--to", "megatron"), 0);
  rft_assert_says(rft_err, "wrote b.bin: 1 documents, ");
  train_on("megatron", "train: [a.bin], validation: [b.bin]", got, BYTES);
  assert_memory_equal(want, got, BYTES);
  snprintf(text, sizeof text, "data    1 file, %.1f KiB, %lld tokens: ", 2 * (double)tokens / 1024, (long long)tokens);
  rft_assert_says(rft_err, text);
  assert_int_equal(RUN("eval", "runs/megatron", "--json"), 0);
  v = rft_parsed();
  assert_null(json_object_get(v, "bits_per_byte"));
  json_decref(v);
  assert_int_equal(RUN("eval", "model", "--set", "data.validation=[b.bin]", "--set", "data.sequence=32"), 0);
  /* Rows are documents. The stream formats have the same ids, and are equal. */
  rft_write_file("rows.jsonl", "{\"text\": \"one 1\"}\n{\"text\": \"two 22\"}\n");
  assert_int_equal(RUN("tokenize", "model", "rows.jsonl", "corpus/a/4.txt", "--out", "n.bin", "--to", "nanogpt"), 0);
  rft_assert_says(rft_err, "wrote n.bin: 3 documents, ");
  memset(text, 0, sizeof text);
  rft_slurp("n.bin", text, sizeof text);
  static const unsigned char rows[] = "o\0n\0e\0 \0001\0\2\0t\0w\0o\0 \0002\0002\0\2\0000\0e\0";
  assert_memory_equal(text, rows, sizeof rows - 1);
  assert_int_equal(RUN("tokenize", "model", "rows.jsonl", "corpus/a/4.txt", "--out", "l.bin", "--to", "llmc"), 0);
  train_on("nanogpt", "train: [n.bin]", want, BYTES);
  train_on("llmc", "train: [l.bin]", got, BYTES);
  assert_memory_equal(want, got, BYTES);
  free(want);
  free(got);
}

static void token_errors(void **state) {
  (void)state;
  static const struct {
    const char *arguments[10], *says;
    int code;
  } cases[] = {
      {{"tokenize", "model", "--out", "x.bin"}, "--out needs files to tokenize", 2},
      {{"tokenize", "model", "rows.jsonl", "--to", "llmc"}, "--to is the format of --out", 2},
      {{"tokenize", "model", "rows.jsonl", "rows.jsonl"}, "2 files; without --out one is printed", 2},
      {{"tokenize", "model", "rows.jsonl", "--out", "x.bin", "--decode"}, "--out writes the tokens", 2},
      {{"tokenize", "model", "rows.jsonl", "--out", "x.tok"}, "the name of a token file ends in .bin", 2},
      {{"tokenize", "model", "rows.jsonl", "--out", "a.bin"}, "a.bin: the file exists already", 2},
      {{"tokenize", "model", "chat.jsonl", "--out", "x.bin"}, "chat.jsonl:1:", 2},
      {{"tokenize", "model", "none.txt", "--out", "x.bin"}, "none.txt", 4},
      {{"tokenize", "model", "a.bin", "--out", "x.bin"}, "has a NUL byte", 2},
      {{"train", "mixed.yaml"}, "a.bin has tokens and chat.jsonl has rows; train on files of one kind", 2},
      {{"train", "megatron.yaml", "--out", "runs/w", "--set", "data.weights=[1]"},
       "only files of rows have weights",
       2},
      {{"train", "llmc.yaml", "--out", "runs/w", "--set", "data.validation=0.01%"},
       "0.01% of 4 documents or blocks",
       2},
      {{"train", "megatron.yaml", "--out", "runs/w", "--set", "data.train=[a.idx]"}, "a.idx: is the index", 2},
      {{"train", "megatron.yaml", "--out", "runs/w", "--set", "data.train=[damaged.bin]"},
       "damaged.idx: byte 9: version 3",
       2},
  };
  rft_write_file("mixed.yaml",
                 "refrain: 1\nmodel: model\ndata: {train: [a.bin, chat.jsonl], sequence: 32}\noptimizer: {lr: 1}\n"
                 "run: {steps: 1}\n");
  assert_int_equal(system("cp a.bin damaged.bin && cp a.idx damaged.idx && printf '\\3' | "
                          "dd of=damaged.idx bs=1 seek=9 conv=notrunc 2>dd.err"),
                   0);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(rft_finish(START(cases[i].arguments)), cases[i].code);
    rft_assert_says(rft_err, cases[i].says);
    assert_int_equal(access("x.bin", F_OK), -1);
    assert_int_equal(access("x.idx", F_OK), -1);
  }
}

/* Trains a tokenizer and a model from scratch with it; its checkpoint works without the folder. */
static void trained_tokenizer(void **state) {
  (void)state;
  static const char *const special[] = {"--special", "<|end|>", "--special", "<|im_start|>", "--special", "<|im_end|>"};
  char text[4096];
  assert_int_equal(RUN("tokenizer-train", "corpus", "--vocab", "300", "--out", "tok", "--template", "chatml",
                       special[0], special[1], special[2], special[3], special[4], special[5], "--json"),
                   0);
  json_t *v = rft_parsed();
  const json_int_t vocab = rft_number(v, "vocab_size");
  assert_int_equal(vocab, 259 + rft_number(v, "merges"));
  assert_int_equal(rft_number(v, "files"), 6);
  json_decref(v);
  rft_write_file(
      "scratch.yaml",
      "refrain: 1\nmodel: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, "
      "num_attention_heads: 2}\ndata: {train: [corpus/a], validation: [corpus/b], tokenizer: tok, sequence: 32}\n"
      "batch: {tokens: 64, microbatch: 2}\noptimizer: {lr: 1e-3}\nprecision: {dtype: f32}\n"
      "run: {steps: 2}\n");
  assert_int_equal(RUN("check", "scratch.yaml"), 0);
  snprintf(text, sizeof text, "vocab_size: %lld", (long long)vocab);
  rft_assert_says(rft_out, text);
  assert_int_equal(RUN("plan", "scratch.yaml"), 0);
  assert_int_equal(RUN("train", "scratch.yaml", "--out", "runs/scratch"), 0);
  assert_int_equal(RUN("generate", "runs/scratch", "--prompt", "1a ", "--tokens", "4", "--temperature", "0"), 0);
  snprintf(text, sizeof text, "%s", rft_out);
  assert_int_equal(RUN("train", "scratch.yaml", "--out", "runs/w", "--set", "model.vocab_size=258"), 3);
  rft_assert_says(rft_err, "the model's vocab_size is 258");
  assert_int_equal(rename("tok", "tok-gone"), 0);
  assert_int_equal(
      RUN("generate", "runs/scratch/step-000002", "--prompt", "1a ", "--tokens", "4", "--temperature", "0"), 0);
  assert_string_equal(rft_out, text);
  assert_int_equal(RUN_WITH("1a\n", "chat", "runs/scratch/step-000002", "--tokens", "2"), 0);
  rft_slurp("runs/scratch/step-000002/config.json", text, sizeof text);
  rft_assert_says(text, "\"eos_token_id\": 0");
  assert_int_equal(RUN("tokenize", "runs/scratch", "corpus/b/5.txt"), 2);
  rft_assert_says(rft_err, "help: give one of its checkpoints");
  assert_int_equal(RUN("export", "runs/scratch", "--to", "gguf", "--out", "scratch.gguf"), 0);
  assert_int_equal(RUN("tokenize", "scratch.gguf", "corpus/b/5.txt"), 0);
  snprintf(text, sizeof text, "%s", rft_out);
  assert_int_equal(RUN("tokenize", "tok-gone", "corpus/b/5.txt"), 0);
  assert_string_equal(rft_out, text);
  assert_int_equal(RUN("tokenizer-train", "corpus", "--vocab", "300"), 2);
  rft_assert_says(rft_err, "--out is missing");
  assert_int_equal(RUN("tokenizer-train", "corpus", "--vocab", "300", "--out", "tok-gone"), 2);
  rft_assert_says(rft_err, "tok-gone exists");
  assert_int_equal(RUN("tokenizer-train", "corpus", "--vocab", "30000", "--out", "tok2.json"), 0);
  rft_assert_says(rft_err, "no other pair occurs 2 times");
  assert_int_equal(RUN("tokenizer-train", "corpus", "--vocab", "100", "--out", "tok3"), 2);
  rft_assert_says(rft_err, "refrain tokenizer-train --help");
}

/* Messages for frequent errors of first use, and the last lines of finetune. */
static void first_errors(void **state) {
  (void)state;
  static const char *const with_model[] = {"chat", "generate", "eval", "tokenize", "inspect", "plan", "check"};
  rft_write_file("one.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"1\"}, {\"role\": \"assistant\", "
                              "\"content\": \"2\"}]}\n");
  assert_int_equal(RUN("finetune", "model", "one.jsonl", TEMPLATE, SMALL), 0);
  rft_assert_says(rft_err, "warning: there are too few distinct rows to hold some out: data.validation is 0%");
  rft_assert_says(rft_err, " of the adapter, ");
  rft_assert_says(rft_err, "data    1 file, ");
  rft_assert_says(rft_out, "\n  refrain chat runs/one  # chat with it\n");
  rft_assert_says(rft_out,
                  "\n  refrain export runs/one --to peft --out runs/one-peft  # export the adapter for PEFT\n");
  rft_assert_says(rft_out, "\n  refrain export runs/one --to gguf --out runs/one.gguf  # ");
  assert_int_equal(RUN("export", "runs/one", "--to", "peft", "--out", "runs/one-peft"), 0);
  assert_int_equal(RUN("inspect", "runs/one-peft"), 0);
  rft_assert_says(rft_out, "use: refrain chat runs/one-peft chats with it; to train it further: refrain finetune ");
  rft_assert_says(rft_out,
                  "DATA --set adapter.from=runs/one-peft; to merge it into its base: refrain export runs/one-peft");
  assert_int_equal(RUN("generate", "runs/one", "--prompt", "a", "--set", "precision.dtype=bf16"), 2);
  rft_assert_says(rft_err, "precision.dtype is f32 in the checkpoint and bf16 in the configuration");
  assert_int_equal(RUN("finetune", "model", "chat.jsonl", TEMPLATE, SMALL, "--out", "runs/time", "--set", "run.time=1s",
                       "--set", "schedule.name=constant", "--set", "adapter.targets=[q_proj]"),
                   0);
  rft_assert_says(rft_err, "steps   for 1 s, of 128 tokens each\n");
  rft_assert_says(rft_err, "held out for validation: ");
  rft_assert_says(rft_err, " rows, ");
  assert_null(strstr(rft_err, " epochs"));
  rft_write_file("pairs.jsonl", "{\"prompt\": \"1\", \"chosen\": \"2\", \"rejected\": \"3\"}\n");
  assert_int_equal(RUN("finetune", "model", "one.jsonl", "pairs.jsonl", TEMPLATE, SMALL, "--out", "runs/mixed"), 2);
  rft_assert_says(rft_err, "pairs.jsonl:1: the rows have chosen and rejected answers; ");
  rft_assert_says(rft_err, "one.jsonl:1:1: chosen: the key is missing");
  /* the model's maximum length is 64, so data.sequence is determined */
  assert_int_equal(RUN("check", "model", "pairs.jsonl", TEMPLATE, "--set", "precision.dtype=f32"), 0);
  rft_assert_says(rft_err, "too few distinct rows to hold some out");
  for (size_t i = 0; i < sizeof with_model / sizeof with_model[0]; i++) {
    assert_int_equal(RUN(with_model[i], "meta-llama/Llama-3.2-1B"), 4);
    rft_assert_says(rft_err, "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`");
  }
  rft_write_file("hub.yaml", "refrain: 1\nmodel: org/name\ndata: {train: [chat.jsonl]}\nbatch: {tokens: 512, "
                             "microbatch: 1}\noptimizer: {lr: 1e-3}\nrun: {steps: 1}\n");
  assert_int_equal(RUN("plan", "hub.yaml"), 4);
  rft_assert_says(rft_err, "org/name does not exist; models are not fetched");
  assert_int_equal(RUN("plan", "nowhere/run.yaml"), 4);
  assert_null(strstr(rft_err, "hf download"));
  rft_write_file("bot.jsonl", "{\"messages\": [{\"role\": \"user\", \"content\": \"1\"}, {\"role\": \"bot\", "
                              "\"content\": \"2\"}]}\n{\"messages\": [\n");
  assert_int_equal(RUN("check", "model", "bot.jsonl", TEMPLATE, SMALL), 2);
  rft_assert_says(rft_err, "bot.jsonl:1: messages[1].role: \"bot\" is unknown");
  assert_int_equal(RUN("check", "model", "bot.jsonl", TEMPLATE, SMALL, "--set", "data.loss=all"), 2);
  rft_assert_says(rft_err, "bot.jsonl:2:");
  rft_assert_says(rft_err, "near end of the line");
}

/* Reads the number of prompt tokens of the n-th answer, one JSON object per answer; -1: there is none. */
static json_int_t prompt_tokens(int line) {
  const char *s = rft_out;
  for (int i = 0; i < line && *s; i++) s += strcspn(s, "\n") + 1;
  if (!*s) return -1;
  json_t *v = json_loads(s, JSON_DISABLE_EOF_CHECK, NULL);
  const json_int_t n = rft_number(v, "prompt_tokens");
  assert_true(rft_number(v, "tokens") <= 1);
  json_decref(v);
  return n;
}

static void chats(void **state) {
  (void)state;
#define CHAT "chat", "runs/chat", "--tokens", "1", "--context", "64", "--json"
  enum { TURN = 1 + 5 + 1 + 1, START = 1 + 10 }; /* <|im_start|>user\n ... <|im_end|>\n, <|im_start|>assistant\n */
  assert_int_equal(RUN_WITH("ab\n\nc\\\nd\n/reset\nx<|im_end|>\n/nothing\n/system s\ny\n/quit\nz\n", CHAT), 0);
  assert_int_equal(prompt_tokens(0), TURN + 2 + START);
  assert_true(prompt_tokens(1) > 2 * TURN + 2 + 3 + START); /* includes the first turns; "c\nd" is one message */
  /* after /reset; the user's <|im_end|> counts as ten characters */
  assert_int_equal(prompt_tokens(2), TURN + 1 + 10 + START);
  assert_int_equal(prompt_tokens(3), TURN + 2 + 1 + TURN + 1 + START); /* includes two characters for "system" */
  assert_int_equal(prompt_tokens(4), -1);
  rft_assert_says(rft_err, "there is no command /nothing");
  assert_int_equal(RUN_WITH("hello\n", "chat", "model"), 2);
  rft_assert_says(rft_err, "model has no chat template\nhelp: name one: --template chatml");
  assert_int_equal(RUN_WITH("", CHAT), 0);
  assert_string_equal(rft_out, "");
  assert_int_equal(system("printf 'a\\0b\\n' | " RFT_PROGRAM " chat runs/chat --context 64 2> nul.txt > nul.out"),
                   2 << 8);
  rft_slurp("nul.txt", rft_err, sizeof rft_err);
  rft_assert_says(rft_err, "the message contains a NUL byte");
#undef CHAT
}

/* A checkpoint is read like its run; an adapter folder is read together with the base that it names. */
static void checkpoint_and_adapter(void **state) {
  (void)state;
  glob_t found;
  assert_int_equal(glob("runs/chat/step-*", 0, NULL, &found), 0);
  const char *const step = found.gl_pathv[found.gl_pathc - 1];
#define ANSWER(path) "generate", path, "--prompt", "7", "--temperature", "0", "--tokens", "40", "--context", "64"
  assert_int_equal(RUN(ANSWER("runs/chat")), 0);
  char *const text = strdup(rft_out);
  assert_int_equal(RUN(ANSWER("model"), "--set", "precision.dtype=f32"), 0);
  assert_string_not_equal(rft_out, text); /* the adapter has an effect */
  assert_int_equal(RUN(ANSWER(step)), 0);
  assert_string_equal(rft_out, text);
  assert_int_equal(RUN("train", step, "--resume"), 4);
  assert_int_equal(RUN("export", "runs/chat", "--to", "peft", "--out", "alone"), 0);
  assert_int_equal(RUN(ANSWER("alone"), "--set", "precision.dtype=f32"), 0);
  assert_string_equal(rft_out, text);
  FILE *config = fopen("alone/adapter_config.json", "r+");
  char json[4096] = "", lost[4096];
  assert_non_null(config);
  assert_true(fread(json, 1, sizeof json - 1, config) > 0);
  char *const name = strstr(json, "_path\": \"") + 9;
  snprintf(lost, sizeof lost, "%.*sorg/none%s", (int)(name - json), json, strchr(name, '"'));
  rewind(config);
  assert_int_equal(ftruncate(fileno(config), 0), 0);
  fputs(lost, config);
  fclose(config);
  assert_int_not_equal(RUN(ANSWER("alone")), 0);
  rft_assert_says(rft_err, "alone is an adapter whose base \"org/none\" is neither a file nor a folder here");
  rft_assert_says(rft_err, "--set adapter.from=alone");
  assert_int_equal(RUN(ANSWER("model"), "--set", "adapter.from=alone", "--set", "precision.dtype=f32"), 0);
  assert_string_equal(rft_out, text);
#undef ANSWER
  free(text);
  globfree(&found);
}

static void generate(void **state) {
  (void)state;
  static char all[512], *text = all + 4;
#define GENERATE "generate", "model", "--temperature", "0", "--tokens", "30", "--set", "precision.dtype=f32"
  assert_int_equal(RUN_WITH("abc", GENERATE, "--prompt", "-"), 0);
  assert_int_equal(strncmp(rft_out, "abc", 3), 0);
  rft_assert_says(rft_err, "prompt of 3 tokens in ");
  snprintf(all, sizeof all, " %s", rft_out);
  assert_true(strlen(text) > 6);
  /* a stop string ends the text before it, however the text is divided into tokens */
  char stop[4];
  memcpy(stop, text + 3, 3), stop[3] = '\0';
  const size_t at = (size_t)(strstr(text, stop) - text);
  assert_int_equal(RUN(GENERATE, "--prompt", "abc", "--stop", "@@@", "--stop", stop, "--json"), 0);
  json_t *v = rft_parsed();
  const char *got = json_string_value(json_object_get(v, "text"));
  assert_int_equal(strlen(got), at);
  assert_memory_equal(got, text, at);
  json_decref(v);
  /* each prompt of a file gives the same answer as alone */
  rft_write_file("prompts.jsonl", "{\"prompt\": \"abc\", \"id\": 7}\n\n{\"prompt\": \"q\"}\n");
  assert_int_equal(RUN(GENERATE, "--prompts", "prompts.jsonl", "--out", "answers.jsonl"), 0);
  rft_slurp("answers.jsonl", rft_out, sizeof rft_out);
  v = json_loads(rft_out, JSON_DISABLE_EOF_CHECK, NULL);
  assert_int_equal(rft_number(v, "id"), 7);
  got = json_string_value(json_object_get(v, "text"));
  assert_memory_equal(got, text, strlen(got));
  assert_int_equal(strlen(got) + 1, strlen(text)); /* the printed text also has an end of line */
  json_decref(v);
  rft_assert_says(strchr(rft_out, '\n'), "\"prompt\": \"q\"");
  /* several texts at once give the same answers, greedy and sampled, with more prompts than texts and with prompts of
   * different lengths */
  static char many[8192];
  for (int i = 0, n = 0; i < 37; i++)
    n += snprintf(many + n, sizeof many - (size_t)n, "{\"prompt\": \"%.*s\"}\n", 1 + i * 7 % 90,
                  "the quick brown fox jumps over the lazy dog and runs away from it as fast as it can do, alas!!!");
  rft_write_file("many.jsonl", many);
  for (int drawn = 0; drawn < 2; drawn++) {
#define MANY                                                                                                 \
  "generate", "model", "--temperature", drawn ? "1" : "0", "--tokens", "20", "--set", "precision.dtype=f32", \
      "--context", "60", "--prompts", "many.jsonl", "--out"
    assert_int_equal(RUN(MANY, "one.jsonl"), 0);
    assert_int_equal(RUN(MANY, "three.jsonl", "--batch", "3"), 0);
    assert_int_equal(RUN(MANY, "most.jsonl", "--batch", "64"), 0);
#undef MANY
    assert_int_equal(system("cmp one.jsonl three.jsonl && cmp one.jsonl most.jsonl"), 0);
  }
  assert_int_equal(RUN(GENERATE, "--batch", "2"), 2);
  assert_int_equal(RUN(GENERATE, "--prompts", "many.jsonl", "--batch", "65"), 2);
  rft_write_file("prompts.jsonl", "{\"prompt\": \"abc\"}\n{\"prompt\" 1}\n");
  assert_int_equal(RUN(GENERATE, "--prompts", "prompts.jsonl"), 2);
  rft_assert_says(rft_err, "prompts.jsonl:2:");
  assert_int_equal(RUN(GENERATE, "--prompts", "prompts.jsonl", "--prompt", "a"), 2);
  assert_int_equal(RUN(GENERATE, "--out", "x"), 2);
  assert_int_equal(RUN(GENERATE, "--repetition-penalty", "0"), 2);
  assert_int_equal(RUN(GENERATE, "--min-p", "1.5"), 2);
#undef GENERATE
}

/* A byte model may generate bytes that are not UTF-8, and NUL, as a model of zeros does. */
static void any_bytes(void **state) {
  static const char zeros[1 << 17];
  uint64_t header;
  (void)state;
  assert_int_equal(system("cp -r '" RFT_SOURCE_DIR "/tests/models/llama' zero && cp -r zero odd"), 0);
  FILE *f = fopen("zero/model.safetensors", "r+b");
  assert_true(f && fread(&header, sizeof header, 1, f) == 1);
  assert_int_equal(fseek(f, 0, SEEK_END), 0);
  const size_t n = (size_t)ftell(f) - 8 - header;
  assert_true(n < sizeof zeros && fseek(f, (long)(8 + header), SEEK_SET) == 0);
  assert_true(fwrite(zeros, n, 1, f) == 1 && fclose(f) == 0);
  rft_write_file("prompts.jsonl", "{\"prompt\": \"ab\"}\n");
  for (int i = 0; i < 4; i++) {
    const char *model = i < 2 ? "zero" : "odd", *option = i % 2 ? "--prompt" : "--prompts";
    assert_int_equal(
        RUN("generate", model, option, i % 2 ? "ab" : "prompts.jsonl", "--tokens", "8", "--temperature", "0", "--json"),
        0);
    json_t *v = json_loads(rft_out, JSON_ALLOW_NUL, NULL);
    const json_t *text = json_object_get(v, "text");
    assert_int_equal(rft_number(v, "tokens"), 8);
    if (json_string_length(text) < 8) fail_msg("%s %s: %s", model, option, rft_out);
    json_decref(v);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(check_data),   cmocka_unit_test(finetune),
      cmocka_unit_test(token_files),  cmocka_unit_test(trained_tokenizer),
      cmocka_unit_test(token_errors), cmocka_unit_test(first_errors),
      cmocka_unit_test(chats),        cmocka_unit_test(checkpoint_and_adapter),
      cmocka_unit_test(generate),     cmocka_unit_test(any_bytes),
  };
  return cmocka_run_group_tests(tests, set_up, rft_program_tear_down);
}
