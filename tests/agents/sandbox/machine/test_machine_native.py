"""The init that is shipped is that of its source."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.live.machine import launch, native
from windtunnel.base.errors import UserError


@pytest.mark.skipif(platform.machine() != "x86_64", reason="shipped for x86-64")
def test_the_shipped_program_is_built_from_the_source_beside_it() -> None:
    assert (native.SOURCE / native.file_name()).exists(), (
        "rebuild: python -m windtunnel.agents.sandbox.live.machine.native"
    )
    assert native.locate().parent == native.SOURCE


def test_it_is_built_where_none_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    native.build(tmp_path / "init")
    assert subprocess.run([str(tmp_path / "init")]).returncode == 2
    assert not list(tmp_path.glob("*.part"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="no C compiler"):
        native.build(tmp_path / "init")


def test_both_lists_of_masked_files_are_the_same() -> None:
    source = (native.SOURCE / "launch.h").read_text()
    listed = source.split("masked[] = {")[1].split("}")[0]
    found = {word.strip().strip('"').removeprefix("/proc/") for word in listed.split(",")}
    assert found == set(launch.MASKED)
