"""What tests of several capabilities of training share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import quick
from training.host_helpers import go as go  # a fixture


@pytest.fixture(scope="module")
def quick_launch() -> Iterator[None]:
    with quick.launches():
        yield
