/* SPDX-License-Identifier: Apache-2.0
 *
 * docs/limits.md: what is accepted and what is refused, and decisions with their reasons. Every row of the first kind
 * is tried when the page is generated: a configuration is opened without its data, a model's config.json is read, a
 * trace is parsed and compiled. A row whose result differs from its text fails the build of the page.
 */
#include "docs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "refrain/train.h"

static const char base[] =
    "refrain: 1\n"
    "model: {model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}\n"
    "data: {train: [\"text/*.txt\"], sequence: 16}\n"
    "batch: {tokens: 64, microbatch: 2}\n"
    "optimizer: {lr: 1e-3}\n"
    "precision: {dtype: f32}\n"
    "run: {steps: 1}\n";

enum { CONFIG, FOLDER, TRACE };
#define LLAMA_LIKE(type, more)                                                                           \
  "{\"model_type\": \"" type "\", \"vocab_size\": 256, \"hidden_size\": 32, \"intermediate_size\": 64, " \
  "\"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"max_position_embeddings\": 64" more "}"
#define LLAMA(more) LLAMA_LIKE("llama", more)
#define GEMMA2(more)                                                                            \
  LLAMA_LIKE("gemma2", ", \"head_dim\": 8, \"num_key_value_heads\": 2, \"sliding_window\": 8, " \
                       "\"query_pre_attn_scalar\": 8, \"attn_logit_softcapping\": 50.0, "       \
                       "\"final_logit_softcapping\": 30.0" more)
#define LINEAR(x, w, rest) "refrain-trace 1\ninput %0 \"x\" input " x "\ninput %1 \"w\" trainable " w "\n" rest

#define CACHED(v)                                                                                      \
  "refrain-trace 1\ninput %0 \"q\" trainable f32[3,2,4]\ninput %1 \"k\" state f32[8,2,4]\n"            \
  "input %2 \"v\" state " v "\ninput %3 \"cursor\" state i64[4]\n"                                     \
  "%4 f32[3,2,4] = attention_cached(%0, %1, %2, %3) scale=0.5 causal=1 window=0 cap=0 phase=forward\n" \
  "%5 f32[1] = sum(%4, _) axis=-1 to=f32 phase=forward\n"                                              \
  "%6 f32[3,2,4] = gradient(%5, %0) to=f32 phase=forward\noutput \"g\" %6\n"

