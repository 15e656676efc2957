/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls: the binding of arguments, methods of lists and dictionaries, and the global functions.
 *
 * Methods that change their object are refused, as by jinja2's ImmutableSandboxedEnvironment.
 */
#include <locale.h>
#include <string.h>
#include <time.h>

#include "text/template_value.h"

#define METHOD(name) static rfi_tval name(rfi_render *r, const rfi_tval *self, const rfi_targs *args)
#define FUNCTION(name) \
  static rfi_tval name(rfi_render *r, const rfi_tval *self __attribute__((unused)), const rfi_targs *args)

/* The k-th blank-separated word. */
static bool word_is(const char *words, int k, const char *name) {
  for (; k > 0; k--) words = strchr(words, ' ') + 1;
  const size_t n = strcspn(words, " ");
  return strlen(name) == n && memcmp(words, name, n) == 0;
}

bool rfi_targs_bind(rfi_render *r, const char *what, const rfi_targs *args, const char *names, int required,
                    rfi_tval *out) {
  int count = *names != 0;
  for (const char *c = names; *c; c++) count += *c == ' ';
  if (r->status != RFR_OK) return false;
  for (int i = 0; i < count; i++) out[i] = (rfi_tval){.kind = RFI_T_ABSENT};
  if (!args) return required == 0 || rfi_render_fail(r, "%s: missing arguments", what);
  if (args->n > count) {
    rfi_render_fail(r, "%s takes at most %d arguments, not %d", what, count, args->n);
    return false;
  }
  for (int i = 0; i < args->n; i++) out[i] = args->items[i];
  for (int k = 0; k < args->n_named; k++) {
    int i = 0;
    while (i < count && !word_is(names, i, args->names[k])) i++;
    if (i == count || out[i].kind != RFI_T_ABSENT) {
      rfi_render_fail(r, "%s: %s argument \"%s\"", what, i == count ? "unknown" : "repeated", args->names[k]);
      return false;
    }
    out[i] = args->named[k];
  }
  for (int i = 0; i < required; i++) {
    if (out[i].kind != RFI_T_ABSENT) continue;
    rfi_render_fail(r, "%s: argument %d is missing", what, i + 1);
    return false;
  }
  return true;
}

rfi_tval rfi_tmethod_new(rfi_render *r, const rfi_tval *self, rfi_tfunction call) {
  rfi_tmethod *m = rfi_render_alloc(r, sizeof *m);
  if (!m) return rfi_tval_none();
  *m = (rfi_tmethod){*self, call};
  return (rfi_tval){.kind = RFI_T_METHOD, .as.method = m};
}

/* ---- dictionaries ---- */

METHOD(dict_get) {
  rfi_tval v[2];
  if (!rfi_targs_bind(r, "get", args, "key default", 1, v)) return rfi_tval_none();
  if (v[0].kind == RFI_T_LIST || v[0].kind == RFI_T_DICT)
    return rfi_render_fail(r, "%s cannot be the key of a dictionary", rfi_tval_type(&v[0])), rfi_tval_none();
  const rfi_tval *found = rfi_tdict_find(r, self->as.dict, &v[0]);
  return found ? *found : v[1].kind == RFI_T_ABSENT ? rfi_tval_none() : v[1];
}

static rfi_tval view_of(rfi_render *r, const rfi_tval *self, const rfi_targs *args, char what) {
  rfi_targs_bind(r, "this method", args, "", 0, NULL);
  rfi_tlist *list = rfi_tlist_new(r);
  if (!list) return rfi_tval_none();
  const rfi_tdict *d = self->as.dict;
  list->view = what == 'k' ? "dict_keys" : what == 'v' ? "dict_values" : "dict_items";
  list->foreign = d->foreign;
  for (int64_t i = 0; i < d->n && r->status == RFR_OK; i++)
    rfi_tlist_add(r, list,
                  what == 'i' ? rfi_ttuple_of(r, d->items[2 * i], d->items[2 * i + 1])
                              : d->items[2 * i + (what == 'v')]);
  return rfi_tlist_value(list, RFI_T_VIEW);
}

METHOD(dict_keys) { return view_of(r, self, args, 'k'); }
METHOD(dict_values) { return view_of(r, self, args, 'v'); }
METHOD(dict_items) { return view_of(r, self, args, 'i'); }

static void copy_pairs(rfi_render *r, rfi_tdict *to, const rfi_tdict *from) {
  for (int64_t i = 0; to && i < from->n && r->status == RFR_OK; i++)
    rfi_tdict_set(r, to, from->items[2 * i], from->items[2 * i + 1]);
}

METHOD(dict_copy) {
  rfi_targs_bind(r, "copy", args, "", 0, NULL);
  rfi_tdict *d = rfi_tdict_new(r);
  copy_pairs(r, d, self->as.dict);
  if (!d) return rfi_tval_none();
  d->foreign = self->as.dict->foreign;
  d->message = self->as.dict->message;
  return (rfi_tval){.kind = RFI_T_DICT, .as.dict = d};
}

/* ---- lists and tuples ---- */

