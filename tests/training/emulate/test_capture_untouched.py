"""Large host tensors take no memory until something looks at them, and then they hold what they should."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from capturing import SCRIPTS, session

from windtunnel.training.emulate.live.session import Session

NAMES = re.findall(r"^def case_(\w+)", (SCRIPTS / "untouched.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def untouched() -> Iterator[Session]:
    with session("untouched.py") as one:
        yield one


@pytest.mark.parametrize("name", NAMES)
def test_who_looks_finds_what_was_put_there(untouched: Session, name: str) -> None:
    untouched.capture([NAMES.index(name)])  # raises with the line of the assertion that does not hold
