"""Every name of `names`: the real and the stood in for are called and answer, the refused raise their
sentence."""

import os
import warnings

import torch
import torch.cuda.amp.common
import torch.cuda.comm
import torch.cuda.gds
import torch.cuda.green_contexts
from real_names import real

from windtunnel.training.emulate.live import names

warnings.filterwarnings("ignore")
LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
cuda, accelerator, backend = torch.cuda, torch.accelerator, torch.backends.cuda
x = torch.ones(4, device="cuda")
q = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
params = backend.SDPAParams(q, q, q, None, 0.0, True, False)
state = cuda.get_rng_state()
GIVEN = {
    "torch.cuda": {
        "CudaError": (2,), "StreamContext": (cuda.Stream(),), "set_stream": (cuda.default_stream(),),
        "stream": (None,), "_set_stream_by_id": (0, LOCAL, 1), "_lazy_call": (lambda: None,),
        "_sleep": (1000,), "can_device_access_peer": (0, 1), "check_error": (0,), "device": (LOCAL,),
        "device_of": (x,),
        "get_device_properties": (0,), "set_device": (f"cuda:{LOCAL}",), "set_sync_debug_mode": ("warn",),
        "manual_seed": (1,), "manual_seed_all": (1,), "set_rng_state": (state,),
        "set_rng_state_all": ([state] * 8,),
        "set_per_process_memory_fraction": (0.5,), "_POOL_HANDLE": ((0, 1),),
        "cudaStatus": None, "default_generators": None,
    },
    "torch.cuda.memory": {"_record_memory_history": (None,), "_dump_snapshot": (os.devnull,)},
    "torch.cuda._utils": {"_get_device_index": ("cuda:2",)},
    "torch.cuda.amp": {"custom_fwd": (lambda ctx, a: a,), "custom_bwd": (lambda ctx, a: a,)},
    "torch.cuda.nccl": {"is_available": ([x],)},
    "torch.cuda.nvtx": {"mark": ("a",), "range": ("a",), "range_start": ("a",), "range_push": ("a",),
                        "range_end": (1,)},
    "torch.cuda.Event": {"elapsed_time": (cuda.Event(), cuda.Event())},
    "torch.accelerator": {
        "device_index": (LOCAL,), "set_device_idx": (LOCAL,), "set_device_index": (LOCAL,),
        "set_stream": (torch.Stream(device="cuda"),),
    },
    "torch.backends.cuda": {
        "SDPAParams": (q, q, q, None, 0.0, True, False), "cuBLASModule": None, "cuFFTPlanCache": (0,),
        "cuFFTPlanCacheAttrContextProp": (int, int), "allow_fp16_bf16_reduction_math_sdp": (True,),
        "can_use_cudnn_attention": (params,), "can_use_efficient_attention": (params,),
        "can_use_flash_attention": (params,), "enable_cudnn_sdp": (True,), "enable_flash_sdp": (True,),
        "enable_math_sdp": (True,), "enable_mem_efficient_sdp": (True,),
    },
    "torch.backends.cudnn": {"is_acceptable": (x,), "rnn": None},
}  # fmt: skip
"""What those that take something are given, by module; None: they are there, and are not called."""
TYPES = {"is_": bool, "has_": bool, "current_device": int, "device_count": int, "memory_allocated": int,
         "memory_reserved": int, "max_memory": int, "memory_stats": dict, "initial_seed": int,
         "mem_get_info": tuple, "get_device_name": str, "get_arch_list": list}  # fmt: skip
"""What answers whose names begin so are of."""


def case_all_that_answer():
    for name in [*real(), *names.STOOD_IN]:
        module, _, last = name.rpartition(".")
        holder, attribute = names.find(name)
        member = getattr(holder, attribute)
        given = GIVEN.get(module, {}).get(last, ())
        try:
            answer = member(*given) if callable(member) and given is not None else member
            if hasattr(answer, "__enter__"):
                with answer:
                    pass
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        wanted = next((kind for begin, kind in TYPES.items() if last.startswith(begin)), object)
        assert isinstance(answer, wanted), f"{name} answers {answer!r}"


def case_all_that_are_refused():
    for name in names.REFUSED:
        place = names.find(name)
        if place is None:
            continue  # of a later PyTorch
        refused = getattr(*place)
        callables = [refused]
        if isinstance(refused, type):
            assert not isinstance(x, refused | int)  # as in an annotation
            callables.append(type("Own", (refused,), {}))
        for call in callables:
            try:
                call()
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
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
