"""Allocator settings: the same strings are accepted and refused as by PyTorch itself."""

import pytest

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

ACCEPTED = [
    "",
    "expandable_segments:True",
    "expandable_segments:False, max_split_size_mb:128",
    "garbage_collection_threshold:0.8,max_split_size_mb:20",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[64:0,>:8],expandable_segments:True",
    "large_segment_size_mb:40,max_split_size_mb:40",
    "max_non_split_rounding_mb:64",
    "pinned_use_background_threads:True",
]
REFUSED = [
    "expandable_segments:true",
    "expandable_segments",
    "max_split_size_mb:19",
    "max_split_size_mb:lots",
    "large_segment_size_mb:10",
    "large_segment_size_mb:40,max_split_size_mb:30",
    "max_non_split_rounding_mb:3",
    "garbage_collection_threshold:0",
    "garbage_collection_threshold:1.0",
    "garbage_collection_threshold:high",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[3:2]",
    "roundup_power2_divisions:[256:3]",
    "roundup_power2_divisions:[64:8",
    "max_split_size_mb",
    "max_split_size_mb:20,large_segment_size_mb:25",
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
    "text", ["max_split_mb:30", "backend:cudaMallocAsync", "per_process_memory_fraction:1.1", "[", "a:b:c"]
)
def test_what_is_not_emulated_is_refused(text):
    with pytest.raises(UserError, match="PYTORCH_CUDA_ALLOC_CONF"):
        AllocatorConfig.parse(text)


def test_cached_memory_is_collected_only_below_a_limit():
    """``c10/cuda/CUDACachingAllocator.cpp``: only where ``allowed_memory_maximum`` has a value."""
    assert not AllocatorConfig.parse("garbage_collection_threshold:0.8").collects
    assert not AllocatorConfig.parse(
        "garbage_collection_threshold:0.8,per_process_memory_fraction:1.0"
    ).collects
    assert not AllocatorConfig.parse("per_process_memory_fraction:0.5").collects
    assert AllocatorConfig.parse("garbage_collection_threshold:0.8,per_process_memory_fraction:0.5").collects


def test_sizes_that_are_not_named_are_not_rounded():
    """The second string of PyTorch's allocator_config_test: 1,024 MiB is left out."""
    config = AllocatorConfig.parse("roundup_power2_divisions:[128:8,256:16,512:1,2048:8,>:2]")
    assert config.roundup_power2_divisions[6:] == (8, 8, 16, 1, 0, 8, 2, 2, 2, 2)
