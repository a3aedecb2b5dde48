"""The comparison's own arithmetic, and its behaviour when a part fails; what it measures is not tested."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.emulate import mpt
from benchmarks.training.emulate.jobs import peak_bytes
from benchmarks.training.emulate.speed import LargeJob, emulate_in_process
from windtunnel.training.emulate.graph import EVENT, EventKind, Operator, Slice


def slice_of(rows: list[tuple[EventKind, int, int]], steady: tuple[int, int]) -> Slice:
    events = np.zeros(len(rows), EVENT)
    for place, (kind, ref, value) in enumerate(rows):
        events[place]["kind"], events[place]["ref"], events[place]["value"] = kind, ref, value
    return Slice(
        0, 1, "cpu", [Operator("aten.mm.default", (), ())], [], [], [], events, [(0, steady[0]), steady], [""]
    )


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), min_size=2, max_size=40), st.data())
def test_peak_bytes_against_counting(program: list[tuple[bool, int]], data: st.DataObject) -> None:
    rows: list[tuple[EventKind, int, int]] = []
    alive: dict[int, int] = {}
    held = []
    for number, (born, size) in enumerate(program):
        if born or not alive:
            alive[number] = size
            rows.append((EventKind.ALLOC, number, size))
        else:
            gone = sorted(alive)[size % len(alive)]
            del alive[gone]
            rows.append((EventKind.FREE, gone, 0))
        held.append(sum(alive.values()))
    begin = data.draw(st.integers(1, len(rows) - 1))
    # What is held when the step begins counts, as it does in a real step.
    assert peak_bytes(slice_of(rows, (begin, len(rows)))) == max(held[begin - 1 :])


# llm-foundry, scripts/train/benchmarking/README.md: its tables' counts of parameters by model and sequence.
MPT_PARAMETERS = {
    ("125m", 2048): 125_311_488, ("350m", 2048): 355_985_408, ("760m", 2048): 760_470_528,
    ("3b", 2048): 2_651_837_440,
    ("1b", 2048): 1_315_950_592, ("7b", 2048): 6_658_859_008, ("7b", 65536): 6_918_905_856,
    ("13b", 2048): 12_853_954_560, ("30b", 2048): 29_975_214_080, ("70b", 2048): 64_862_437_376,
}  # fmt: skip


@pytest.mark.parametrize(("size", "sequence"), MPT_PARAMETERS)
def test_mpt_has_the_parameters_that_its_table_counts(size: str, sequence: int) -> None:
    with torch.device("meta"):
        model = mpt.Model(mpt.SIZES[size], sequence)
    assert sum(parameter.numel() for parameter in model.parameters()) == MPT_PARAMETERS[size, sequence]


@pytest.mark.conformance
@pytest.mark.slow
def test_mpt_is_emulated_as_its_row_says() -> None:
    arguments = "--size debug --seq 256 --batch 2 --accumulate 3 --ac full --sharding SHARD_GRAD_OP"
    job = LargeJob("MPT", "h100-sxm:1x2", arguments, program=Path(mpt.__file__))
    _, summary = emulate_in_process(job)
    assert summary["tokens_per_iteration"] == 2 * 3 * 2 * 256
    assert summary["hardware_flops_per_iteration"] > summary["model_flops_per_iteration"]
