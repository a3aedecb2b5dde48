"""Allocator settings: the same strings are accepted and refused as by PyTorch itself."""

import pytest

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

ACCEPTED = [
    "",
    "expandable_segments:True",
    "expandable_segments:False, max_split_size_mb:128",
    "max_split_size_mb:20",
    "pinned_use_background_threads:True",
]
REFUSED = [
    "expandable_segments:true",
    "expandable_segments",
    "max_split_size_mb:19",
    "max_split_size_mb:lots",
    "max_split_size_mb",
]


def torch_accepts(text: str) -> bool:
    torch = pytest.importorskip("torch")
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError):
        return False
    finally:
        torch._C._accelerator_setAllocatorSettings("")
    return True


@pytest.mark.parametrize("text", ACCEPTED)
def test_accepted_as_by_pytorch(text):
    AllocatorConfig.parse(text)
    assert torch_accepts(text)


@pytest.mark.parametrize("text", REFUSED)
def test_refused_as_by_pytorch(text):
    with pytest.raises(UserError) as refused:
        AllocatorConfig.parse(text)
    assert str(refused.value).startswith("PYTORCH_CUDA_ALLOC_CONF: ")
    assert any(key in str(refused.value) for key in text.replace(":", ",").split(","))
    assert not torch_accepts(text)


@pytest.mark.parametrize(
    "text",
    [
        "max_split_mb:30", "backend:cudaMallocAsync", "per_process_memory_fraction:0.5", "[", "a:b:c",
        "garbage_collection_threshold:0.8", "roundup_power2_divisions:[256:1,512:2]",
        "max_non_split_rounding_mb:64", "large_segment_size_mb:40",
    ],
)  # fmt: skip
def test_what_is_not_emulated_is_refused(text):
    with pytest.raises(UserError, match="PYTORCH_CUDA_ALLOC_CONF"):
        AllocatorConfig.parse(text)
