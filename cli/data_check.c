/* SPDX-License-Identifier: Apache-2.0
 *
 * refrain check MODEL DATA...: the rows and tokens that `refrain finetune` would train on, one row as the model reads
 * it with the trained text marked, and the memory of a step. Loads no weights and trains nothing.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli.h"

static void warn(const rfr_event *e, void *user) {
  if (e->kind == RFR_EVENT_WARNING) cli_warn(user, e->message);
}

/* On a terminal trained text is bold and other text dim; otherwise trained text is in double brackets. */
typedef struct marks {
  bool terminal;
  int trained; /* whether the last piece was trained; -1: there is none */
} marks;

static void put_piece(const char *text, size_t n, int trained, void *user) {
  marks *m = user;
  if (trained != m->trained) {
    if (m->terminal) fputs(trained < 0 ? "\033[0m" : trained ? "\033[0;1m" : "\033[0;2m", stdout);
    else if (trained > 0) fputs("[[", stdout);
    else if (m->trained > 0) fputs("]]", stdout);
  }
  m->trained = trained;
  fwrite(text, 1, n, stdout);
}

static void put_json_piece(const char *text, size_t n, int trained, void *user) {
  json *j = user;
  char *copy = strndup(text, n);
  json_begin(j, NULL, '{');
  json_text(j, "text", copy ? copy : "");
  json_bool(j, "trained", trained != 0);
  json_end(j, '}');
  free(copy);
}

/*  X(field of rfr_run_info, name) */
#define NUMBERS(X)                                                              \
  X(train_rows, "rows")                                                         \
  X(validation_rows, "held-out rows")                                           \
  X(train_windows, "windows in an epoch")                                       \
  X(window, "tokens in a window")                                               \
  X(train_tokens, "tokens")                                                     \
  X(trained_tokens, "trained tokens")                                           \
  X(truncated_rows, "rows that are cut, because they are longer than a window") \
  X(cut_tokens, "tokens cut off")                                               \
  X(dropped_rows, "rows dropped, because they are longer than a window")        \
  X(untrained_rows, "rows left out, because they have no token to train")       \
  X(equal_rows, "pairs left out, because both answers are equal")               \
  X(parameters, "parameters of the model")                                      \
  X(adapter_parameters, "parameters of the adapter")                            \
  X(trainable_parameters, "trainable parameters")

static rfr_status print_json(const rfr_run *data, const rfr_run_info *i, const cli_fit *fit) {
  json j = {.f = stdout};
  json_begin(&j, NULL, '{');
#define ROW(field, name) json_int(&j, #field, i->field);
  NUMBERS(ROW)
#undef ROW
  json_begin(&j, "sample", '[');
  const rfr_status s = i->train_rows > 0 ? rfr_run_data_row(data, 0, put_json_piece, &j) : RFR_OK;
  json_end(&j, ']');
  json_int(&j, "planned_bytes", fit->plan.planned_bytes);
  cli_fit_json(fit, &j);
  json_end(&j, '}');
  putchar('\n');
  return s;
}

static rfr_status print_text(const rfr_run *data, const rfr_run_info *i, const cli_fit *fit) {
  marks m = {isatty(STDOUT_FILENO), -1};
  char a[32];
#define ROW(field, name) \
  if (i->field > 0) printf("%14lld  %s\n", (long long)i->field, name);
  NUMBERS(ROW)
#undef ROW
  rfr_status s = RFR_OK;
  if (i->train_rows > 0) {
    printf("\nthe first row, %s:\n", m.terminal ? "trained text in bold" : "trained text in [[ ]]");
    s = rfr_run_data_row(data, 0, put_piece, &m);
    put_piece("", 0, -1, &m);
    printf("\n\n");
  }
  printf("a step needs %lld bytes (%s):\n", (long long)fit->plan.planned_bytes, cli_bytes(a, fit->plan.planned_bytes));
  cli_fit_print(fit, stdout);
  return s;
}

rfr_status cli_check_data(cli *c) {
  char *text = NULL;
  rfr_run *data = NULL, *plan = NULL;
  rfr_run_info info;
  cli_fit fit;
  rfr_status s = cli_finetune_config(c, &text);
  if (s == RFR_OK) {
    rfr_run_options o = cli_run_options(c);
    o.programs = 0;
    o.on_event = warn;
    o.event_user = c;
    s = rfr_run_open(c->ctx, text, NULL, &o, &data);
  }
  if (s == RFR_OK) s = cli_open_config(c, text, RFR_RUN_TRAIN, false, NULL, &plan);
  if (s == RFR_OK) s = cli_fit_make(c, text, plan, RFR_RUN_TRAIN, &fit);
  if (s == RFR_OK) rfr_run_get_info(data, &info);
  if (s == RFR_OK) s = c->json ? print_json(data, &info, &fit) : print_text(data, &info, &fit);
  fflush(stdout);
  if (s == RFR_OK && !fit.fits) s = cli_fit_fail(&fit);
  rfr_run_close(plan);
  rfr_run_close(data);
  free(text);
  return s;
}
