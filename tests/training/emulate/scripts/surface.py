"""Every name of `names`: the real and the stood in for are called and answer with the right type, the refused
raise their sentence."""

import os
import sys
import warnings

import torch
import torch.cuda.amp.common
import torch.cuda.comm
import torch.cuda.gds
import torch.cuda.green_contexts
from cases import run

from windtunnel.training.emulate.live import names

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from real_names import real

warnings.filterwarnings("ignore")
LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
cuda, accelerator, backend, tunable = torch.cuda, torch.accelerator, torch.backends.cuda, torch.cuda.tunable
NONE = type(None)
x = torch.ones(4, device="cuda")
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
pool = cuda.MemPool()
address = cuda.caching_allocator_alloc(1024)
params = backend.SDPAParams(q, q, q, None, 0.0, True, False)
state = cuda.get_rng_state()


def inside(context):
    with context:
        return None


def decorated(decorator):
    return decorator(lambda ctx, a: a)(torch.autograd.Function(), x)


STORAGES = {f"torch.cuda.{name}Storage": name for name in (
    "BFloat16", "Bool", "Byte", "Char", "ComplexDouble", "ComplexFloat", "Double", "Float", "Half", "Int",
    "Long", "Short",
)}  # fmt: skip
TENSORS = (
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor", "ShortTensor",
)  # fmt: skip

