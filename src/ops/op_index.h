/* SPDX-License-Identifier: Apache-2.0; made from ops.def by tools/make_op_index
 *
 * The indices of the operands (RFI_IN_), results (RFI_OUT_) and attributes (RFI_AT_) of each op.
 * A variadic operand has the index of its first value.
 */
#ifndef RFI_OP_INDEX_H
#define RFI_OP_INDEX_H

/* clang-format off */
enum { RFI_IN_matmul_a, RFI_IN_matmul_b, RFI_IN_matmul_bias, RFI_IN_matmul_acc };
enum { RFI_OUT_matmul_y };
enum { RFI_AT_matmul_ta, RFI_AT_matmul_tb, RFI_AT_matmul_to };
enum { RFI_IN_lora_matmul_x, RFI_IN_lora_matmul_w, RFI_IN_lora_matmul_u, RFI_IN_lora_matmul_b, RFI_IN_lora_matmul_bias,
  RFI_IN_lora_matmul_acc };
enum { RFI_OUT_lora_matmul_y };
enum { RFI_AT_lora_matmul_tb, RFI_AT_lora_matmul_to };
enum { RFI_IN_matmul_gelu_bwd_a, RFI_IN_matmul_gelu_bwd_b, RFI_IN_matmul_gelu_bwd_x };
enum { RFI_OUT_matmul_gelu_bwd_dx };
enum { RFI_AT_matmul_gelu_bwd_ta, RFI_AT_matmul_gelu_bwd_tb, RFI_AT_matmul_gelu_bwd_to };
enum { RFI_IN_quantize_x, RFI_IN_quantize_scale, RFI_IN_quantize_step, RFI_IN_quantize_microbatch };
enum { RFI_OUT_quantize_row, RFI_OUT_quantize_col, RFI_OUT_quantize_row_scale, RFI_OUT_quantize_col_scale,
  RFI_OUT_quantize_row_global, RFI_OUT_quantize_col_global, RFI_OUT_quantize_amax };
enum { RFI_AT_quantize_format, RFI_AT_quantize_scaling, RFI_AT_quantize_options, RFI_AT_quantize_site,
  RFI_AT_quantize_stream };
enum { RFI_IN_grouped_quantize_x, RFI_IN_grouped_quantize_offsets, RFI_IN_grouped_quantize_scale,
  RFI_IN_grouped_quantize_step, RFI_IN_grouped_quantize_microbatch };
enum { RFI_OUT_grouped_quantize_row, RFI_OUT_grouped_quantize_col, RFI_OUT_grouped_quantize_row_scale,
  RFI_OUT_grouped_quantize_col_scale, RFI_OUT_grouped_quantize_row_global, RFI_OUT_grouped_quantize_col_global,
  RFI_OUT_grouped_quantize_amax };
enum { RFI_AT_grouped_quantize_format, RFI_AT_grouped_quantize_scaling, RFI_AT_grouped_quantize_options,
  RFI_AT_grouped_quantize_site, RFI_AT_grouped_quantize_stream };
enum { RFI_IN_permute_codes_q, RFI_IN_permute_codes_scale, RFI_IN_permute_codes_order, RFI_IN_permute_codes_place,
  RFI_IN_permute_codes_offsets };
enum { RFI_OUT_permute_codes_row, RFI_OUT_permute_codes_col, RFI_OUT_permute_codes_row_scale,
  RFI_OUT_permute_codes_col_scale };
enum { RFI_IN_swiglu_quantize_gate, RFI_IN_swiglu_quantize_up, RFI_IN_swiglu_quantize_scale };
enum { RFI_OUT_swiglu_quantize_y, RFI_OUT_swiglu_quantize_row, RFI_OUT_swiglu_quantize_col,
  RFI_OUT_swiglu_quantize_row_scale, RFI_OUT_swiglu_quantize_col_scale, RFI_OUT_swiglu_quantize_amax };
enum { RFI_AT_swiglu_quantize_format, RFI_AT_swiglu_quantize_options };
enum { RFI_IN_swiglu_bwd_quantize_dy, RFI_IN_swiglu_bwd_quantize_gate, RFI_IN_swiglu_bwd_quantize_up,
  RFI_IN_swiglu_bwd_quantize_gate_scale, RFI_IN_swiglu_bwd_quantize_up_scale };
enum { RFI_OUT_swiglu_bwd_quantize_dgate, RFI_OUT_swiglu_bwd_quantize_dup, RFI_OUT_swiglu_bwd_quantize_gate_row,
  RFI_OUT_swiglu_bwd_quantize_gate_col, RFI_OUT_swiglu_bwd_quantize_gate_row_scale,
  RFI_OUT_swiglu_bwd_quantize_gate_col_scale, RFI_OUT_swiglu_bwd_quantize_gate_amax, RFI_OUT_swiglu_bwd_quantize_up_row,
  RFI_OUT_swiglu_bwd_quantize_up_col, RFI_OUT_swiglu_bwd_quantize_up_row_scale,
  RFI_OUT_swiglu_bwd_quantize_up_col_scale, RFI_OUT_swiglu_bwd_quantize_up_amax };
