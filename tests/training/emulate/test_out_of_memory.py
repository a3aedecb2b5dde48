"""Out of memory: what the memory was for, and who holds the rest, whatever asks for too much."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from capturing import cases, session

from windtunnel.training.emulate.graph import Category, Slice
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig
from windtunnel.training.emulate.twin.memory.profile import OutOfMemory, emulate_memory

GIB = 1 << 30
NAMES = cases("needy.py")
SAID = {
    "line": (r"needy\.py:\d+ in case_line", 100),
    "parameter": (r"parameter weight", 90),
    "forward": (r"1", 90),
    "backward": (r"backward of 1", 30),
    "gradient": (r"gradient of 0\.weight", 50),
    "optimizer": (r"optimizer state of 0\.weight", 30),
    "loss": (r"needy\.py:\d+ in too_much", 90),
}


@pytest.fixture(scope="module")
def slices() -> Iterator[dict[str, Slice]]:
    with session("needy.py", cluster="h100-sxm:1x8") as capture_session:
        yield dict(zip(NAMES, capture_session.capture(range(len(NAMES))), strict=True))


def refused(slice_: Slice) -> OutOfMemory:
    oom = emulate_memory(slice_, AllocatorConfig(), 79.5 * GIB).oom
    assert oom is not None
    return oom


@pytest.mark.parametrize("name", NAMES)
def test_what_it_is_for_is_named(slices: dict[str, Slice], name: str) -> None:
    scope, size = SAID[name]
    oom = refused(slices[name])
    assert re.fullmatch(scope, oom.scope), oom.scope
    assert oom.requested_bytes == size * GIB


def test_what_is_held_is_that_without_the_refused_block(slices: dict[str, Slice]) -> None:
    oom = refused(slices["optimizer"])
    assert [(block.scope, block.bytes) for block in oom.held[:2]] == [
        ("parameters", 30 * GIB),
        ("0", 30 * GIB),
    ]
    assert oom.by_category[Category.PARAMETER] == oom.by_category[Category.GRADIENT] == 30 * GIB
    assert oom.by_category[Category.OPTIMIZER] < GIB
    assert sum(oom.by_category.values()) == oom.allocated_bytes