CALLS = {
    **{name: (lambda name=name: getattr(cuda, name.rpartition(".")[2])(3), torch.storage.TypedStorage)
       for name in STORAGES},
    **{f"torch.cuda.{name}": (lambda name=name: getattr(cuda, name)(2, 3), torch.Tensor) for name in TENSORS},
    "torch.cuda.AcceleratorError": (lambda: cuda.AcceleratorError("no"), RuntimeError),
    "torch.cuda.CudaError": (lambda: cuda.CudaError(2), RuntimeError),
    "torch.cuda.DeferredCudaCallError": (lambda: cuda.DeferredCudaCallError("no"), Exception),
    "torch.cuda.OutOfMemoryError": (lambda: cuda.OutOfMemoryError("no"), RuntimeError),
    "torch.cuda.cudaStatus": (lambda: cuda.cudaStatus.SUCCESS, int),
    "torch.cuda.check_error": (lambda: cuda.check_error(0), NONE),
    "torch.cuda.Event": (lambda: cuda.Event(enable_timing=True, blocking=True), torch.Event),
    "torch.cuda.Stream": (lambda: cuda.Stream(priority=-1), torch.Stream),
    "torch.cuda.StreamContext": (lambda: inside(cuda.StreamContext(cuda.Stream())), NONE),
    "torch.cuda.current_stream": (lambda: cuda.current_stream(LOCAL), cuda.Stream),
    "torch.cuda.default_stream": (lambda: cuda.default_stream(), cuda.Stream),
    "torch.cuda.set_stream": (lambda: cuda.set_stream(cuda.default_stream()), NONE),
    "torch.cuda.stream": (lambda: inside(cuda.stream(None)), NONE),
    "torch.cuda.synchronize": (lambda: cuda.synchronize(LOCAL), NONE),
    "torch.cuda._set_stream_by_id": (lambda: cuda._set_stream_by_id(0, LOCAL, 1), NONE),
    "torch.cuda._is_compiled": (cuda._is_compiled, bool),
    "torch.cuda._is_in_bad_fork": (cuda._is_in_bad_fork, bool),
    "torch.cuda._lazy_call": (lambda: cuda._lazy_call(lambda: None), NONE),
    "torch.cuda._lazy_init": (cuda._lazy_init, NONE),
    "torch.cuda._sleep": (lambda: cuda._sleep(1000), NONE),
    "torch.cuda.init": (cuda.init, NONE),
    "torch.cuda.ipc_collect": (cuda.ipc_collect, NONE),
    "torch.cuda.is_available": (cuda.is_available, bool),
    "torch.cuda.is_initialized": (cuda.is_initialized, bool),
    "torch.cuda.can_device_access_peer": (lambda: cuda.can_device_access_peer(0, 1), bool),
    "torch.cuda.current_device": (cuda.current_device, int),
    "torch.cuda.cudart": (lambda: cuda.cudart().cudaMemGetInfo(0), tuple),
    "torch.cuda.device": (lambda: inside(cuda.device(LOCAL)), NONE),
    "torch.cuda.device_count": (cuda.device_count, int),
    "torch.cuda.device_of": (lambda: inside(cuda.device_of(x)), NONE),
    "torch.cuda.get_arch_list": (cuda.get_arch_list, list),
    "torch.cuda.get_device_capability": (lambda: cuda.get_device_capability("cuda:1"), tuple),
    "torch.cuda.get_device_name": (cuda.get_device_name, str),
    "torch.cuda.get_device_properties": (lambda: cuda.get_device_properties(0), cuda._CudaDeviceProperties),
    "torch.cuda.get_gencode_flags": (cuda.get_gencode_flags, str),
    "torch.cuda.has_half": (lambda: cuda.has_half, bool),
    "torch.cuda.has_magma": (lambda: cuda.has_magma, bool),
    "torch.cuda.is_bf16_supported": (cuda.is_bf16_supported, bool),
    "torch.cuda.is_tf32_supported": (cuda.is_tf32_supported, bool),
    "torch.cuda.set_device": (lambda: cuda.set_device(f"cuda:{LOCAL}"), NONE),
    "torch.cuda.get_sync_debug_mode": (cuda.get_sync_debug_mode, int),
    "torch.cuda.set_sync_debug_mode": (lambda: cuda.set_sync_debug_mode("warn"), NONE),
    "torch.cuda.default_generators": (lambda: cuda.default_generators, tuple),
    "torch.cuda.get_rng_state": (cuda.get_rng_state, torch.Tensor),
    "torch.cuda.get_rng_state_all": (cuda.get_rng_state_all, list),
    "torch.cuda.initial_seed": (cuda.initial_seed, int),
    "torch.cuda.manual_seed": (lambda: cuda.manual_seed(1), NONE),
    "torch.cuda.manual_seed_all": (lambda: cuda.manual_seed_all(1), NONE),
    "torch.cuda.seed": (cuda.seed, NONE),
    "torch.cuda.seed_all": (cuda.seed_all, NONE),
    "torch.cuda.set_rng_state": (lambda: cuda.set_rng_state(state), NONE),
    "torch.cuda.set_rng_state_all": (lambda: cuda.set_rng_state_all([state] * 8), NONE),
    "torch.cuda.caching_allocator_alloc": (lambda: cuda.caching_allocator_alloc(512), int),
    "torch.cuda.caching_allocator_delete": (lambda: cuda.caching_allocator_delete(address), NONE),
    "torch.cuda.empty_cache": (cuda.empty_cache, NONE),
    "torch.cuda.get_allocator_backend": (cuda.get_allocator_backend, str),
    "torch.cuda.get_per_process_memory_fraction": (cuda.get_per_process_memory_fraction, float),
    "torch.cuda.set_per_process_memory_fraction": (lambda: cuda.set_per_process_memory_fraction(0.5), NONE),
    "torch.cuda.max_memory_allocated": (cuda.max_memory_allocated, int),
    "torch.cuda.max_memory_cached": (cuda.max_memory_cached, int),
    "torch.cuda.max_memory_reserved": (cuda.max_memory_reserved, int),
    "torch.cuda.mem_get_info": (lambda: cuda.mem_get_info("cuda:0"), tuple),
    "torch.cuda.memory_allocated": (cuda.memory_allocated, int),
    "torch.cuda.memory_cached": (cuda.memory_cached, int),
    "torch.cuda.memory_reserved": (cuda.memory_reserved, int),
    "torch.cuda.memory_stats": (cuda.memory_stats, dict),
    "torch.cuda.memory_stats_as_nested_dict": (cuda.memory_stats_as_nested_dict, dict),
    "torch.cuda.memory_summary": (lambda: cuda.memory_summary(abbreviated=True), str),
    "torch.cuda.device_memory_used": (cuda.device_memory_used, int),
    "torch.cuda.reset_accumulated_memory_stats": (cuda.reset_accumulated_memory_stats, NONE),
    "torch.cuda.reset_accumulated_host_memory_stats": (cuda.reset_accumulated_host_memory_stats, NONE),
    "torch.cuda.reset_max_memory_allocated": (cuda.reset_max_memory_allocated, NONE),
    "torch.cuda.reset_max_memory_cached": (cuda.reset_max_memory_cached, NONE),
    "torch.cuda.reset_peak_memory_stats": (cuda.reset_peak_memory_stats, NONE),
    "torch.cuda.reset_peak_host_memory_stats": (cuda.reset_peak_host_memory_stats, NONE),
    "torch.cuda._POOL_HANDLE": (lambda: cuda._POOL_HANDLE((0, 1)), tuple),
    "torch.cuda.graph_pool_handle": (cuda.graph_pool_handle, tuple),
    "torch.cuda.is_current_stream_capturing": (cuda.is_current_stream_capturing, bool),
    "torch.cuda.memory._record_memory_history": (lambda: cuda.memory._record_memory_history(None), NONE),
    "torch.cuda._utils._get_device_index": (lambda: cuda._utils._get_device_index("cuda:2"), int),
    "torch.cuda.amp.GradScaler": (lambda: cuda.amp.GradScaler().scale(x), torch.Tensor),
    "torch.cuda.amp.amp_definitely_not_available": (cuda.amp.amp_definitely_not_available, bool),
    "torch.cuda.amp.common.amp_definitely_not_available": (
        cuda.amp.common.amp_definitely_not_available, bool),
    "torch.cuda.amp.autocast": (lambda: inside(cuda.amp.autocast(dtype=torch.bfloat16)), NONE),
    "torch.cuda.amp.custom_fwd": (lambda: decorated(cuda.amp.custom_fwd), torch.Tensor),
    "torch.cuda.amp.custom_bwd": (lambda: cuda.amp.custom_bwd, object),
    "torch.cuda.nccl.is_available": (lambda: cuda.nccl.is_available([x]), bool),
    "torch.cuda.nccl.unique_id": (cuda.nccl.unique_id, bytes),
    "torch.cuda.nccl.version": (cuda.nccl.version, tuple),
    "torch.cuda.nvtx.mark": (lambda: cuda.nvtx.mark("here"), NONE),
    "torch.cuda.nvtx.range": (lambda: inside(cuda.nvtx.range("here")), NONE),
    "torch.cuda.nvtx.range_start": (lambda: cuda.nvtx.range_start("here"), int),
    "torch.cuda.nvtx.range_end": (lambda: cuda.nvtx.range_end(cuda.nvtx.range_start("here")), NONE),
    "torch.cuda.nvtx.range_push": (lambda: cuda.nvtx.range_push("here"), int),
    "torch.cuda.nvtx.range_pop": (lambda: cuda.nvtx.range_pop(), int),
    "torch.cuda.profiler.profile": (lambda: inside(cuda.profiler.profile()), NONE),
    "torch.cuda.profiler.start": (cuda.profiler.start, NONE),
    "torch.cuda.profiler.stop": (cuda.profiler.stop, NONE),
    "torch.cuda.tunable.get_filename": (tunable.get_filename, str),
    "torch.cuda.tunable.get_max_tuning_duration": (tunable.get_max_tuning_duration, int),
    "torch.cuda.tunable.get_max_tuning_iterations": (tunable.get_max_tuning_iterations, int),
    "torch.cuda.tunable.get_results": (tunable.get_results, tuple),
    "torch.cuda.tunable.get_rotating_buffer_size": (tunable.get_rotating_buffer_size, int),
    "torch.cuda.tunable.get_validators": (tunable.get_validators, tuple),
    "torch.cuda.tunable.is_enabled": (tunable.is_enabled, bool),
    "torch.cuda.tunable.record_untuned_is_enabled": (tunable.record_untuned_is_enabled, bool),
    "torch.cuda.tunable.set_filename": (lambda: tunable.set_filename("out.csv"), NONE),
    "torch.cuda.tunable.set_max_tuning_duration": (lambda: tunable.set_max_tuning_duration(5), NONE),
    "torch.cuda.tunable.set_max_tuning_iterations": (lambda: tunable.set_max_tuning_iterations(5), NONE),
    "torch.cuda.tunable.set_numerical_check_tolerances": (
        lambda: tunable.set_numerical_check_tolerances(True), NONE),
    "torch.cuda.tunable.set_rotating_buffer_size": (lambda: tunable.set_rotating_buffer_size(5), NONE),
    "torch.cuda.tunable.tuning_is_enabled": (tunable.tuning_is_enabled, bool),
    "torch.accelerator.current_accelerator": (accelerator.current_accelerator, torch.device),
    "torch.accelerator.current_device_idx": (accelerator.current_device_idx, int),
    "torch.accelerator.current_device_index": (accelerator.current_device_index, int),
    "torch.accelerator.current_stream": (accelerator.current_stream, torch.Stream),
    "torch.accelerator.device_count": (accelerator.device_count, int),
    "torch.accelerator.device_index": (lambda: inside(accelerator.device_index(LOCAL)), NONE),
    "torch.accelerator.empty_cache": (accelerator.empty_cache, NONE),
    "torch.accelerator.empty_host_cache": (accelerator.empty_host_cache, NONE),
    "torch.accelerator.get_device_capability": (accelerator.get_device_capability, dict),
    "torch.accelerator.get_memory_info": (accelerator.get_memory_info, tuple),
    "torch.accelerator.is_available": (accelerator.is_available, bool),
    "torch.accelerator.max_memory_allocated": (accelerator.max_memory_allocated, int),
    "torch.accelerator.max_memory_reserved": (accelerator.max_memory_reserved, int),
    "torch.accelerator.memory_allocated": (accelerator.memory_allocated, int),
    "torch.accelerator.memory_reserved": (accelerator.memory_reserved, int),
    "torch.accelerator.memory_stats": (accelerator.memory_stats, dict),
    "torch.accelerator.reset_accumulated_memory_stats": (accelerator.reset_accumulated_memory_stats, NONE),
    "torch.accelerator.reset_peak_memory_stats": (accelerator.reset_peak_memory_stats, NONE),
    "torch.accelerator.set_device_idx": (lambda: accelerator.set_device_idx(LOCAL), NONE),
    "torch.accelerator.set_device_index": (lambda: accelerator.set_device_index(LOCAL), NONE),
    "torch.accelerator.set_stream": (lambda: accelerator.set_stream(torch.Stream(device="cuda")), NONE),
    "torch.accelerator.synchronize": (accelerator.synchronize, NONE),
    "torch.backends.cuda.SDPAParams": (lambda: params, backend.SDPAParams),
    "torch.backends.cuda.blas_workspace_size": (lambda: backend.blas_workspace_size, object),
    "torch.backends.cuda.cuBLASModule": (lambda: backend.matmul, backend.cuBLASModule),
    "torch.backends.cuda.cuFFTPlanCache": (lambda: backend.cufft_plan_cache[0], backend.cuFFTPlanCache),
    "torch.backends.cuda.cuFFTPlanCacheAttrContextProp": (
        lambda: backend.cuFFTPlanCacheAttrContextProp(int, int), object),
    "torch.backends.cuda.cuFFTPlanCacheManager": (
        lambda: backend.cufft_plan_cache, backend.cuFFTPlanCacheManager),
    "torch.backends.cuda.preferred_rocm_fa_library": (lambda: backend.preferred_rocm_fa_library, object),
    "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": (
        lambda: backend.allow_fp16_bf16_reduction_math_sdp(True), NONE),
    "torch.backends.cuda.can_use_cudnn_attention": (lambda: backend.can_use_cudnn_attention(params), bool),
    "torch.backends.cuda.can_use_efficient_attention": (
        lambda: backend.can_use_efficient_attention(params), bool),
    "torch.backends.cuda.can_use_flash_attention": (lambda: backend.can_use_flash_attention(params), bool),
    "torch.backends.cuda.cublas_workspace_size": (backend.cublas_workspace_size, int),
    "torch.backends.cuda.cublaslt_workspace_size": (backend.cublaslt_workspace_size, int),
    "torch.backends.cuda.cudnn_sdp_enabled": (backend.cudnn_sdp_enabled, bool),
    "torch.backends.cuda.cufft_plan_cache": (lambda: backend.cufft_plan_cache.size, int),
    "torch.backends.cuda.enable_cudnn_sdp": (lambda: backend.enable_cudnn_sdp(True), NONE),
    "torch.backends.cuda.enable_flash_sdp": (lambda: backend.enable_flash_sdp(True), NONE),
    "torch.backends.cuda.enable_math_sdp": (lambda: backend.enable_math_sdp(True), NONE),
    "torch.backends.cuda.enable_mem_efficient_sdp": (lambda: backend.enable_mem_efficient_sdp(True), NONE),
    "torch.backends.cuda.flash_sdp_enabled": (backend.flash_sdp_enabled, bool),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed": (
        backend.fp16_bf16_reduction_math_sdp_allowed, bool),
    "torch.backends.cuda.is_built": (backend.is_built, bool),
    "torch.backends.cuda.is_ck_sdpa_available": (backend.is_ck_sdpa_available, bool),
    "torch.backends.cuda.is_flash_attention_available": (backend.is_flash_attention_available, bool),
    "torch.backends.cuda.math_sdp_enabled": (backend.math_sdp_enabled, bool),
    "torch.backends.cuda.matmul": (lambda: backend.matmul.allow_tf32, bool),
    "torch.backends.cuda.mem_efficient_sdp_enabled": (backend.mem_efficient_sdp_enabled, bool),
    "torch.backends.cuda.preferred_blas_library": (backend.preferred_blas_library, object),
    "torch.backends.cuda.preferred_linalg_library": (backend.preferred_linalg_library, object),
    "torch.backends.cuda.sdp_kernel": (lambda: inside(backend.sdp_kernel(enable_math=False)), NONE),
    "torch.backends.cudnn.allow_tf32": (lambda: torch.backends.cudnn.allow_tf32, bool),
    "torch.backends.cudnn.benchmark": (lambda: torch.backends.cudnn.benchmark, bool),
    "torch.backends.cudnn.benchmark_limit": (lambda: torch.backends.cudnn.benchmark_limit, object),
    "torch.backends.cudnn.deterministic": (lambda: torch.backends.cudnn.deterministic, bool),
    "torch.backends.cudnn.enabled": (lambda: torch.backends.cudnn.enabled, bool),
    "torch.backends.cudnn.flags": (lambda: inside(torch.backends.cudnn.flags(deterministic=True)), NONE),
    "torch.backends.cudnn.is_acceptable": (lambda: torch.backends.cudnn.is_acceptable(x), bool),
    "torch.backends.cudnn.is_available": (torch.backends.cudnn.is_available, bool),
    "torch.backends.cudnn.rnn": (lambda: torch.backends.cudnn.rnn.get_cudnn_mode("LSTM"), int),
    "torch.backends.cudnn.version": (torch.backends.cudnn.version, int),
    "torch.backends.cusparselt.is_available": (torch.backends.cusparselt.is_available, bool),
    "torch.backends.cusparselt.version": (torch.backends.cusparselt.version, (int, NONE)),
    "torch.backends.cusparselt.get_max_alg_id": (torch.backends.cusparselt.get_max_alg_id, (int, NONE)),
    # stood in for
    "torch.cuda.Event.elapsed_time": (lambda: cuda.Event().elapsed_time(cuda.Event()), float),
    "torch.cuda.utilization": (cuda.utilization, int),
    "torch.cuda.temperature": (cuda.temperature, int),
    "torch.cuda.power_draw": (cuda.power_draw, int),
    "torch.cuda.clock_rate": (cuda.clock_rate, int),
    "torch.cuda.memory_usage": (cuda.memory_usage, int),
    "torch.cuda.list_gpu_processes": (cuda.list_gpu_processes, str),
    "torch.cuda.memory_snapshot": (cuda.memory_snapshot, list),
    "torch.cuda.memory._snapshot": (cuda.memory._snapshot, dict),
    "torch.cuda.memory._dump_snapshot": (lambda: cuda.memory._dump_snapshot(os.devnull), NONE),
    "torch.cuda.host_memory_stats": (cuda.host_memory_stats, dict),
    "torch.cuda.host_memory_stats_as_nested_dict": (cuda.host_memory_stats_as_nested_dict, dict),
    "torch.cuda.MemPool": (lambda: cuda.MemPool().id, tuple),
    "torch.cuda.use_mem_pool": (lambda: inside(cuda.use_mem_pool(pool)), NONE),
    "torch.cuda.tunable.enable": (lambda: tunable.enable(True), NONE),
    "torch.cuda.tunable.tuning_enable": (lambda: tunable.tuning_enable(True), NONE),
    "torch.cuda.tunable.record_untuned_enable": (lambda: tunable.record_untuned_enable(True), NONE),
}  # fmt: skip


