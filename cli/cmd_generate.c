/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain generate: continues a prompt, or answers it with the model's chat template. Text goes to standard output as
 * soon as it is complete; the speed goes to standard error. With --prompts, the lines of a file, --batch of them at a
 * time.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "model_text.h"

static void show(const char *piece, size_t n, void *user) {
  (void)user;
  fwrite(piece, 1, n, stdout);
  fflush(stdout);
}

/* ---- one prompt ---- */

/* A conversation that consists of the prompt, after --system. */
static json_t *conversation(const cli *c, const char *prompt) {
  json_t *messages = json_array();
  if (c->system) json_array_append_new(messages, json_pack("{s:s, s:s}", "role", "system", "content", c->system));
  json_array_append_new(messages, json_pack("{s:s, s:s}", "role", "user", "content", prompt));
  return messages;
}

static rfr_status encode(const cli *c, cli_text *t, const char *prompt, size_t n) {
  if (!c->chat) return cli_text_encode(t, prompt, n);
  json_t *messages = conversation(c, prompt);
  if (json_array_size(messages) < 1) return cli_usage("convert the prompt to UTF-8", "the prompt is not valid UTF-8");
  const rfr_status s = cli_text_encode_chat(t, messages);
  json_decref(messages);
  return s;
}

static void print_json(const char *prompt, const cli_string *made, const cli_stream *x) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "prompt", prompt);
  json_bytes(&j, "text", made->data ? made->data : "", made->n);
  json_int(&j, "tokens", x->tokens);
  json_double(&j, "prompt_seconds", x->tokens > 0 ? x->first - x->start : 0.0);
  json_double(&j, "tokens_per_second", cli_stream_rate(x));
  json_end(&j, '}');
  putchar('\n');
}

static rfr_status continue_prompt(cli *c, rfr_run *run, cli_text *t, const char *prompt, size_t n) {
  cli_string made = {0};
  cli_stream x = {.text = t, .write = show};
  if (c->json) x.write = cli_string_add, x.user = &made;
  rfr_status s = encode(c, t, prompt, n);
  if (s == RFR_OK && !c->json && !c->chat) show(prompt, n, NULL);
  if (s == RFR_OK) s = cli_stream_run(c, run, &x);
  if (s == RFR_OK && made.failed) s = RFR_NO_MEMORY;
  if (s == RFR_OK && c->json) print_json(prompt, &made, &x);
  if (s == RFR_OK && !c->json) putchar('\n');
  fflush(stdout);
  if (s == RFR_OK && !c->json && !c->quiet && x.tokens > 1)
    fprintf(stderr, "prompt of %lld %s in %.3f s, then %.0f tokens/s\n", (long long)t->tokens.n,
            t->tokenizer ? "tokens" : "bytes", x.first - x.start, cli_stream_rate(&x));
  cli_stream_deinit(&x);
  free(made.data);
  return s;
}

/* ---- a file of prompts ---- */

/* Reads the tokens of a line: "messages", or "prompt" as text or, with --chat, as a user's message. */
static rfr_status encode_line(const cli *c, cli_text *t, const char *place, json_t *row) {
  const json_t *messages = json_object_get(row, "messages"), *prompt = json_object_get(row, "prompt");
  if (json_is_array(messages)) return cli_text_encode_chat(t, messages);
  if (json_is_string(prompt)) return encode(c, t, json_string_value(prompt), json_string_length(prompt));
  return cli_usage("write {\"prompt\": \"TEXT\"} or {\"messages\": [...]}", "%s: neither \"prompt\" nor \"messages\"",
                   place);
}

/* A line of the file: its object and, until it is written, the generated text. */
typedef struct line {
  json_t *row;
  cli_string made;
  cli_stream stream;
  rfr_prompt prompt;
} line;

enum { LINES_PER_TEXT = 8 }; /* lines are read ahead, so that a text that has ended can be replaced */

typedef struct prompts {
  cli *c;
  rfr_run *run;
  cli_text *text;
  FILE *in, *out;
  const char *name;
  int64_t number, done, tokens;
  line *lines;
  int n, most;
} prompts;

static void free_lines(prompts *p) {
  for (int i = 0; i < p->n; i++) {
    line *x = &p->lines[i];
    json_decref(x->row);
    free(x->made.data);
    free((int32_t *)x->prompt.tokens);
    cli_stream_deinit(&x->stream);
  }
  p->n = 0;
}

static rfr_status add_line(prompts *p, const char *text, size_t n) {
  json_error_t e;
  char place[4200];
  snprintf(place, sizeof place, "%s:%lld", p->name, (long long)p->number);
  line *x = &p->lines[p->n++];
  *x = (line){.row = json_loadb(text, n, JSON_REJECT_DUPLICATES, &e)};
  x->stream = (cli_stream){.text = p->text, .write = cli_string_add, .user = &x->made};
  if (!json_is_object(x->row))
    return cli_usage("write one JSON object a line", "%s:%d: %s", place, x->row ? 1 : e.column,
                     x->row ? "not an object" : e.text);
  rfr_status s = RFR_OK;
  if (json_object_get(x->row, "messages") && !p->text->chat) s = cli_text_open_chat(p->c, p->run, p->text);
  if (s == RFR_OK) s = encode_line(p->c, p->text, place, x->row);
  if (s == RFR_OK) s = cli_stream_begin(p->c, p->run, &x->stream);
  if (s != RFR_OK) return s;
  const rfr_tokens *tokens = &p->text->tokens;
  int32_t *ids = malloc(((size_t)tokens->n + 1) * sizeof *ids);
  if (!ids) return RFR_NO_MEMORY;
  memcpy(ids, tokens->ids, (size_t)tokens->n * sizeof *ids);
  x->prompt = (rfr_prompt){ids, tokens->n, (uint64_t)p->c->seed, cli_stream_take, &x->stream};
  return RFR_OK;
}