METHOD(list_index) {
  rfi_tval v;
  if (!rfi_targs_bind(r, "index", args, "value", 1, &v)) return rfi_tval_none();
  for (int64_t i = 0; i < self->as.list->n && rfi_render_step(r, 1); i++)
    if (rfi_tval_equal(r, &self->as.list->items[i], &v)) return rfi_tval_int(i);
  rfi_render_fail(r, "index: the list does not contain the value");
  return rfi_tval_none();
}

METHOD(list_count) {
  rfi_tval v;
  int64_t n = 0;
  if (!rfi_targs_bind(r, "count", args, "value", 1, &v)) return rfi_tval_none();
  for (int64_t i = 0; i < self->as.list->n && rfi_render_step(r, 1); i++)
    n += rfi_tval_equal(r, &self->as.list->items[i], &v);
  return rfi_tval_int(n);
}

METHOD(list_copy) {
  rfi_targs_bind(r, "copy", args, "", 0, NULL);
  rfi_tlist *list = rfi_tlist_new(r);
  for (int64_t i = 0; i < self->as.list->n && r->status == RFR_OK; i++) rfi_tlist_add(r, list, self->as.list->items[i]);
  return rfi_tlist_value(list, RFI_T_LIST);
}

/* ---- cyclers and joiners ---- */

METHOD(cycler_next) {
  rfi_targs_bind(r, "next", args, "", 0, NULL);
  rfi_tcycle *c = self->as.cycle;
  const rfi_tval v = c->items[c->position];
  c->position = (c->position + 1) % c->n;
  return v;
}

METHOD(cycler_reset) {
  rfi_targs_bind(r, "reset", args, "", 0, NULL);
  self->as.cycle->position = 0;
  return rfi_tval_none();
}

static rfi_tval cycle_new(rfi_render *r, const rfi_tval *items, int n, rfi_tkind kind) {
  rfi_tcycle *c = rfi_render_alloc(r, sizeof *c);
  rfi_tval *copy = rfi_render_alloc(r, (size_t)n * sizeof *copy);
  if (!c || !copy) return rfi_tval_none();
  memcpy(copy, items, (size_t)n * sizeof *copy);
  *c = (rfi_tcycle){copy, n, 0};
  return (rfi_tval){.kind = kind, .as.cycle = c};
}

FUNCTION(cycler) {
  if (args->n == 0 || args->n_named > 0) return rfi_render_fail(r, "cycler needs items"), rfi_tval_none();
  return cycle_new(r, args->items, args->n, RFI_T_CYCLER);
}

FUNCTION(joiner) {
  rfi_tval v;
  if (!rfi_targs_bind(r, "joiner", args, "sep", 0, &v)) return rfi_tval_none();
  if (v.kind == RFI_T_ABSENT) v = rfi_text_new(r, ", ", 2, 0);
  return cycle_new(r, &v, 1, RFI_T_JOINER);
}

/* ---- functions ---- */

FUNCTION(range) {
  int64_t v[3] = {0, 0, 1};
  if (args->n < 1 || args->n > 3 || args->n_named > 0)
    return rfi_render_fail(r, "range takes 1 to 3 arguments"), rfi_tval_none();
  for (int i = 0; i < args->n; i++)
    if (!rfi_tval_as_int(&args->items[i], &v[args->n == 1 ? 1 : i]))
      return rfi_render_fail(r, "range needs integers, not %s", rfi_tval_type(&args->items[i])), rfi_tval_none();
  if (v[2] == 0) return rfi_render_fail(r, "the step of a range is 0"), rfi_tval_none();
  const long double items = ((long double)v[1] - (long double)v[0]) / (long double)v[2];
  if (items > RFI_RENDER_RANGE)
    return rfi_render_limit(r, "a range has more than %d items", RFI_RENDER_RANGE), rfi_tval_none();
  rfi_tlist *list = rfi_tlist_new(r);
  if (!list) return rfi_tval_none();
  list->start = v[0];
  list->stop = v[1];
  list->step = v[2];
  for (int64_t i = v[0]; (v[2] > 0 ? i < v[1] : i > v[1]) && r->status == RFR_OK;) {
    rfi_tlist_add(r, list, rfi_tval_int(i));
    if (__builtin_add_overflow(i, v[2], &i)) break;
  }
  return rfi_tlist_value(list, RFI_T_RANGE);
}

/* dict(): from a dictionary or a list of pairs, and named arguments. */
static rfi_tdict *dict_of(rfi_render *r, const char *what, const rfi_targs *args) {
  rfi_tdict *d = rfi_tdict_new(r);
  if (args->n > 1) return rfi_render_fail(r, "%s takes at most one argument without a name", what);
  if (args->n == 1 && (args->items[0].kind == RFI_T_DICT)) {
    copy_pairs(r, d, args->items[0].as.dict);
  } else if (args->n == 1) {
    const rfi_tlist *pairs = rfi_tval_items(r, &args->items[0]);
    for (int64_t i = 0; pairs && i < pairs->n && r->status == RFR_OK; i++) {
      const rfi_tlist *pair = rfi_tval_items(r, &pairs->items[i]);
      if (!pair || pair->n != 2) return rfi_render_fail(r, "%s needs pairs", what);
      rfi_tdict_set(r, d, pair->items[0], pair->items[1]);
    }
  }
  for (int i = 0; i < args->n_named; i++)
    rfi_tdict_set(r, d, rfi_text_new(r, args->names[i], strlen(args->names[i]), 0), args->named[i]);
  return r->status == RFR_OK ? d : NULL;
}

