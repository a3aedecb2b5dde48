"""Values on the device that the host can know: what came from it, what follows, and declared routing. Large
host tensors take no memory until something looks at them, and then they hold what they should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from capturing import cases, session

from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.live.session import Session

NAMES, UNTOUCHED = cases("known.py"), cases("untouched.py")
DECLARED = {name for name in NAMES if "chosen" in name}


@pytest.fixture(scope="module")
def knowing() -> Iterator[Session]:
    with session("known.py", cluster="h100-sxm:2x8") as capture_session:
        yield capture_session


def slice_of(knowing: Session, name: str) -> Slice:
    return knowing.capture([NAMES.index(name)])[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_host_reads_what_is_there(knowing: Session, name: str) -> None:
    slice_ = slice_of(knowing, name)  # raises with the line of the assertion that does not hold
    declared = [note.text for note in slice_.notes if "balanced routing is declared" in note.text]
    assert len(declared) == (name in DECLARED), "said where it was read, once"


def test_a_result_as_large_as_its_values_say_makes_the_host_wait(knowing: Session) -> None:
    slice_ = slice_of(knowing, "sizes_that_depend_on_what_is_chosen")
    ops = [i for i, e in enumerate(slice_.events) if e["kind"] == EventKind.OP]
    sized = [i for i in ops if slice_.operators[slice_.events[i]["ref"]].name == "aten.nonzero.default"]
    assert len(sized) == 1 + 8 + 1, "the experts that are hit, the tokens of each, and one mask"
    assert all(slice_.events[i + 1]["kind"] == EventKind.SYNC for i in sized)


@pytest.fixture(scope="module")
def untouched() -> Iterator[Session]:
    with session("untouched.py") as capture_session:
        yield capture_session


@pytest.mark.parametrize("name", UNTOUCHED)
def test_who_looks_finds_what_was_put_there(untouched: Session, name: str) -> None:
    untouched.capture([UNTOUCHED.index(name)])
