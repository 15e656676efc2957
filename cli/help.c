/* SPDX-License-Identifier: Apache-2.0
 *
 * Help, as text and as JSON, from the table of commands.
 */
#include <string.h>

#include "cli.h"

enum { COLUMNS = 80, HELP_COLUMN = 24 };

void cli_put_wrapped(FILE *f, const char *text, int at, int indent) {
  while (*text) {
    const int n = (int)strcspn(text, " ");
    if (at > indent && at + 1 + n > COLUMNS) {
      fprintf(f, "\n%*s", indent, "");
      at = indent;
    } else if (at > indent) {
      fputc(' ', f);
      at++;
    }
    fwrite(text, 1, (size_t)n, f);
    at += n;
    text += n;
    text += strspn(text, " ");
  }
  fputc('\n', f);
}

/* Copies the next word of a list of choices; returns the rest, or NULL at the end. */
static const char *next_choice(const char *choices, char word[64]) {
  choices += strspn(choices, " ");
  const int n = (int)strcspn(choices, " ");
  snprintf(word, 64, "%.*s", n, choices);
  return n > 0 ? choices + n : NULL;
}

static void put_option(FILE *f, const cli_option *o) {
  char text[512], word[64];
  const int n = fprintf(f, "  --%s%s%s", o->name, o->argument ? " " : "", o->argument ? o->argument : "");
  int at = snprintf(text, sizeof text, "%s", o->help);
  const char *before = "; one of ";
  for (const char *c = o->choices; c && (c = next_choice(c, word)); before = ", ")
    at += snprintf(text + at, sizeof text - (size_t)at, "%s%s", before, word);
  if (n + 1 < HELP_COLUMN) fprintf(f, "%*s", HELP_COLUMN - n, "");
  else fprintf(f, "\n%*s", HELP_COLUMN, "");
  cli_put_wrapped(f, text, HELP_COLUMN, HELP_COLUMN);
}

/* The commands by purpose. Each command is in one group. */
static const struct {
  const char *title, *commands;
} groups[] = {
    {"Train", "train finetune sweep"},
    {"Look at runs", "top report diff eval"},
    {"Use a model", "generate chat export inspect"},
    {"Prepare a run", "check keys tokenize tokenizer-train"},
    {"Study a step", "plan trace profile schedule bench"},
    {"Check the machine", "doctor"},
};
enum { N_GROUPS = sizeof groups / sizeof groups[0] };

static void print_group(FILE *f, int group) {
  const cli_command *c;
  char name[64];
  fprintf(f, "%s:\n", groups[group].title);
  for (const char *rest = groups[group].commands; (rest = next_choice(rest, name));)
    for (int i = 0; (c = cli_command_at(i)); i++) {
      if (strcmp(c->name, name) != 0) continue;
      const int n = fprintf(f, "  %-9s %s", c->name, c->operands);
      fprintf(f, "%*s %s\n", n < 33 ? 33 - n : 0, "", c->summary);
    }
  fputc('\n', f);
}

static void print_commands(FILE *f) {
  fputs("usage: refrain COMMAND [OPERANDS] [OPTIONS]\n\n"
        "Trains and fine-tunes transformers. A training step is recorded once, planned, captured and replayed.\n\n",
        f);
  const char *meaning, *word;
  for (int i = 0; i < N_GROUPS; i++) print_group(f, i);
  fputs("Operands:\n", f);
  for (int i = 0; (word = cli_operand_word(i, &meaning)); i++) fprintf(f, "  %-9s %s\n", word, meaning);
  fputs("\n`refrain help COMMAND` prints a command's options, `refrain --version` the version.\n"
        "\nExit codes: 0 done; 1 the run failed; 2 wrong usage or input; 3 does not fit, or a library\n"
        "is missing; 4 input or output failed; 5 stopped early, can be resumed; 70 a defect of Refrain.\n",
        f);
}

void cli_print_help(FILE *f, int command) {
  const cli_command *c = cli_command_at(command);
  const char *meaning, *word;
  if (!c) {
    print_commands(f);
    return;
  }
  fprintf(f, "usage: refrain %s %s%s[OPTIONS]\n\n", c->name, c->operands, *c->operands ? " " : "");
  cli_put_wrapped(f, c->details, 0, 0);
  fprintf(f, "\n  %s\n", c->example);
  bool is_first = true;
  for (int i = 0; (word = cli_operand_word(i, &meaning)); i++) {
    if (!cli_has_operand(c, word)) continue;
    if (is_first) fputs("\noperands:\n", f);
    is_first = false;
    const int n = fprintf(f, "  %s", word);
    fprintf(f, "%*s", HELP_COLUMN - n, "");
    cli_put_wrapped(f, meaning, HELP_COLUMN, HELP_COLUMN);
  }
  fputs("\noptions:\n", f);
  for (const cli_option *o = c->options; o->name; o++) put_option(f, o);
}

/* ---- JSON ---- */

static void put_json_option(json *j, const cli_option *o) {
  char word[64];
  json_begin(j, NULL, '{');
  json_text(j, "name", o->name);
  if (o->argument) json_text(j, "argument", o->argument);
  if (o->choices) json_begin(j, "choices", '[');
  for (const char *c = o->choices; c && (c = next_choice(c, word));) json_text(j, NULL, word);
  if (o->choices) json_end(j, ']');
  json_bool(j, "repeats", o->kind == CLI_LIST);
  json_text(j, "help", o->help);
  json_end(j, '}');
}

static void put_json_command(json *j, const cli_command *c) {
  json_begin(j, NULL, '{');
  json_text(j, "name", c->name);
  json_text(j, "operands", c->operands);
  json_text(j, "summary", c->summary);
  json_text(j, "details", c->details);
  json_text(j, "example", c->example);
  json_begin(j, "options", '[');
  for (const cli_option *o = c->options; o->name; o++) put_json_option(j, o);
  json_end(j, ']');
  json_end(j, '}');
}

void cli_print_help_json(FILE *f, int command) {
  json j = {.f = f};
  const cli_command *c = cli_command_at(command);
  const char *meaning, *word;
  if (c) {
    put_json_command(&j, c);
    fputc('\n', f);
    return;
  }
  json_begin(&j, NULL, '{');
  json_begin(&j, "commands", '[');
  for (int i = 0; (c = cli_command_at(i)); i++) put_json_command(&j, c);
  json_end(&j, ']');
  json_begin(&j, "operands", '{');
  for (int i = 0; (word = cli_operand_word(i, &meaning)); i++) json_text(&j, word, meaning);
  json_end(&j, '}');
  json_end(&j, '}');
  fputc('\n', f);
}
