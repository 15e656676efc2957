/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates: opening them, rendering conversations, and marking the bytes of the assistant's messages.
 *
 * The loss mask never searches a text. With {% generation %}, the marked bytes carry a flag through every string
 * operation. Without it, the conversation is rendered up to and including each assistant message, and the texts are
 * compared. If that is inconclusive, each output byte belongs to the message whose loop iteration wrote it.
 */
#include "text/chat.h"
#include "text/model_file.h"

#include <string.h>

#include "data/file.h"
#include "data/hash.h"
#include "data/json_file.h"
#include "text/template_value.h"

struct rfr_chat_template {
  rfr_ctx *ctx;
  rfi_template *t;
  json_t *variables; /* an object */
  char *text;
  size_t n;
};

static const char chatml[] =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/* ---- opening ---- */

/* Takes over the reference to `variables`, which may be NULL. */
static rfr_status create(rfr_ctx *ctx, const char *name, const char *text, size_t n, json_t *variables,
                         rfr_chat_template **out) {
  rfr_status s;
  rfr_chat_template *chat = NULL;
  *out = NULL;
  s = RFI_ALLOC(ctx, sizeof *chat, &chat);
  if (s != RFR_OK) {
    json_decref(variables);
    return s;
  }
  chat->ctx = ctx;
  chat->variables = variables ? variables : json_object();
  if (!chat->variables) RFI_GOTO(rfi_fail(RFI_E_NO_MEMORY, "out of memory while reading %s", name));
  RFI_GOTO(rfi_template_parse(ctx, name, text, n, &chat->t));
  RFI_GOTO(RFI_ALLOC(ctx, n + 1, &chat->text));
  memcpy(chat->text, text, n);
  chat->n = n;
  *out = chat;
  return RFR_OK;
fail:
  rfr_chat_template_destroy(chat);
  return s;
}

void rfr_chat_template_destroy(rfr_chat_template *chat) {
  if (!chat) return;
  rfr_ctx *ctx = chat->ctx;
  rfi_template_destroy(chat->t);
  json_decref(chat->variables);
  rfi_free(ctx, chat->text);
  rfi_free(ctx, chat);
}

rfr_status rfr_chat_template_create(rfr_ctx *ctx, const char *name, const char *text, size_t n, const char *variables,
                                    rfr_chat_template **out) {
  json_t *object = NULL;
  if (out) *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!out || !name || (!text && n > 0)) return rfi_fail(RFI_E_ARGUMENT, "rfr_chat_template_create: NULL argument");
  if (variables) {
    RFI_TRY(rfi_json_parse("variables", variables, strlen(variables), &object));
    if (!json_is_object(object)) {
      json_decref(object);
      return rfi_fail(RFI_E_JSON, "the variables of a chat template are not a JSON object");
    }
  }
  return create(ctx, name, text ? text : "", n, object, out);
}

/* Adds the special tokens of tokenizer_config.json or special_tokens_map.json, which are strings or objects with
 * "content". */
static rfr_status add_tokens(const json_t *config, json_t *variables) {
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)config, key, value) {
    const size_t n = strlen(key);
    if (n < 7 || strcmp(key + n - 6, "_token") != 0 || strncmp(key, "add_", 4) == 0) continue;
    const json_t *text = json_is_object(value) ? json_object_get(value, "content") : value;
    if (!json_is_string(text) || json_object_get(variables, key)) continue;
    RFI_TRY(rfi_json_set(variables, key, json_string(json_string_value(text))));
  }
  return RFR_OK;
}

/* Reads a file of the folder as JSON; NULL if it does not exist. */
static rfr_status load(rfr_ctx *ctx, const char *folder, const char *name, json_t **out) {
  char *path = NULL, *text;
  size_t n;
  *out = NULL;
  RFI_TRY(rfi_model_file(ctx, folder, name, RFI_JSON_LIMIT, &text, &n));
  rfr_status s = rfi_path_join(ctx, folder, name, &path);
  if (s == RFR_OK && text) s = rfi_json_parse_reals(path, text, n, out);
  if (s == RFR_OK && *out && !json_is_object(*out)) {
    s = rfi_fail_at(RFI_E_JSON, path, 0, "the file is not a JSON object");
    json_decref(*out);
    *out = NULL;
  }
  rfi_free(ctx, text);
  rfi_free(ctx, path);
  return s;
}

