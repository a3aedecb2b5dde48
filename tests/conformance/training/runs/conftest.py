"""Undisturbed runs to compare with, each made once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from runs_helpers import undisturbed


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def sharded(shared: Any) -> dict[str, Any]:
    return undisturbed(shared, "fsdp")


@pytest.fixture(scope="session")
def replicated(shared: Any) -> dict[str, Any]:
    return undisturbed(shared, "ddp", hosts=2, per_host=2)
