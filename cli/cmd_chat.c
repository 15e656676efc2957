/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain chat: a conversation with a model through its template. Each line of standard input is one message; a
 * backslash at the end of a line continues the message on the next line. At a terminal the loop prints a prompt, and
 * Ctrl-C ends the answer in progress. In a pipe the answers alone go to standard output.
 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "model_text.h"

static atomic_bool interrupted;

static void on_signal(int number) {
  (void)number;
  atomic_store(&interrupted, true);
}

typedef struct chat {
  cli *c;
  rfr_run *run;
  cli_text text;
  json_t *messages;
  int64_t window;
  bool terminal, shortened;
} chat;

static void add_message(chat *x, const char *role, const char *content, size_t n) {
  json_t *message = json_object();
  json_object_set_new(message, "role", json_string(role));
  json_object_set_new(message, "content", json_stringn(content, n));
  json_array_append_new(x->messages, message);
}

static void reset(chat *x) {
  json_array_clear(x->messages);
  if (x->c->system) add_message(x, "system", x->c->system, strlen(x->c->system));
}

/* ---- input ---- */

/* Reads one message of *length bytes, without its last line end, from malloc; NULL at the end of the input. */
static char *read_message(const chat *x, size_t *length) {
  cli_string s = {0};
  char *line = NULL;
  size_t capacity = 0;
  bool more = true, any = false;
  for (bool first = true; more; first = false) {
    if (x->terminal) fputs(first ? "> " : "  ", stderr);
    errno = 0;
    const ssize_t got = getline(&line, &capacity, stdin);
    if (got < 0) break;
    any = true;
    size_t n = (size_t)got;
    if (n > 0 && line[n - 1] == '\n') n--;
    if (n > 0 && line[n - 1] == '\r') n--;
    more = n > 0 && line[n - 1] == '\\';
    if (more) line[n - 1] = '\n';
    cli_string_add(line, n, &s);
  }
  free(line);
  *length = s.n;
  if (any) return s.data;
  free(s.data);
  return NULL;
}

/* Runs a line that begins with a slash as a command. false: it ends the conversation. */
static bool run_command(chat *x, const char *line) {
  if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0) return false;
  if (strcmp(line, "/reset") == 0) {
    reset(x);
  } else if (strcmp(line, "/system") == 0 || strncmp(line, "/system ", 8) == 0) {
    free((char *)x->c->system);
    x->c->system = line[7] ? strdup(line + 8) : NULL;
    reset(x);
  } else if (strcmp(line, "/help") == 0) {
    fputs("/reset        start a new conversation\n"
          "/system TEXT  start a new one with this system message\n"
          "/quit         end\n"
          "A backslash at the end of a line continues the message on the next line.\n",
          stderr);
  } else {
    fprintf(stderr, "there is no command %s; /help lists the commands\n", line);
  }
  return true;
}

/* ---- answers ---- */

typedef struct answer {
  cli_string text;
  bool shown;
} answer;

static void take(const char *piece, size_t n, void *user) {
  answer *a = user;
  cli_string_add(piece, n, &a->text);
  if (!a->shown) return;
  fwrite(piece, 1, n, stdout);
  fflush(stdout);
}

/* Renders the conversation. Removes the oldest messages after the system message until there is space for an answer. */
static rfr_status encode(chat *x) {
  for (;;) {
    const rfr_status s = cli_text_encode_chat(&x->text, x->messages);
    if (s != RFR_OK) return s;
    const int64_t least = x->c->tokens < x->window / 2 ? x->c->tokens : x->window / 2;
    const size_t first = x->c->system != NULL, n = json_array_size(x->messages);
    if (x->text.tokens.n + least <= x->window || n < first + 3) return RFR_OK;
    if (!x->shortened) cli_warn(x->c, "the conversation is longer than the context: its oldest messages are left out");
    x->shortened = true;
    json_array_remove(x->messages, first);
    json_array_remove(x->messages, first); /* the answer to it */
  }
}

static rfr_status answer_message(chat *x, const char *message) {
  answer a = {.shown = !x->c->json};
  cli_stream stream = {.text = &x->text, .write = take, .user = &a, .interrupted = &interrupted};
  add_message(x, "user", message, strlen(message));
  if (!json_object_get(json_array_get(x->messages, json_array_size(x->messages) - 1), "content")) {
    json_array_remove(x->messages, json_array_size(x->messages) - 1);
    return cli_usage("write the message as UTF-8", "the message is not valid UTF-8");
  }
  atomic_store(&interrupted, false);
  rfr_status s = encode(x);
  if (s == RFR_OK) s = cli_stream_run(x->c, x->run, &stream);
  if (s == RFR_OK && a.text.failed) s = RFR_NO_MEMORY;
  if (s == RFR_OK && x->c->json) {
    json j = {.f = stdout};
    json_begin(&j, NULL, '{');
    json_text(&j, "role", "assistant");
    json_bytes(&j, "content", a.text.data ? a.text.data : "", a.text.n);
    json_int(&j, "prompt_tokens", x->text.tokens.n);
    json_int(&j, "tokens", stream.tokens);
    json_double(&j, "tokens_per_second", cli_stream_rate(&stream));
    json_end(&j, '}');
  }
  if (s == RFR_OK) putchar('\n');
  fflush(stdout);
  if (s == RFR_OK) add_message(x, "assistant", a.text.data ? a.text.data : "", a.text.n);
  free(a.text.data);
  cli_stream_deinit(&stream);
  return s;
}

rfr_status cli_chat(cli *c) {
  chat x = {.c = c, .messages = json_array()};
  rfr_run_info info;
  rfr_status s = cli_check_sampling(c);
  x.terminal = isatty(STDIN_FILENO) && !c->quiet && !c->json;
  c->system = c->system ? strdup(c->system) : NULL;
  if (s == RFR_OK) s = cli_open_generator(c, &x.run);
  if (s == RFR_OK) cli_text_open(x.run, &x.text);
  if (s == RFR_OK) s = cli_text_open_chat(c, x.run, &x.text);
  if (s == RFR_OK) {
    rfr_run_get_info(x.run, &info);
    x.window = info.window;
    reset(&x);
    if (x.terminal) {
      fprintf(stderr, "%s; /help lists the commands\n", c->operand);
      struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
      sigaction(SIGINT, &action, NULL);
    }
  }
  size_t n;
  for (char *message; s == RFR_OK && (message = read_message(&x, &n));) {
    bool goes_on = true;
    if (strlen(message) != n) s = cli_usage("write the message without it", "the message contains a NUL byte");
    else if (*message == '/') goes_on = run_command(&x, message);
    else if (*message) s = answer_message(&x, message);
    free(message);
    if (!goes_on) break;
  }
  if (x.terminal) fputc('\n', stderr);
  json_decref(x.messages);
  cli_text_deinit(&x.text);
  free((char *)c->system);
  rfr_run_close(x.run);
  return s;
}