/* The template with this name in a value of "chat_template": a string, or a list of {"name", "template"}. */
static rfr_status choose(const char *place, const json_t *value, const char *choice, const json_t **out) {
  *out = NULL;
  if (json_is_string(value)) {
    *out = choice ? NULL : value;
    return RFR_OK;
  }
  if (!json_is_array(value))
    return rfi_fail_at(RFI_E_JSON, place, 0, "\"chat_template\" is neither a string nor a list");
  for (size_t i = 0; i < json_array_size(value); i++) {
    const json_t *item = json_array_get(value, i), *text = json_object_get(item, "template");
    const char *name = json_string_value(json_object_get(item, "name"));
    if (!name || !json_is_string(text))
      return rfi_fail_at(RFI_E_JSON, place, 0, "\"chat_template\"[%zu] has no \"name\" or \"template\"", i);
    if (strcmp(name, choice ? choice : "default") == 0) *out = text;
  }
  return RFR_OK;
}

/* The template text of a folder; *text is NULL if it has none. */
static rfr_status find_in_folder(rfr_ctx *ctx, const char *folder, const char *choice, const json_t *config,
                                 char **text, size_t *n) {
  json_t *processor = NULL;
  const json_t *found = NULL;
  char name[256];
  *text = NULL;
  if (choice) {
    if (strchr(choice, '/') || rfi_snprintf(name, sizeof name, "additional_chat_templates/%s.jinja", choice) >= 256)
      return rfi_fail(RFI_E_ARGUMENT, "\"%s\" is not the name of a template", choice);
    RFI_TRY(rfi_model_file(ctx, folder, name, RFI_TEMPLATE_BYTES, text, n));
  }
  if (!*text && (!choice || strcmp(choice, "default") == 0))
    RFI_TRY(rfi_model_file(ctx, folder, "chat_template.jinja", RFI_TEMPLATE_BYTES, text, n));
  if (*text) return RFR_OK;
  rfr_status s = load(ctx, folder, "chat_template.json", &processor);
  const json_t *value = json_object_get(processor, "chat_template");
  if (s == RFR_OK && value) s = choose("chat_template.json", value, choice, &found);
  value = json_object_get(config, "chat_template");
  if (s == RFR_OK && !found && value) s = choose("tokenizer_config.json", value, choice, &found);
  if (s == RFR_OK && found) {
    *n = json_string_length(found);
    s = RFI_ALLOC(ctx, *n + 1, text);
    if (s == RFR_OK) memcpy(*text, json_string_value(found), *n);
  }
  json_decref(processor);
  return s;
}

static rfr_status open_folder(rfr_ctx *ctx, const char *folder, const char *choice, rfr_chat_template **out) {
  rfr_status s;
  json_t *config = NULL, *map = NULL, *variables = json_object();
  char *text = NULL;
  size_t n = 0;
  if (!variables) return rfi_fail(RFI_E_NO_MEMORY, "out of memory while reading %s", folder);
  RFI_GOTO(load(ctx, folder, "tokenizer_config.json", &config));
  RFI_GOTO(load(ctx, folder, "special_tokens_map.json", &map));
  if (config) RFI_GOTO(add_tokens(config, variables));
  if (map) RFI_GOTO(add_tokens(map, variables));
  RFI_GOTO(find_in_folder(ctx, folder, choice, config, &text, &n));
  if (!text)
    RFI_GOTO(rfi_fail_at(RFI_E_CHAT_TEMPLATE, folder, 0, "the folder has no chat template%s%s",
                         choice ? " of the name " : "", choice ? choice : ""));
  char name[512];
  rfi_snprintf(name, sizeof name, "%s (chat template)", folder);
  s = create(ctx, name, text, n, json_incref(variables), out);
fail:
  json_decref(config);
  json_decref(map);
  json_decref(variables);
  rfi_free(ctx, text);
  return s;
}

