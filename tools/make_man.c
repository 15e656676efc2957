/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes man pages and shell completion from the table of commands in cli/commands.c:
 *
 *   make_man FOLDER    FOLDER/man/refrain.1, FOLDER/man/refrain-COMMAND.1, FOLDER/completion/refrain (bash) and
 *                      FOLDER/completion/_refrain (zsh)
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "cli/cli.h"

static FILE *create(const char *folder, const char *name) {
  char path[4096];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
  FILE *f = fopen(path, "wb");
  if (!f) perror(path);
  return f;
}

static bool finish(FILE *f) {
  const bool failed = ferror(f) != 0;
  return fclose(f) == 0 && !failed;
}

/* ---- man pages ---- */

/* Writes text for troff, where a backslash, a hyphen, and a control character at the start of a line have special
 * meanings. */
static void put_troff(FILE *f, const char *text) {
  if (*text == '.' || *text == '\'') fputs("\\&", f);
  for (; *text; text++) {
    if (*text == '\\') fputs("\\e", f);
    else if (*text == '-') fputs("\\-", f);
    else if (*text == '\n') fputs("\n", f);
    else fputc(*text, f);
  }
}

static void put_title(FILE *f, const char *name, const char *summary) {
  fprintf(
      f, ".\\\" SPDX-License-Identifier: Apache-2.0; made by tools/make_man.c\n.TH \"%s\" 1 \"\" \"refrain %s\" \"\"\n",
      name, rfr_version());
  fputs(".SH NAME\n", f);
  put_troff(f, name);
  fputs(" \\- ", f);
  put_troff(f, summary);
  fputc('\n', f);
}

static void put_choices(FILE *f, const cli_option *o, const char *before) {
  for (const char *c = o->choices ? o->choices : ""; *c;) {
    char word[64];
    c += strspn(c, " ");
    const int n = (int)strcspn(c, " ");
    snprintf(word, sizeof word, "%.*s", n, c);
    c += n;
    fputs(before, f);
    put_troff(f, word);
    before = ", ";
  }
}

static void put_operands(FILE *f, const cli_command *c) {
  const char *meaning, *word;
  for (int i = 0; (word = cli_operand_word(i, &meaning)); i++) {
    if (!cli_has_operand(c, word)) continue;
    fprintf(f, "\n.TP\n\\fI%s\\fR\n", word);
    put_troff(f, meaning);
  }
}

static bool put_command_page(const char *folder, int command) {
  const cli_command *c = cli_command_at(command);
  char name[64], file[80];
  snprintf(name, sizeof name, "refrain-%s", c->name);
  snprintf(file, sizeof file, "man/%s.1", name);
  FILE *f = create(folder, file);
  if (!f) return false;
  put_title(f, name, c->summary);
  fprintf(f, ".SH SYNOPSIS\n.B refrain %s\n.I ", c->name);
  put_troff(f, c->operands);
  fputs("\n[\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n", f);
  put_troff(f, c->details);
  put_operands(f, c);
  fputs("\n.SH OPTIONS\n", f);
  for (const cli_option *o = c->options; o->name; o++) {
    fputs(".TP\n\\fB\\-\\-", f);
    put_troff(f, o->name);
    fputs("\\fR", f);
    if (o->argument) fprintf(f, " \\fI%s\\fR", o->argument);
    fputc('\n', f);
    put_troff(f, o->help);
    put_choices(f, o, "; one of ");
    fputc('\n', f);
  }
  fputs(".SH EXAMPLE\n.nf\n", f);
  put_troff(f, c->example);
  fputs("\n.fi\n.SH SEE ALSO\n.BR refrain (1)\n", f);
  return finish(f);
}

static bool put_main_page(const char *folder) {
  const cli_command *c;
  FILE *f = create(folder, "man/refrain.1");
  if (!f) return false;
  put_title(f, "refrain", "train transformers");
  fputs(".SH SYNOPSIS\n.B refrain\n.I COMMAND\n[\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n"
        "Trains transformers. A step is traced once, planned to the byte, captured and replayed.\n.SH COMMANDS\n",
        f);
  for (int i = 0; (c = cli_command_at(i)); i++) {
    fprintf(f, ".TP\n\\fBrefrain %s\\fR \\fI", c->name);
    put_troff(f, c->operands);
    fputs("\\fR\n", f);
    put_troff(f, c->summary);
    fputc('\n', f);
  }
  fputs(".SH EXIT STATUS\n"
        ".TP\n0\ndone\n.TP\n1\nthe run failed\n.TP\n2\nwrong usage or input\n"
        ".TP\n3\ndoes not fit, or a library is missing\n.TP\n4\ninput or output failed\n"
        ".TP\n5\nstopped early, can be resumed\n.TP\n70\na defect of Refrain\n"
        ".SH ENVIRONMENT\n.TP\n.B REFRAIN_DEVICE\nthe device, if \\-\\-device is not given\n"
        ".TP\n.B REFRAIN_THREADS\nthe number of threads, if \\-\\-threads is not given\n.SH SEE ALSO\n",
        f);
  for (int i = 0; (c = cli_command_at(i)); i++) fprintf(f, "%s.BR refrain\\-%s (1)", i > 0 ? ",\n" : "", c->name);
  fputc('\n', f);
  return finish(f);
}

