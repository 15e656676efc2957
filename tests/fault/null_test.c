/* SPDX-License-Identifier: Apache-2.0
 *
 * Calls every public function that takes a handle with NULL for it: it must return an argument error, or a neutral
 * value if it returns no status. The list of functions is compared with the headers, so that a new function cannot be
 * forgotten.
 */
#include <ctype.h>
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "refrain/model.h"
#include "refrain/refrain.h"

static char called[16384]; /* the names, a blank before and after each */

static void note(const char *name) {
  if (!*called) strcpy(called, " ");
  assert_true(strlen(called) + strlen(name) + 2 < sizeof called);
  strcat(strcat(called, name), " ");
}

static void expect_error(const char *name) {
  const rfr_error *e = rfr_last_error();
  if (strcmp(e->slug, "argument") != 0 || !strstr(e->message, "is NULL"))
    fail_msg("%s: %s (%s)", name, e->message, e->slug);
}

/* Sets an error of another call, so that the tested call must replace it. */
static void forget(const char *name) {
  note(name);
  assert_int_equal(rfr_tensor_from_dlpack(NULL, &(rfr_tensor){0}), RFR_INVALID);
}

#define STATUS(name, ...)                             \
  do {                                                \
    forget(#name);                                    \
    assert_int_equal(name(__VA_ARGS__), RFR_INVALID); \
    expect_error(#name);                              \
  } while (0)
#define VALUE(name, ...)                           \
  do {                                             \
    forget(#name);                                 \
    assert_int_equal(name(__VA_ARGS__), RFR_NONE); \
    expect_error(#name);                           \
  } while (0)
#define VOID(name, ...)  \
  do {                   \
    forget(#name);       \
    name(__VA_ARGS__);   \
    expect_error(#name); \
  } while (0)
#define QUIET(name, ...) \
  do {                   \
    note(#name);         \
    name(__VA_ARGS__);   \
  } while (0)
#define GIVES(wanted, name, ...)                \
  do {                                          \
    note(#name);                                \
    assert_true(name(__VA_ARGS__) == (wanted)); \
  } while (0)
#define NOWHERE ((rfr_source){NULL, 0})

static int take_token(int32_t token, void *user) {
  (void)token, (void)user;
  return 0;
}
static void ignore(const char *text, size_t n, void *user) {
  (void)text;
  (void)n;
  (void)user;
}

static const char *no_shape(const rfr_infer *c) {
  (void)c;
  return "never called";
}

static void contexts(void) {
  rfr_ctx_stats stats = rfr_ctx_get_stats(NULL);
  rfr_tensor x = {.name = "x", .type = {.dtype = RFR_F32}, .data = &stats, .bytes = 4};
  rfr_op_desc d = rfr_op_desc_default();
  const rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  const rfr_adapter_options o = rfr_adapter_options_default();
  rfr_adapter *adapter;
  float two[2] = {0};
  DLManagedTensorVersioned *dl;
  rfr_programs *p;
  rfr_machine machine;
  char gpu[8];
  rfr_piece piece;
  const rfr_op *op;
  rfr_trace *t;
  rfr_run *run;
  note("rfr_ctx_get_stats");
  assert_int_equal(stats.alloc_calls + stats.live_bytes + stats.live_blocks + stats.peak_bytes, 0);
  QUIET(rfr_ctx_destroy, NULL);
  QUIET(rfr_ctx_fail_alloc, NULL, 1);
  STATUS(rfr_trace_create, NULL, &t);
  STATUS(rfr_trace_parse, NULL, "x", "refrain-trace 1\n", 16, &t);
  STATUS(rfr_compile, NULL, 1, (const rfr_trace *const[]){NULL}, NULL, NULL, &p);
  STATUS(rfr_tensor_to_dlpack, NULL, &x, NULL, NULL, &dl);
  STATUS(rfr_quant_encode, NULL, RFR_QUANT_NF4, 2, (int64_t[]){1, 2}, RFR_F32, two, 1, two);
  STATUS(rfr_adapter_create, NULL, &c, &o, &adapter);
  d.name = "a.b";
  d.shape = no_shape;
  STATUS(rfr_op_register, NULL, &d, &op);
  assert_non_null(rfr_op_find(NULL, "matmul"));
  GIVES(NULL, rfr_op_find, NULL, "no.op");
  STATUS(rfr_run_open, NULL, "refrain: 1\n", NULL, NULL, &run);
  STATUS(rfr_machine_describe, NULL, &machine);
  STATUS(rfr_cuda_describe, NULL, gpu, sizeof gpu);
  STATUS(rfr_cuda_piece, NULL, 0, &piece);
  STATUS(rfr_config_resolve, NULL, "refrain: 1\n", NULL, 0, ignore, NULL);
  STATUS(rfr_finetune_config, NULL, "model", NULL, 0, NULL, ignore, NULL);
  STATUS(rfr_model_run_config, NULL, "model", 1, NULL, ignore, NULL);
  STATUS(rfr_config_key_at, 0, NULL);
}

static void reports(void) {
  rfr_report *r;
  STATUS(rfr_report_open, NULL, (const char *const[]){"a"}, 1, &r);
  STATUS(rfr_report_read, NULL, &(int){0});
  STATUS(rfr_report_page, NULL, 0, ignore, NULL);
  STATUS(rfr_report_data, NULL, ignore, NULL);
  STATUS(rfr_report_screen, NULL, 0, 80, 0, 0, ignore, NULL);
  STATUS(rfr_report_diff, NULL, "a", "b", 0, 9, ignore, NULL, &(int){0});
  STATUS(rfr_report_wandb, NULL, 0, "a");
  GIVES(0, rfr_report_bytes, NULL);
  QUIET(rfr_report_close, NULL);
}

static void sweeps(void) {
  rfr_sweep *s;
  STATUS(rfr_sweep_open, NULL, "a", "b", NULL, &s);
  STATUS(rfr_sweep_get, NULL, 0, &(rfr_sweep_run){0});
  STATUS(rfr_sweep_set, NULL, 0, RFR_SWEEP_DONE, NULL);
  GIVES(0, rfr_sweep_count, NULL);
  GIVES(0, rfr_sweep_rank, NULL, &(int){0});
  GIVES(NULL, rfr_sweep_config, NULL);
  QUIET(rfr_sweep_close, NULL);
}

static void chats(void) {
  rfr_chat_template *chat;
  rfr_rendered text;
  STATUS(rfr_chat_template_create, NULL, "t", "", 0, NULL, &chat);
  STATUS(rfr_chat_template_open, NULL, "chatml", NULL, &chat);
  STATUS(rfr_chat_render, NULL, "[]", 2, NULL, &text);
  STATUS(rfr_chat_render_training, NULL, "[]", 2, NULL, &text);
  STATUS(rfr_chat_encode, NULL, NULL, "[]", 2, NULL, &(rfr_tokens){0});
  STATUS(rfr_chat_stops, NULL, NULL, NULL, 0, &(int){0});
  GIVES(0, rfr_chat_template_marks_generation, NULL);
  QUIET(rfr_chat_template_destroy, NULL);
  QUIET(rfr_rendered_deinit, NULL);
}

static void traces(void) {
  const int64_t shape[] = {2, 3};
  rfr_model_config c = rfr_model_config_default(RFR_MODEL_LLAMA);
  rfr_value *p = calloc((size_t)rfr_model_parameter_count(&c), sizeof *p);
  QUIET(rfr_trace_destroy, NULL);
  STATUS(rfr_trace_finish, NULL);
  STATUS(rfr_trace_status, NULL);
  VALUE(rfr_input_at, NULL, NOWHERE, "x", RFR_ROLE_INPUT, RFR_F32, 2, shape);
  VOID(rfr_output_at, NULL, NOWHERE, "y", 0);
  VOID(rfr_scope, NULL, "layer0");
  VOID(rfr_microbatch, NULL, 0);
  VOID(rfr_set_phase, NULL, RFR_PHASE_OPTIM);
  VOID(rfr_set_recompute, NULL, RFR_POLICY_KEEP);
  VOID(rfr_recipe_begin, NULL, NULL);
  VOID(rfr_recipe_end, NULL);
  STATUS(rfr_recipe_check, NULL);
  QUIET(rfr_value_set_name, NULL, 0, "x");
  GIVES(0, rfr_trace_op_count, NULL);
  GIVES(0, rfr_trace_sites, NULL);
  GIVES(0, rfr_trace_linears, NULL);
  assert_int_equal(rfr_value_type(NULL, 0).rank, 0);
  note("rfr_value_type");
  assert_string_equal(rfr_value_name(NULL, 0), "");
  note("rfr_value_name");
  STATUS(rfr_trace_print, NULL, NULL, ignore, NULL);
  GIVES(1, rfr_trace_equal, NULL, NULL);
  STATUS(rfr_trace_verify, NULL);
  STATUS(rfr_trace_diff, NULL, NULL, ignore, NULL);
  VALUE(rfr_record_at, NULL, NOWHERE, rfr_op_find(NULL, "add"), 2, (rfr_value[]){0, 0}, NULL, NULL);
  VOID(rfr_model_declare, NULL, &c, NULL, 0, p);
  VALUE(rfr_model_forward, NULL, &c, p, 0, 0, 0);
  VALUE(rfr_model_forward_experts, NULL, &c, p, 0, 0, 0, NULL);
  VALUE(rfr_model_forward_cached, NULL, &c, p, 0, 0, 0, 8);
  VALUE(rfr_model_logits, NULL, &c, p, 0, RFR_F32);
  c.experts = c.experts_per_token = 1, c.z_loss = 1;
  VALUE(rfr_model_routing_loss, NULL, &c, NULL, 0, 0);
  free(p);
}

static void ops(void) {
  const int64_t shape[] = {2, 3};
  const rfr_value v[] = {0, 0};
  VALUE(rfr_matmul_at, NULL, NOWHERE, 0, 0, 0, 0, 0, RFR_F32);
  VALUE(rfr_linear_at, NULL, NOWHERE, 0, 0, 0);
  VALUE(rfr_quantize_at, NULL, NOWHERE, 0, NULL, NULL);
  VALUE(rfr_grouped_quantize_at, NULL, NOWHERE, 0, 0, NULL, NULL);
  VALUE(rfr_dequantize_at, NULL, NOWHERE, 0, RFR_QUANT_NF4, 2, shape, RFR_F32);
  VALUE(rfr_matmul_scaled_at, NULL, NOWHERE, NULL, NULL, 0, RFR_F32);
  VALUE(rfr_splits_to_offsets_at, NULL, NOWHERE, 0, 0, NULL);
  VALUE(rfr_grouped_linear_at, NULL, NOWHERE, 0, 0, 0, 0, 0);
  VALUE(rfr_grouped_linear_separate_at, NULL, NOWHERE, 0, 1, (rfr_value[]){0}, 0, 0, 0);
  VALUE(rfr_moe_route_at, NULL, NOWHERE, 0, 0, NULL, NULL);
  VALUE(rfr_moe_sort_at, NULL, NOWHERE, 0, 4, NULL, NULL);
  VALUE(rfr_moe_parts_at, NULL, NOWHERE, 0, 0, 0, 2, 4, NULL, NULL);
  VALUE(rfr_moe_part_experts_at, NULL, NOWHERE, 0, 2, 4);
  VALUE(rfr_moe_permute_at, NULL, NOWHERE, 0, 0, 0, 0);
  VALUE(rfr_moe_row_weight_at, NULL, NOWHERE, 0, 0, 0);
  VALUE(rfr_moe_unpermute_at, NULL, NOWHERE, 0, 0, 0, 0);
  VALUE(rfr_moe_loss_at, NULL, NOWHERE, 0, 0, 0, 0, 1.0, 0.0, 0);
  VALUE(rfr_moe_load_at, NULL, NOWHERE, 0, NULL, 1, NULL, NULL);
  VALUE(rfr_embedding_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_positions_at, NULL, NOWHERE, 0, 4);
  VALUE(rfr_rope_at, NULL, NOWHERE, 0, 0, 1e4, NULL);
  VALUE(rfr_rope_table_at, NULL, NOWHERE, 0, 0, (const double[]){1}, 1, 1);
  VALUE(rfr_layernorm_at, NULL, NOWHERE, 0, 0, 0, 1e-5);
  VALUE(rfr_rmsnorm_at, NULL, NOWHERE, 0, 0, 1e-5);
  VALUE(rfr_attention_at, NULL, NOWHERE, 0, 0, 0, 0, NULL);
  VALUE(rfr_attention_cached_at, NULL, NOWHERE, 0, 0, 0, 0, NULL);
  VALUE(rfr_add_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_mul_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_scale_at, NULL, NOWHERE, 0, 2, 0);
  VALUE(rfr_cast_at, NULL, NOWHERE, 0, RFR_BF16);
  VALUE(rfr_copy_at, NULL, NOWHERE, 0);
  VALUE(rfr_fill_at, NULL, NOWHERE, 1, RFR_F32, 2, shape);
  VALUE(rfr_gelu_at, NULL, NOWHERE, 0, 1);
  VALUE(rfr_silu_at, NULL, NOWHERE, 0);
  VALUE(rfr_swiglu_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_swiglu_weighted_at, NULL, NOWHERE, 0, 0, 0);
  VALUE(rfr_softcap_at, NULL, NOWHERE, 0, 30.0);
  VALUE(rfr_dropout_at, NULL, NOWHERE, 0, 0, 0.5, 0);
  VALUE(rfr_sum_at, NULL, NOWHERE, 0, -1);
  VALUE(rfr_mean_at, NULL, NOWHERE, 0, -1);
  VALUE(rfr_max_at, NULL, NOWHERE, 0, -1);
  VALUE(rfr_reshape_at, NULL, NOWHERE, 0, 2, shape);
  VALUE(rfr_transpose_at, NULL, NOWHERE, 0, 0, 1);
  VALUE(rfr_slice_at, NULL, NOWHERE, 0, 0, 0, 1);
  VALUE(rfr_expand_at, NULL, NOWHERE, 0, 0, 1);
  VALUE(rfr_concat_at, NULL, NOWHERE, 2, v, 0);
  VALUE(rfr_detach_at, NULL, NOWHERE, 0);
  VALUE(rfr_token_count_at, NULL, NOWHERE, 1, v, -100, NULL);
  VALUE(rfr_cross_entropy_at, NULL, NOWHERE, 0, 0, 0, -100);
  VALUE(rfr_token_loss_at, NULL, NOWHERE, 0, 0, -100);
  VALUE(rfr_segment_sum_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_dpo_loss_at, NULL, NOWHERE, 0, 0, 0, 0, 0.1, 0.0, NULL, NULL);
  VALUE(rfr_gradient_at, NULL, NOWHERE, 0, 0, RFR_F32);
  VALUE(rfr_all_gather_at, NULL, NOWHERE, 0, 2);
  VALUE(rfr_reduce_scatter_at, NULL, NOWHERE, 0, 2);
  VALUE(rfr_all_reduce_at, NULL, NOWHERE, 0, 2);
  VALUE(rfr_all_to_all_at, NULL, NOWHERE, 0, 2);
  VALUE(rfr_all_to_all_rows_at, NULL, NOWHERE, 0, 0, 0, 2);
  VALUE(rfr_gradient_onto_at, NULL, NOWHERE, 0, 0, 0);
  VALUE(rfr_step_block_at, NULL, NOWHERE);
  VALUE(rfr_rng_stream_at, NULL, NOWHERE, "name");
  VALUE(rfr_lr_schedule_at, NULL, NOWHERE, 0, NULL);
  VALUE(rfr_lr_schedule_steps_at, NULL, NOWHERE, 0, 0, NULL);
  VALUE(rfr_grad_norm_at, NULL, NOWHERE, 2, v, NULL);
  VALUE(rfr_grad_norm_zeros_at, NULL, NOWHERE, 2, v, 0, NULL);
  VALUE(rfr_clip_scale_at, NULL, NOWHERE, 0, 1);
  VALUE(rfr_adamw_at, NULL, NOWHERE, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL);
  VALUE(rfr_sgd_at, NULL, NOWHERE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1);
  VALUE(rfr_sgd_stochastic_at, NULL, NOWHERE, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1);
  VALUE(rfr_ema_at, NULL, NOWHERE, 0, 0, 0, 0, 0.9, 0, 0);
  VALUE(rfr_loss_scale_at, NULL, NOWHERE, 0, NULL);
  VALUE(rfr_loss_scale_end_at, NULL, NOWHERE, 0, 0, 2000);
  VALUE(rfr_skip_bad_at, NULL, NOWHERE, 0, 0, NULL, NULL, NULL);
  VALUE(rfr_step_end_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_ring_read_at, NULL, NOWHERE, 0, 0);
  VALUE(rfr_text_read_at, NULL, NOWHERE, 0, 0, 1, NULL, NULL);
  VALUE(rfr_cache_write_at, NULL, NOWHERE, 0, 0, 0);
  VALUE(rfr_text_append_at, NULL, NOWHERE, 0, 0, 0, 0, 1);
  VALUE(rfr_text_end_at, NULL, NOWHERE, 0, 0, 1);
  VALUE(rfr_metrics_write_at, NULL, NOWHERE, 0, 0, 1, v);
}

static void programs(void) {
  rfr_tensor x;
  rfr_choice choice;
  rfr_plan_summary plan;
  rfr_plan_buffer buffer;
  rfr_plan_op op;
  rfr_frontier_point points[2];
  rfr_memory_use use;
  rfr_memory memory;
  int n;
  rfr_rng rng = {0};
  rfr_step_memory *shared;
  QUIET(rfr_step_memory_destroy, NULL);
  STATUS(rfr_step_memory_create, NULL, 0, &shared);
  GIVES(-1, rfr_step_memory_bytes, NULL);
  QUIET(rfr_programs_destroy, NULL);
  STATUS(rfr_programs_tensor, NULL, "x", &x);
  STATUS(rfr_programs_tensor_at, NULL, 0, &x);
  STATUS(rfr_programs_choice_at, NULL, 0, &choice);
  STATUS(rfr_program_output, NULL, 0, "y", &x);
  STATUS(rfr_programs_load, NULL);
  STATUS(rfr_program_run, NULL, 0);
  STATUS(rfr_programs_wait, NULL);
  STATUS(rfr_programs_poll, NULL, &n);
  memset(&x, 0, sizeof x);
  STATUS(rfr_programs_write, NULL, &x, &x);
  STATUS(rfr_programs_read, NULL, &x, &x);
  STATUS(rfr_programs_get_rng, NULL, NULL, &rng);
  STATUS(rfr_programs_set_rng, NULL, NULL, &rng);
  STATUS(rfr_program_capture, NULL, 0);
  STATUS(rfr_program_profile, NULL, 0, NULL, 0, &n);
  STATUS(rfr_program_replay, NULL, 0, NULL, 0);
  STATUS(rfr_program_plan, NULL, 0, &plan);
  STATUS(rfr_program_plan_buffer, NULL, 0, 0, &buffer);
  STATUS(rfr_program_op, NULL, 0, 0, &op);
  GIVES(-1, rfr_programs_touched_bytes, NULL);
  GIVES(-1, rfr_program_unwritten_bytes, NULL, 0);
  STATUS(rfr_programs_check, NULL);
  STATUS(rfr_programs_memory_use, NULL, &use);
  STATUS(rfr_programs_memory, NULL, &memory);
  GIVES(NULL, rfr_program_trace, NULL, 0, "record");
  GIVES(NULL, rfr_program_report, NULL, 0, "prune");
  GIVES(NULL, rfr_programs_watched_name, NULL, 0);
  STATUS(rfr_failure_append, NULL, "x", &(rfr_failure){0});
  STATUS(rfr_programs_watched, NULL, 0, 0, &(rfr_watched){0});
  GIVES(0, rfr_program_flops, NULL, 0);
  GIVES(0, rfr_program_recomputed_flops, NULL, 0);
  STATUS(rfr_program_frontier, NULL, 0, points, 2, &n);
}

static void runs(void) {
  rfr_evaluation e;
  rfr_run_info info;
  int n;
  QUIET(rfr_run_close, NULL);
  QUIET(rfr_run_request_stop, NULL);
  STATUS(rfr_run_step, NULL);
  STATUS(rfr_run_profile, NULL, NULL, 0, &n);
  STATUS(rfr_run_train, NULL);
  STATUS(rfr_run_evaluate, NULL, &e);
  STATUS(rfr_run_generate, NULL, "a", 1, NULL, ignore, NULL);
  STATUS(rfr_export, NULL, "a", "b", NULL);
  STATUS(rfr_inspect, NULL, "a", 0, ignore, NULL);
  STATUS(rfr_tokenizer_open, NULL, "a", &(rfr_tokenizer *){NULL});
  STATUS(rfr_tokenizer_write_files, NULL, (const char *const[]){"a"}, 1, RFR_TOKENS_LLMC, "a.bin", NULL, NULL);
  STATUS(rfr_tokenizer_train, NULL, (const char *const[]){"a"}, 1, NULL, "b", NULL);
  STATUS(rfr_run_generate_batch, NULL, &(rfr_prompt){0}, 1, NULL);
  STATUS(rfr_run_generate_tokens, NULL, &(int32_t){0}, 1, NULL, take_token, NULL);
  STATUS(rfr_run_score, NULL, &(int32_t){0}, 1, &(float){0});
  STATUS(rfr_run_save, NULL);
  QUIET(rfr_run_get_info, NULL, &info);
  rfr_run_pipeline pipeline;
  QUIET(rfr_run_get_pipeline, NULL, &pipeline);
  rfr_stage_costs costs;
  STATUS(rfr_run_stage_costs, NULL, &costs, &costs.seconds[0]);
  assert_int_equal(info.parameters + info.steps, 0);
  GIVES(NULL, rfr_run_data_file, NULL, 0, 0);
  STATUS(rfr_run_data_row, NULL, 0, NULL, NULL);
  GIVES(NULL, rfr_run_tokenizer, NULL);
  GIVES(NULL, rfr_run_template, NULL);
  GIVES(NULL, rfr_run_programs, NULL);
  GIVES(-1, rfr_run_program_index, NULL, RFR_RUN_TRAIN);
  rfr_run_phase phase;
  STATUS(rfr_run_phase_at, NULL, 0, &phase);
}

static void graphs(void) {
  int n;
  rfr_graphs *g;
  rfr_tensor x;
  rfr_graphs_memory m = {.size = sizeof m};
  rfr_rng rng = {0};
  rfr_action action;
  const rfr_callable c = rfr_callable_default();
  QUIET(rfr_graphs_destroy, NULL);
  STATUS(rfr_graphs_create, NULL, &c, 1, NULL, &g);
  STATUS(rfr_graphs_begin_step, NULL, NULL, 0);
  STATUS(rfr_graphs_begin_evaluation, NULL, NULL, 0);
  STATUS(rfr_graphs_forward, NULL, 0, 0, NULL, 0, &x, 1);
  STATUS(rfr_graphs_backward, NULL, 0, 0, NULL, 0, &x, 1);
  STATUS(rfr_graphs_wgrad, NULL, 0, 0);
  STATUS(rfr_graphs_end_step, NULL);
  STATUS(rfr_graphs_abort_step, NULL);
  STATUS(rfr_graphs_expected, NULL, &action, &n);
  STATUS(rfr_graphs_changed, NULL);
  STATUS(rfr_graphs_grads_ready, NULL, NULL, 0, &n);
  STATUS(rfr_graphs_reschedule, NULL, NULL);
  STATUS(rfr_graphs_rebind, NULL, NULL, 0, NULL, 0, NULL, 0);
  STATUS(rfr_graphs_set_stream, NULL, NULL);
  STATUS(rfr_graphs_wait, NULL);
  STATUS(rfr_graphs_tensor, NULL, "w", &x);
  STATUS(rfr_graphs_gradient, NULL, "w", &x);
  STATUS(rfr_graphs_write, NULL, &x, &x);
  STATUS(rfr_graphs_read, NULL, &x, &x);
  STATUS(rfr_graphs_get_rng, NULL, NULL, &rng);
  STATUS(rfr_graphs_set_rng, NULL, NULL, &rng);
  STATUS(rfr_graphs_get_memory, NULL, &m);
  GIVES(-1, rfr_graphs_ops, NULL, 0, RFR_ACTION_F);
  GIVES(NULL, rfr_graphs_trace, NULL, 0);
  GIVES(NULL, rfr_graphs_report, NULL, 0, "fuse");
}

static void communicators(void) {
  const rfr_launch launch = {0};
  rfr_comm *mpi;
  rfr_comm *c;
  float x, y;
  QUIET(rfr_comm_destroy, NULL);
  QUIET(rfr_comm_abort, NULL);
  GIVES(0, rfr_comm_size, NULL);
  GIVES(-1, rfr_comm_rank, NULL);
  STATUS(rfr_comm_threads_create, NULL, 1, 0, &c);
  STATUS(rfr_comm_mpi_create, NULL, 1, &mpi);
  STATUS(rfr_launch_join, NULL, &launch, 1, &mpi);
  STATUS(rfr_launch_leave, NULL, NULL);
  char id[RFR_NCCL_ID_BYTES];
  STATUS(rfr_comm_nccl_id, NULL, id);
  STATUS(rfr_comm_nccl_create, NULL, id, 1, 0, 0, &c);
  STATUS(rfr_comm_all_gather, NULL, &x, &y, 1, RFR_F32);
  STATUS(rfr_comm_reduce_scatter, NULL, &x, &y, 1, RFR_F32);
  STATUS(rfr_comm_all_reduce, NULL, &x, &y, 1, RFR_F32);
  STATUS(rfr_comm_all_to_all, NULL, &x, &y, 1, RFR_F32);
}

static void schedules(void) {
  rfr_schedule *s;
  rfr_schedule_info info;
  int n = 1;
  QUIET(rfr_schedule_destroy, NULL);
  STATUS(rfr_schedule_create, NULL, 1, (const rfr_action *const[]){NULL}, &n, &s);
  STATUS(rfr_schedule_parse, NULL, "x", "0F0", 3, &s);
  STATUS(rfr_schedule_parse_order, NULL, "x", "1", 1, NULL, 0, &s);
  const rfr_schedule_options o = rfr_schedule_options_default();
  STATUS(rfr_schedule_generate, NULL, &o, &s);
  STATUS(rfr_schedule_add_communication, NULL, &s);
  rfr_schedule_result result;
  rfr_stage_costs costs;
  STATUS(rfr_schedule_simulate, NULL, NULL, 0, &result, NULL, NULL, NULL);
  STATUS(rfr_schedule_costs_parse, NULL, "x", "{}", 2, 1, &costs);
  rfr_layer_costs layered;
  STATUS(rfr_layer_costs_parse, NULL, "x", "{}", 2, &layered);
  STATUS(rfr_layer_costs_stages, NULL, 1, 1, &costs);
  STATUS(rfr_schedule_print, NULL, ignore, NULL);
  STATUS(rfr_schedule_get_info, NULL, &info);
  GIVES(NULL, rfr_schedule_actions, NULL, 0, &n);
  assert_int_equal(n, 0);
  GIVES(-1, rfr_schedule_rank, NULL, 0);
  GIVES(-1, rfr_schedule_find, NULL, ((rfr_action){RFR_ACTION_F, 0, 0}));
  STATUS(rfr_schedule_set_layers, NULL, &n, 1);
  GIVES(0, rfr_schedule_layers, NULL, 0);
  GIVES(0, rfr_schedule_slots, NULL, 0);
  GIVES(-1, rfr_schedule_slot, NULL, 0, 0);
}

/* ---- the functions of the headers ---- */

/* Whether a parameter is a pointer to a handle, not an address for one. */
static int takes_handle(const char *declaration) {
  static const char *const types[] = {"rfr_ctx *", "rfr_trace *",    "rfr_programs *",
                                      "rfr_run *", "rfr_schedule *", "rfr_graphs *"};
  const char *parameters = strchr(declaration, '(');
  for (size_t i = 0; parameters && i < sizeof types / sizeof types[0]; i++)
    for (const char *s = parameters; (s = strstr(s, types[i])); s++)
      if (s[strlen(types[i])] != '*') return 1;
  return 0;
}

/* Lists functions of a header that were not called. */
static int missed_in(char *text) {
  int missed = 0;
  for (char *s = text, *end; (s = strstr(s, "RFR_API ")) && (end = strchr(s, ';')); s = end + 1) {
    char name[80];
    *end = 0;
    char *last = strchr(s, '('), *first = last;
    while (first && first > s && (isalnum((unsigned char)first[-1]) || first[-1] == '_')) first--;
    if (!takes_handle(s)) continue;
    snprintf(name, sizeof name, " %.*s ", (int)(last - first), first);
    if (strstr(called, name)) continue;
    print_error("not called without a handle:%s\n", name);
    missed++;
  }
  return missed;
}

static void test_null_handles(void **state) {
  (void)state;
  static char text[65536], path[1024];
  int headers = 0, missed = 0;
  contexts();
  chats();
  sweeps();
  reports();
  traces();
  ops();
  programs();
  runs();
  communicators();
  schedules();
  graphs();
  DIR *dir = opendir(RFT_SOURCE_DIR "/include/refrain");
  assert_non_null(dir);
  for (struct dirent *e; (e = readdir(dir));) {
    if (!strstr(e->d_name, ".h")) continue;
    snprintf(path, sizeof path, "%s/include/refrain/%s", RFT_SOURCE_DIR, e->d_name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    missed += missed_in(text);
    headers++;
  }
  closedir(dir);
  assert_true(headers >= 8);
  assert_int_equal(missed, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_null_handles)};
  return cmocka_run_group_tests_name("null", tests, NULL, NULL);
}