rfr_status rfr_chat_template_open(rfr_ctx *ctx, const char *path, const char *choice, rfr_chat_template **out) {
  bool is_model;
  if (out) *out = NULL;
  RFI_TRY(rfi_check_handle(ctx, "rfr_ctx"));
  if (!out || !path) return rfi_fail(RFI_E_ARGUMENT, "rfr_chat_template_open: NULL argument");
  if (strcmp(path, "chatml") == 0) return create(ctx, "chatml", chatml, sizeof chatml - 1, NULL, out);
  RFI_TRY(rfi_model_has_files(ctx, path, &is_model));
  if (is_model) return open_folder(ctx, path, choice, out);
  char *text;
  size_t n;
  RFI_TRY(rfi_file_read_limited(ctx, path, RFI_TEMPLATE_BYTES, &text, &n));
  rfr_status s = create(ctx, path, text, n, NULL, out);
  rfi_free(ctx, text);
  return s;
}

rfr_status rfi_chat_template_exists(rfr_ctx *ctx, const char *folder, bool *exists) {
  json_t *config;
  char *text = NULL;
  size_t n;
  *exists = false;
  RFI_TRY(load(ctx, folder, "tokenizer_config.json", &config));
  rfr_status s = find_in_folder(ctx, folder, NULL, config, &text, &n);
  *exists = text != NULL;
  json_decref(config);
  rfi_free(ctx, text);
  return s;
}

int rfr_chat_template_marks_generation(const rfr_chat_template *chat) { return chat && chat->t->has_generation; }

const char *rfi_chat_template_text(const rfr_chat_template *chat, size_t *n) {
  *n = chat->n;
  return chat->text;
}

uint64_t rfi_chat_template_hash(const rfr_chat_template *chat) {
  uint64_t hash = rfi_hash_bytes(chat->text, chat->n).low;
  const char *key;
  json_t *value;
  json_object_foreach(chat->variables, key, value) {
    const uint64_t pair[3] = {
        hash, rfi_hash_bytes(key, strlen(key)).low,
        rfi_hash_bytes(json_string_value(value) ? json_string_value(value) : "", json_string_length(value)).low};
    hash = rfi_hash_bytes(pair, sizeof pair).low;
  }
  return hash;
}

/* ---- rendering ---- */

enum { MAX_VARIABLES = 256 };

/* The variables of a call. */
typedef struct session {
  const rfr_chat_template *chat;
  rfi_render r;
  rfi_tvariable variables[MAX_VARIABLES];
  int n;
  rfi_tlist *messages;
} session;

/* A rendered text with the data to compare it. */
typedef struct rendering {
  rfi_arena *arena; /* arena of its memory; NULL: that of the session */
  rfi_text *text;
  struct rfi_tpart *parts;
  int n_parts;
  const size_t *pieces;
  int n_pieces;
} rendering;

static void add_variable(session *x, const char *name, rfi_tval value) {
  for (int i = 0; i < x->n; i++) {
    if (strcmp(x->variables[i].name, name) != 0) continue;
    x->variables[i].value = value;
    return;
  }
  if (x->n == MAX_VARIABLES) rfi_render_fail(&x->r, "more than %d variables", MAX_VARIABLES);
  else x->variables[x->n++] = (rfi_tvariable){name, value};
}

static void add_member(rfi_render *r, rfi_tdict *d, const char *key, const json_t *value) {
  const uint32_t flags = strcmp(key, "role") == 0 ? RFI_TEXT_FOREIGN : RFI_TEXT_FOREIGN | RFI_TEXT_CONTENT;
  rfi_tdict_set(r, d, rfi_text_new(r, key, strlen(key), RFI_TEXT_FOREIGN), rfi_tval_from_json(r, value, flags));
}

