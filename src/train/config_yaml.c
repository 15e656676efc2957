/* SPDX-License-Identifier: Apache-2.0
 *
 * Builds a tree from libyaml's events. libyaml's own documents are not used: they resolve aliases, so that a few lines
 * can become gigabytes, and they drop duplicate keys. The limits on bytes, depth and keys of a map bound the time: a
 * key is compared with all keys of its map before it.
 */
#include "train/config_yaml.h"

#include <string.h>
#include <yaml.h>

enum { MOST_BYTES = 1 << 20, MOST_DEPTH = 32, MOST_KEYS = 512 };

typedef struct reader {
  yaml_parser_t parser;
  rfi_arena *arena;
  const char *file;
  rfi_yaml *stack[MOST_DEPTH]; /* open lists and maps */
  int depth;
  const char *key; /* key of a map whose value follows */
  int64_t key_line;
  rfi_yaml *root;
  int documents;
} reader;

#define BAD(line, ...) rfi_fail_at(RFI_E_CONFIG_SYNTAX, r->file, line, __VA_ARGS__)

rfi_yaml *rfi_yaml_scalar(rfi_arena *arena, const char *text, int64_t line) {
  rfi_yaml *node = rfi_arena_alloc(arena, sizeof *node);
  if (!node) return NULL;
  node->text = rfi_arena_strdup(arena, text);
  node->null = *text == 0;
  node->line = line;
  return node->text ? node : NULL;
}

static rfr_status attach(reader *r, rfi_yaml *node) {
  if (!node) return RFR_NO_MEMORY;
  if (r->depth == 0) {
    r->root = node;
    return RFR_OK;
  }
  rfi_yaml *parent = r->stack[r->depth - 1];
  if (parent->kind == RFI_YAML_MAP) {
    node->key = r->key;
    node->line = r->key_line;
    r->key = NULL;
  }
  if (parent->last) parent->last->next = node;
  else parent->first = node;
  parent->last = node;
  parent->n++;
  return RFR_OK;
}

static rfr_status take_key(reader *r, const char *key, int64_t line) {
  if (r->stack[r->depth - 1]->n == MOST_KEYS) return BAD(line, "more than %d keys in one map", MOST_KEYS);
  for (const rfi_yaml *other = r->stack[r->depth - 1]->first; other; other = other->next)
    if (strcmp(other->key, key) == 0)
      return rfi_fail_at(RFI_E_CONFIG_KEY, r->file, line, "\"%s\" is given twice, first in line %lld", key,
                         (long long)other->line);
  r->key = rfi_arena_strdup(r->arena, key);
  r->key_line = line;
  return r->key ? RFR_OK : RFR_NO_MEMORY;
}

static bool expects_key(const reader *r) {
  return r->depth > 0 && r->stack[r->depth - 1]->kind == RFI_YAML_MAP && !r->key;
}

static rfr_status take_scalar(reader *r, const yaml_event_t *e, int64_t line) {
  const char *text = (const char *)e->data.scalar.value;
  if (e->data.scalar.anchor)
    return BAD(line, "anchors (&%.100s) are not supported; repeat the value", e->data.scalar.anchor);
  if (e->data.scalar.tag) return BAD(line, "tags (%.100s) are not supported; remove the tag", e->data.scalar.tag);
  if (strlen(text) != e->data.scalar.length) return BAD(line, "a text contains a NUL byte");
  if (expects_key(r)) return take_key(r, text, line);
  rfi_yaml *node = rfi_yaml_scalar(r->arena, text, line);
  bool plain = e->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
  if (node) node->null = plain && (*text == 0 || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
  return attach(r, node);
}

static rfr_status take_start(reader *r, rfi_yaml_kind kind, const yaml_char_t *anchor, const yaml_char_t *tag,
                             int64_t line) {
  if (anchor) return BAD(line, "anchors (&%.100s) are not supported; repeat the value", anchor);
  if (tag) return BAD(line, "tags (%.100s) are not supported; remove the tag", tag);
  if (expects_key(r)) return BAD(line, "a key must be a text");
  if (r->depth == MOST_DEPTH) return BAD(line, "nested more than %d levels deep", MOST_DEPTH);
  rfi_yaml *node = rfi_arena_alloc(r->arena, sizeof *node);
  if (!node) return RFR_NO_MEMORY;
  node->kind = kind;
  node->line = line;
  RFI_TRY(attach(r, node));
  r->stack[r->depth++] = node;
  return RFR_OK;
}

static rfr_status take(reader *r, const yaml_event_t *e) {
  int64_t line = (int64_t)e->start_mark.line + 1;
  switch (e->type) {
    case YAML_DOCUMENT_START_EVENT:
      if (r->documents++) return BAD(line, "a second document starts here; a configuration is one document");
      if (e->data.document_start.tag_directives.start != e->data.document_start.tag_directives.end)
        return BAD(line, "tag directives are not supported");
      return RFR_OK;
    case YAML_ALIAS_EVENT:
      return BAD(line, "aliases (*%.100s) are not supported; repeat the value, or put a pattern in quotes",
                 e->data.alias.anchor);
    case YAML_SCALAR_EVENT: return take_scalar(r, e, line);
    case YAML_SEQUENCE_START_EVENT:
      return take_start(r, RFI_YAML_LIST, e->data.sequence_start.anchor, e->data.sequence_start.tag, line);
    case YAML_MAPPING_START_EVENT:
      return take_start(r, RFI_YAML_MAP, e->data.mapping_start.anchor, e->data.mapping_start.tag, line);
    case YAML_SEQUENCE_END_EVENT:
    case YAML_MAPPING_END_EVENT: r->depth--; return RFR_OK;
    default: return RFR_OK;
  }
}

static rfr_status syntax_error(const reader *r) {
  const yaml_parser_t *p = &r->parser;
  if (p->error == YAML_MEMORY_ERROR) return rfi_fail(RFI_E_NO_MEMORY, "a YAML parser");
  /* The most frequent mistake: YAML reads a pattern such as *.h as an alias. */
  bool alias = p->context && strstr(p->context, "alias");
  return BAD((int64_t)p->problem_mark.line + 1, "column %zu: %s%s", p->problem_mark.column + 1,
             p->problem ? p->problem : "not YAML", alias ? "; put a text that starts with * in quotes" : "");
}

rfr_status rfi_yaml_parse(rfi_arena *arena, const char *file, const char *text, size_t n, rfi_yaml **out) {
  reader state = {.arena = arena, .file = file}, *r = &state;
  *out = NULL;
  if (n > MOST_BYTES) return BAD(0, "the text has %zu bytes; a configuration has at most %d", n, MOST_BYTES);
  if (!yaml_parser_initialize(&r->parser)) return rfi_fail(RFI_E_NO_MEMORY, "a YAML parser");
  yaml_parser_set_encoding(&r->parser, YAML_UTF8_ENCODING);
  yaml_parser_set_input_string(&r->parser, (const unsigned char *)text, n);
  rfr_status s = RFR_OK;
  for (bool end = false; !end && s == RFR_OK;) {
    yaml_event_t event;
    if (!yaml_parser_parse(&r->parser, &event)) {
      s = syntax_error(r);
      break;
    }
    s = take(r, &event);
    end = event.type == YAML_STREAM_END_EVENT;
    yaml_event_delete(&event);
  }
  yaml_parser_delete(&r->parser);
  if (s == RFR_OK) *out = r->root;
  return s;
}
