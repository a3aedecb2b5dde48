"""Setup: a source that is known by its digest, and that nothing half done stays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.criu import Criu, program
from windtunnel.agents.sandbox.criu.program import find_criu, setup
from windtunnel.agents.sandbox.errors import CriuError

TARBALL = b"the source"
SAYS = f"#!/bin/sh\necho Version: 4.2.1; echo GitID: {program.build_id()}\n"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a mirror's pool that setup looks for."""
    pool = tmp_path / "mirror" / "pool/main/c/criu"
    pool.mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(
        program, "list_mirrors", lambda: [f"file://{tmp_path}/none/", f"file://{tmp_path}/mirror/"]
    )
    monkeypatch.setattr(program, "SNAPSHOT", f"file://{tmp_path}/archive")
    monkeypatch.setattr(program, "SHA256", hashlib.sha256(TARBALL).hexdigest())
    return pool / program.TARBALL


def test_the_source_is_the_one_that_is_known(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    mirror.write_bytes(TARBALL)
    assert program.fetch_source(work, print).read_bytes() == TARBALL
    mirror.write_bytes(b"another")
    notes: list[str] = []
    (tmp_path / "archive").write_bytes(TARBALL)
    assert program.fetch_source(work, notes.append).read_bytes() == TARBALL
    assert len(notes) == 1 and "another" in notes[0]
    (tmp_path / "archive").unlink()
    with pytest.raises(CriuError, match=r"mirror of Debian .*0001-compel.* WINDTUNNEL_CRIU"):
        program.fetch_source(work, print)


def fake_build(text: str) -> Callable[..., Path]:
    def build(work: Path, progress: program.Progress) -> Path:
        built = work / "criu"
        built.write_text(text)
        built.chmod(0o755)
        return built

    return build


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_install_packages", lambda progress: None)
    monkeypatch.setattr(program, "default_prefix", lambda: tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    old = tmp_path / "bin" / "criu"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho Version: 3.17\n")
    old.chmod(0o755)
    (tmp_path / ".work-stale").mkdir()
    before = old.read_text()
    for text, why in (
        ("#!/bin/sh\necho Version: 4.2.1\n", "is not build windtunnel-"),
        (SAYS, "does not work here"),
    ):
        monkeypatch.setattr(program, "build", fake_build(text))
        with pytest.raises(CriuError, match=why):
            setup()
        assert old.read_text() == before
        assert sorted(file.name for file in tmp_path.rglob("*")) == [".lock", "bin", "criu"]


def test_a_good_one_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_install_packages", lambda progress: None)
    monkeypatch.setattr(program, "default_prefix", lambda: tmp_path)
    monkeypatch.setattr(program, "trial", lambda criu: "")
    monkeypatch.setattr(program, "build", fake_build(SAYS))
    installed = setup()
    assert installed == Criu(tmp_path / "bin" / "criu", (4, 2, 1), patched=True)
    monkeypatch.setattr(program, "build", None)
    assert setup() == installed


@pytest.mark.root
def test_the_trial_tells_a_working_criu_from_a_broken_one(tmp_path: Path) -> None:
    criu = find_criu()
    if criu is None or os.geteuid() != 0:
        pytest.skip("needs root, and CRIU: windtunnel sandbox setup")
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert program.trial(criu) == ""
    assert "CRIU failed" in program.trial(Criu(broken, (4, 2, 1)))
