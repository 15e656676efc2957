/* SPDX-License-Identifier: Apache-2.0
 *
 * Values of a running template, with Python's semantics: what they print, how they compare, what they contain.
 *
 * All values live in the arena of one render call and are immutable, except namespaces, which have variables as
 * attributes. Errors are latched: the first one is kept in rfi_render.status, later results are `none` and are not
 * used. A function that allocates returns NULL or an empty value on error, and every function accepts the values that
 * an earlier error left.
 *
 * Every byte of a text has flags that record its origin. Each operation keeps them: a builder makes every text and
 * copies ranges of other texts with their flags.
 */
#ifndef RFI_TEMPLATE_VALUE_H
#define RFI_TEMPLATE_VALUE_H

#include <jansson.h>

#include "base/arena.h"
#include "text/template_node.h"
#include "text/unicode.h"
#include "text/work_divisor.h"

enum {
  RFI_TEXT_FOREIGN = 1,   /* from the conversation */
  RFI_TEXT_GENERATED = 2, /* inside {% generation %} */
  RFI_TEXT_CONTENT = 4,   /* from a member of a message other than its role */
};

/* Bytes up to `end` with these flags. */
typedef struct rfi_trun {
  uint32_t end;
  uint32_t flags;
} rfi_trun;

typedef struct rfi_text {
  const char *data; /* valid UTF-8; no NUL at the end */
  uint32_t n;
  uint32_t flags; /* flags of all bytes, if there are no runs */
  const rfi_trun *runs;
  int n_runs;
  bool safe;     /* the value is a result of the filters safe or escape */
  int64_t chars; /* number of code points; -1: not counted yet */
} rfi_text;

typedef enum rfi_tkind {
  RFI_T_ABSENT, /* an argument that was not passed */
  RFI_T_UNDEFINED,
  RFI_T_NONE,
  RFI_T_BOOL,
  RFI_T_INT,
  RFI_T_FLOAT,
  RFI_T_TEXT,
  RFI_T_LIST,
  RFI_T_TUPLE,
  RFI_T_RANGE,
  RFI_T_VIEW, /* keys(), values() or items() of a dictionary */
  RFI_T_DICT,
  RFI_T_ITERATOR, /* a generator: each item can be taken once */
  RFI_T_NAMESPACE,
  RFI_T_LOOP,
  RFI_T_MACRO,
  RFI_T_METHOD,
  RFI_T_FUNCTION,
  RFI_T_CYCLER,
  RFI_T_JOINER,
} rfi_tkind;

typedef struct rfi_tval rfi_tval;
typedef struct rfi_render rfi_render;

typedef struct rfi_tlist {
  rfi_tval *items;
  int64_t n, capacity;
  int depth;                 /* depth of nesting, at least 1 */
  bool foreign;              /* from the conversation */
  const char *view;          /* type name of a view: "dict_keys", ... */
  int64_t start, stop, step; /* fields of a range */
} rfi_tlist;

typedef struct rfi_tdict {
  rfi_tval *items;     /* key, value, key, value, ... */
  int64_t n, capacity; /* number of pairs */
  int depth;
  bool foreign;
  int message; /* 1 + the index of the message, or 0 */
} rfi_tdict;

typedef struct rfi_titerator {
  rfi_tlist *list;
  int64_t next;
} rfi_titerator;

/* The arguments of a call. */
typedef struct rfi_targs {
  rfi_tval *items;
  int n;
  const char **names; /* names of the named ones */
  rfi_tval *named;
  int n_named;
} rfi_targs;

typedef rfi_tval (*rfi_tfunction)(rfi_render *r, const rfi_tval *self, const rfi_targs *args);

struct rfi_tval {
  rfi_tkind kind;
  union {
    bool b;
    int64_t i;
    double f;
    rfi_text *text;
    rfi_tlist *list; /* list, tuple, range, view */
    rfi_tdict *dict; /* dictionary, namespace */
    rfi_titerator *iterator;
    struct rfi_tloop *loop;
    struct rfi_tmacro *macro;
    struct rfi_tmethod *method;
    struct rfi_tcycle *cycle;
    rfi_tfunction function;
    const char *hint; /* an undefined value: its name, or NULL */
  } as;
};

typedef struct rfi_tmethod {
  rfi_tval self;
  rfi_tfunction call;
} rfi_tmethod;

typedef struct rfi_tcycle {
  rfi_tval *items;
  int64_t n, position;
} rfi_tcycle;

/* A text that grows. */
typedef struct rfi_tbuilder {
  rfi_render *r;
  char *data;
  size_t n, capacity;
  rfi_trun *runs;
  int n_runs, capacity_runs;
} rfi_tbuilder;

struct rfi_tscope;