def case_all_that_answer():
    listed = {*real(), *names.STOOD_IN}
    assert set(CALLS) == listed, set(CALLS) ^ listed
    for name, (call, kind) in CALLS.items():
        try:
            answer = call()
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        assert isinstance(answer, kind), f"{name} answers {answer!r}"


def case_all_that_are_refused():
    for name in names.REFUSED:
        found = names.find(name)
        if found is None:
            continue  # of a later PyTorch
        refused = getattr(*found)
        asked = [refused]
        if isinstance(refused, type):
            assert not isinstance(x, refused | int)  # as in an annotation
            asked.append(type("Own", (refused,), {}))
        for one in asked:
            try:
                one()
            except NotImplementedError as error:
                begin = f"windtunnel: {name} cannot be emulated because "
                assert str(error) == begin + names.REFUSED[name], str(error)
            else:
                raise AssertionError(f"{name} is not refused")


def case_attention_is_asked_of_what_chooses_it():
    assert backend.can_use_flash_attention(params) and backend.can_use_efficient_attention(params)
    wide = torch.randn(1, 1, 8, 512, device="cuda", dtype=torch.bfloat16)
    too_wide = backend.SDPAParams(wide, wide, wide, None, 0.0, False, False)
    assert not backend.can_use_flash_attention(too_wide) and backend.can_use_efficient_attention(too_wide)


if __name__ == "__main__":
    run(globals(), sys.argv[1:])