/* As apply_chat_template does: null members are dropped; reasoning has the names reasoning_content and thinking. */
static rfi_tval message_value(rfi_render *r, const json_t *message, int number) {
  rfi_tdict *d = rfi_tdict_new(r);
  if (!d) return rfi_tval_none();
  d->foreign = true;
  d->message = number;
  static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
  const json_t *reasoning = NULL;
  for (int i = 0; i < 3 && (!reasoning || json_is_null(reasoning)); i++) reasoning = json_object_get(message, names[i]);
  if (json_is_null(reasoning)) reasoning = NULL;
  if (reasoning) add_member(r, d, "thinking", reasoning);
  const char *key;
  json_t *value;
  json_object_foreach((json_t *)message, key, value) {
    if (!json_is_null(value)) add_member(r, d, key, value);
    if (r->status != RFR_OK) break;
  }
  if (reasoning) add_member(r, d, "reasoning_content", reasoning);
  return (rfi_tval){.kind = RFI_T_DICT, .as.dict = d};
}

static rfr_status start(session *x, const rfr_chat_template *chat, const rfi_chat_input *in) {
  memset(x, 0, sizeof *x);
  x->chat = chat;
  x->r = (rfi_render){.ctx = chat->ctx, .t = chat->t, .status = RFR_OK, .date = in->date};
  if (!json_is_array(in->messages)) return rfi_fail(RFI_E_JSON, "\"messages\" is not a list");
  for (size_t i = 0; i < json_array_size(in->messages); i++)
    if (!json_is_object(json_array_get(in->messages, i)))
      return rfi_fail(RFI_E_JSON, "messages[%zu] is not an object", i);
  if (in->tools && !json_is_array(in->tools) && !json_is_null(in->tools))
    return rfi_fail(RFI_E_JSON, "\"tools\" is not a list");
  if (in->variables && !json_is_object(in->variables)) return rfi_fail(RFI_E_JSON, "the variables are not an object");
  RFI_TRY(rfi_arena_create(chat->ctx, &x->r.arena));
  rfi_render *r = &x->r;
  x->messages = rfi_tlist_new(r);
  for (size_t i = 0; i < json_array_size(in->messages) && r->status == RFR_OK; i++)
    rfi_tlist_add(r, x->messages, message_value(r, json_array_get(in->messages, i), (int)i + 1));
  if (x->messages) x->messages->foreign = true;
  add_variable(x, "tools", in->tools ? rfi_tval_from_json(r, in->tools, RFI_TEXT_FOREIGN) : rfi_tval_none());
  add_variable(x, "documents", rfi_tval_none());
  const char *key;
  json_t *value;
  json_object_foreach(chat->variables, key, value) add_variable(x, key, rfi_tval_from_json(r, value, 0));
  json_object_foreach((json_t *)in->variables, key, value)
      add_variable(x, key, rfi_tval_from_json(r, value, RFI_TEXT_FOREIGN));
  return r->status;
}

/* Renders the first n messages. `separate`: in a separate arena. */
static rfr_status render(session *x, int64_t n, bool prompt, bool separate, rendering *out) {
  rfi_render *r = &x->r;
  rfi_arena *const arena = r->arena;
  const size_t bytes = r->bytes;
  rfi_tlist list = *x->messages;
  *out = (rendering){0};
  list.n = n;
  list.capacity = n; /* values that share its items must be copied, because a list is immutable */
  if (separate) {
    RFI_TRY(rfi_arena_create(r->ctx, &out->arena));
    r->arena = out->arena;
  }
  r->steps = 0;
  r->status = RFR_OK;
  add_variable(x, "messages", (rfi_tval){.kind = RFI_T_LIST, .as.list = &list});
  add_variable(x, "add_generation_prompt", rfi_tval_bool(prompt));
  rfr_status s = rfi_render_run(r, x->variables, x->n, &out->text);
  out->parts = r->parts;
  out->n_parts = r->n_parts;
  out->pieces = r->pieces;
  out->n_pieces = r->n_pieces;
  r->arena = arena;
  r->bytes = bytes;
  return s;
}