enum { RFI_AT_swiglu_bwd_quantize_format, RFI_AT_swiglu_bwd_quantize_options };
enum { RFI_IN_rmsnorm_quantize_x, RFI_IN_rmsnorm_quantize_w, RFI_IN_rmsnorm_quantize_scale };
enum { RFI_OUT_rmsnorm_quantize_y, RFI_OUT_rmsnorm_quantize_rstd, RFI_OUT_rmsnorm_quantize_row,
  RFI_OUT_rmsnorm_quantize_col, RFI_OUT_rmsnorm_quantize_row_scale, RFI_OUT_rmsnorm_quantize_col_scale,
  RFI_OUT_rmsnorm_quantize_amax };
enum { RFI_AT_rmsnorm_quantize_eps, RFI_AT_rmsnorm_quantize_format, RFI_AT_rmsnorm_quantize_options };
enum { RFI_IN_add_rmsnorm_quantize_x, RFI_IN_add_rmsnorm_quantize_other, RFI_IN_add_rmsnorm_quantize_w,
  RFI_IN_add_rmsnorm_quantize_scale };
enum { RFI_OUT_add_rmsnorm_quantize_sum, RFI_OUT_add_rmsnorm_quantize_y, RFI_OUT_add_rmsnorm_quantize_rstd,
  RFI_OUT_add_rmsnorm_quantize_row, RFI_OUT_add_rmsnorm_quantize_col, RFI_OUT_add_rmsnorm_quantize_row_scale,
  RFI_OUT_add_rmsnorm_quantize_col_scale, RFI_OUT_add_rmsnorm_quantize_amax };
enum { RFI_AT_add_rmsnorm_quantize_eps, RFI_AT_add_rmsnorm_quantize_format, RFI_AT_add_rmsnorm_quantize_options };
enum { RFI_IN_layernorm_quantize_x, RFI_IN_layernorm_quantize_w, RFI_IN_layernorm_quantize_b,
  RFI_IN_layernorm_quantize_scale };
enum { RFI_OUT_layernorm_quantize_y, RFI_OUT_layernorm_quantize_mean, RFI_OUT_layernorm_quantize_rstd,
  RFI_OUT_layernorm_quantize_row, RFI_OUT_layernorm_quantize_col, RFI_OUT_layernorm_quantize_row_scale,
  RFI_OUT_layernorm_quantize_col_scale, RFI_OUT_layernorm_quantize_amax };
enum { RFI_AT_layernorm_quantize_eps, RFI_AT_layernorm_quantize_format, RFI_AT_layernorm_quantize_options };
enum { RFI_IN_add_layernorm_quantize_x, RFI_IN_add_layernorm_quantize_other, RFI_IN_add_layernorm_quantize_w,
  RFI_IN_add_layernorm_quantize_b, RFI_IN_add_layernorm_quantize_scale };
enum { RFI_OUT_add_layernorm_quantize_sum, RFI_OUT_add_layernorm_quantize_y, RFI_OUT_add_layernorm_quantize_mean,
  RFI_OUT_add_layernorm_quantize_rstd, RFI_OUT_add_layernorm_quantize_row, RFI_OUT_add_layernorm_quantize_col,
  RFI_OUT_add_layernorm_quantize_row_scale, RFI_OUT_add_layernorm_quantize_col_scale,
  RFI_OUT_add_layernorm_quantize_amax };
enum { RFI_AT_add_layernorm_quantize_eps, RFI_AT_add_layernorm_quantize_format, RFI_AT_add_layernorm_quantize_options };
enum { RFI_IN_matmul_scaled_a, RFI_IN_matmul_scaled_b, RFI_IN_matmul_scaled_scale_a, RFI_IN_matmul_scaled_scale_b,
  RFI_IN_matmul_scaled_global_a, RFI_IN_matmul_scaled_global_b, RFI_IN_matmul_scaled_bias, RFI_IN_matmul_scaled_acc };
enum { RFI_OUT_matmul_scaled_y };
enum { RFI_AT_matmul_scaled_to };
enum { RFI_IN_grouped_matmul_scaled_a, RFI_IN_grouped_matmul_scaled_w, RFI_IN_grouped_matmul_scaled_offsets,
  RFI_IN_grouped_matmul_scaled_scale_a, RFI_IN_grouped_matmul_scaled_scale_w, RFI_IN_grouped_matmul_scaled_global_a,
  RFI_IN_grouped_matmul_scaled_global_w, RFI_IN_grouped_matmul_scaled_bias, RFI_IN_grouped_matmul_scaled_scale };
enum { RFI_OUT_grouped_matmul_scaled_y };
enum { RFI_AT_grouped_matmul_scaled_to };
enum { RFI_IN_grouped_wgrad_scaled_dy, RFI_IN_grouped_wgrad_scaled_x, RFI_IN_grouped_wgrad_scaled_offsets,
  RFI_IN_grouped_wgrad_scaled_scale_dy, RFI_IN_grouped_wgrad_scaled_scale_x, RFI_IN_grouped_wgrad_scaled_global_dy,
  RFI_IN_grouped_wgrad_scaled_global_x, RFI_IN_grouped_wgrad_scaled_acc };
