"""What tests of several capabilities of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import quick


@pytest.fixture(scope="module")
def quick_launch() -> Iterator[None]:
    with quick.launches():
        yield
