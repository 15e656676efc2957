/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain generate: continues a prompt, or answers it with the model's chat template. Text goes to standard output as
 * soon as it is complete; the speed goes to standard error. With --prompts, one line of a file after the other.
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

/* A conversation of the prompt alone, after --system. */
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

static void print_json(const char *prompt, const char *made, const cli_stream *x) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
  json_text(&j, "prompt", prompt);
  json_text(&j, "text", made ? made : "");
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
  if (s == RFR_OK && c->json) print_json(prompt, made.data, &x);
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

/* The line's tokens: "messages", or "prompt" as text or, with --chat, as a user's message. */
static rfr_status encode_line(const cli *c, cli_text *t, const char *place, json_t *row) {
  const json_t *messages = json_object_get(row, "messages"), *prompt = json_object_get(row, "prompt");
  if (json_is_array(messages)) return cli_text_encode_chat(t, messages);
  if (json_is_string(prompt)) return encode(c, t, json_string_value(prompt), json_string_length(prompt));
  return cli_usage("write {\"prompt\": \"TEXT\"} or {\"messages\": [...]}", "%s: neither \"prompt\" nor \"messages\"",
                   place);
}

static rfr_status answer_line(cli *c, rfr_run *run, cli_text *t, const char *place, const char *line, size_t n,
                              FILE *out, int64_t *tokens) {
  json_error_t e;
  cli_string made = {0};
  cli_stream x = {.text = t, .write = cli_string_add, .user = &made};
  json_t *row = json_loadb(line, n, JSON_REJECT_DUPLICATES, &e);
  if (!json_is_object(row)) {
    json_decref(row);
    return cli_usage("write one JSON object a line", "%s:%d: %s", place, row ? 1 : e.column,
                     row ? "not an object" : e.text);
  }
  rfr_status s = RFR_OK;
  if (json_object_get(row, "messages") && !t->chat) s = cli_text_open_chat(c, run, t);
  if (s == RFR_OK) s = encode_line(c, t, place, row);
  if (s == RFR_OK) s = cli_stream_run(c, run, &x);
  if (s == RFR_OK && made.failed) s = RFR_NO_MEMORY;
  if (s == RFR_OK) {
    json_object_set_new(row, "text", json_stringn(made.data ? made.data : "", made.n));
    json_object_set_new(row, "tokens", json_integer(x.tokens));
    if (json_dumpf(row, out, 0) != 0 || fputc('\n', out) == EOF || fflush(out) != 0) s = cli_cannot_write(c->out);
  }
  *tokens += x.tokens;
  cli_stream_deinit(&x);
  free(made.data);
  json_decref(row);
  return s;
}

static rfr_status answer_file(cli *c, rfr_run *run, cli_text *t) {
  const bool from_stdin = strcmp(c->prompts, "-") == 0;
  FILE *in = from_stdin ? stdin : fopen(c->prompts, "rb"), *out = stdout;
  char *line = NULL, place[4200];
  size_t capacity = 0;
  int64_t n = 0, done = 0, tokens = 0;
  const double start = cli_now();
  rfr_status s = RFR_OK;
  if (!in) return cli_fail(RFR_IO, "check the path", "%s: %s", c->prompts, strerror(errno));
  if (c->out && strcmp(c->out, "-") != 0 && !(out = fopen(c->out, "wb"))) s = cli_cannot_write(c->out);
  for (ssize_t got; s == RFR_OK && (got = getline(&line, &capacity, in)) >= 0;) {
    snprintf(place, sizeof place, "%s:%lld", from_stdin ? "standard input" : c->prompts, (long long)++n);
    if (strspn(line, " \t\r\n") == (size_t)got) continue;
    s = answer_line(c, run, t, place, line, (size_t)got, out, &tokens);
    done += s == RFR_OK;
  }
  if (s == RFR_OK && ferror(in)) s = cli_fail(RFR_IO, "check the path", "%s cannot be read", c->prompts);
  if (out && out != stdout && fclose(out) != 0 && s == RFR_OK) s = cli_cannot_write(c->out);
  if (!from_stdin) fclose(in);
  free(line);
  if (s == RFR_OK && !c->quiet && !c->json)
    fprintf(stderr, "%lld prompts, %lld tokens in %.1f s\n", (long long)done, (long long)tokens, cli_now() - start);
  return s;
}

/* ---- the command ---- */

static rfr_status check_options(const cli *c) {
  if (c->prompts && c->prompt) return cli_usage("omit one of them", "--prompt and --prompts both give prompts");
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