enum { RFI_OUT_grouped_wgrad_scaled_dw };
enum { RFI_AT_grouped_wgrad_scaled_to, RFI_AT_grouped_wgrad_scaled_of, RFI_AT_grouped_wgrad_scaled_first };
enum { RFI_IN_collect_amax_onto, RFI_IN_collect_amax_amax };
enum { RFI_OUT_collect_amax_y };
enum { RFI_AT_collect_amax_slots, RFI_AT_collect_amax_at };
enum { RFI_IN_scale_update_history, RFI_IN_scale_update_scale, RFI_IN_scale_update_skip, RFI_IN_scale_update_amax };
enum { RFI_OUT_scale_update_history1, RFI_OUT_scale_update_scale1 };
enum { RFI_AT_scale_update_margin, RFI_AT_scale_update_newest };
enum { RFI_IN_dequantize_x };
enum { RFI_OUT_dequantize_y };
enum { RFI_AT_dequantize_format, RFI_AT_dequantize_to, RFI_AT_dequantize_shape };
enum { RFI_IN_bytes_as_x };
enum { RFI_OUT_bytes_as_y };
enum { RFI_AT_bytes_as_to, RFI_AT_bytes_as_start, RFI_AT_bytes_as_shape };
enum { RFI_IN_transposed_x };
enum { RFI_OUT_transposed_y };
enum { RFI_IN_splits_to_offsets_splits };
enum { RFI_OUT_splits_to_offsets_offsets, RFI_OUT_splits_to_offsets_bad };
enum { RFI_AT_splits_to_offsets_rows };
enum { RFI_IN_grouped_matmul_x, RFI_IN_grouped_matmul_w, RFI_IN_grouped_matmul_offsets, RFI_IN_grouped_matmul_bias,
  RFI_IN_grouped_matmul_scale, RFI_IN_grouped_matmul_ws };
enum { RFI_OUT_grouped_matmul_y };
enum { RFI_AT_grouped_matmul_tb, RFI_AT_grouped_matmul_to };
enum { RFI_IN_grouped_swiglu_x, RFI_IN_grouped_swiglu_w, RFI_IN_grouped_swiglu_offsets, RFI_IN_grouped_swiglu_weight };
enum { RFI_OUT_grouped_swiglu_y, RFI_OUT_grouped_swiglu_h };
enum { RFI_AT_grouped_swiglu_tb, RFI_AT_grouped_swiglu_to };
enum { RFI_IN_grouped_wgrad_dy, RFI_IN_grouped_wgrad_x, RFI_IN_grouped_wgrad_offsets, RFI_IN_grouped_wgrad_acc };
enum { RFI_OUT_grouped_wgrad_dw };
enum { RFI_AT_grouped_wgrad_to, RFI_AT_grouped_wgrad_of };
enum { RFI_IN_grouped_dbias_dy, RFI_IN_grouped_dbias_offsets, RFI_IN_grouped_dbias_scale, RFI_IN_grouped_dbias_acc };
enum { RFI_OUT_grouped_dbias_db };
enum { RFI_AT_grouped_dbias_to };
enum { RFI_IN_grouped_dscale_dy, RFI_IN_grouped_dscale_bias, RFI_IN_grouped_dscale_offsets };
enum { RFI_OUT_grouped_dscale_ds };
enum { RFI_AT_grouped_dscale_to };
enum { RFI_IN_moe_route_logits, RFI_IN_moe_route_bias };
enum { RFI_OUT_moe_route_weight, RFI_OUT_moe_route_index };
enum { RFI_AT_moe_route_k, RFI_AT_moe_route_score, RFI_AT_moe_route_norm, RFI_AT_moe_route_groups,
  RFI_AT_moe_route_group_k, RFI_AT_moe_route_scale };
