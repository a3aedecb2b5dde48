"""Captures start from a process that has torch imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import quick


@pytest.fixture(autouse=True, scope="session")
def quick_captures() -> Iterator[None]:
    with quick.captures():
        yield