static void release(rendering *x) { rfi_arena_destroy(x->arena); }

/* The sorted spans of bytes with a flag. */
static rfr_status spans_of(rfr_ctx *ctx, const rfi_text *s, uint32_t flag, rfr_span **out, size_t *n) {
  const rfi_trun single = {s->n, s->flags}, *runs = s->n_runs > 0 ? s->runs : &single;
  const int n_runs = s->n_runs > 0 ? s->n_runs : 1;
  size_t count = 0;
  *out = NULL;
  *n = 0;
  for (int i = 0; i < n_runs; i++) count += (runs[i].flags & flag) != 0;
  if (count == 0 || s->n == 0) return RFR_OK;
  RFI_TRY(RFI_ALLOC(ctx, count * sizeof **out, out));
  size_t begin = 0;
  for (int i = 0; i < n_runs; begin = runs[i++].end) {
    if (!(runs[i].flags & flag)) continue;
    if (*n > 0 && (*out)[*n - 1].end == begin) (*out)[*n - 1].end = runs[i].end;
    else (*out)[(*n)++] = (rfr_span){begin, runs[i].end};
  }
  return RFR_OK;
}

static rfr_status take_text(rfr_ctx *ctx, const rfi_text *s, rfr_rendered *out) {
  out->ctx = ctx;
  RFI_TRY(RFI_ALLOC(ctx, (size_t)s->n + 1, &out->text));
  memcpy(out->text, s->data, s->n);
  out->n = s->n;
  return spans_of(ctx, s, RFI_TEXT_FOREIGN, &out->foreign, &out->n_foreign);
}

void rfr_rendered_deinit(rfr_rendered *x) {
  if (!x || !x->ctx) return;
  rfi_free(x->ctx, x->text);
  rfi_free(x->ctx, x->foreign);
  rfi_free(x->ctx, x->trained);
  *x = (rfr_rendered){0};
}

rfr_status rfi_chat_render(const rfr_chat_template *chat, const rfi_chat_input *in, rfr_rendered *out) {
  session *x;
  rendering full;
  *out = (rfr_rendered){0};
  RFI_TRY(RFI_ALLOC(chat->ctx, sizeof *x, &x));
  rfr_status s = start(x, chat, in);
  if (s == RFR_OK) s = render(x, x->messages->n, in->add_generation_prompt, false, &full);
  if (s == RFR_OK) s = take_text(chat->ctx, full.text, out);
  if (s == RFR_OK) s = spans_of(chat->ctx, full.text, RFI_TEXT_GENERATED, &out->trained, &out->n_trained);
  if (s != RFR_OK) rfr_rendered_deinit(out);
  rfi_arena_destroy(x->r.arena);
  rfi_free(chat->ctx, x);
  return s;
}

/* ---- the assistant's bytes ---- */

static bool begins_with(const rfi_text *s, const rfi_text *prefix) {
  return s->n >= prefix->n && memcmp(s->data, prefix->data, prefix->n) == 0;
}

/* White space of the template after its end-of-turn token is not trained; white space that is itself the end of the
 * turn is. */
static size_t trim_end(const rfi_text *s, size_t begin, size_t end) {
  size_t i = end;
  while (i > begin && strchr(" \n\r\t", s->data[i - 1]) && !(rfi_text_flags_at(s, i - 1) & RFI_TEXT_FOREIGN)) i--;
  return i > begin && !(rfi_text_flags_at(s, i - 1) & RFI_TEXT_FOREIGN) ? i : end;
}

static rfr_status fail_mask(const session *x, int64_t i, const char *why) {
  return rfi_fail_at(RFI_E_CHAT_MASK, x->chat->t->name, 0, "messages[%lld]: %s", (long long)i, why);
}