static const struct row {
  int kind;
  const char *what;
  const char *slug; /* NULL: accepted */
  const char *text; /* overrides, one per line; config.json; or a trace */
} rows[] = {
    {CONFIG, "Llama", NULL, ""},
    {CONFIG, "grouped query heads", NULL, "model.num_key_value_heads=2"},
    {CONFIG, "biases and tied embeddings in Llama", NULL,
     "model.attention_bias=true\nmodel.mlp_bias=true\nmodel.tie_word_embeddings=true"},
    {CONFIG, "an explicit head size", NULL, "model.head_dim=16"},
    {CONFIG, "GPT-2 with dropout", NULL, "model.model_type=gpt2\nmodel.dropout=0.1"},
    {CONFIG, "weights and activations in bf16", NULL, "precision.dtype=bf16"},
    {CONFIG, "weights and activations in f16, with a dynamic loss scale", NULL, "precision.dtype=f16"},
    {CONFIG, "SGD with momentum", NULL, "optimizer.name=sgd\noptimizer.momentum=0.9"},
    {CONFIG, "Muon", NULL, "optimizer.name=muon"},
    {CONFIG, "Muon with 8-bit moments", "config.value", "optimizer.name=muon\noptimizer.state_dtype=u8"},
    {CONFIG, "a batch ramp", NULL, "batch.ramp=[{until: 9, tokens: 32, sequence: 8}]\nrun.steps=20"},
    {CONFIG, "a batch ramp that ends after the last step", "config.value",
     "batch.ramp=[{until: 9, tokens: 32}]\nrun.steps=5"},
    {CONFIG, "a batch ramp with run.time", "unsupported",
     "batch.ramp=[{until: 9, tokens: 32}]\nrun.steps=0\nrun.time=5s\nschedule.name=constant"},
    {CONFIG, "an EMA of the weights", NULL, "optimizer.ema=0.999"},
    {CONFIG, "bf16 weights without master weights, rounded stochastically", NULL,
     "precision.dtype=bf16\noptimizer.master_weights=false\noptimizer.rounding=stochastic"},
    {CONFIG, "stochastic rounding with master weights", "config.value",
     "precision.dtype=bf16\noptimizer.rounding=stochastic"},
    {CONFIG, "bf16 moments", NULL, "optimizer.state_dtype=bf16"},
    {CONFIG, "8-bit moments", NULL, "optimizer.state_dtype=u8"},
    {CONFIG, "gradients in the type of the weights", NULL, "optimizer.gradient_dtype=model"},
    {CONFIG, "some weights frozen", NULL, "optimizer.frozen=[\"*layers.0*\"]"},
    {CONFIG, "a pattern that matches no weight", "config.value", "optimizer.frozen=[\"*layer.0*\"]"},
    {CONFIG, "everything recomputed", NULL, "memory.recompute=all"},
    {CONFIG, "key and value heads that do not divide the query heads", "config.value", "model.num_key_value_heads=3"},
    {CONFIG, "an odd head size with rotary embedding", "model.config", "model.head_dim=7"},
    {CONFIG, "GPT-2 with grouped heads", "model.config", "model.model_type=gpt2\nmodel.num_key_value_heads=2"},
    {CONFIG, "an activation of another family", "unsupported", "model.hidden_act=gelu_new"},
    {CONFIG, "another family", "config.value", "model.model_type=mamba"},
    {CONFIG, "another optimizer", "config.value", "optimizer.name=lion"},
    {CONFIG, "a weight of 0", "config.value", "data.weights=[0]"},
    {CONFIG, "a vocabulary smaller than the bytes", "config.value", "model.vocab_size=128"},
    {CONFIG, "tokens that are not a multiple of a microbatch", "config.value", "batch.tokens=50"},
    {CONFIG, "a misspelt key", "config.key", "model.hiden_size=32"},
    {CONFIG, "a budget below the smallest plan", "plan.over_budget", "memory.recompute=auto\nmemory.budget=100KiB"},
    {CONFIG, "everything frozen: there is no backward", NULL, "optimizer.frozen=[\"*\"]"},
    {FOLDER, "a Llama folder", NULL, LLAMA("")},
    {FOLDER, "a Llama folder with its own head size", NULL, LLAMA(", \"head_dim\": 16")},
    {FOLDER, "a Gemma 2 folder, with soft caps", NULL, GEMMA2("")},
    {FOLDER, "a Gemma 2 folder without its logit cap", "model.config",
     LLAMA_LIKE("gemma2", ", \"head_dim\": 8, \"num_key_value_heads\": 2, \"sliding_window\": 8, "
                          "\"query_pre_attn_scalar\": 8, \"attn_logit_softcapping\": 50.0")},
    {FOLDER, "a logit cap in another family", "model.config", LLAMA(", \"final_logit_softcapping\": 30.0")},
    {FOLDER, "dropout inside attention", "model.config", LLAMA(", \"attention_dropout\": 0.1")},
    {FOLDER, "an unknown field: accepted with a warning", NULL, LLAMA(", \"something_new\": 1")},
    {FOLDER, "a field that changes the mathematics of another family", "model.config", LLAMA(", \"clip_qkv\": 8.0")},
    {FOLDER, "an OLMo 2 folder", NULL, LLAMA_LIKE("olmo2", "")},
    {FOLDER, "a Granite folder", NULL, LLAMA_LIKE("granite", ", \"embedding_multiplier\": 12.0")},
    {FOLDER, "a SmolLM3 folder", NULL, LLAMA_LIKE("smollm3", ", \"num_key_value_heads\": 2")},
    {FOLDER, "a Phi-4-mini folder: RoPE on a part of each head", NULL,
     LLAMA_LIKE("phi3", ", \"partial_rotary_factor\": 0.75")},
    {FOLDER, "RoPE on a part of each head in another family", "model.config",
     LLAMA(", \"partial_rotary_factor\": 0.75")},
    {FOLDER, "a Gemma 3 folder of text and images", "model.config", LLAMA_LIKE("gemma3", "")},
    {FOLDER, "YaRN", NULL, LLAMA(", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0}")},
    {FOLDER, "dynamic NTK scaling", "model.config",
     LLAMA(", \"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 4.0}")},
    {FOLDER, "another model type", "model.config", LLAMA_LIKE("bert", "")},
    {FOLDER, "an unknown activation", "model.config", LLAMA(", \"hidden_act\": \"relu\"")},
    {FOLDER, "a truncated config.json", "json", "{\"model_type\": "},
    {FOLDER, "a key given twice", "json", "{\"model_type\": \"llama\", \"model_type\": \"gpt2\"}"},
    {TRACE, "a linear layer and its gradient", NULL,
     LINEAR("f32[4,8]", "f32[3,8]",
            "%2 f32[4,3] = matmul(%0, %1, _, _) ta=0 tb=1 to=f32 phase=forward\n"
            "%3 f32[1] = sum(%2, _) axis=-1 to=f32 phase=forward\n"
            "%4 f32[3,8] = gradient(%3, %1) to=f32 phase=forward\noutput \"g\" %4\n")},
    {TRACE, "an empty batch", NULL,
     LINEAR("f32[0,8]", "f32[3,8]",
            "%2 f32[0,3] = matmul(%0, %1, _, _) ta=0 tb=1 to=f32 phase=forward\noutput \"y\" %2\n")},
    {TRACE, "operands that do not fit", "trace.parse",
     LINEAR("f32[4,7]", "f32[3,8]",
            "%2 f32[4,3] = matmul(%0, %1, _, _) ta=0 tb=1 to=f32 phase=forward\noutput \"y\" %2\n")},
    {TRACE, "a result with a wrong printed type", "trace.parse",
     LINEAR("f32[4,8]", "f32[3,8]",
            "%2 f32[4,4] = matmul(%0, %1, _, _) ta=0 tb=1 to=f32 phase=forward\noutput \"y\" %2\n")},
    {TRACE, "an unknown op", "trace.parse",
     LINEAR("f32[4,8]", "f32[3,8]", "%2 f32[4,3] = conv(%0, %1) phase=forward\noutput \"y\" %2\n")},
    {TRACE, "one name for two inputs", "trace.name",
     "refrain-trace 1\ninput %0 \"x\" input f32[4]\ninput %1 \"x\" input f32[4]\noutput \"y\" %1\n"},
    {TRACE, "a gradient of an input that the loss does not depend on", "autodiff.unreached",
     LINEAR("f32[4,8]", "f32[3,8]",
            "%2 f32[1] = sum(%0, _) axis=-1 to=f32 phase=forward\n"
            "%3 f32[3,8] = gradient(%2, %1) to=f32 phase=forward\noutput \"g\" %3\n")},
    {TRACE, "a gradient through cached keys", "autodiff.no_rule", CACHED("f32[8,2,4]")},
    {TRACE, "cached keys and values with different heads", "trace.parse", CACHED("f32[8,1,4]")},
    {TRACE, "a gradient of an input that is not trained", "autodiff.role",
     LINEAR("f32[4,8]", "f32[3,8]",
            "%2 f32[1] = sum(%0, _) axis=-1 to=f32 phase=forward\n"
            "%3 f32[4,8] = gradient(%2, %0) to=f32 phase=forward\noutput \"g\" %3\n")},
};
enum { N_ROWS = sizeof rows / sizeof rows[0] };

