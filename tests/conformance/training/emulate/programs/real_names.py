"""The names of CUDA that are real on the absent device: neither stood in for nor refused (`live.names`)."""

REAL = {
    "torch.cuda": """
        AcceleratorError CudaError DeferredCudaCallError OutOfMemoryError cudaStatus check_error Event
        Stream StreamContext current_stream default_stream set_stream stream synchronize _set_stream_by_id
        BFloat16Storage BoolStorage ByteStorage CharStorage ComplexDoubleStorage ComplexFloatStorage
        DoubleStorage FloatStorage HalfStorage IntStorage LongStorage ShortStorage BFloat16Tensor
        BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor
        ShortTensor _is_compiled _is_in_bad_fork _lazy_call _lazy_init init ipc_collect is_available
        is_initialized can_device_access_peer current_device cudart device device_count device_of
        get_arch_list get_device_capability get_device_name get_device_properties get_gencode_flags
        has_half has_magma is_bf16_supported is_tf32_supported set_device get_sync_debug_mode
        set_sync_debug_mode default_generators get_rng_state get_rng_state_all initial_seed manual_seed
        manual_seed_all seed seed_all set_rng_state set_rng_state_all empty_cache
        get_allocator_backend get_per_process_memory_fraction
        max_memory_allocated max_memory_cached max_memory_reserved mem_get_info memory_allocated
        memory_cached memory_reserved memory_stats memory_stats_as_nested_dict memory_summary
        device_memory_used reset_accumulated_memory_stats reset_accumulated_host_memory_stats
        reset_max_memory_allocated reset_max_memory_cached reset_peak_memory_stats
        reset_peak_host_memory_stats _POOL_HANDLE graph_pool_handle is_current_stream_capturing
        """,
    "torch.cuda.memory": "_record_memory_history",
    "torch.cuda._utils": "_get_device_index",
    "torch.cuda.amp": "GradScaler amp_definitely_not_available autocast custom_bwd custom_fwd",
    "torch.cuda.amp.common": "amp_definitely_not_available",
    "torch.cuda.nccl": "is_available unique_id version",
    "torch.cuda.nvtx": "mark range range_end range_pop range_push range_start",
    "torch.cuda.profiler": "profile start stop",
    "torch.accelerator": """
        current_accelerator current_device_idx current_device_index current_stream device_count
        device_index empty_cache empty_host_cache get_device_capability get_memory_info is_available
        max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats
        reset_accumulated_memory_stats reset_peak_memory_stats set_device_idx set_device_index set_stream
        synchronize
        """,
    "torch.backends.cuda": """
        SDPAParams blas_workspace_size cuBLASModule cuFFTPlanCache cuFFTPlanCacheAttrContextProp
        cuFFTPlanCacheManager preferred_rocm_fa_library allow_fp16_bf16_reduction_math_sdp
        can_use_cudnn_attention can_use_efficient_attention can_use_flash_attention cublas_workspace_size
        cublaslt_workspace_size cudnn_sdp_enabled cufft_plan_cache enable_cudnn_sdp enable_flash_sdp
        enable_math_sdp enable_mem_efficient_sdp flash_sdp_enabled fp16_bf16_reduction_math_sdp_allowed
        is_built is_ck_sdpa_available is_flash_attention_available math_sdp_enabled matmul
        mem_efficient_sdp_enabled preferred_blas_library preferred_linalg_library sdp_kernel
        """,
    "torch.backends.cudnn": """
        allow_tf32 benchmark benchmark_limit deterministic enabled flags is_acceptable is_available rnn
        version
        """,
    "torch.backends.cusparselt": "is_available version get_max_alg_id",
}


def real() -> list[str]:
    """The names of `REAL`, whole."""
    return [f"{module}.{name}" for module, names in REAL.items() for name in names.split()]
