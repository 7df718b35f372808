"""Every internal of vLLM that this package uses, as data; `contract` compares it with the installed vLLM."""

from dataclasses import dataclass

MODEL = "vllm.models.deepseek_v41.nvidia.model"
ATTENTION = "vllm.models.deepseek_v41.attention"
SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_MHC = "vllm.model_executor.kernels.mhc"
# What the mHC kernels share.
_PRE = "rms_eps, hc_pre_eps, hc_sinkhorn_eps, hc_post_mult_value, sinkhorn_repeat, pre_mix=None"


@dataclass(frozen=True)
class Internal:
    """One internal of vLLM, and what is relied on.

    name: qualified within its module, "" for the module itself. signature: parameters and defaults, without
    annotations. attributes: of a class, its instances or an enum: methods, fields, or what its methods assign to self.
    calls: what a function calls, as written. value: what it equals.
    """

    module: str
    name: str
    signature: str | None = None
    attributes: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    value: object = None

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


CONTRACT: list[Internal] = [
    # Where the executor takes over.
    Internal(MODEL, "specialized_decode_config", signature="(vllm_config)"),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM.__init__",
        signature="(self, *, vllm_config, prefix='')",
        calls=("specialized_decode_config",),
    ),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM",
        attributes=("model", "lm_head", "specialized_decode", "specialized_decode_config"),
    ),
    Internal(MODEL, "DeepseekV41LLMForCausalLM.build_specialized_decode", signature="(self)"),
    Internal(MODEL, "DeepseekV41LLMForCausalLM.get_model_state_cls", signature="(self)"),
    Internal(
        MODEL,
        "DeepseekV41LLMForCausalLM.forward",
        signature="(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, "
        "lookback_token_ids=None)",
        calls=("decode.plan", "self.model"),
    ),
    # Where the step starts, and what it hands back.
    Internal(MODEL, "DeepseekV4Model.forward", calls=("decode_step.run", "hc_collapse_triton", "self.norm")),
    Internal(
        MODEL,
        "DeepseekV4Model",
        attributes=(
            *("layers", "start_layer", "end_layer", "norm", "config", "_mtp_hidden_buffer"),
            "aux_hidden_state_layers",
        ),
    ),
    Internal(
        "vllm.models.deepseek_v41.nvidia.vl_model",
        "DeepseekV41ForCausalLM",
        attributes=("language_model", "get_model_state_cls"),
    ),
    # The layer whose calls stock.py repeats.
    Internal(
        MODEL,
        "DeepseekV4DecoderLayer",
        attributes=(
            *("attn", "ffn", "engram", "attn_norm", "ffn_norm", "rms_norm_eps"),
            *("hc_attn_fn", "hc_attn_base", "hc_attn_scale", "hc_ffn_fn", "hc_ffn_base", "hc_ffn_scale"),
            *("hc_attn_fn_broadcast", "hc_mult", "hc_eps", "hc_post_alpha", "hc_sinkhorn_iters"),
        ),
    ),
    Internal(
        MODEL,
        "DeepseekV4DecoderLayer.forward",
        calls=("mhc_pre", "mhc_post_tilelang", "mhc_shifted_post_pre", "self.engram", "self.attn", "self.ffn"),
    ),
    Internal(MODEL, "DeepseekV4Model._collapse", calls=("mhc_post_tilelang", "hidden_states.mean")),
    Internal(MODEL, "DeepseekV4Model.finalize_mhc_broadcast_weights", signature="(self)"),
    Internal(
        f"{_MHC}.tilelang",
        "mhc_pre_delayed_tilelang",
        signature=f"(residual, fn, hc_scale, hc_base, {_PRE}, x=None, norm_weight=None, norm_eps=1e-06)",
    ),
    Internal(f"{_MHC}.tilelang", "mhc_post_tilelang", signature="(x, residual, post_layer_mix, comb_res_mix)"),
    Internal(f"{_MHC}.triton", "hc_collapse_triton", signature="(x, pre_mix)"),
    Internal(
        "vllm.models.deepseek_v41.nvidia.ops.mhc",
        "mhc_shifted_post_pre",
        signature=f"(x, residual, post_layer_mix, comb_res_mix, fn, hc_scale, hc_base, {_PRE}, norm_weight=None, "
        "norm_eps=1e-06, capture_aux=False, *, stream=None, reduce_results=False)",
        calls=("mhc_fused_post_pre_delayed_tilelang",),
    ),
    Internal("vllm.model_executor.layers.layernorm", "RMSNorm", attributes=("weight", "variance_epsilon")),
    # Sublayers, whose outputs are taken before their all-reduce.
    Internal(
        ATTENTION,
        "DeepseekV4Attention",
        attributes=(
            *("wo_b", "aux_stream_list", "swa_cache_layer", "layer_id", "prefix", "n_local_heads"),
            *("head_dim", "rope_head_dim", "q_lora_rank", "n_local_groups", "o_lora_rank", "window_size"),
            *(
                "compress_ratio",
                "kv_source_layer_id",
                "index_source_layer_id",
                "candidate_source_layer",
                "candidate_block_size",
                "eps",
            ),
            *("scale", "attn_sink", "fused_wqa_wkv", "wq_b", "wo_a", "q_norm"),
            *("kv_norm", "rotary_emb", "topk_indices_buffer", "candidate_block_buffer", "compressor", "indexer"),
            *("kv_mxfp8", "compressed_cache_prefix", "_compressed_kv_cache", "kv_cache_dtype", "max_model_len"),
        ),
    ),
    Internal(
        ATTENTION,
        "DeepseekV4Attention.forward",
        signature="(self, positions, hidden_states, llama_4_scaling=None)",
    ),
    Internal(SWA, "DeepseekV4SWACache", attributes=("prefix", "kv_cache")),
    Internal(
        "vllm.model_executor.layers.linear",
        "RowParallelLinear.forward",
        signature="(self, input_)",
        calls=("tensor_model_parallel_all_reduce",),
    ),
    Internal("vllm.model_executor.layers.linear", "RowParallelLinear", attributes=("reduce_results",)),
    Internal(
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4MoE.forward",
        signature="(self, hidden_states, input_ids=None, mega_gate_metadata=None)",
        calls=("self._forward_fused_moe",),
    ),
    Internal(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "MoERunner",
        attributes=("moe_config", "shared_experts", "router", "routed_experts"),
    ),
    Internal(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner",
        "MoERunner._maybe_reduce_final_output",
        calls=("tensor_model_parallel_all_reduce",),
    ),
    Internal("vllm.model_executor.layers.fused_moe.config", "FusedMoEConfig", attributes=("skip_final_all_reduce",)),
    Internal("vllm.model_executor.layers.fused_moe.runner.shared_experts", "SharedExperts", attributes=("_stream",)),
    # Of the hash ids it reads the count alone: the rows were looked up before the layers.
    Internal(
        "vllm.models.deepseek_v41.common.engram",
        "Engram.forward",
        signature="(self, hidden_states, hash_ids, token_mask=None)",
        calls=("self.embed", "self._batch.wkv_input", "self.wkv"),
    ),
    Internal("vllm.models.deepseek_v41.common.engram", "Engram.embed", calls=("self._ready_rows",)),
    Internal(
        "vllm.models.deepseek_v41.common.engram",
        "Engram",
        attributes=("_prefetch_stream", "wkv", "q_weight", "k_weight", "eps", "staged_rows"),
    ),
    # The host.
    Internal("vllm.distributed", "tensor_model_parallel_all_reduce", signature="(input_)"),
    Internal(
        "vllm.distributed.parallel_state",
        "GroupCoordinator",
        attributes=("rank_in_group", "world_size", "device_group", "cpu_group", "all_gather"),
    ),
    Internal("vllm.forward_context", "get_forward_context", signature="()"),
    Internal("vllm.forward_context", "is_forward_context_available", signature="()"),
    Internal("vllm.forward_context", "ForwardContext", attributes=("attn_metadata", "cudagraph_runtime_mode")),
    Internal(
        "vllm.config",
        "CUDAGraphMode",
        attributes=("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"),
    ),
    Internal(
        "vllm.envs",
        "",
        attributes=(
            *(
                "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD",
                "VLLM_BATCH_INVARIANT",
                "VLLM_LOG_STATS_INTERVAL",
                "VLLM_HUMMING_INPUT_QUANT_CONFIG",
                "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
                "VLLM_HUMMING_MOE_GEMM_TYPE",
            ),
            *("VLLM_HUMMING_USE_F16_ACCUM",),
        ),
    ),
    # The model state: made after the weights and before memory profiling; a capture is warmed by a run of its own.
    Internal(
        "vllm.models.deepseek_v41.nvidia.model_state",
        "DeepseekV41ModelState.__init__",
        signature="(self, vllm_config, model, encoder_cache, device)",
    ),
    Internal(
        "vllm.models.deepseek_v41.nvidia.model_state",
        "DeepseekV41ModelState.prepare_attn",
        signature="(self, input_batch, cudagraph_mode, block_tables, slot_mappings, attn_groups, kv_cache_config, "
        "for_capture=False, ubatch_idx=0, model_specific_attn_metadata=None)",
        calls=("self._build_attn_metadata",),
    ),
    Internal("vllm.v1.worker.gpu.model_states", "resolve_model_state_cls", calls=("model.get_model_state_cls",)),
    Internal("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.load_model", calls=("init_model_state",)),
    Internal(
        "vllm.v1.worker.gpu.model_runner", "GPUModelRunner.execute_model", calls=("self.model_state.prepare_attn",)
    ),
    Internal("vllm.v1.worker.gpu.cudagraph_utils", "prepare_inputs_to_capture", calls=("model_state.prepare_attn",)),
    Internal(
        "vllm.v1.worker.gpu.cudagraph_utils", "CudaGraphManager.capture", calls=("create_forward_fn", "forward_fn")
    ),
    # A batch without prompts is one of vLLM's own.
    Internal(
        "vllm.v1.worker.gpu.input_batch",
        "InputBatch",
        attributes=("req_ids", "prefill_len_np", "has_prefill", "num_tokens_after_padding"),
    ),
    Internal("vllm.v1.worker.gpu.input_batch", "InputBatch.make_dummy", calls=("np.zeros",)),
    Internal("vllm.plugins", "DEFAULT_PLUGINS_GROUP", value="vllm.general_plugins"),
    # Weights, which vLLM's backends repack once they are loaded.
    Internal(
        "vllm.model_executor.model_loader.utils",
        "process_weights_after_loading",
        calls=("quant_method.process_weights_after_loading",),
    ),
    Internal("vllm.model_executor.layers.linear", "LinearBase", attributes=("quant_method", "prefix")),
    Internal(
        "vllm.models.deepseek_v41.quant_config",
        "DeepseekV4FP8Config.get_quant_method",
        calls=("ModelOptLinearMethod", "CkptCtx", "Mxfp4MoEMethod"),
    ),
    Internal(
        "vllm.model_executor.layers.quantization.modelopt",
        "ModelOptLinearMethod.process_weights_after_loading",
        signature="(self, layer)",
        calls=("self.kernel.process_weights_after_loading",),
    ),
    Internal(
        "vllm.model_executor.layers.quantization.modelopt",
        "KMxfp8Static.get_scale_weight_loader",
        calls=("loaded_weight.view(torch.uint8).repeat_interleave",),
    ),
    Internal(
        "vllm.model_executor.model_loader.dummy_loader",
        "DummyModelLoader.load_weights",
        calls=("initialize_single_dummy_weight",),
    ),
    Internal(
        "vllm.models.deepseek_v4.nvidia.model",
        "DeepseekV4MoE",
        attributes=(
            "gate",
            "shared_experts",
            "experts",
            "n_activated_experts",
            "routed_scaling_factor",
            "swiglu_limit",
        ),
    ),
    Internal("vllm.models.deepseek_v4.nvidia.model", "DeepseekV4MLP", attributes=("gate_up_proj", "down_proj")),
    Internal("vllm.model_executor.layers.fused_moe.router.base_router", "BaseRouter", attributes=("capture_fn",)),
    Internal("vllm.model_executor.layers.quantization.mxfp4", "Mxfp4MoEMethod", attributes=("mxfp4_backend",)),
    # One layer's attention.
    Internal(
        ATTENTION,
        "DeepseekV4Indexer",
        attributes=(
            "wq_b",
            "weights_proj",
            "wk",
            "k_norm",
            "k_cache",
            "owns_k",
            "n_head",
            "head_dim",
            "topk_tokens",
            "compress_ratio",
        ),
    ),
    Internal(
        "vllm.models.deepseek_v41.compressor",
        "DeepseekCompressor",
        attributes=("fused_wkv_wgate", "norm", "rms_norm_eps", "compress_ratio", "state_cache"),
    ),
    # BF16 weights stay as they were loaded, [N, K], and are read in place.
    Internal(
        ATTENTION,
        "DeepseekV4Attention._run_parallel_input_projections",
        calls=("torch.mm", "indexer.weights_proj"),
    ),
    Internal(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.process_weights_after_loading",
        signature="(self, layer)",
        calls=("current_platform.is_cpu", "current_platform.is_xpu"),
    ),
    # A ring holds more rows than a request's step: none replaces what the step's first row reads.
    Internal(
        "vllm.models.deepseek_v41.compressor",
        "CompressorStateCache.__init__",
        calls=("(rows_per_step - 1).bit_length",),
    ),
    # Caches, bound anew for each allocation, and the metadata of a batch.
    Internal(ATTENTION, "DeepseekV4Attention.bind_kv_cache", signature="(self, kv_cache)", calls=("kv_cache.squeeze",)),
    Internal(ATTENTION, "DeepseekV4IndexerCache", attributes=("kv_cache", "prefix")),
    Internal("vllm.models.deepseek_v41.compressor", "CompressorStateCache", attributes=("kv_cache", "prefix")),
    Internal(
        SWA,
        "DeepseekSparseSWAMetadata",
        attributes=("num_prefills", "slot_mapping", "block_table", "token_to_req_indices", "query_start_loc"),
    ),
    Internal(
        "vllm.models.deepseek_v41.sparse_mla",
        "DeepseekV4FlashMLAMetadata",
        attributes=("slot_mapping", "block_table", "req_id_per_token", "query_start_loc", "max_seq_len"),
    ),
    Internal(
        "vllm.v1.attention.backends.mla.indexer",
        "DeepseekV32IndexerMetadata",
        attributes=("slot_mapping", "block_table", "max_seq_len"),
    ),
    Internal(
        "vllm.models.deepseek_v41.compressor",
        "CompressorMetadata",
        attributes=("slot_mapping", "token_to_req_indices", "query_start_loc"),
    ),
    # For Blackwell: another class of attention, whose caches our own ops do not read.
    Internal(
        "vllm.models.deepseek_v41.nvidia.flashinfer_sparse",
        "DeepseekV4FlashInferMLAAttention",
        attributes=("wo_b", "swa_cache_layer", "_compressed_kv_cache", "kv_cache_torch_dtype"),
    ),
    Internal(ATTENTION, "_use_v41_mxfp8_kv_record", signature="()"),
    # Engram's rows of a batch, and the wait for them.
    Internal(
        "vllm.models.deepseek_v41.common.engram",
        "Engram._ready_rows",
        signature="(self, num_tokens)",
        calls=("self._finish_prefetch",),
    ),
    # What the deployment check reads.
    Internal(MODEL, "_select_dsv4_attn_cls", signature="(vllm_config)"),
    Internal("vllm.models.deepseek_v41.nvidia.flashmla", "DeepseekV4FlashMLAAttention"),
    Internal(
        "vllm.config",
        "VllmConfig",
        attributes=(
            *("model_config", "cache_config", "parallel_config", "compilation_config", "kernel_config"),
            *("attention_config", "offload_config", "quant_config", "lora_config", "speculative_config"),
            *("kv_transfer_config", "weight_transfer_config", "additional_config", "instance_id"),
            "use_v2_model_runner",
        ),
    ),
    Internal(
        "vllm.config",
        "ModelConfig",
        attributes=("architectures", "hf_config", "hf_text_config", "quantization_config", "enable_sleep_mode"),
    ),
    Internal(
        "vllm.config",
        "ParallelConfig",
        attributes=(
            *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"),
            *("prefill_context_parallel_size", "decode_context_parallel_size"),
            *("enable_expert_parallel", "enable_eplb", "use_ubatching"),
        ),
    ),
    Internal("vllm.config", "CacheConfig", attributes=("cache_dtype", "gpu_memory_utilization")),
    Internal("vllm.config", "CompilationConfig", attributes=("mode", "cudagraph_mode", "cudagraph_capture_sizes")),
    Internal("vllm.config", "CompilationMode", attributes=("NONE", "VLLM_COMPILE")),
    Internal("vllm.config.kernel", "KernelConfig", attributes=("moe_backend", "enable_jit_warmup")),
    Internal("vllm.config.attention", "AttentionConfig", attributes=("backend", "hisparse_config")),
    Internal("vllm.config.kv_transfer", "KVTransferConfig", attributes=("kv_connector",)),
    Internal("vllm.config.offload", "OffloadConfig", attributes=("uva", "prefetch")),
    Internal("vllm.config.offload", "UVAOffloadConfig", attributes=("cpu_offload_gb",)),
    Internal("vllm.config.offload", "PrefetchOffloadConfig", attributes=("offload_group_size",)),
    Internal("vllm.config.quantization", "QuantizationConfigArgs", attributes=("linear", "moe", "targets", "ignore")),
    Internal("vllm.config.quantization", "QuantSpec", attributes=("weight", "activation")),
    Internal("vllm.config.speculative", "SpeculativeConfig", attributes=("method", "draft_model_config")),
    Internal("vllm.config", "get_current_vllm_config_or_none", signature="()"),
    Internal("vllm.config", "set_current_vllm_config", signature="(vllm_config, check_compile=False, prefix=None)"),
    Internal(
        "vllm.model_executor.kernels.linear",
        "init_mxfp8_linear_kernel",
        signature="(*, weight_shape, bmm_batch_size=None)",
    ),
    Internal("vllm.model_executor.kernels.linear.mxfp8.humming", "HummingMxfp8LinearKernel"),
    Internal(
        "vllm.model_executor.layers.fused_moe.oracle.mxfp4",
        "_get_priority_backends",
        signature="()",
        calls=("prioritize_humming",),
    ),
    Internal(
        "vllm.models.deepseek_v41.quant_config", "DeepseekV4FP8Config", attributes=("weight_block_size", "get_name")
    ),
    Internal("vllm.distributed", "get_tp_group", signature="()"),
    # What the counters of steps use.
    Internal(
        "vllm.v1.metrics.loggers",
        "PrometheusStatLogger.__init__",
        signature="(self, vllm_config, engine_indexes=None)",
    ),
    Internal("vllm.v1.metrics.loggers", "StatLoggerManager.__init__", calls=("PrometheusStatLogger",)),
    Internal("vllm.v1.metrics.prometheus", "get_prometheus_registry", calls=("multiprocess.MultiProcessCollector",)),
]