/* Decisions that no row can test. */
static const struct {
  const char *what, *why;
} decisions[] = {
    {"`refrain plan --device cuda:none` compares the plan with `memory.budget` only",
     "without a GPU there is no free memory to compare with"},
    {"the settings that `refrain plan` lists for a step that does not fit are planned one at a time, and once together",
     "each row has the bytes of a real plan; all combinations would take minutes"},
    {"`refrain bench` without a name has no `--json`", "each benchmark prints its own object"},
    {"`refrain eval MODEL` needs `--set data.validation=FILES`", "a model folder names no data"},
    {"a picture of a large plan merges buffers smaller than a pixel into bands of the dominant kind",
     "a picture with hundreds of thousands of rectangles is unreadable; `--json` has every buffer"},
    {"collectives of callables do not overlap with compute; only W runs on a side stream",
     "the plan shares bytes between parts that do not run at the same time"},
    {"evaluation with a training set of callables applies dropout",
     "dropout is part of the trace; an inference set evaluates without it"},
    {"wgrad hooks run after `post_backward`; a hook that reshards there frees weights that W reads",
     "`rfr_hook_event.wgrad_reads` is 1 if W reads them"},
    {"with `optimizer.gradient_dtype: model` the gradients of embedding tables and of a fused head are computed in "
     "f32 first",
     "their kernels accumulate in f32; the plan may be up to 9 % larger than with `gradient_dtype: f32`"},
    {"the gradient of a 16-bit input is computed in 16 bits, even if f32 is requested",
     "the conversion follows the op's own rule"},
    {"a program without gradients is fused as inference; its 16-bit loss may differ from the training program's",
     "freezing some weights changes no bit, but dropping all gradients may"},
    {"`run.time` needs the schedule `wsd` or `constant`", "other schedules need the number of steps at the first step"},
    {"a run with run.time may move its last step while the learning rate decays, also after a checkpoint",
     "the run ends in time when the load of the machine changes; a resume takes the last step from the checkpoint, "
     "so two resumes give the same bits"},
    {"oneDNN allocates inside its own calls while a step runs",
     "the allocator of `rfr_ctx_options` serves only calls of the library itself"},
    {"`plan_only` measures no algorithms", "measuring needs the device"},
    {"no public call reads a safetensors file", "`rfr_run_open` reads model folders"},
    {"the address of a callable's trained parameter is compared at replay only if the caller passes the parameter",
     "after a move, call `rfr_graphs_rebind`"},
};

