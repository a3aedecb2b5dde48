"""What tests of several capabilities of training share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from training.host_helpers import STAYS, script
from windtunnel.training import cleanup
from windtunnel.training.launch import Launched, launch


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Any]:
    begun: list[Launched] = []

    def begin(text: str = STAYS, *arguments: str, **options: Any) -> Launched:
        settings: dict[str, Any] = {"hosts": 2, "preload": (), "folder": tmp_path / "run", "lease": 5.0}
        with (tmp_path / "output").open("wb") as output:
            settings["output"] = output.fileno()
            launched = launch(script(tmp_path, text), arguments, **{**settings, **options})
        begun.append(launched)
        return launched

    yield begin
    for launched in begun:
        launched.close()
        assert cleanup.marked(launched.token) == []
        assert not launched.memory.exists()