/* The header that the template writes before an assistant message: the end of `prompt` that the text without generation
 * prompt lacks, or that the template writes outside its loop over the messages. */
static rfr_status header_of(session *x, int64_t i, const rendering *prompt, size_t *begin) {
  rendering plain;
  const rfr_status s = render(x, i, false, true, &plain);
  bool known = s == RFR_OK && begins_with(prompt->text, plain.text);
  if (known) *begin = plain.text->n;
  release(&plain);
  if (known) return RFR_OK;
  if (s == RFR_NO_MEMORY) return s;
  const int n = prompt->n_parts;
  if (n > 0 && prompt->parts[n - 1].message == 0) {
    *begin = n > 1 ? prompt->parts[n - 2].end : 0;
    return RFR_OK;
  }
  return fail_mask(x, i, "the generation prompt cannot be separated from the text before it");
}

/* The bytes of message i in the full text: those that its loop iteration wrote. */
static rfr_status mark_by_loop(session *x, const rendering *full, int64_t i, const rendering *prompt, rfr_span *out) {
  size_t header, begin = 0, end = 0;
  bool found = false;
  for (int k = 0; k < full->n_parts; k++) {
    if (full->parts[k].message != i + 1) continue;
    const size_t from = k > 0 ? full->parts[k - 1].end : 0;
    if (found && from != end) return fail_mask(x, i, "the template writes the message in more than one place");
    if (!found) begin = from;
    end = full->parts[k].end;
    found = true;
  }
  if (!found)
    return fail_mask(
        x, i,
        "the template writes the message differently when more messages follow, and outside a loop over the messages");
  RFI_TRY(header_of(x, i, prompt, &header));
  const rfi_text *s = full->text, *p = prompt->text;
  size_t content = begin;
  while (content < end && !(rfi_text_flags_at(s, content) & RFI_TEXT_CONTENT)) content++;
  size_t k = 0;
  while (header + k < p->n && begin + k < end && p->data[header + k] == s->data[begin + k]) k++;
  if (header + k < p->n) { /* a part of the prompt: up to the message's own text, or to the end of a piece of output */
    const bool has_text = content < end && begin + k >= content;
    size_t common = has_text ? content : begin;
    for (int piece = 0; !has_text && piece < full->n_pieces && full->pieces[piece] <= begin + k; piece++)
      if (full->pieces[piece] > begin) common = full->pieces[piece];
    if (common == begin) return fail_mask(x, i, "the message does not begin with the template's generation prompt");
    k = common - begin;
  }
  *out = (rfr_span){begin + k, trim_end(s, begin + k, end)};
  return RFR_OK;
}

/* The bytes of assistant message i of the full text. */
static rfr_status mark(session *x, const rendering *full, int64_t i, rfr_span *out) {
  rendering prompt, turn = {0};
  rfr_status s = render(x, i, true, true, &prompt);
  if (s == RFR_NO_MEMORY) goto fail;
  if (s != RFR_OK) {
    char why[512];
    rfi_snprintf(why, sizeof why, "the messages before it cannot be rendered: %s", rfr_last_error()->message);
    RFI_GOTO(fail_mask(x, i, why));
  }
  const bool last = i + 1 == x->messages->n;
  if (!last) {
    s = render(x, i + 1, false, true, &turn);
    if (s == RFR_NO_MEMORY) goto fail;
  }
  const rfi_text *t = last ? full->text : turn.text;
  if (s == RFR_OK && begins_with(t, prompt.text) && begins_with(full->text, t)) {
    *out = (rfr_span){prompt.text->n, trim_end(full->text, prompt.text->n, t->n)};
  } else {
    s = mark_by_loop(x, full, i, &prompt, out);
  }
fail:
  release(&prompt);
  release(&turn);
  return s;
}

static bool is_assistant(session *x, int64_t i) {
  const rfi_tval *role = rfi_tdict_find_name(&x->r, x->messages->items[i].as.dict, "role");
  return role && role->kind == RFI_T_TEXT && rfi_text_is(role->as.text, "assistant");
}