FUNCTION(dict_new) {
  rfi_tdict *d = dict_of(r, "dict", args);
  return d ? (rfi_tval){.kind = RFI_T_DICT, .as.dict = d} : rfi_tval_none();
}

FUNCTION(namespace_new) {
  rfi_tdict *d = dict_of(r, "namespace", args);
  for (int64_t i = 0; d && i < d->n; i++) {
    const rfi_tval *key = &d->items[2 * i];
    if (key->kind == RFI_T_TEXT && key->as.text->n > 0 && key->as.text->data[0] == '_')
      return rfi_render_fail(r, "a namespace cannot have an attribute that begins with \"_\""), rfi_tval_none();
  }
  return d ? (rfi_tval){.kind = RFI_T_NAMESPACE, .as.dict = d} : rfi_tval_none();
}

FUNCTION(raise_exception) {
  rfi_tval v;
  if (!rfi_targs_bind(r, "raise_exception", args, "message", 1, &v)) return rfi_tval_none();
  const char *text = rfi_text_string(r, rfi_tval_str(r, &v));
  rfi_render_fail(r, "the template refuses the conversation: %s", text ? text : "");
  return rfi_tval_none();
}

FUNCTION(strftime_now) {
  rfi_tval v;
  char text[512];
  struct tm parts;
  if (!rfi_targs_bind(r, "strftime_now", args, "format", 1, &v)) return rfi_tval_none();
  const char *format = v.kind == RFI_T_TEXT ? rfi_text_string(r, v.as.text) : NULL;
  if (!format) return rfi_render_fail(r, "strftime_now needs a string"), rfi_tval_none();
  time_t t = r->date ? (time_t)r->date : time(NULL);
  if (!(r->date ? gmtime_r(&t, &parts) : localtime_r(&t, &parts)))
    return rfi_render_fail(r, "strftime_now: the date is out of range"), rfi_tval_none();
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  if (c == (locale_t)0) return rfi_render_fail(r, "strftime_now: out of memory"), rfi_tval_none();
  const size_t n = strftime_l(text, sizeof text, format, &parts, c);
  freelocale(c);
  if (n == 0 && *format) return rfi_render_fail(r, "strftime_now: the result is empty or too long"), rfi_tval_none();
  if (rfi_utf8_valid(text, n) < n) return rfi_render_fail(r, "strftime_now: the result is not UTF-8"), rfi_tval_none();
  return rfi_text_copy(r, text, n, 0);
}

typedef struct named_function {
  const char *name;
  rfi_tfunction call;
} named_function;

static const named_function globals[] = {
    {"range", range},   {"dict", dict_new}, {"namespace", namespace_new},   {"raise_exception", raise_exception},
    {"cycler", cycler}, {"joiner", joiner}, {"strftime_now", strftime_now},
};
static const named_function dict_methods[] = {
    {"get", dict_get}, {"keys", dict_keys}, {"values", dict_values}, {"items", dict_items}, {"copy", dict_copy}};
static const named_function list_methods[] = {{"index", list_index}, {"count", list_count}, {"copy", list_copy}};
static const named_function cycler_methods[] = {{"next", cycler_next}, {"reset", cycler_reset}};

rfi_tfunction rfi_global_find(const char *name) {
  for (size_t i = 0; i < sizeof globals / sizeof *globals; i++)
    if (strcmp(globals[i].name, name) == 0) return globals[i].call;
  return NULL;
}

static rfi_tfunction find(const named_function *table, size_t n, const rfi_text *name) {
  for (size_t i = 0; i < n; i++)
    if (rfi_text_is(name, table[i].name)) return table[i].call;
  return NULL;
}

/* Whether a name is one of the blank-separated words. */
static bool is_word(const char *words, const rfi_text *name) {
  char text[32];
  if (name->n >= sizeof text) return false;
  memcpy(text, name->data, name->n);
  text[name->n] = 0;
  return rfi_has_word(words, text);
}

rfi_tfunction rfi_tmethod_find(rfi_render *r, const rfi_tval *self, const rfi_text *name, bool *refused) {
  (void)r;
  switch (self->kind) {
    case RFI_T_TEXT: return rfi_text_method(name);
    case RFI_T_DICT:
      *refused = is_word("clear pop popitem setdefault update", name);
      return find(dict_methods, sizeof dict_methods / sizeof *dict_methods, name);
    case RFI_T_LIST:
      *refused = is_word("append clear pop reverse insert sort extend remove", name);
      return find(list_methods, sizeof list_methods / sizeof *list_methods, name);
    case RFI_T_RANGE:
    case RFI_T_TUPLE: return find(list_methods, 2, name);
    case RFI_T_CYCLER: return find(cycler_methods, sizeof cycler_methods / sizeof *cycler_methods, name);
    default: return NULL;
  }
}
