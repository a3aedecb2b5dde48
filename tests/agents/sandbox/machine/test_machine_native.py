"""What is shipped compiled is that of its source."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from windtunnel.agents.sandbox import criu as sandbox_criu
from windtunnel.agents.sandbox.machine import walls
from windtunnel.base.errors import UserError

BUILDS = {build.what: build for build in (walls.PROGRAM, sandbox_criu.STEPS)}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="shipped for x86-64")
@pytest.mark.parametrize("what", BUILDS)
def test_what_is_shipped_is_built_from_the_source_beside_it(what: str) -> None:
    build = BUILDS[what]
    assert (build.folder / build.file_name()).exists(), "rebuild: make native"
    assert build.locate().parent == build.folder


def test_it_is_built_where_none_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    walls.PROGRAM.build(tmp_path / "init")
    assert subprocess.run([str(tmp_path / "init")]).returncode == 2
    assert not list(tmp_path.glob("*.part"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for build in BUILDS.values():
        with pytest.raises(UserError, match=f"no {build.what} .* no C compiler"):
            build.build(tmp_path / "again")
