/* SPDX-License-Identifier: Apache-2.0
 *
 * Built-in configurations, timed on random tokens: zeros would run faster than real data. The demo is
 * examples/demo.yaml, copied when the build was configured.
 */
#include <string.h>

#include "cli.h"
#include "demo_yaml.h" /* DEMO_YAML, made from examples/demo.yaml */

static const cli_builtin builtins[] = {
    {"demo", "the byte model of the demo", DEMO_YAML, false},
    {"gpt2-124m", "GPT-2 124M, B 4 x T 64",
     "refrain: 1\n"
     "model: {model_type: gpt2, vocab_size: 50257, hidden_size: 768, num_hidden_layers: 12,\n"
     "        num_attention_heads: 12, max_position_embeddings: 1024}\n"
     "data: {train: [random], sequence: 64}\n"
     "batch: {tokens: 256, microbatch: 4}\n"
     "optimizer: {lr: 1e-3}\n"
     "run: {steps: 1000}\n",
     false},
    {"gpt2-124m-64k", "GPT-2 124M, B 64 x T 1024",
     "refrain: 1\n"
     "model: {model_type: gpt2, vocab_size: 50257, hidden_size: 768, num_hidden_layers: 12,\n"
     "        num_attention_heads: 12, max_position_embeddings: 1024}\n"
     "data: {train: [random], sequence: 1024}\n"
     "batch: {tokens: 64k, microbatch: 64}\n"
     "optimizer: {lr: 1e-4}\n"
     "run: {steps: 1000}\n",
     true},
    {"llama-1b", "Llama of 1.2 billion parameters, grouped heads, B 4 x T 4096",
     "refrain: 1\n"
     "model: {model_type: llama, vocab_size: 128256, hidden_size: 2048, intermediate_size: 8192,\n"
     "        num_hidden_layers: 16, num_attention_heads: 32, num_key_value_heads: 8,\n"
     "        rope_theta: 500000, tie_word_embeddings: true, max_position_embeddings: 4096}\n"
     "data: {train: [random], sequence: 4096}\n"
     "batch: {tokens: 16k, microbatch: 4}\n"
     "optimizer: {lr: 1e-4}\n"
     "run: {steps: 1000}\n",
     true},
    {"qwen3-moe", "4 layers of Qwen3 30B-A3B's shapes, 128 experts, top 8, B 4 x T 4096, all in bf16",
     "refrain: 1\n"
     "model: {model_type: qwen3_moe, vocab_size: 32000, hidden_size: 2048, moe_intermediate_size: 768,\n"
     "        num_hidden_layers: 4, num_attention_heads: 32, num_key_value_heads: 4, head_dim: 128,\n"
     "        num_experts: 128, num_experts_per_tok: 8, norm_topk_prob: true, max_position_embeddings: 4096}\n"
     "data: {train: [random], sequence: 4096}\n"
     "batch: {tokens: 16k, microbatch: 4}\n"
     "optimizer: {lr: 1e-4, master_weights: false, gradient_dtype: model, state_dtype: bf16}\n"
     "run: {steps: 1000}\n",
     true},
    {"lora-8b", "LoRA of rank 16 on 8 layers of Llama 3 8B's shapes, B 4 x T 2048",
     "refrain: 1\n"
     "model: {model_type: llama, vocab_size: 128256, hidden_size: 4096, intermediate_size: 14336,\n"
     "        num_hidden_layers: 8, num_attention_heads: 32, num_key_value_heads: 8,\n"
     "        rope_theta: 500000, max_position_embeddings: 8192}\n"
     "data: {train: [random], sequence: 2048}\n"
     "batch: {tokens: 8k, microbatch: 4}\n"
     "adapter: {type: lora, rank: 16, alpha: 32}\n"
     "optimizer: {lr: 1e-4}\n"
     "run: {steps: 1000}\n",
     true},
};
enum { N_BUILTINS = sizeof builtins / sizeof builtins[0] };

const cli_builtin *cli_builtin_at(int i) { return i >= 0 && i < N_BUILTINS ? &builtins[i] : NULL; }

const cli_builtin *cli_builtin_find(const char *name) {
  for (int i = 0; i < N_BUILTINS; i++)
    if (strcmp(builtins[i].name, name) == 0) return &builtins[i];
  return NULL;
}

/* A step that was skipped, for example, must not be timed unnoticed. Every rank has the same warnings. */
static void warn(const rfr_event *e, void *user) {
  const cli *c = user;
  if (e->kind == RFR_EVENT_WARNING && c->launch.rank == 0) cli_warn(c, e->message);
}

rfr_status cli_open_timed(cli *c, const cli_builtin *b, rfr_run **out) {
  char dtype[64];
  rfr_run_options o = cli_run_options(c);
  if (!c->config[0]) o.config_name = b->name;
  o.no_data = 1;
  o.programs = RFR_RUN_TRAIN;
  if (cli_has_ranks(c)) o.on_event = warn, o.event_user = c;
  /* Times the step after a ramp, because programs of earlier phases have other ops. The array has space for both
   * entries: it has one per argument, and the program, the command, its operand and --dtype are arguments too. */
  c->sets.items[o.n_overrides++] = "batch.ramp=[]";
  if (c->dtype) {
    snprintf(dtype, sizeof dtype, "precision.dtype=%s", c->dtype);
    c->sets.items[o.n_overrides++] = dtype;
  }
  return rfr_run_open(c->ctx, b->config, NULL, &o, out);
}
