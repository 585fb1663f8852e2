"""The identity table: which settings of vLLM decide the bytes of a KV cache, and which do not.

Data only. Every field of the listed config classes and every environment variable of vLLM is in exactly one list.
*Identity*: the value is part of the model descriptor, so engines with different values never share KV. *Irrelevant*:
the value cannot change KV, for the given reason. A test compares the table with vLLM's source. At run time, a name that
is in neither list makes the domain process-local (`UnknownIdentityField`).

Settings that compute the same function in the same precision and differ only in the order of additions are irrelevant:
vLLM's own prefix cache mixes such values too, because the order also depends on the other requests of a step. When in
doubt, a setting is identity: that costs a cold cache after a change, but never a wrong token.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any, NamedTuple

LAYOUT = "part of the LayoutId"
PLACE = "decides where or when something is computed or kept, not what"
ROUNDING = "the same function in the same precision: only the order of additions may differ"
TOKENS = "decides token ids at most, which are in every block hash"
SAMPLING = "decides which tokens are sampled, not the KV of given tokens"
LIMITS = "a limit: what exceeds it is refused, not computed in another way"
SPEED = "transport, waiting, scheduling, or the size of a buffer"
LOGS = "logs, metrics, profiling and debugging"
BUILD = "read when vLLM is built or started"
CACHED_COUNTS = "how many blocks there are and how long they are kept"
DERIVED = "derived from settings and files that are identity"
CONTENT = "location of files; their content is identity"
ROUTED_EXPERTS = "engines that return routed experts are not served (`RoutedExperts`)"


class Fields(NamedTuple):
    """The fields of one class. `irrelevant` maps a reason to names."""

    identity: tuple[str, ...]
    irrelevant: dict[str, tuple[str, ...]]

    def names(self) -> set[str]:
        return {*self.identity, *(name for names in self.irrelevant.values() for name in names)}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Fields that not all supported versions have: the value that means the same as no field. Without it, an upgrade would
#: change the identity.
AS_IF_ABSENT: dict[tuple[str, str], Any] = {("ParallelConfig", "sd_worker_cls"): "auto"}

#: Class name -> its fields in all supported versions.
CLASSES: dict[str, Fields] = {
    "VllmConfig": Fields(
        identity=_words(
            "model_config cache_config parallel_config scheduler_config load_config attention_config kernel_config"
            " lora_config speculative_config additional_config diffusion_config mamba_config"
        ),
        irrelevant={
            LAYOUT: ("device_config",),
            PLACE: _words("offload_config engram_config"),
            ROUNDING: _words("compilation_config optimization_level performance_mode"),
            DERIVED: ("quant_config",),
            SAMPLING: _words("watermark_config structured_outputs_config reasoning_config"),
            ROUTED_EXPERTS: ("aux_output_config",),
            LOGS: _words(
                "observability_config logging_config profiler_config instance_id shutdown_timeout watchdog_config"
            ),
            SPEED: _words("kv_transfer_config kv_events_config ec_manager_config"),
            "items of such engines are never shared (`multimodal_named_by_user`)": ("ec_transfer_config",),
            "weights that change at run time are kept apart when they change": ("weight_transfer_config",),
        },
    ),
    "ModelConfig": Fields(
        identity=_words(
            "model runner convert trust_remote_code dtype hf_config hf_text_config code_revision max_model_len"
            " quantization quantization_config disable_sliding_window model_class_overrides model_impl"
            " multimodal_config config_format enable_prompt_embeds"
            " word_embeddings_untied_by_checkpoint"
        ),
        irrelevant={
            CONTENT: _words("model_weights revision hf_config_path hf_token"),
            "applied to hf_config, which is identity": ("hf_overrides",),
            TOKENS: _words("tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin"),
            "weights that are drawn at random are never shared (`DummyWeights`)": ("seed",),
            LIMITS: _words(
                "allowed_local_media_path allowed_media_domains spec_target_max_model_len"
                " allow_deprecated_quantization max_logprobs"
            ),
            ROUNDING: _words("enforce_eager disable_cascade_attn"),
            SAMPLING: _words(
                "return_sampling_mask logprobs_mode use_fp64_gumbel enable_trace_replay generation_config"
                " override_generation_config logits_processors pooler_config"
            ),
            ROUTED_EXPERTS: ("enable_return_routed_experts",),
            "a name for clients": ("served_model_name",),
            PLACE: _words(
                "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph"
                " enable_nccl_comm_suspend enable_cumem_allocator renderer_num_workers"
            ),
            "set for parts of a model while it is built": ("is_submodel_config",),
            "an argument of the constructor that ends in multimodal_config": _words(
                "language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs"
                " mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb"
                " mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype"
                " mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"
                " interleave_mm_strings skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc"
                " mm_ipc_gpu_memory_gb mm_device_do_normalize mm_processor_device"
            ),
        },
    ),
    "MultiModalConfig": Fields(
        identity=_words(
            "language_model_only limit_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs"
            " mm_device_do_normalize mm_encoder_only mm_encoder_attn_backend mm_encoder_attn_dtype"
            " mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method allow_missing_mm_embeddings"
        ),
        irrelevant={
            SPEED: _words(
                "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc"
                " mm_ipc_gpu_memory_gb skip_mm_profiling"
            ),
            "all of them are collision-resistant": ("mm_hasher_algorithm",),
            ROUNDING: ("mm_encoder_tp_mode",),
            TOKENS: ("interleave_mm_strings",),
            "written, never read": _words("mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin"),
        },
    ),
    "CacheConfig": Fields(
        identity=_words(
            "cache_dtype sliding_window kv_cache_dtype_skip_layers kv_sharing_fast_prefill swa_bounded_replay"
            " mamba_cache_dtype mamba_ssm_cache_dtype use_replayssm use_kda_recoverssm replayssm_buffer_len"
        ),
        irrelevant={
            LAYOUT: _words(
                "block_size user_specified_block_size kv_cache_layout effective_attention_block_size"
                " skip_page_size_padded _block_size_resolved mamba_page_size_padded mamba_block_size"
                " user_specified_mamba_block_size"
            ),
            "part of the keys": _words("prefix_caching_hash_algo prefix_match_unit hash_block_size"),
            CACHED_COUNTS: _words(
                "gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching prefix_cache_retention_interval"
                " num_gpu_blocks num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes"
                " kv_offloading_size kv_offloading_backend cache_hit_alignment_tokens mamba_cache_mode"
                " enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache"
                " simple_cpu_offload_num_blocks"
            ),
            "such models have no KV cache": ("is_attention_free",),
        },
    ),
    "MambaConfig": Fields(
        identity=_words("backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm"),
        irrelevant={},
    ),
    "LoadConfig": Fields(
        identity=_words("load_format model_loader_extra_config ignore_patterns safetensors_load_strategy"),
        irrelevant={
            CONTENT: ("download_dir",),
            SPEED: _words(
                "safetensors_prefetch_num_threads safetensors_prefetch_block_size device pt_load_map_location"
            ),
            LOGS: ("use_tqdm_on_load",),
        },
    ),
    "AttentionConfig": Fields(
        identity=_words(
            "backend minimax_m3_msa_decode_backend backend_per_kind flash_attn_version use_trtllm_attention"
            " disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype"
            " indexer_sparse_logits hisparse_config use_non_causal sparse_mla_force_mqa trtllm_ragged_backend"
            " minimax_m3_indexer_cp"
        ),
        irrelevant={
            ROUNDING: _words(
                "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph"
                " sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size"
                " flex_attn_kv_block_size indexer_tp_shard_min_rows"
            ),
        },
    ),
    "ParallelConfig": Fields(
        identity=_words("all2all_backend worker_cls worker_extension_cls sd_worker_cls"),
        irrelevant={
            LAYOUT: _words(
                "pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size"
                " decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
                " _allow_auto_resolve_cp_interleave_size"
            ),
            ROUNDING: _words(
                "enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling disable_custom_all_reduce"
                " enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend"
                " dcp_q_replicate"
            ),
            "which copy of an expert computes, not what": _words(
                "enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy enable_elastic_ep"
                " elastic_ep_max_dp_size is_moe_model"
            ),
            PLACE: _words(
                "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local"
                " data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port"
                " data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb max_parallel_loading_workers"
                " enable_shm_tensor_arena disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env"
                " placement_group master_addr master_port node_rank nnodes numa_bind"
                " numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds"
                " cpu_distributed_timeout_seconds world_size rank _data_parallel_master_port_list _coord_store_port"
                " data_parallel_index _api_process_count _api_process_rank"
            ),
            "engines that survive faults of others are not served (`FaultTolerance`)": _words(
                "enable_fault_tolerance fault_tolerance_config"
            ),
            "where ranks run; ranks with a scheduler each are not served (`ExternalLauncher`)": (
                "distributed_executor_backend",
            ),
        },
    ),
    "SchedulerConfig": Fields(
        # An image that attends to itself in both directions must not be computed in two steps.
        identity=_words("disable_chunked_mm_input"),
        irrelevant={
            "a copy of the model's": _words("max_model_len is_encoder_decoder runner_type is_multimodal_model"),
            ROUNDING: _words(
                "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs"
                " long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill"
                " max_num_encoder_input_tokens"
            ),
            SPEED: _words(
                "max_num_queued_reqs max_num_queued_tokens encoder_cache_size policy scheduler_cls"
                " scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling stream_interval"
            ),
            LAYOUT: ("disable_hybrid_kv_cache_manager",),
        },
    ),
    "KernelConfig": Fields(
        identity=_words("moe_backend linear_backend linear_backend_per_quant sparse_indexer_topk_backend monokernel"),
        irrelevant={
            ROUNDING: _words(
                "ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune"
                " enable_cutedsl_warmup enable_jit_warmup"
            ),
        },
    ),
    "LoRAConfig": Fields(
        identity=_words("lora_dtype target_modules enable_tower_connector_lora"),
        irrelevant={
            LIMITS: _words("max_lora_rank max_loras max_cpu_loras max_lora_cls_labels"),
            ROUNDING: _words(
                "fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format enable_moe_shared_loras"
            ),
            "such a request names its adapter, whose content is in the namespace": ("default_mm_loras",),
        },
    ),
    "SpeculativeConfig": Fields(
        identity=_words(
            "method num_speculative_tokens draft_model_config draft_load_config quantization moe_backend"
            " attention_backend kv_cache_dtype index_share_for_mtp_iteration use_heterogeneous_vocab parallel_drafting"
            " disable_eagle_block_drop dspark_draft_topk disable_lookahead_block_hashes"
        ),
        irrelevant={
            CONTENT: _words("model revision code_revision"),
            ROUNDING: _words("enforce_eager disable_padded_drafter_batch use_local_argmax_reduction"),
            PLACE: _words(
                "draft_tensor_parallel_size tensor_parallel_size target_parallel_config draft_parallel_config"
            ),
            "a copy of the model's": _words("target_model_config max_model_len"),
            SAMPLING: _words(
                "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size"
                " suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor"
                " suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates"
                " synthetic_acceptance_length enable_adaptive_verification draft_sample_method fly_window_size"
                " fly_entropy_threshold fly_entropy_top_k xpress_topc draft_lm_head_quantization"
            ),
        },
    ),
}

#: Environment variables: those of vLLM's `envs.py`, others that vLLM reads, and a few of its libraries.
ENVIRONMENT = Fields(
    identity=_words(
        # Precision and kernels of another precision.
        "VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_CPU_INT4_W4A8 VLLM_USE_TRITON_AWQ"
        " VLLM_DISABLED_KERNELS VLLM_USE_HW_AGNOSTIC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL"
        " VLLM_USE_OINK_OPS VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD"
        " VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG"
        " VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM VLLM_HUMMING_MOE_GEMM_TYPE"
        " VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0"
        " VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT"
        " VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_ENABLE_GEMM_RS"
        " VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_USE_FLASHINFER_MOE_INT4"
        " VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE"
        " VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_XPU_INC_WNA16_BACKEND"
        " VLLM_STEP5_SHARD_SP_SHARED_EXPERT"
        " VLLM_ENABLE_HPC_OPS VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_USE_V2_MODEL_RUNNER"
        # ROCm.
        " VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_LINEAR"
        " VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2"
        " VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_AITER_MOE_DISPATCH_POLICY"
        " VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_AITER_MLA_DCP_VERIFY"
        " VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_FP4_ASM_GEMM"
        " VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_FP8BMM"
        " VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION"
        " VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS"
        " VLLM_ROCM_MONO_DECODE VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING"
        " VLLM_ROCM_MOE_PADDING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"
        " VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB"
        " VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB"
        " VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"
        # What is computed, and from what.
        " VLLM_MLA_DISABLE VLLM_KV_CACHE_LAYOUT VLLM_PP_LAYER_PARTITION"
        " VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_TEST_FORCE_LOAD_FORMAT VLLM_PLUGINS"
        " VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR VLLM_SSM_CONV_STATE_LAYOUT"
        # Of libraries: precision of matrix multiplications.
        " NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    ),
    irrelevant={
        BUILD: _words(
            "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED"
            " VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT"
            " VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE"
            " VLLM_SKIP_VERSION_SUFFIX VLLM_PRECOMPILED_WHEEL_LOCATION CUDA_HOME LD_LIBRARY_PATH VLLM_NCCL_SO_PATH"
            " VLLM_CUDART_SO_PATH VLLM_NCCL_INCLUDE_PATH VLLM_HAS_FLASHINFER_CUBIN VLLM_ENABLE_CUDA_COMPATIBILITY"
            " VLLM_CUDA_COMPATIBILITY_PATH"
        ),
        CONTENT: _words(
            "VLLM_USE_MODELSCOPE VLLM_MODEL_REDIRECT_PATH VLLM_LORA_RESOLVER_CACHE_DIR"
            " VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_ALLOW_RUNTIME_LORA_UPDATING S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY"
            " S3_ENDPOINT_URL VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN"
            " VLLM_XLA_CACHE_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB"
            " VLLM_MEDIA_CACHE_TTL_HOURS"
        ),
        TOKENS: _words(
            "VLLM_USE_FASTOKENS VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT"
            " VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE"
            " VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_ENFORCE_STRICT_TOOL_CALLING"
            " VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API"
            " VLLM_CHAT_TEMPLATE_FUEL"
        ),
        SAMPLING: _words(
            "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_XGRAMMAR_CACHE_MB"
            " VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_V1_USE_OUTLINES_CACHE"
            " VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT"
        ),
        LIMITS: _words(
            "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES"
            " VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MAX_AUDIO_CLIP_FILESIZE_MB"
            " VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_EMBED_DECODE_BYTES"
            " VLLM_MAX_IMAGE_PIXELS VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS"
            " VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"
            " VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_API_KEY"
            " VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES"
            " VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB"
        ),
        ROUNDING: _words(
            "VLLM_TRITON_USE_TD VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES VLLM_USE_BREAKABLE_CUDAGRAPH"
            " VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_FORCE_AOT_LOAD VLLM_USE_MEGA_AOT_ARTIFACT"
            " VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_USE_LAYERNAME VLLM_CPU_ATTN_SPLIT_KV"
            " VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_CPU_MOE_PREPACK VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
            " VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TUNED_CONFIG_FOLDER VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS"
            " VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER"
            " VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_CUSTOM_ALLREDUCE_ALGO VLLM_USE_NCCL_SYMM_MEM"
            " VLLM_DISABLE_PYNCCL VLLM_SKIP_P2P_CHECK VLLM_MOE_SKIP_PADDING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE"
            " VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_ENABLE_XPU_GRAPH"
            " VLLM_DCP_Q_REPLICATE VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER"
            " VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM"
            " VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD"
            " VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD"
        ),
        PLACE: _words(
            "VLLM_REPLICATE_EMBED VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP LOCAL_RANK"
            " CUDA_VISIBLE_DEVICES VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT"
            " VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND"
            " VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV VLLM_CPU_SIM_MULTI_NUMA"
            " VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE"
            " VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_XPU_PP_MICROBATCH"
            " VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_WORKER_MULTIPROC_METHOD"
            " VLLM_ENABLE_V1_MULTIPROCESSING VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES"
            " VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
            " VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_TPU_USING_PATHWAYS VLLM_XLA_CHECK_RECOMPILATION VLLM_XLA_USE_SPMD"
            " VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY"
            " VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_PLE_CPU_OFFLOAD VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_DIST_IDENT"
            " VLLM_HOST_PORT VLLM_OMP_NUM_THREADS_SET_BY_VLLM VLLM_DEVICE_CONTROL_ENV_VAR_PLACEHOLDER"
            " VLLM_ENABLE_STARTUP_PLAN VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_GPU_NIC_PCIE_MAPPING"
            " VLLM_NIC_SELECTION_VARS VLLM_SNAPSHOT_IGNORED_FD_MAP VLLM_SNAPSHOT_TIMEOUT_S"
        ),
        "weights that other engines send are never shared (`WeightsFromPeers`)": ("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH",),
        SPEED: _words(
            "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_ENGINE_READY_TIMEOUT_S VLLM_ENGINE_ITERATION_TIMEOUT_S"
            " VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"
            " VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_TRITON_JIT_WARMUP_NUM_THREADS"
            " VLLM_DEEP_GEMM_WARMUP VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH"
            " VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"
            " VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST"
            " VLLM_P2P_SIDE_CHANNEL_PORT VLLM_P2P_MAX_PEERS VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S"
            " VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT"
            " VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MOONCAKE_LOAD_RECV_THREADS"
            " VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME"
            " VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MORIIO_CONNECTOR_READ_MODE VLLM_MORIIO_NUM_WORKERS"
            " VLLM_MORIIO_POST_BATCH_SIZE VLLM_MORIIO_QP_PER_TRANSFER VLLM_MORIIO_TRANSFER_TIMEOUT_S"
            " VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
            " VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_ENABLE_CUDAGRAPH_GC VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"
            " VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_DEEPEP_BUFFER_SIZE_MB"
            " VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL"
            " VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DBO_COMM_SMS"
            " VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT"
        ),
        LOGS: _words(
            "VLLM_GPU_SYNC_CHECK VLLM_REQUEST_BODY_LOG_LEVEL"
            " VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH"
            " VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"
            " VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL"
            " VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL"
            " VLLM_TRACE_FUNCTION VLLM_LOG_BATCHSIZE_INTERVAL VLLM_SERVER_DEV_MODE VLLM_COMPUTE_NANS_IN_LOGITS"
            " VLLM_RAISE_ON_LOGIT_NANS VLLM_PROCESS_NAME_PREFIX VLLM_CUSTOM_SCOPES_FOR_PROFILING"
            " VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION"
            " VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO"
        ),
    },
)
#: Variables of the table that vLLM reads elsewhere than in `envs.py`, or that are not vLLM's.
ENVIRONMENT_ELSEWHERE = frozenset(
    _words(
        "VLLM_PRECOMPILED_WHEEL_LOCATION VLLM_CPU_MOE_PREPACK VLLM_CPU_SIM_MULTI_NUMA VLLM_CUSTOM_ALLREDUCE_ALGO"
        " VLLM_DEVICE_CONTROL_ENV_VAR_PLACEHOLDER VLLM_DIST_IDENT VLLM_HOST_PORT VLLM_MORIIO_CONNECTOR_READ_MODE"
        " VLLM_MORIIO_NUM_WORKERS VLLM_MORIIO_POST_BATCH_SIZE VLLM_MORIIO_QP_PER_TRANSFER"
        " VLLM_MORIIO_TRANSFER_TIMEOUT_S VLLM_OMP_NUM_THREADS_SET_BY_VLLM VLLM_SNAPSHOT_IGNORED_FD_MAP"
        " VLLM_SNAPSHOT_TIMEOUT_S NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    )
)

_SERVICE = re.compile(r"(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)\Z")


def is_service_link(name: str, environment: Container[str]) -> bool:
    """Whether Kubernetes set the variable for a Service, whose name may begin with `vllm-` or `sglang-`."""
    for at in (i for i, letter in enumerate(name) if letter == "_"):
        service, rest = name[:at], name[at + 1 :]
        if (
            _SERVICE.match(rest)
            and f"{service}_SERVICE_HOST" in environment
            and f"{service}_SERVICE_PORT" in environment
        ):
            return True
    return False