static rfr_status try_config(rfr_ctx *ctx, const char *text) {
  enum { MOST = 8 };
  char copy[400];
  const char *set[MOST];
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run = NULL;
  snprintf(copy, sizeof copy, "%s", text);
  for (char *s = strtok(copy, "\n"); s && o.n_overrides < MOST; s = strtok(NULL, "\n")) set[o.n_overrides++] = s;
  o.overrides = set;
  o.no_data = 1;
  rfr_status s = rfr_run_open(ctx, base, NULL, &o, &run);
  rfr_run_close(run);
  return s;
}

/* Creates a folder named "model" in an empty working folder, so that messages contain no paths of this machine. */
static rfr_status try_folder(rfr_ctx *ctx, const char *text) {
  char folder[512], back[4096];
  rfr_run_options o = rfr_run_options_default();
  rfr_run *run = NULL;
  FILE *f = NULL;
  snprintf(folder, sizeof folder, "%s/docs-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
  if (!getcwd(back, sizeof back) || !mkdtemp(folder) || chdir(folder) != 0) return RFR_IO;
  rfr_status s = mkdir("model", 0777) == 0 && (f = fopen("model/config.json", "wb")) ? RFR_OK : RFR_IO;
  if (f) {
    fputs(text, f);
    fclose(f);
  }
  o.overrides = (const char *const[]){"batch.microbatch=2"};
  o.n_overrides = 1;
  o.no_data = 1;
  if (s == RFR_OK)
    s = rfr_run_open(ctx,
                     "refrain: 1\nmodel: model\ndata: {train: [\"text/*.txt\"], sequence: 16}\n"
                     "batch: {tokens: 64}\noptimizer: {lr: 1e-3}\nprecision: {dtype: f32}\nrun: {steps: 1}\n",
                     NULL, &o, &run);
  rfr_run_close(run);
  unlink("model/config.json");
  rmdir("model");
  if (chdir(back) != 0) return RFR_IO;
  rmdir(folder);
  return s;
}

static rfr_status try_trace(rfr_ctx *ctx, const char *text) {
  rfr_trace *t = NULL;
  rfr_programs *p = NULL;
  rfr_status s = rfr_trace_parse(ctx, "trace", text, strlen(text), &t);
  if (s == RFR_OK) s = rfr_compile(ctx, 1, (const rfr_trace *const[]){t}, NULL, NULL, &p);
  rfr_programs_destroy(p);
  rfr_trace_destroy(t);
  return s;
}

/* Writes text into a cell of a table. */
static rfr_status put_cell(rfi_string *s, const char *text) {
  for (; *text; text++)
    RFI_TRY(rfi_string_append(s, *text == '|' ? "\\|" : *text == '\n' ? " " : text, *text == '|' ? 2 : 1));
  return RFR_OK;
}

rfr_status docs_limits(rfr_ctx *ctx, rfi_string *s) {
  static const char *const titles[] = {"Configurations", "Folders of Hugging Face models", "Traces"};
  static rfr_status (*const tries[])(rfr_ctx *, const char *) = {try_config, try_folder, try_trace};
  RFI_TRY(rfi_string_printf(
      s, "<!-- SPDX-License-Identifier: Apache-2.0; generated by `make docs` -->\n# Limits\n\n"
         "Look up whether a configuration, a model folder or a trace is accepted. For your own, run\n"
         "`refrain check CONFIG.yaml`.\n\n"
         "Every row was tried when this page was generated, and the test `docs_current` tries it again: the table "
         "is in\n[tools/docs_limits.c](../tools/docs_limits.c). A request that would change results "
         "or the planned memory\nis an error with a slug ([errors.md](errors.md)); there is no silent fallback.\n"));
  int wrong = 0;
  for (int i = 0; i < N_ROWS; i++) {
    const struct row *r = &rows[i];
    if (i == 0 || rows[i - 1].kind != r->kind)
      RFI_TRY(rfi_string_printf(s, "\n## %s\n\n| what | %s | |\n|---|---|---|\n", titles[r->kind],
                                r->kind == CONFIG ? "change" : "answer"));
    const rfr_status got = tries[r->kind](ctx, r->text);
    const char *slug = got == RFR_OK ? NULL : rfr_last_error()->slug;
    if ((slug == NULL) != (r->slug == NULL) || (slug && strcmp(slug, r->slug) != 0)) {
      fprintf(stderr, "limits: %s: %s instead of %s (%s)\n", r->what, slug ? slug : "accepted",
              r->slug ? r->slug : "accepted", slug ? rfr_last_error()->message : "");
      wrong++;
    }
    RFI_TRY(rfi_string_printf(s, "| %s | ", r->what));
    if (r->kind == CONFIG) {
      for (const char *at = r->text; *at; at += strcspn(at, "\n"), at += *at == '\n')
        RFI_TRY(rfi_string_printf(s, "%s`%.*s`", at == r->text ? "" : ", ", (int)strcspn(at, "\n"), at));
      RFI_TRY(rfi_string_printf(s, " | "));
    }
    RFI_TRY(rfi_string_printf(s, slug ? "refused, `%s`%s" : "accepted", slug, r->kind == CONFIG ? ": " : " | "));
    const char *message = slug ? rfr_last_error()->message : "", *file = strstr(message, "model/config.json");
    if (slug) RFI_TRY(put_cell(s, file ? file : message)); /* replaces the path of the folder created here */
    else if (r->kind != CONFIG) RFI_TRY(rfi_string_printf(s, " | "));
    RFI_TRY(rfi_string_printf(s, " |\n"));
  }
  RFI_TRY(rfi_string_printf(s, "\n## Decisions\n\n| what | why |\n|---|---|\n"));
  for (size_t i = 0; i < sizeof decisions / sizeof decisions[0]; i++)
    RFI_TRY(rfi_string_printf(s, "| %s | %s |\n", decisions[i].what, decisions[i].why));
  return wrong ? rfi_fail(RFI_E_ARGUMENT, "%d rows of docs/limits.md have another result than they say", wrong)
               : RFR_OK;
}