enum { RFI_IN_moe_route_bwd_dweight, RFI_IN_moe_route_bwd_logits, RFI_IN_moe_route_bwd_index };
enum { RFI_OUT_moe_route_bwd_dlogits };
enum { RFI_AT_moe_route_bwd_score, RFI_AT_moe_route_bwd_norm, RFI_AT_moe_route_bwd_scale };
enum { RFI_IN_moe_sort_index };
enum { RFI_OUT_moe_sort_splits, RFI_OUT_moe_sort_order, RFI_OUT_moe_sort_place };
enum { RFI_AT_moe_sort_experts };
enum { RFI_IN_moe_permute_x, RFI_IN_moe_permute_order, RFI_IN_moe_permute_place, RFI_IN_moe_permute_weight };
enum { RFI_OUT_moe_permute_y };
enum { RFI_IN_moe_unpermute_y, RFI_IN_moe_unpermute_order, RFI_IN_moe_unpermute_place, RFI_IN_moe_unpermute_weight };
enum { RFI_OUT_moe_unpermute_out };
enum { RFI_IN_moe_unpermute_dw_y, RFI_IN_moe_unpermute_dw_place, RFI_IN_moe_unpermute_dw_dout };
enum { RFI_OUT_moe_unpermute_dw_dw };
enum { RFI_AT_moe_unpermute_dw_to };
enum { RFI_IN_moe_loss_logits, RFI_IN_moe_loss_index, RFI_IN_moe_loss_targets };
enum { RFI_OUT_moe_loss_loss };
enum { RFI_AT_moe_loss_sigmoid, RFI_AT_moe_loss_balance, RFI_AT_moe_loss_z, RFI_AT_moe_loss_ignore };
enum { RFI_IN_moe_loss_bwd_dloss, RFI_IN_moe_loss_bwd_logits, RFI_IN_moe_loss_bwd_index, RFI_IN_moe_loss_bwd_targets };
enum { RFI_OUT_moe_loss_bwd_dlogits };
enum { RFI_AT_moe_loss_bwd_sigmoid, RFI_AT_moe_loss_bwd_balance, RFI_AT_moe_loss_bwd_z, RFI_AT_moe_loss_bwd_ignore };
enum { RFI_IN_moe_load_splits };
enum { RFI_OUT_moe_load_most, RFI_OUT_moe_load_least, RFI_OUT_moe_load_by_layer };
enum { RFI_AT_moe_load_layers };
enum { RFI_IN_moe_parts_splits, RFI_IN_moe_parts_order, RFI_IN_moe_parts_place };
enum { RFI_OUT_moe_parts_part_order, RFI_OUT_moe_parts_part_place, RFI_OUT_moe_parts_need };
enum { RFI_AT_moe_parts_ranks, RFI_AT_moe_parts_capacity };
enum { RFI_IN_moe_part_experts_counts };
enum { RFI_OUT_moe_part_experts_index };
enum { RFI_AT_moe_part_experts_ranks, RFI_AT_moe_part_experts_capacity };
enum { RFI_IN_embedding_table, RFI_IN_embedding_ids };
enum { RFI_OUT_embedding_y };
enum { RFI_IN_embedding_grad_dy, RFI_IN_embedding_grad_ids, RFI_IN_embedding_grad_acc };
enum { RFI_OUT_embedding_grad_dtable };
enum { RFI_AT_embedding_grad_rows };
enum { RFI_IN_positions_offsets };
enum { RFI_OUT_positions_positions };
enum { RFI_AT_positions_tokens };
enum { RFI_IN_rope_x, RFI_IN_rope_positions };
enum { RFI_OUT_rope_y };
enum { RFI_AT_rope_theta, RFI_AT_rope_inverse, RFI_AT_rope_factor, RFI_AT_rope_low, RFI_AT_rope_high,
  RFI_AT_rope_original };
enum { RFI_IN_rope_table_x, RFI_IN_rope_table_positions };
enum { RFI_OUT_rope_table_y };
enum { RFI_AT_rope_table_inverse, RFI_AT_rope_table_scale, RFI_AT_rope_table_frequency };
enum { RFI_IN_layernorm_x, RFI_IN_layernorm_w, RFI_IN_layernorm_b };
enum { RFI_OUT_layernorm_y, RFI_OUT_layernorm_mean, RFI_OUT_layernorm_rstd };
enum { RFI_AT_layernorm_eps };
enum { RFI_IN_layernorm_dx_dy, RFI_IN_layernorm_dx_x, RFI_IN_layernorm_dx_w, RFI_IN_layernorm_dx_mean,
  RFI_IN_layernorm_dx_rstd };
enum { RFI_OUT_layernorm_dx_dx };
enum { RFI_IN_layernorm_dw_dy, RFI_IN_layernorm_dw_x, RFI_IN_layernorm_dw_mean, RFI_IN_layernorm_dw_rstd,
  RFI_IN_layernorm_dw_acc };
enum { RFI_OUT_layernorm_dw_dw };
enum { RFI_IN_layernorm_db_dy, RFI_IN_layernorm_db_acc };
enum { RFI_OUT_layernorm_db_db };
enum { RFI_IN_layernorm_bwd_dy, RFI_IN_layernorm_bwd_x, RFI_IN_layernorm_bwd_w, RFI_IN_layernorm_bwd_mean,
  RFI_IN_layernorm_bwd_rstd, RFI_IN_layernorm_bwd_residual, RFI_IN_layernorm_bwd_acc, RFI_IN_layernorm_bwd_acc_b,
  RFI_IN_layernorm_bwd_acc_sum };
enum { RFI_OUT_layernorm_bwd_dx, RFI_OUT_layernorm_bwd_dw, RFI_OUT_layernorm_bwd_db, RFI_OUT_layernorm_bwd_sum };
enum { RFI_IN_add_layernorm_x, RFI_IN_add_layernorm_other, RFI_IN_add_layernorm_w, RFI_IN_add_layernorm_b };
enum { RFI_OUT_add_layernorm_sum, RFI_OUT_add_layernorm_y, RFI_OUT_add_layernorm_mean, RFI_OUT_add_layernorm_rstd };
enum { RFI_AT_add_layernorm_eps };
enum { RFI_IN_rmsnorm_x, RFI_IN_rmsnorm_w };
enum { RFI_OUT_rmsnorm_y, RFI_OUT_rmsnorm_rstd };
enum { RFI_AT_rmsnorm_eps };
enum { RFI_IN_rmsnorm_dx_dy, RFI_IN_rmsnorm_dx_x, RFI_IN_rmsnorm_dx_w, RFI_IN_rmsnorm_dx_rstd };
enum { RFI_OUT_rmsnorm_dx_dx };
enum { RFI_IN_rmsnorm_dw_dy, RFI_IN_rmsnorm_dw_x, RFI_IN_rmsnorm_dw_rstd, RFI_IN_rmsnorm_dw_acc };
enum { RFI_OUT_rmsnorm_dw_dw };
enum { RFI_IN_rmsnorm_bwd_dy, RFI_IN_rmsnorm_bwd_x, RFI_IN_rmsnorm_bwd_w, RFI_IN_rmsnorm_bwd_rstd,
  RFI_IN_rmsnorm_bwd_residual, RFI_IN_rmsnorm_bwd_acc };