struct rfi_render {
  rfr_ctx *ctx;
  rfi_arena *arena;
  const rfi_template *t;
  rfr_status status; /* status of the first error */
  uint32_t at;       /* source position of the node that is evaluated */
  int depth;
  int64_t steps;
  size_t bytes; /* bytes used in the arena */
  int64_t date;
  struct rfi_tscope *scope;
  rfi_tbuilder *out;
  int message; /* 1 + index of the message that is looped over, or 0 */
  /* Parts of the output by message: bytes up to `end` were written while looping over `message`. */
  struct rfi_tpart {
    size_t end;
    int message;
  } * parts;
  int n_parts, capacity_parts;
  size_t *pieces; /* ends of the outputs of single statements, ascending */
  int n_pieces, capacity_pieces;
  rfi_tbuilder *root;
};

/* Limits of one render call. */
enum {
  RFI_RENDER_STEPS = 5000000 / RFI_WORK_DIVISOR,
  RFI_RENDER_DEPTH = 1000,
  RFI_RENDER_BYTES = (1 << 30) / RFI_WORK_DIVISOR,   /* of memory */
  RFI_RENDER_OUTPUT = (64 << 20) / RFI_WORK_DIVISOR, /* of a text */
  RFI_RENDER_RANGE = 100000,                         /* items of a range, as in jinja2's sandbox */
  RFI_RENDER_NESTING = 200,                          /* of lists and dictionaries */
};

