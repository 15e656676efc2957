/* SPDX-License-Identifier: Apache-2.0
 *
 * The syntax tree of a template. All nodes live in the template's arena and are immutable after parsing.
 */
#ifndef RFI_TEMPLATE_NODE_H
#define RFI_TEMPLATE_NODE_H

#include "base/arena.h"
#include "base/base.h"

typedef enum rfi_ttoken_type {
  RFI_TOKEN_EOF,
  RFI_TOKEN_DATA,
  RFI_TOKEN_BLOCK_BEGIN,
  RFI_TOKEN_BLOCK_END,
  RFI_TOKEN_VARIABLE_BEGIN,
  RFI_TOKEN_VARIABLE_END,
  RFI_TOKEN_NAME,
  RFI_TOKEN_STRING,
  RFI_TOKEN_INTEGER,
  RFI_TOKEN_FLOAT,
  /* Operators: one byte is its own type; those of two bytes follow. */
  RFI_TOKEN_FLOORDIV = 256,
  RFI_TOKEN_POW,
  RFI_TOKEN_EQ,
  RFI_TOKEN_NE,
  RFI_TOKEN_GE,
  RFI_TOKEN_LE,
} rfi_ttoken_type;

typedef struct rfi_ttoken {
  int type;
  uint32_t at;      /* byte of the source */
  const char *text; /* of a name, string or data; NUL-terminated, but strings may contain NUL */
  uint32_t n;
  int64_t i;
  double f;
} rfi_ttoken;

typedef enum rfi_tnode_type {
  /* expressions */
  RFI_NODE_CONST, /* text, number, true, false, none */
  RFI_NODE_NAME,
  RFI_NODE_LIST,
  RFI_NODE_TUPLE,
  RFI_NODE_DICT, /* kids: key, value, key, value */
  RFI_NODE_NOT,
  RFI_NODE_NEG,
  RFI_NODE_POS,
  RFI_NODE_AND,
  RFI_NODE_OR,
  RFI_NODE_BINARY,  /* op; kids: left, right */
  RFI_NODE_COMPARE, /* kids: first, then one per operator; ops in `ops` */
  RFI_NODE_CONCAT,
  RFI_NODE_COND,   /* kids: condition, value, other or NULL */
  RFI_NODE_ATTR,   /* kid; text: name */
  RFI_NODE_ITEM,   /* kids: object, key */
  RFI_NODE_SLICE,  /* kids: object, start, stop, step; NULL where omitted */
  RFI_NODE_CALL,   /* kids: function, then arguments */
  RFI_NODE_FILTER, /* text: name; kids: value (NULL in a block), then arguments */
  RFI_NODE_TEST,
  /* statements */
  RFI_NODE_DATA,
  RFI_NODE_OUTPUT,
  RFI_NODE_IF,            /* kids: condition, body, condition, body, ..., body of else */
  RFI_NODE_FOR,           /* kids: target, iterable, test or NULL, body, else or NULL */
  RFI_NODE_SET,           /* kids: target, value */
  RFI_NODE_SET_BLOCK,     /* kids: target, filter or NULL, body */
  RFI_NODE_NAMESPACE_SET, /* a target: symbol of the namespace; text: attribute */
  RFI_NODE_MACRO,         /* name `symbol`; params; kids: body, then a default or NULL for each parameter */
  RFI_NODE_CALL_BLOCK,    /* kids: call, macro of the caller */
  RFI_NODE_FILTER_BLOCK,  /* kids: filter, body */
  RFI_NODE_GENERATION,    /* kid: body */
  RFI_NODE_WITH,          /* kids: target, value, ..., body */
  RFI_NODE_BREAK,
  RFI_NODE_CONTINUE,
  RFI_NODE_BODY, /* a list of statements */
} rfi_tnode_type;

typedef enum rfi_tconst { RFI_CONST_NONE, RFI_CONST_BOOL, RFI_CONST_INT, RFI_CONST_FLOAT, RFI_CONST_TEXT } rfi_tconst;

typedef struct rfi_tnode rfi_tnode;
struct rfi_tnode {
  rfi_tnode_type type;
  uint32_t at;
  int op;           /* a token type; of a constant: an rfi_tconst; of a filter: its number of "." arguments */
  int symbol;       /* of a name */
  int depth;        /* depth of the subtree */
  const char *text; /* NUL-terminated */
  uint32_t n;
  int64_t i;
  double f;
  rfi_tnode **kids;
  int n_kids, capacity;
  /* Arguments of a call, filter or test: the last n_named kids are named, unless they are splats. */
  const char **names; /* per argument: NULL, a keyword, "*" or "**" */
  int *ops;           /* of a comparison */
  /* Parameters of a macro; for the body of a scope, the names that are undefined at its start. */
  int *params;
  int n_params;
  bool uses_varargs, uses_kwargs, uses_caller;
  const void *cached; /* a text value, made once by the parser */
};

/* Names that every template can use. */
enum { RFI_SYMBOL_VARARGS, RFI_SYMBOL_KWARGS, RFI_SYMBOL_CALLER, RFI_SYMBOL_LOOP };

typedef struct rfi_tsymbols {
  const char **names;
  int n, capacity;
} rfi_tsymbols;

typedef struct rfi_template {
  rfr_ctx *ctx;
  rfi_arena *arena;
  const char *name;
  const char *source; /* line ends are "\n" */
  size_t n;
  rfi_ttoken *tokens;
  int n_tokens, capacity;
  rfi_tsymbols symbols;
  rfi_tnode *root;
  bool has_generation;
} rfi_template;

enum { RFI_TEMPLATE_BYTES = 1 << 20 }; /* maximum size of a template */

/* Fails with the place of byte `at`: line and column. */
rfr_status rfi_template_fail(const rfi_template *t, rfi_error error, uint32_t at, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* Splits t->source into tokens. */
rfr_status rfi_template_lex(rfi_template *t);
/* Stores in each body of a scope the names that are undefined at its start. */
rfr_status rfi_template_scopes(rfi_template *t);
/* Number of a variable's name; *symbol is -1 if the template does not use the name. */
int rfi_template_symbol(const rfi_template *t, const char *name);

/* Parses a template. Released with rfi_template_destroy. Errors: template.syntax, memory.alloc. */
rfr_status rfi_template_parse(rfr_ctx *ctx, const char *name, const char *text, size_t n, rfi_template **out);
void rfi_template_destroy(rfi_template *t); /* accepts NULL */

#endif