enum { RFI_OUT_rmsnorm_bwd_dx, RFI_OUT_rmsnorm_bwd_dw };
enum { RFI_IN_add_rmsnorm_x, RFI_IN_add_rmsnorm_other, RFI_IN_add_rmsnorm_w };
enum { RFI_OUT_add_rmsnorm_sum, RFI_OUT_add_rmsnorm_y, RFI_OUT_add_rmsnorm_rstd };
enum { RFI_AT_add_rmsnorm_eps };
enum { RFI_IN_attention_q, RFI_IN_attention_k, RFI_IN_attention_v, RFI_IN_attention_offsets };
enum { RFI_OUT_attention_o, RFI_OUT_attention_lse };
enum { RFI_AT_attention_scale, RFI_AT_attention_causal, RFI_AT_attention_window, RFI_AT_attention_cap,
  RFI_AT_attention_longest };
enum { RFI_IN_attention_bwd_do, RFI_IN_attention_bwd_q, RFI_IN_attention_bwd_k, RFI_IN_attention_bwd_v,
  RFI_IN_attention_bwd_o, RFI_IN_attention_bwd_lse, RFI_IN_attention_bwd_offsets };
enum { RFI_OUT_attention_bwd_dq, RFI_OUT_attention_bwd_dk, RFI_OUT_attention_bwd_dv };
enum { RFI_AT_attention_bwd_scale, RFI_AT_attention_bwd_causal, RFI_AT_attention_bwd_window, RFI_AT_attention_bwd_cap,
  RFI_AT_attention_bwd_longest };
enum { RFI_IN_attention_bwd_packed_do, RFI_IN_attention_bwd_packed_q, RFI_IN_attention_bwd_packed_k,
  RFI_IN_attention_bwd_packed_v, RFI_IN_attention_bwd_packed_o, RFI_IN_attention_bwd_packed_lse,
  RFI_IN_attention_bwd_packed_offsets };
enum { RFI_OUT_attention_bwd_packed_dqkv };
enum { RFI_AT_attention_bwd_packed_scale, RFI_AT_attention_bwd_packed_causal, RFI_AT_attention_bwd_packed_window,
  RFI_AT_attention_bwd_packed_cap, RFI_AT_attention_bwd_packed_longest };
enum { RFI_IN_attention_cached_q, RFI_IN_attention_cached_k, RFI_IN_attention_cached_v,
  RFI_IN_attention_cached_cursor };
enum { RFI_OUT_attention_cached_o };
enum { RFI_AT_attention_cached_scale, RFI_AT_attention_cached_causal, RFI_AT_attention_cached_window,
  RFI_AT_attention_cached_cap };
enum { RFI_IN_add_a, RFI_IN_add_b };
enum { RFI_OUT_add_y };
enum { RFI_IN_accumulate_x, RFI_IN_accumulate_acc };
enum { RFI_OUT_accumulate_y };
enum { RFI_IN_mul_a, RFI_IN_mul_b };
enum { RFI_OUT_mul_y };
enum { RFI_IN_scale_x, RFI_IN_scale_s };
enum { RFI_OUT_scale_y };
enum { RFI_AT_scale_by };
enum { RFI_IN_cast_x };
enum { RFI_OUT_cast_y };
enum { RFI_AT_cast_to };
enum { RFI_IN_copy_x };
enum { RFI_OUT_copy_y };
enum { RFI_OUT_fill_y };
enum { RFI_AT_fill_value, RFI_AT_fill_to, RFI_AT_fill_shape };
enum { RFI_IN_gelu_x };
enum { RFI_OUT_gelu_y };
enum { RFI_AT_gelu_tanh };
enum { RFI_IN_gelu_bwd_dy, RFI_IN_gelu_bwd_x };
enum { RFI_OUT_gelu_bwd_dx };
enum { RFI_AT_gelu_bwd_tanh };
enum { RFI_IN_silu_x };
enum { RFI_OUT_silu_y };
enum { RFI_IN_silu_bwd_dy, RFI_IN_silu_bwd_x };
enum { RFI_OUT_silu_bwd_dx };
enum { RFI_IN_swiglu_gate, RFI_IN_swiglu_up };
enum { RFI_OUT_swiglu_y };
enum { RFI_IN_swiglu_bwd_dy, RFI_IN_swiglu_bwd_gate, RFI_IN_swiglu_bwd_up, RFI_IN_swiglu_bwd_onto };
enum { RFI_OUT_swiglu_bwd_dgate, RFI_OUT_swiglu_bwd_dup, RFI_OUT_swiglu_bwd_h };
enum { RFI_IN_swiglu_bwd_packed_dy, RFI_IN_swiglu_bwd_packed_gate, RFI_IN_swiglu_bwd_packed_up,
  RFI_IN_swiglu_bwd_packed_onto };
