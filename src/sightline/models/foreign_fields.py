"""Config fields that change the result in some model family, and the values that switch them off.

If a family does not read such a field, a config that sets it probably describes another network, and is refused. The
names are those that the configs of transformers 5.22 for causal language models declare, without those for training,
dropout and special tokens (a test compares the two), and a few that transformers reads but does not declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_NAMES = """
    H_cycles L_bp_cycles L_cycles _remove_final_layer_norm activation activation_function activation_sparsity_pattern
    adapter_layer_norm adapter_rank adapter_reduction_factor adapter_reuse_layer_norm add_bias_linear add_out_norm afn
    alibi altup_active_idx altup_coef_clip altup_correct_scale altup_num_inputs
    apply_residual_connection_post_layernorm asm attention_bias attention_chunk_size attention_head_dim
    attention_head_size attention_heads attention_hidden_size attention_in_multiplier attention_k_eq_v
    attention_multiplier attention_out_bias attention_out_multiplier attention_softmax_in_fp32 attention_type
    attention_types attention_value_scale attention_window_size attn_config attn_layer_indices attn_layer_offset
    attn_layer_period attn_layers attn_logit_softcapping attn_scale attn_temperature_tuning attn_type audio_chunk_size
    audio_config audio_encoder audio_encoder_config audio_merge_size audio_soft_tokens_per_image audio_vocab_size
    axial_norm_std axial_pos_embds axial_pos_embds_dim axial_pos_shape backbone_hidden_size bias
    block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of block_size block_types causal cca_time0
    cca_time1 centroid_intermediate_top_k chain_hidden_post_norm chroma_length chunk_size clamp_len clip_qkv
    compress_rates compress_rope_theta concat_input context_length conv1d_width conv_L_cache conv_bias conv_kernel
    conv_kernel_size cross_attn_k d_head d_inner d_model d_rel decoder decoder_attention_heads decoder_bias
    decoder_config decoder_ffn_dim decoder_layers decoder_sparse_step decoder_vocab_size dense_intermediate_size
    depth_decoder_config dff dim_ff dim_head dim_model_base do_layer_norm_before emb_dim embedding_dim
    embedding_fraction embedding_multiplier embedding_scale embedding_size enable_bias enable_moe_block
    enable_moe_fp32_combine enable_pronunciation enable_shape encoder_attention_heads encoder_config encoder_ffn_dim
    encoder_hash_byte_group_nb_functions encoder_hash_byte_group_size encoder_hash_byte_group_vocab encoder_layers eps
    expand expansion_ratio expert_ffn_hidden_size expert_layer_offset expert_layer_period expert_selection_fn
    experts_per_token feed_forward_size ff_activation ffn_config ffn_dim ffn_hidden_size ffn_proj_factor
    ffn_round_up_to_multiple_of final_logit_softcapping first_k_dense_replace floor_scale full_attn_alpha_factor
    full_attn_beta_factor full_attn_idxs fusion_config gate_soft_cap gated_norm_rank gating gelu_activation
    global_attn_every_n_layers global_config hc_count hc_eps hc_lowrank hc_magnitude hc_mult hc_sinkhorn_iters
    head_dim heads_per_ngram hidden_act hidden_activation hidden_mamba_act hidden_size hidden_size_per_layer_input
    image_seq_length image_size index_block_size index_head_dim index_local_blocks index_n_heads index_topk
    index_topk_blocks indexer_budget indexer_compress_ratio indexer_head_dim indexer_kv_heads indexer_n_heads
    indexer_types inference_state_dtype input_embedding_size interleave_moe_layer_step intermediate_multiple_size
    intermediate_size intermediate_size_mlp is_causal is_encoder is_moe kda_lower_bound kda_safe_gate keep_window_size
    key_multiplier kv_channels kv_lora_rank lambda_std_dev laurel_rank layer_group_size layer_norm_elementwise_affine
    layer_norm_eps layer_norm_epsilon layer_rope_theta layer_types layernorm_embedding layers_block_type
    learned_pos_emb linear_a_log_max linear_a_log_min linear_allow_neg_eigval linear_attn_alpha_factor
    linear_attn_beta_factor linear_conv_kernel_dim linear_dt_max linear_dt_min linear_head_dim linear_key_head_dim
    linear_num_heads linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias lm_head_multiplier
    ln_before_adapter local_attention local_attn_chunk_length local_layer_ids local_num_chunks_after
    local_num_chunks_before log_scaling_alpha log_scaling_n_floor logit_scale logits_mup_width_multiplier
    logits_scaling logits_soft_cap lru_width lsh_attn_chunk_length lsh_num_chunks_after lsh_num_chunks_before
    make_ngram_vocab_size_divisible_by mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm
    mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim mamba_hidden_act mamba_n_groups mamba_n_heads
    mamba_ngroups mamba_norm_before_gate mamba_num_heads mamba_proj_bias mamba_rms_norm mamba_ssm_cache_dtype
    max_patch_length max_position_embeddings max_seq_len max_source_positions max_target_positions max_window_layers
    median_filter_width mem_len mixer_rms_eps mlp_alpha_factor mlp_beta_factor mlp_bias mlp_hidden_act mlp_layer_types
    mlp_multipliers mlp_only_layers mm_tokens_per_image model_max_length moe_apply_router_weight_on_input
    moe_intermediate_size moe_k moe_latent_size moe_layer_end_index moe_layer_freq moe_layer_interval
    moe_layer_start_index moe_layers moe_norm_min moe_num_experts moe_num_shared_experts moe_routed_scaling_factor
    moe_router_logit_softcapping moe_shared_expert_intermediate_size moe_shared_expert_overlap moe_topk mrope_section
    mtp_hidden_states_first mtp_layer_types mtp_layers_block_type mtp_local_layer_ids mtp_mlp_layer_types multi_query
    mup_enabled n_ctx n_embd n_group n_groups n_head n_heads n_inner n_langs n_layer n_layers n_mamba_heads
    n_positions n_routed_experts n_shared_experts n_token n_words new_decoder_architecture ngram ngram_size
    ngram_vocab_size_base no_bias no_rope_layer_interval no_rope_layers norm_bias norm_eps norm_epsilon
    norm_reduction_force_float32 norm_topk_prob norm_type num_attention_heads num_attention_heads_per_layer num_blocks
    num_buckets num_centroids num_channels num_chroma num_codebooks num_decoder_attention_heads num_decoder_layers
    num_dense_layers num_encoder_attention_heads num_encoder_layers num_experts num_experts_per_tok num_hashes
    num_heads num_hidden_layers num_image_with_embedding num_key_value_heads num_kv_heads num_kv_shared_layers
    num_layers num_layers_per_stack num_ln_in_parallel_attn num_local_experts num_mel_bins num_mem_blocks
    num_mtp_layers num_nextn_predict_layers num_random_blocks num_shared_experts o_groups o_lora_rank
    original_max_position_embeddings output_embedding_size output_gate_type output_logit_soft_cap parallel_attn
    partial_rotary_factor patch_in_forward patch_size patcher_config patching_batch_size patching_mode
    patching_threshold per_layer_config ple_conv_kernel_size ple_embed_dim ple_layer_ids pooling
    position_bias_max_distance position_bias_num_buckets position_embedding_type pre_norm
    prefix_dense_intermediate_size prefix_dense_sliding_window_pattern prefix_lm projector_bias projector_hidden_act
    projectors_bias prompt_length prompt_mid_dim prompt_types pronunciation_embed_dim pronunciation_vocab_size
    q_lora_rank qk_dim_factor qk_head_dim qk_layernorm qk_nope_head_dim qk_norm qk_rope_head_dim qkv_bias
    query_pre_attn_scalar rel_extent relative_max_distance reorder_and_upcast_attn rescale_embeddings rescale_every
    rescale_prenorm_residual residual_in_fp32 residual_multiplier reuse_len rms_norm_eps rms_norm_eps_moe_gate
    rope_frequency_factors rope_interleave rope_interleaved rope_parameters rope_ratio rope_scaling rope_theta
    rotary_dim rotary_value route_scale routed_scaling_factor router_hidden_size router_scaling_factor same_length
    scale_attention_softmax_in_fp32 scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb
    scale_embedding sconv_kernel_size scoring_func segment_types shape_embed_dim shape_vocab_size
    share_encoder_decoder_embeddings shared_expert_combination_strategy shared_expert_intermediate_size
    shared_expert_sink shared_intermediate_size short_conv_kernel_size sinusoidal_embeddings sliding_window
    sliding_window_pattern sliding_window_size slow_but_exact split_ngram_parts ssm_in_multiplier ssm_multipliers
    ssm_out_multiplier ssm_state_size state_size swa_head_dim swa_num_attention_heads swa_num_key_value_heads
    swiglu_alpha swiglu_limit task_type_vocab_size text_config text_encoder tie_word_embeddings time_step_floor
    time_step_limit time_step_max time_step_min time_step_rank time_step_scale top_k_experts topk_group topk_method
    transformers_weights type_vocab_size unpadded_vocab_size use_bias use_bidirectional_attention use_conv_bias
    use_double_wide_mlp use_dynamic_ntk use_expert_bias use_lang_emb use_learned_position_embeddings use_logn_attn
    use_long_context use_mem_rope use_mems_eval use_mems_train use_mrope use_ordered_embeddings use_parallel_residual
    use_post_norm use_prompt use_qk_norm use_qkv_bias use_rope use_shared_attention_adapter use_sliding_window
    use_task_id use_weighted_layer_sum v_dim_factor v_head_dim vision_config vision_soft_tokens_per_image vocab_size
    vocab_size_per_layer_input vocabulary_map vq_config weight_mode window_size word_embed_proj_dim zero_expert_num
"""

_OFF: tuple[object, ...] = (None, False, 0, "", [], {})
_OFF_AT_ONE = """
    attention_in_multiplier attention_out_multiplier attention_value_scale decoder_sparse_step embedding_multiplier
    key_multiplier lm_head_multiplier logit_scale logits_scaling moe_layer_freq moe_routed_scaling_factor n_group
    partial_rotary_factor residual_multiplier route_scale routed_scaling_factor router_scaling_factor scale_emb
    topk_group
"""
_NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        **dict.fromkeys(_OFF_AT_ONE.split(), (None, 1)),
        **dict.fromkeys(("is_causal", "scale_attn_weights", "use_rope"), (None, True)),
        "attention_multiplier": (None,),
    }
)
"""The neutral values of fields that `_OFF` does not switch off."""

FOREIGN_FIELDS = frozenset(_NAMES.split())


def is_neutral(name: str, value: object) -> bool:
    """True if this value of another family's field changes nothing."""
    return value in _NEUTRAL.get(name, _OFF)
