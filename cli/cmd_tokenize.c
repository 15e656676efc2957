/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain tokenize: text to token ids, one per line, or with --decode ids to text. Reads a file or standard input. With
 * --out, texts to a token file.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "refrain/text.h"

/* Reads all bytes of a file, or of standard input for "-" and NULL; from malloc. */
static rfr_status read_all(const char *path, char **out, size_t *n) {
  const bool is_input = !path || strcmp(path, "-") == 0;
  FILE *f = is_input ? stdin : fopen(path, "rb");
  size_t capacity = 1 << 16;
  *n = 0;
  *out = f ? malloc(capacity) : NULL;
  if (!f) return cli_fail(RFR_IO, "check the path and its permissions", "%s: %s", path, strerror(errno));
  while (*out) {
    *n += fread(*out + *n, 1, capacity - *n, f);
    if (*n < capacity) break;
    char *more = realloc(*out, capacity *= 2);
    if (!more) free(*out);
    *out = more;
  }
  const bool failed = ferror(f) != 0;
  if (!is_input) fclose(f);
  if (!*out) return cli_fail(RFR_NO_MEMORY, "tokenize a part of the file", "out of memory");
  if (!failed) return RFR_OK;
  free(*out);
  *out = NULL;
  return cli_fail(RFR_IO, "check the file", "%s cannot be read", is_input ? "standard input" : path);
}

static void print_tokens(const cli *c, const rfr_tokenizer *tokenizer, const rfr_tokens *t, size_t bytes) {
  json j = {.f = stdout};
  if (!c->json) {
    for (int64_t i = 0; i < t->n; i++) printf("%d\n", (int)t->ids[i]);
    return;
  }
  json_begin(&j, NULL, '{');
  json_int(&j, "bytes", (int64_t)bytes);
  json_int(&j, "n", t->n);
  json_begin(&j, "tokens", '[');
  for (int64_t i = 0; i < t->n; i++) {
    json_begin(&j, NULL, '{');
    json_int(&j, "id", t->ids[i]);
    json_text(&j, "token", rfr_tokenizer_token(tokenizer, t->ids[i], NULL));
    json_int(&j, "begin", t->begins[i]);
    json_end(&j, '}');
  }
  json_end(&j, ']');
  json_end(&j, '}');
  putchar('\n');
}

static rfr_status encode(cli *c, const rfr_tokenizer *tokenizer, const char *text, size_t n) {
  rfr_encode_options o = rfr_encode_options_default();
  rfr_tokens tokens = {0};
  o.add_special = c->special;
  o.parallel = 1;
  const double start = cli_now();
  const rfr_status s = rfr_tokenizer_encode(tokenizer, text, n, &o, &tokens);
  const double seconds = cli_now() - start;
  if (s == RFR_OK) print_tokens(c, tokenizer, &tokens, n);
  if (s == RFR_OK && !c->quiet && !c->json)
    fprintf(stderr, "%lld tokens, %zu bytes, %.1f MB/s\n", (long long)tokens.n, n,
            seconds > 0 ? (double)n / seconds / 1e6 : 0.0);
  rfr_tokens_deinit(&tokens);
  return s;
}

/* Ids separated by white space or commas. */
static rfr_status decode(const rfr_tokenizer *tokenizer, char *text, size_t n) {
  static const char separators[] = " \t\r\n,";
  rfr_decoder *decoder;
  rfr_status s = rfr_decoder_create(tokenizer, 1, &decoder);
  for (size_t i = 0; s == RFR_OK;) {
    while (i < n && text[i] && strchr(separators, text[i])) i++;
    if (i == n) break;
    int64_t id = 0;
    const size_t begin = i;
    for (; i < n && text[i] >= '0' && text[i] <= '9' && id < INT32_MAX; i++) id = 10 * id + (text[i] - '0');
    if (i == begin || id >= INT32_MAX || (i < n && (!text[i] || !strchr(separators, text[i])))) {
      s = cli_usage("give ids separated by white space or commas, as refrain tokenize prints them",
                    "no token id starts at byte %zu of the input", begin);
    } else if (!rfr_tokenizer_token(tokenizer, (int32_t)id, NULL)) {
      s = cli_usage("use the tokenizer that made the ids", "the vocabulary has no id %lld (byte %zu of the input)",
                    (long long)id, begin);
    } else {
      s = rfr_decoder_add(decoder, (int32_t)id, cli_write, NULL);
    }
  }
  if (s == RFR_OK) s = rfr_decoder_end(decoder, cli_write, NULL);
  rfr_decoder_destroy(decoder);
  return s;
}

/* Writes the texts of the operands after the model to a token file. */
static rfr_status write_file(cli *c, const rfr_tokenizer *tokenizer) {
  const rfr_token_format format = !c->to || strcmp(c->to, "megatron") == 0 ? RFR_TOKENS_MEGATRON
                                  : strcmp(c->to, "llmc") == 0             ? RFR_TOKENS_LLMC
                                                                           : RFR_TOKENS_NANOGPT;
  int64_t documents, tokens;
  json j = {.f = stdout};
  const rfr_status s =
      rfr_tokenizer_write_files(tokenizer, c->operands + 1, c->n_operands - 1, format, c->out, &documents, &tokens);
  if (s != RFR_OK) return s;
  if (c->json) {
    json_begin(&j, NULL, '{');
    json_text(&j, "out", c->out);
    json_int(&j, "documents", documents);
    json_int(&j, "tokens", tokens);
    json_end(&j, '}');
    putchar('\n');
  } else if (!c->quiet) {
    fprintf(stderr, "wrote %s: %lld documents, %lld tokens\n", c->out, (long long)documents, (long long)tokens);
  }
  return s;
}

/* Refuses options that cannot be combined. */
static rfr_status check_options(const cli *c) {
  if (c->decode && c->json) return cli_usage("omit one of them", "--decode prints text, --json describes tokens");
  if (c->out && (c->decode || c->special))
    return cli_usage("omit one of them", "--out writes the tokens of a training; --decode and --special print");
  if (c->out && c->n_operands < 2) return cli_usage("name text files or .jsonl files", "--out needs files to tokenize");
  if (!c->out && c->to) return cli_usage("add --out FILE.bin", "--to is the format of --out");
  if (!c->out && c->n_operands > 2)
    return cli_usage("name one file, or add --out FILE.bin", "%d files; without --out one is printed",
                     c->n_operands - 1);
  return RFR_OK;
}

rfr_status cli_tokenize(cli *c) {
  rfr_tokenizer *tokenizer = NULL;
  char *text = NULL;
  size_t n;
  rfr_status s = check_options(c);
  if (s == RFR_OK) s = rfr_tokenizer_open(c->ctx, c->operand, &tokenizer);
  if (s == RFR_IO && cli_operand_kind(c) == CLI_RUN)
    return cli_usage("give one of its checkpoints: RUN/step-N", "%s is a run and has no tokenizer", c->operand);
  if (s == RFR_OK && c->out) {
    s = write_file(c, tokenizer);
    rfr_tokenizer_destroy(tokenizer);
    return s;
  }
  if (s == RFR_OK) s = read_all(c->n_operands > 1 ? c->operands[1] : NULL, &text, &n);
  if (s == RFR_OK) s = c->decode ? decode(tokenizer, text, n) : encode(c, tokenizer, text, n);
  free(text);
  rfr_tokenizer_destroy(tokenizer);
  return s;
}
