"""A DDP job captured on the CPU with pretended peers, against the same job for real."""

import json
from collections import Counter
from pathlib import Path

import pytest
from capturing import capture

from benchmarks.training.emulate.jobs import peak_bytes
from support.ranks import run_ranks
from windtunnel.training.emulate.graph import EventKind, Slice

SCRIPT = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layers = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(4)])
model = DistributedDataParallel(layers, bucket_cap_mb=0.05)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(6):
    optimizer.zero_grad()
    x = torch.arange(8 * 96).view(8, 96) + step * dist.get_rank()
    model(x.float()).pow(2).mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
"""
WEIGHTS = 4 * (96 * 96 + 96) * 4  # bytes


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "job.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def slices(script: Path) -> list[Slice]:
    return capture(str(script), ranks=(0, 1), cluster="cpu:1x2")


def steady(slice_: Slice) -> list[tuple[EventKind, int, int]]:
    begin, end = slice_.steady
    rows = slice_.events[begin:end]
    return [(EventKind(int(row["kind"])), int(row["ref"]), int(row["value"])) for row in rows]


def test_ddp_reduces_every_gradient_and_waits_before_the_optimiser(slices: list[Slice]) -> None:
    slice_ = slices[0]
    events = steady(slice_)
    calls = [
        (place, ref, handle)
        for place, (kind, ref, handle) in enumerate(events)
        if kind == EventKind.COLLECTIVE
    ]
    assert sum(slice_.collectives[ref].in_bytes for _, ref, _ in calls) == WEIGHTS
    assert len(calls) > 1  # in several buckets
    names = [slice_.operators[ref].name if kind == EventKind.OP else "" for kind, ref, _ in events]
    update = names.index("aten._fused_adamw_.default")
    last_product = max(place for place, name in enumerate(names) if name == "aten.mm.default")
    for place, _, handle in calls:
        waits = [
            at
            for at, (kind, ref, value) in enumerate(events)
            if kind == EventKind.SYNC and (ref, value) == (-3, handle)
        ]
        assert place < waits[0] < update
        assert waits[0] > last_product  # reductions overlap with the backward pass until its end


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_memory_of_the_real_run_is_equal_to_the_byte(script: Path, tmp_path: Path, world: int) -> None:
    emulated = peak_bytes(capture(str(script), cluster=f"cpu:1x{world}", jobs=1)[0])
    tracked = ["-m", "benchmarks.training.emulate.tracked", "memory", tmp_path, script]
    done = run_ranks(tracked, world)
    assert done.returncode == 0, done.stderr
    for rank in range(world):
        peaks = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(peaks) == 6
        # Buckets are rebuilt in the second step; a thread of gloo may hold a buffer a moment longer.
        assert Counter(peaks[2:]).most_common(1)[0][0] == emulated