enum { RFI_OUT_swiglu_bwd_packed_d, RFI_OUT_swiglu_bwd_packed_h };
enum { RFI_IN_swiglu_weighted_gate, RFI_IN_swiglu_weighted_up, RFI_IN_swiglu_weighted_weight };
enum { RFI_OUT_swiglu_weighted_y };
enum { RFI_IN_swiglu_weighted_bwd_dy, RFI_IN_swiglu_weighted_bwd_gate, RFI_IN_swiglu_weighted_bwd_up,
  RFI_IN_swiglu_weighted_bwd_weight, RFI_IN_swiglu_weighted_bwd_onto };
enum { RFI_OUT_swiglu_weighted_bwd_dweight, RFI_OUT_swiglu_weighted_bwd_dgate, RFI_OUT_swiglu_weighted_bwd_dup,
  RFI_OUT_swiglu_weighted_bwd_h };
enum { RFI_IN_swiglu_weighted_bwd_packed_dy, RFI_IN_swiglu_weighted_bwd_packed_gate,
  RFI_IN_swiglu_weighted_bwd_packed_up, RFI_IN_swiglu_weighted_bwd_packed_weight,
  RFI_IN_swiglu_weighted_bwd_packed_onto };
enum { RFI_OUT_swiglu_weighted_bwd_packed_dweight, RFI_OUT_swiglu_weighted_bwd_packed_d,
  RFI_OUT_swiglu_weighted_bwd_packed_h };
enum { RFI_IN_softcap_x };
enum { RFI_OUT_softcap_y };
enum { RFI_AT_softcap_cap };
enum { RFI_IN_softcap_bwd_dy, RFI_IN_softcap_bwd_y };
enum { RFI_OUT_softcap_bwd_dx };
enum { RFI_AT_softcap_bwd_cap };
enum { RFI_IN_dropout_x, RFI_IN_dropout_step, RFI_IN_dropout_microbatch };
enum { RFI_OUT_dropout_y };
enum { RFI_AT_dropout_p, RFI_AT_dropout_site, RFI_AT_dropout_stream };
enum { RFI_IN_sum_x, RFI_IN_sum_acc };
enum { RFI_OUT_sum_y };
enum { RFI_AT_sum_axis, RFI_AT_sum_to };
enum { RFI_IN_max_x };
enum { RFI_OUT_max_y };
enum { RFI_AT_max_axis };
enum { RFI_IN_max_bwd_dy, RFI_IN_max_bwd_x, RFI_IN_max_bwd_y };
enum { RFI_OUT_max_bwd_dx };
enum { RFI_AT_max_bwd_axis };
enum { RFI_IN_reshape_x };
enum { RFI_OUT_reshape_y };
enum { RFI_AT_reshape_shape };
enum { RFI_IN_transpose_x };
enum { RFI_OUT_transpose_y };
enum { RFI_AT_transpose_a, RFI_AT_transpose_b };
enum { RFI_IN_slice_x };
enum { RFI_OUT_slice_y };
enum { RFI_AT_slice_axis, RFI_AT_slice_start, RFI_AT_slice_count };
enum { RFI_IN_expand_x };
enum { RFI_OUT_expand_y };
enum { RFI_AT_expand_axis, RFI_AT_expand_count };
enum { RFI_IN_pad_x };
enum { RFI_OUT_pad_y };
enum { RFI_AT_pad_axis, RFI_AT_pad_start, RFI_AT_pad_count };
enum { RFI_IN_concat_xs };
enum { RFI_OUT_concat_y };
enum { RFI_AT_concat_axis };
enum { RFI_IN_detach_x };
enum { RFI_OUT_detach_y };
enum { RFI_IN_token_count_targets };
enum { RFI_OUT_token_count_inv_valid, RFI_OUT_token_count_count };
enum { RFI_AT_token_count_ignore };
enum { RFI_IN_cross_entropy_logits, RFI_IN_cross_entropy_targets, RFI_IN_cross_entropy_inv_valid };
enum { RFI_OUT_cross_entropy_loss, RFI_OUT_cross_entropy_lse };
enum { RFI_AT_cross_entropy_ignore };
enum { RFI_IN_cross_entropy_bwd_dloss, RFI_IN_cross_entropy_bwd_logits, RFI_IN_cross_entropy_bwd_targets,
  RFI_IN_cross_entropy_bwd_lse, RFI_IN_cross_entropy_bwd_inv_valid };
enum { RFI_OUT_cross_entropy_bwd_dlogits };
enum { RFI_AT_cross_entropy_bwd_ignore };
enum { RFI_IN_linear_cross_entropy_x, RFI_IN_linear_cross_entropy_w, RFI_IN_linear_cross_entropy_targets,
  RFI_IN_linear_cross_entropy_inv_valid, RFI_IN_linear_cross_entropy_dloss, RFI_IN_linear_cross_entropy_acc };