/* ---- completion ---- */

/* Writes the words that complete the argument of an option: `case` rows of one command. */
static void put_bash_choices(FILE *f, const cli_command *c) {
  for (const cli_option *o = c->options; o->name; o++)
    if (o->choices)
      fprintf(f, "    %s:--%s) COMPREPLY=($(compgen -W \"%s\" -- \"$cur\")); return ;;\n", c->name, o->name,
              o->choices + strspn(o->choices, " "));
}

static bool put_bash(const char *folder) {
  const cli_command *c;
  FILE *f = create(folder, "completion/refrain");
  if (!f) return false;
  fputs("# SPDX-License-Identifier: Apache-2.0; made by tools/make_man.c\n# bash completion for refrain\n"
        "_refrain() {\n  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} options\n"
        "  COMPREPLY=()\n  if [ \"$COMP_CWORD\" = 1 ] || [ \"$prev\" = help ]; then\n    COMPREPLY=($(compgen -W \"",
        f);
  for (int i = 0; (c = cli_command_at(i)); i++) fprintf(f, "%s ", c->name);
  fputs("help --help --version\" -- \"$cur\"))\n    return\n  fi\n  case ${COMP_WORDS[1]}:$prev in\n", f);
  for (int i = 0; (c = cli_command_at(i)); i++) put_bash_choices(f, c);
  fputs("  esac\n  case ${COMP_WORDS[1]} in\n", f);
  for (int i = 0; (c = cli_command_at(i)); i++) {
    fprintf(f, "    %s) options=\"", c->name);
    for (const cli_option *o = c->options; o->name; o++) fprintf(f, "%s--%s", o == c->options ? "" : " ", o->name);
    fputs("\" ;;\n", f);
  }
  fputs("  esac\n  if [[ $cur == -* ]]; then\n    COMPREPLY=($(compgen -W \"$options\" -- \"$cur\"))\n"
        "  else\n    COMPREPLY=($(compgen -f -- \"$cur\"))\n  fi\n}\n"
        "complete -o filenames -F _refrain refrain\n",
        f);
  return finish(f);
}

/* Writes text between single quotes in zsh's option notation, where [ ] : have special meanings. */
static void put_zsh(FILE *f, const char *text) {
  for (; *text; text++) {
    if (*text == '\'') fputs("'\\''", f);
    else if (strchr("[]:\\", *text)) fprintf(f, "\\%c", *text);
    else fputc(*text, f);
  }
}

static bool put_zsh_file(const char *folder) {
  const cli_command *c;
  FILE *f = create(folder, "completion/_refrain");
  if (!f) return false;
  fputs("#compdef refrain\n# SPDX-License-Identifier: Apache-2.0; made by tools/make_man.c\n"
        "_refrain() {\n  local -a commands\n  commands=(\n",
        f);
  for (int i = 0; (c = cli_command_at(i)); i++) {
    fprintf(f, "    '%s:", c->name);
    put_zsh(f, c->summary);
    fputs("'\n", f);
  }
  fputs("    'help:print the help of a command'\n  )\n"
        "  if (( CURRENT == 2 )) || [[ $words[2] == help ]]; then\n    _describe command commands\n    return\n  fi\n"
        "  local command=$words[2]\n  shift words\n  (( CURRENT-- ))\n  case $command in\n",
        f);
  for (int i = 0; (c = cli_command_at(i)); i++) {
    fprintf(f, "    %s) _arguments", c->name);
    for (const cli_option *o = c->options; o->name; o++) {
      fprintf(f, " \\\n      '%s--%s[", o->kind == CLI_LIST ? "*" : "", o->name);
      put_zsh(f, o->help);
      fputc(']', f);
      const bool is_path = o->argument && (strcmp(o->argument, "FILE") == 0 || strcmp(o->argument, "FOLDER") == 0);
      if (o->choices) fprintf(f, ":%s:(%s)", o->argument, o->choices + strspn(o->choices, " "));
      else if (o->argument) fprintf(f, ":%s:%s", o->argument, is_path ? "_files" : "");
      fputc('\'', f);
    }
    fputs(c->most > 0 ? " \\\n      '*:operand:_files' ;;\n" : " ;;\n", f);
  }
  fputs("  esac\n}\n_refrain \"$@\"\n", f);
  return finish(f);
}

int main(int argc, char **argv) {
  char path[4096];
  if (argc != 2) return 2;
  for (int i = 0; i < 3; i++) {
    static const char *const folders[] = {"", "/man", "/completion"};
    snprintf(path, sizeof path, "%s%s", argv[1], folders[i]);
    mkdir(path, 0777); /* create it if possible; opening a file reports a missing folder */
  }
  bool good = put_main_page(argv[1]) && put_bash(argv[1]) && put_zsh_file(argv[1]);
  for (int i = 0; cli_command_at(i); i++) good = put_command_page(argv[1], i) && good;
  return good ? 0 : 1;
}