/* Errors. */
void *rfi_render_fail(rfi_render *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
void *rfi_render_limit(rfi_render *r, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Counts work; returns false after the limit is exceeded or an error has occurred. */
bool rfi_render_step(rfi_render *r, int64_t steps);
void *rfi_render_alloc(rfi_render *r, size_t bytes); /* zeroed */

/* UTF-8 and code points. */
int32_t rfi_utf8_at(const char *s, size_t n, uint32_t *size); /* of valid UTF-8 */
bool rfi_unicode_is_space(int32_t c);

/* Texts. */
rfi_text *rfi_text_constant(rfi_arena *arena, const char *data, uint32_t n);      /* NULL: out of memory */
rfi_tval rfi_text_new(rfi_render *r, const char *data, size_t n, uint32_t flags); /* does not copy */
rfi_tval rfi_text_copy(rfi_render *r, const char *data, size_t n, uint32_t flags);
rfi_tval rfi_text_slice(rfi_render *r, const rfi_text *s, size_t begin, size_t end); /* bytes */
int64_t rfi_text_chars(rfi_render *r, rfi_text *s);
size_t rfi_text_offset(rfi_render *r, rfi_text *s, int64_t chars); /* byte of a code point */
uint32_t rfi_text_flags_at(const rfi_text *s, size_t byte);
rfi_text *rfi_text_escape(rfi_render *r, const rfi_text *s); /* for HTML, unless it is safe */
rfi_tval rfi_text_mark_safe(rfi_render *r, const rfi_text *s);
bool rfi_text_is(const rfi_text *s, const char *literal);
/* A copy with a NUL at the end, or NULL. */
const char *rfi_text_string(rfi_render *r, const rfi_text *s);
void rfi_tbuilder_add(rfi_tbuilder *b, const char *data, size_t n, uint32_t flags);
void rfi_tbuilder_add_text(rfi_tbuilder *b, const rfi_text *s, size_t begin, size_t end);
void rfi_tbuilder_add_char(rfi_tbuilder *b, int32_t c, uint32_t flags);
rfi_tval rfi_tbuilder_finish(rfi_tbuilder *b);

/* Values. */
static inline rfi_tval rfi_tval_none(void) { return (rfi_tval){.kind = RFI_T_NONE}; }
static inline rfi_tval rfi_tval_bool(bool b) { return (rfi_tval){.kind = RFI_T_BOOL, .as.b = b}; }
static inline rfi_tval rfi_tval_int(int64_t i) { return (rfi_tval){.kind = RFI_T_INT, .as.i = i}; }
static inline rfi_tval rfi_tval_float(double f) { return (rfi_tval){.kind = RFI_T_FLOAT, .as.f = f}; }
static inline rfi_tval rfi_tval_undefined(const char *name) {
  return (rfi_tval){.kind = RFI_T_UNDEFINED, .as.hint = name};
}
const char *rfi_tval_type(const rfi_tval *v); /* "a string": for messages */
bool rfi_tval_truth(const rfi_tval *v);
bool rfi_tval_is_number(const rfi_tval *v);          /* bool too */
bool rfi_tval_as_int(const rfi_tval *v, int64_t *i); /* int and bool */
double rfi_tval_as_float(const rfi_tval *v);         /* must be a number */
bool rfi_tval_equal(rfi_render *r, const rfi_tval *a, const rfi_tval *b);
/* -1, 0, 1 for a < b, a == b, a > b; 2 for NaN. Fails for values without an order. */
int rfi_tval_order(rfi_render *r, const rfi_tval *a, const rfi_tval *b);
bool rfi_tval_contains(rfi_render *r, const rfi_tval *container, const rfi_tval *item);
rfi_text *rfi_tval_str(rfi_render *r, const rfi_tval *v); /* Python's str(); never NULL */
void rfi_tval_print(rfi_tbuilder *b, const rfi_tval *v);  /* appends str() */
void rfi_tval_repr(rfi_tbuilder *b, const rfi_tval *v);
void rfi_float_repr(char out[40], double f);
int64_t rfi_tval_length(rfi_render *r, const rfi_tval *v); /* len() */
/* The items that a loop over v visits; consumes an iterator. NULL: not iterable (the error is set). */
rfi_tlist *rfi_tval_items(rfi_render *r, const rfi_tval *v);
bool rfi_tval_is_iterable(const rfi_tval *v);

rfi_tlist *rfi_tlist_new(rfi_render *r);
void rfi_tlist_add(rfi_render *r, rfi_tlist *list, rfi_tval v);
rfi_tval rfi_tlist_value(rfi_tlist *list, rfi_tkind kind); /* none if list is NULL */
rfi_tval rfi_titerator_new(rfi_render *r, rfi_tlist *list);
rfi_tval rfi_ttuple_of(rfi_render *r, rfi_tval a, rfi_tval b);
rfi_tdict *rfi_tdict_new(rfi_render *r);
rfi_tval *rfi_tdict_find(rfi_render *r, const rfi_tdict *d, const rfi_tval *key); /* the value, or NULL */
rfi_tval *rfi_tdict_find_name(rfi_render *r, const rfi_tdict *d, const char *name);
void rfi_tdict_set(rfi_render *r, rfi_tdict *d, rfi_tval key, rfi_tval value);
/* A JSON value; its texts are borrowed and have these flags. */
rfi_tval rfi_tval_from_json(rfi_render *r, const json_t *json, uint32_t flags);

/* Operators and access, in template_ops.c. */
rfi_tval rfi_tval_binary(rfi_render *r, int op, const rfi_tval *a, const rfi_tval *b);
rfi_tval rfi_tval_negate(rfi_render *r, const rfi_tval *v);
rfi_tval rfi_tval_item(rfi_render *r, const rfi_tval *object, const rfi_tval *key);
rfi_tval rfi_tval_attribute(rfi_render *r, const rfi_tval *object, const rfi_text *name);
rfi_tval rfi_tval_slice(rfi_render *r, const rfi_tval *object, const rfi_tval bounds[3]);
/* text % value */
rfi_tval rfi_text_format(rfi_render *r, const rfi_text *format, const rfi_tval *value);

/* Binds arguments. `names`: blank-separated parameters, of which the first `required` must be passed; the others stay
 * absent. */
bool rfi_targs_bind(rfi_render *r, const char *what, const rfi_targs *args, const char *names, int required,
                    rfi_tval *out);
rfi_tval rfi_tval_call(rfi_render *r, const rfi_tval *function, const rfi_targs *args);
rfi_tval rfi_tmethod_new(rfi_render *r, const rfi_tval *self, rfi_tfunction call);
/* The method of a text, list, dictionary, ...; NULL: there is no method with this name. */
rfi_tfunction rfi_tmethod_find(rfi_render *r, const rfi_tval *self, const rfi_text *name, bool *refused);
rfi_tval rfi_tloop_attribute(rfi_render *r, const rfi_tval *loop, const rfi_text *name);
/* Filters and tests; args NULL: no arguments. */
rfi_tval rfi_filter_call(rfi_render *r, const char *name, const rfi_tval *value, const rfi_targs *args);
bool rfi_test_call(rfi_render *r, const char *name, const rfi_tval *value, const rfi_targs *args);
rfi_tfunction rfi_global_find(const char *name);
/* The methods of texts, in template_text.c. */
rfi_tfunction rfi_text_method(const rfi_text *name);
rfi_text *rfi_text_strip(rfi_render *r, const rfi_text *s, const rfi_text *chars, bool left, bool right);
rfi_text *rfi_text_replace(rfi_render *r, const rfi_text *s, const rfi_text *old, const rfi_text *with, int64_t count);
rfi_text *rfi_text_case(rfi_render *r, const rfi_text *s,
                        int how); /* 'u', 'l', 'c' capitalize, 't' title, 'w' title of jinja2, 's' swapcase */
rfi_tlist *rfi_text_lines(rfi_render *r, const rfi_text *s, bool keep_ends);
bool rfi_text_is_class(rfi_render *r, const rfi_text *s, const char *name);  /* "islower", "isupper", ... */
int64_t rfi_text_find(const rfi_text *s, const rfi_text *what, size_t from); /* byte, or -1 */
/* JSON text as json.dumps writes it. */
rfi_tval rfi_tval_to_json(rfi_render *r, const rfi_tval *v, const rfi_targs *args);

/* Runs a template; in template_eval.c. */
typedef struct rfi_tvariable {
  const char *name;
  rfi_tval value;
} rfi_tvariable;
/* Renders with these variables; the output and its parts are in r afterwards. */
rfr_status rfi_render_run(rfi_render *r, const rfi_tvariable *variables, int n, rfi_text **out);

#endif