enum { RFI_OUT_linear_cross_entropy_loss, RFI_OUT_linear_cross_entropy_dx, RFI_OUT_linear_cross_entropy_dw };
enum { RFI_AT_linear_cross_entropy_ignore, RFI_AT_linear_cross_entropy_chunk, RFI_AT_linear_cross_entropy_cap,
  RFI_AT_linear_cross_entropy_to };
enum { RFI_IN_token_loss_logits, RFI_IN_token_loss_targets };
enum { RFI_OUT_token_loss_nll, RFI_OUT_token_loss_lse };
enum { RFI_AT_token_loss_ignore };
enum { RFI_IN_token_loss_bwd_dnll, RFI_IN_token_loss_bwd_logits, RFI_IN_token_loss_bwd_targets,
  RFI_IN_token_loss_bwd_lse };
enum { RFI_OUT_token_loss_bwd_dlogits };
enum { RFI_AT_token_loss_bwd_ignore };
enum { RFI_IN_linear_token_loss_x, RFI_IN_linear_token_loss_w, RFI_IN_linear_token_loss_targets,
  RFI_IN_linear_token_loss_dnll, RFI_IN_linear_token_loss_acc };
enum { RFI_OUT_linear_token_loss_nll, RFI_OUT_linear_token_loss_dx, RFI_OUT_linear_token_loss_dw };
enum { RFI_AT_linear_token_loss_ignore, RFI_AT_linear_token_loss_chunk, RFI_AT_linear_token_loss_cap,
  RFI_AT_linear_token_loss_to };
enum { RFI_IN_segment_sum_x, RFI_IN_segment_sum_offsets };
enum { RFI_OUT_segment_sum_y };
enum { RFI_IN_segment_sum_bwd_dy, RFI_IN_segment_sum_bwd_offsets };
enum { RFI_OUT_segment_sum_bwd_dx };
enum { RFI_AT_segment_sum_bwd_rows, RFI_AT_segment_sum_bwd_to };
enum { RFI_IN_dpo_loss_sums, RFI_IN_dpo_loss_reference, RFI_IN_dpo_loss_pairs, RFI_IN_dpo_loss_inv_pairs };
enum { RFI_OUT_dpo_loss_loss, RFI_OUT_dpo_loss_margin, RFI_OUT_dpo_loss_accuracy };
enum { RFI_AT_dpo_loss_beta, RFI_AT_dpo_loss_smoothing };
enum { RFI_IN_dpo_loss_bwd_dloss, RFI_IN_dpo_loss_bwd_sums, RFI_IN_dpo_loss_bwd_reference, RFI_IN_dpo_loss_bwd_pairs,
  RFI_IN_dpo_loss_bwd_inv_pairs };
enum { RFI_OUT_dpo_loss_bwd_dsums };
enum { RFI_AT_dpo_loss_bwd_beta, RFI_AT_dpo_loss_bwd_smoothing };
enum { RFI_IN_lr_schedule_step, RFI_IN_lr_schedule_steps };
enum { RFI_OUT_lr_schedule_lr };
enum { RFI_AT_lr_schedule_kind, RFI_AT_lr_schedule_base, RFI_AT_lr_schedule_min, RFI_AT_lr_schedule_warmup,
  RFI_AT_lr_schedule_total, RFI_AT_lr_schedule_decay };
enum { RFI_IN_grad_norm_zeros, RFI_IN_grad_norm_grads };
enum { RFI_OUT_grad_norm_norm, RFI_OUT_grad_norm_skip, RFI_OUT_grad_norm_zeros1 };
enum { RFI_IN_grad_squares_grads };
enum { RFI_OUT_grad_squares_squares };
enum { RFI_IN_norm_of_squares_zeros, RFI_IN_norm_of_squares_squares };
enum { RFI_OUT_norm_of_squares_norm, RFI_OUT_norm_of_squares_skip, RFI_OUT_norm_of_squares_zeros1 };
enum { RFI_AT_norm_of_squares_ranks };
enum { RFI_IN_clip_scale_norm };
enum { RFI_OUT_clip_scale_clip };
enum { RFI_AT_clip_scale_max };
enum { RFI_IN_adamw_w, RFI_IN_adamw_g, RFI_IN_adamw_m, RFI_IN_adamw_v, RFI_IN_adamw_master, RFI_IN_adamw_lr,
  RFI_IN_adamw_clip, RFI_IN_adamw_skip, RFI_IN_adamw_step };
enum { RFI_OUT_adamw_w1, RFI_OUT_adamw_m1, RFI_OUT_adamw_v1, RFI_OUT_adamw_master1 };
enum { RFI_AT_adamw_beta1, RFI_AT_adamw_beta2, RFI_AT_adamw_eps, RFI_AT_adamw_decay, RFI_AT_adamw_lr_scale,
  RFI_AT_adamw_draws, RFI_AT_adamw_first };
