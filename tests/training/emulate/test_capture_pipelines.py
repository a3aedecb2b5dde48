"""Micro-batches that are not run are written down as if they had been."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from training.emulate.capturing import SCRIPTS
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.live import session
from windtunnel.training.emulate.live.chunks import ALIKE
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script

LLAMA = Path(__file__).parents[3] / "examples" / "train_llama.py"


def captured(
    monkeypatch: pytest.MonkeyPatch, script: Script, cluster: str, ranks: list[int], templates: bool
) -> list[Slice]:
    monkeypatch.setattr(session, "TEMPLATES", templates)
    with Session(script, load_cluster(cluster), jobs=1) as capture_session:
        return [capture_session.capture([rank])[0] for rank in ranks]


def left_out(slice_: Slice) -> bool:
    """Whether not all micro-batches were run."""
    return ALIKE in {note.text for note in slice_.notes}


def differing(slice_: Slice, other: Slice) -> list[str]:
    """What differs between two slices beside their notes."""
    pairs = [(field.name, getattr(slice_, field.name), getattr(other, field.name)) for field in fields(Slice)]
    return [
        name
        for name, a, b in pairs
        if name != "notes" and not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
    ]


def check(
    monkeypatch: pytest.MonkeyPatch, script: Script, cluster: str, ranks: list[int], fewer: bool
) -> None:
    few, all_ = (captured(monkeypatch, script, cluster, ranks, templates) for templates in (True, False))
    assert [left_out(slice_) for slice_ in (*few, *all_)] == [fewer] * len(ranks) + [False] * len(ranks)
    assert [differing(a, b) for a, b in zip(few, all_, strict=True)] == [[]] * len(ranks)


def test_what_is_not_run_is_as_if_it_had_been(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(SCRIPTS / "pipelined.py", ("alike",))
    check(monkeypatch, script, "h100-sxm:1x4", [0, 1, 2], fewer=True)  # the second takes all from the first


@pytest.mark.parametrize("templates", [True, False])
def test_the_steps_of_a_split_backward_pass_are_alike(
    monkeypatch: pytest.MonkeyPatch, templates: bool
) -> None:
    """PyTorch groups its parameters in sets, in the order of addresses."""
    script = Script(SCRIPTS / "zero_bubble.py", ())
    slices = captured(monkeypatch, script, "h100-sxm:1x2", [0, 1], templates)
    assert [len(slice_.steps) for slice_ in slices] == [2, 2]


def test_a_micro_batch_of_other_inputs_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, Script(SCRIPTS / "pipelined.py", ("last",)), "h100-sxm:1x4", [0, 1], fewer=True)


@pytest.mark.parametrize("case", ["counts", "hook", "reads", "gathers", "backward"])
def test_micro_batches_that_may_differ_are_run(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    check(monkeypatch, Script(SCRIPTS / "pipelined.py", (case,)), "h100-sxm:1x4", [0], fewer=False)


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("options", "fewer"),
    [
        ("", True),
        ("--ac full", True),
        ("--ac none --no-loss-parallel", True),
        ("--schedule gpipe", True),
        ("--schedule interleaved1f1b", True),
        ("--grad-accum 2", True),
    ],
)
def test_llama(monkeypatch: pytest.MonkeyPatch, options: str, fewer: bool) -> None:
    words = f"--size debug --tp 4 --pp 2 --microbatches 8 --batch 8 {options}".split()
    check(monkeypatch, Script(LLAMA, tuple(words)), "h100-sxm:4x8", [0, 31], fewer)