static rfr_status mark_all(session *x, const rendering *full, rfr_rendered *out) {
  const rfr_chat_template *chat = x->chat;
  if (chat->t->has_generation)
    return spans_of(chat->ctx, full->text, RFI_TEXT_GENERATED, &out->trained, &out->n_trained);
  size_t count = 0;
  for (int64_t i = 0; i < x->messages->n; i++) count += is_assistant(x, i);
  if (count == 0) return RFR_OK;
  RFI_TRY(RFI_ALLOC(chat->ctx, count * sizeof *out->trained, &out->trained));
  for (int64_t i = 0; i < x->messages->n; i++) {
    rfr_span span;
    if (!is_assistant(x, i)) continue;
    RFI_TRY(mark(x, full, i, &span));
    const size_t before = out->n_trained > 0 ? out->trained[out->n_trained - 1].end : 0;
    if (span.begin < before || span.end < span.begin || span.end > out->n)
      return fail_mask(x, i, "the template writes the messages in another order");
    if (span.begin < span.end) out->trained[out->n_trained++] = span;
  }
  return RFR_OK;
}

rfr_status rfi_chat_render_training(const rfr_chat_template *chat, const rfi_chat_input *in, rfr_rendered *out) {
  session *x;
  rendering full;
  *out = (rfr_rendered){0};
  RFI_TRY(RFI_ALLOC(chat->ctx, sizeof *x, &x));
  rfr_status s = start(x, chat, in);
  if (s == RFR_OK) s = render(x, x->messages->n, false, false, &full);
  if (s == RFR_OK) s = take_text(chat->ctx, full.text, out);
  if (s == RFR_OK) s = mark_all(x, &full, out);
  if (s != RFR_OK) rfr_rendered_deinit(out);
  rfi_arena_destroy(x->r.arena);
  rfi_free(chat->ctx, x);
  return s;
}

/* ---- the public calls ---- */

rfr_chat_options rfr_chat_options_default(void) { return (rfr_chat_options){.size = sizeof(rfr_chat_options)}; }

static rfr_status render_json(const rfr_chat_template *chat, const char *messages, size_t n,
                              const rfr_chat_options *options, bool training, rfr_rendered *out) {
  json_t *list = NULL, *tools = NULL, *variables = NULL;
  rfr_status s;
  if (out) *out = (rfr_rendered){0};
  RFI_TRY(rfi_check_handle(chat, "rfr_chat_template"));
  if (!out || !messages) return rfi_fail(RFI_E_ARGUMENT, "rfr_chat_render: NULL argument");
  const rfr_chat_options o = options ? *options : rfr_chat_options_default();
  RFI_TRY(rfi_check_options("rfr_chat_options", options ? options : &o, o.size, sizeof o));
  RFI_GOTO(rfi_json_parse("messages", messages, n, &list));
  if (o.tools) RFI_GOTO(rfi_json_parse("tools", o.tools, strlen(o.tools), &tools));
  if (o.variables) RFI_GOTO(rfi_json_parse("variables", o.variables, strlen(o.variables), &variables));
  const rfi_chat_input in = {list, tools, variables, o.add_generation_prompt != 0, o.date};
  s = training ? rfi_chat_render_training(chat, &in, out) : rfi_chat_render(chat, &in, out);
fail:
  json_decref(list);
  json_decref(tools);
  json_decref(variables);
  return s;
}

rfr_status rfr_chat_render(const rfr_chat_template *chat, const char *messages, size_t n,
                           const rfr_chat_options *options, rfr_rendered *out) {
  return render_json(chat, messages, n, options, false, out);
}

rfr_status rfr_chat_render_training(const rfr_chat_template *chat, const char *messages, size_t n,
                                    const rfr_chat_options *options, rfr_rendered *out) {
  return render_json(chat, messages, n, options, true, out);
}