/* Reads lines until there are `most` or the file ends. */
static rfr_status read_lines(prompts *p) {
  char *text = NULL;
  size_t capacity = 0;
  rfr_status s = RFR_OK;
  while (s == RFR_OK && p->n < p->most) {
    const ssize_t got = getline(&text, &capacity, p->in);
    if (got < 0) break;
    p->number++;
    if (strspn(text, " \t\r\n") != (size_t)got) s = add_line(p, text, (size_t)got);
  }
  free(text);
  if (s == RFR_OK && ferror(p->in)) s = cli_fail(RFR_IO, "check the path", "%s cannot be read", p->name);
  return s;
}

static rfr_status write_line(prompts *p, line *x) {
  rfr_status s = cli_stream_end(&x->stream);
  if (s == RFR_OK && x->made.failed) s = RFR_NO_MEMORY;
  if (s != RFR_OK) return s;
  cli_string valid = {0}; /* a byte-level model may generate any byte */
  cli_string_add_utf8(&valid, x->made.data ? x->made.data : "", x->made.n);
  const bool failed =
      valid.failed || json_object_set_new(x->row, "text", json_stringn(valid.data ? valid.data : "", valid.n)) != 0;
  free(valid.data);
  if (failed) return RFR_NO_MEMORY;
  json_object_set_new(x->row, "tokens", json_integer(x->stream.tokens));
  if (json_dumpf(x->row, p->out, 0) != 0 || fputc('\n', p->out) == EOF || fflush(p->out) != 0)
    return cli_cannot_write(p->c->out);
  p->tokens += x->stream.tokens;
  p->done++;
  return RFR_OK;
}

/* Continues the lines that were read, as a batch, and writes them in the order of the file. */
static rfr_status answer_lines(prompts *p) {
  const rfr_generate_options g = cli_sampling(p->c, p->text);
  rfr_prompt *all = malloc((size_t)p->n * sizeof *all);
  if (!all) return RFR_NO_MEMORY;
  for (int i = 0; i < p->n; i++) all[i] = p->lines[i].prompt;
  rfr_status s = rfr_run_generate_batch(p->run, all, p->n, &g);
  for (int i = 0; s == RFR_OK && i < p->n; i++) s = write_line(p, &p->lines[i]);
  free(all);
  return s;
}

static rfr_status answer_file(cli *c, rfr_run *run, cli_text *t) {
  const bool from_stdin = strcmp(c->prompts, "-") == 0;
  prompts p = {.c = c, .run = run, .text = t, .in = from_stdin ? stdin : fopen(c->prompts, "rb"), .out = stdout};
  const double start = cli_now();
  rfr_status s = RFR_OK;
  p.name = from_stdin ? "standard input" : c->prompts;
  p.most = c->batch > 1 ? (int)c->batch * LINES_PER_TEXT : 1;
  if (!p.in) return cli_fail(RFR_IO, "check the path", "%s: %s", c->prompts, strerror(errno));
  if (!(p.lines = calloc((size_t)p.most, sizeof *p.lines))) s = RFR_NO_MEMORY;
  if (s == RFR_OK && c->out && strcmp(c->out, "-") != 0 && !(p.out = fopen(c->out, "wb"))) s = cli_cannot_write(c->out);
  for (bool more = true; s == RFR_OK && more;) {
    s = read_lines(&p);
    more = p.n > 0;
    if (s == RFR_OK && more) s = answer_lines(&p);
    free_lines(&p);
  }
  if (p.out && p.out != stdout && fclose(p.out) != 0 && s == RFR_OK) s = cli_cannot_write(c->out);
  if (!from_stdin) fclose(p.in);
  free(p.lines);
  if (s == RFR_OK && !c->quiet && !c->json)
    fprintf(stderr, "%lld prompts, %lld tokens in %.1f s\n", (long long)p.done, (long long)p.tokens, cli_now() - start);
  return s;
}

/* ---- the command ---- */

static rfr_status check_options(const cli *c) {
  if (c->prompts && c->prompt) return cli_usage("omit one of them", "--prompt and --prompts both give prompts");
  if (c->batch < 0 || c->batch > 64)
    return cli_usage("give 1 to 64", "--batch %lld is out of range", (long long)c->batch);
  if (c->batch > 1 && !c->prompts) return cli_usage("omit --batch", "--batch is for --prompts");
  if (c->out && !c->prompts) return cli_usage("omit --out", "--out is for --prompts");
  if (c->system && !c->chat) return cli_usage("add --chat", "--system is for --chat");
  if (c->prompt && !*c->prompt) return cli_usage("give at least one byte, or omit --prompt", "--prompt is empty");
  return cli_check_sampling(c);
}

rfr_status cli_generate(cli *c) {
  rfr_run *run = NULL;
  cli_text t = {0};
  char *read = NULL;
  const char *prompt = c->prompt ? c->prompt : "\n";
  rfr_status s = check_options(c);
  if (s == RFR_OK && strcmp(prompt, "-") == 0) {
    s = cli_read_file("-", &read);
    prompt = read;
    if (s == RFR_OK && !*prompt) s = cli_usage("give at least one byte", "standard input is empty");
  }
  if (s == RFR_OK) s = cli_open_generator(c, &run);
  if (s == RFR_OK) cli_text_open(run, &t);
  if (s == RFR_OK && c->chat) s = cli_text_open_chat(c, run, &t);
  if (s == RFR_OK) s = c->prompts ? answer_file(c, run, &t) : continue_prompt(c, run, &t, prompt, strlen(prompt));
  cli_text_deinit(&t);
  free(read);
  rfr_run_close(run);
  return s;
}