enum { RFI_IN_sgd_w, RFI_IN_sgd_g, RFI_IN_sgd_momentum, RFI_IN_sgd_master, RFI_IN_sgd_lr, RFI_IN_sgd_clip,
  RFI_IN_sgd_skip, RFI_IN_sgd_step };
enum { RFI_OUT_sgd_w1, RFI_OUT_sgd_momentum1, RFI_OUT_sgd_master1 };
enum { RFI_AT_sgd_momentum, RFI_AT_sgd_decay, RFI_AT_sgd_lr_scale, RFI_AT_sgd_draws, RFI_AT_sgd_first };
enum { RFI_IN_muon_momentum_g, RFI_IN_muon_momentum_b, RFI_IN_muon_momentum_clip, RFI_IN_muon_momentum_skip };
enum { RFI_OUT_muon_momentum_u, RFI_OUT_muon_momentum_b1 };
enum { RFI_AT_muon_momentum_momentum, RFI_AT_muon_momentum_to };
enum { RFI_IN_muon_polynomial_g, RFI_IN_muon_polynomial_p };
enum { RFI_OUT_muon_polynomial_q };
enum { RFI_AT_muon_polynomial_a, RFI_AT_muon_polynomial_b, RFI_AT_muon_polynomial_c, RFI_AT_muon_polynomial_unit };
enum { RFI_IN_ema_average, RFI_IN_ema_w, RFI_IN_ema_skip, RFI_IN_ema_step };
enum { RFI_OUT_ema_average1 };
enum { RFI_AT_ema_decay, RFI_AT_ema_start, RFI_AT_ema_warmup };
enum { RFI_IN_ema_weight_average };
enum { RFI_OUT_ema_weight_w };
enum { RFI_AT_ema_weight_to };
enum { RFI_IN_loss_scale_state };
enum { RFI_OUT_loss_scale_scale, RFI_OUT_loss_scale_inverse };
enum { RFI_IN_loss_scale_end_state, RFI_IN_loss_scale_end_skip };
enum { RFI_OUT_loss_scale_end_state1 };
enum { RFI_AT_loss_scale_end_every };
enum { RFI_IN_skip_bad_skip, RFI_IN_skip_bad_flags };
enum { RFI_OUT_skip_bad_skip1, RFI_OUT_skip_bad_which, RFI_OUT_skip_bad_group };
enum { RFI_IN_step_end_step, RFI_IN_step_end_skip };
enum { RFI_OUT_step_end_step1 };
enum { RFI_IN_ring_read_ring, RFI_IN_ring_read_step };
enum { RFI_OUT_ring_read_x };
enum { RFI_IN_metrics_write_ring, RFI_IN_metrics_write_step, RFI_IN_metrics_write_values };
enum { RFI_OUT_metrics_write_ring1 };
enum { RFI_IN_watch_row_ring, RFI_IN_watch_row_step, RFI_IN_watch_row_x };
enum { RFI_OUT_watch_row_ring1 };
enum { RFI_AT_watch_row_row, RFI_AT_watch_row_more };
enum { RFI_IN_watch_end_ring, RFI_IN_watch_end_step };
enum { RFI_OUT_watch_end_ring1 };
enum { RFI_IN_text_read_text, RFI_IN_text_read_cursor };
enum { RFI_OUT_text_read_tokens, RFI_OUT_text_read_positions, RFI_OUT_text_read_last };
enum { RFI_AT_text_read_rows };
enum { RFI_IN_cache_write_cache, RFI_IN_cache_write_x, RFI_IN_cache_write_cursor };
enum { RFI_OUT_cache_write_cache1 };
enum { RFI_IN_text_append_text, RFI_IN_text_append_logits, RFI_IN_text_append_cursor, RFI_IN_text_append_sampling };
enum { RFI_OUT_text_append_text1 };
enum { RFI_AT_text_append_rows };
enum { RFI_IN_text_end_cursor, RFI_IN_text_end_text };
enum { RFI_OUT_text_end_cursor1 };
enum { RFI_AT_text_end_rows };
enum { RFI_IN_all_gather_x };
enum { RFI_OUT_all_gather_y };
enum { RFI_AT_all_gather_ranks };
enum { RFI_IN_reduce_scatter_x };
enum { RFI_OUT_reduce_scatter_y };
enum { RFI_AT_reduce_scatter_ranks };
enum { RFI_IN_all_reduce_x };
enum { RFI_OUT_all_reduce_y };
enum { RFI_AT_all_reduce_ranks };
enum { RFI_IN_all_to_all_x };
enum { RFI_OUT_all_to_all_y };
enum { RFI_AT_all_to_all_ranks };
enum { RFI_IN_all_to_all_rows_x, RFI_IN_all_to_all_rows_sent, RFI_IN_all_to_all_rows_received };
enum { RFI_OUT_all_to_all_rows_y };
enum { RFI_AT_all_to_all_rows_ranks };
enum { RFI_IN_gradient_loss, RFI_IN_gradient_w, RFI_IN_gradient_onto };
enum { RFI_OUT_gradient_g };
enum { RFI_AT_gradient_to };
enum { RFI_IN_cotangent_y, RFI_IN_cotangent_dy };
enum { RFI_OUT_cotangent_loss };
/* clang-format on */

#endif
