"""Setup: a source that is known by its digest, and that nothing half done stays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.criu import Criu, install, setup
from windtunnel.agents.sandbox.criu.find import known_trial
from windtunnel.agents.sandbox.errors import CriuError

TARBALL = b"the source"


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a mirror's pool that setup looks for."""
    pool = tmp_path / "mirror" / "pool/main/c/criu"
    pool.mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(
        install, "mirrors", lambda: [f"file://{tmp_path}/none/", f"file://{tmp_path}/mirror/"]
    )
    monkeypatch.setattr(install, "SHA256", hashlib.sha256(TARBALL).hexdigest())
    return pool / install.TARBALL


def test_the_source_is_the_one_that_is_known(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror.write_bytes(TARBALL)
    assert install.source(tmp_path / "work", print).read_bytes() == TARBALL
    monkeypatch.setattr(install, "newest", lambda work, progress: work / "of-apt")
    mirror.write_bytes(b"another")
    told: list[str] = []
    assert install.source(tmp_path / "work", told.append).name == "of-apt"
    assert len(told) == 1 and "another" in told[0]
    mirror.unlink()
    assert install.source(tmp_path / "work", told.append).name == "of-apt" and len(told) == 1


def test_what_the_mirror_has_no_more_is_asked_of_apt(
    mirror: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def command(words: list[str], folder: Path | None = None) -> str:
        asked.append(words)
        if "source" in words:
            assert folder is not None
            for name in ("criu_9.orig.tar.xz", "criu_9.orig.tar.xz.asc", "criu_9-1.dsc"):
                (folder / name).touch()
        return ""

    monkeypatch.setattr(install, "_command", command)
    assert install.source(tmp_path / "work", print).name == "criu_9.orig.tar.xz"
    assert [words[-1] for words in asked] == ["update", "criu"]
    assert f"URIs: file://{tmp_path}/none/" in (tmp_path / "work/parts/criu.sources").read_text()
    monkeypatch.setattr(install, "mirrors", list)
    with pytest.raises(CriuError, match=r"no mirror of Debian .* WINDTUNNEL_CRIU"):
        install.source(tmp_path / "work", print)


def fake_build(text: str) -> Callable[..., Path]:
    def build(work: Path, progress: install.Progress) -> Path:
        program = work / "criu"
        program.write_text(text)
        program.chmod(0o755)
        return program

    return build


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_packages", lambda progress: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    old = tmp_path / "bin" / "criu"
    old.parent.mkdir()
    old.write_text("#!/bin/sh\necho Version: 3.17\n")
    old.chmod(0o755)
    (tmp_path / ".work-stale").mkdir()
    before = old.read_text()
    for text, why in (
        ("#!/bin/sh\necho Version: 4.1\n", "version 4.1, 4.2.1 is needed"),
        ("#!/bin/sh\necho Version: 4.2.1\n", "does not work here"),
    ):
        monkeypatch.setattr(install, "build", fake_build(text))
        with pytest.raises(CriuError, match=why):
            setup(tmp_path)
        assert old.read_text() == before
        assert sorted(file.name for file in tmp_path.rglob("*")) == [".lock", "bin", "criu"]


def test_a_good_one_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_packages", lambda progress: None)
    monkeypatch.setattr(install, "trial", lambda criu: "")
    monkeypatch.setattr(install, "build", fake_build("#!/bin/sh\necho Version: 4.2.1\n"))
    made = setup(tmp_path)
    assert made == Criu(tmp_path / "bin" / "criu", (4, 2, 1))
    monkeypatch.setattr(install, "build", None)
    assert setup(tmp_path) == made


def test_what_building_needs_is_named_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(work: Path, progress: install.Progress) -> Path:
        raise CriuError("make did not run")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(install, "build", build)
    with pytest.raises(CriuError, match=r"make did not run; building it needs .* libnet1-dev"):
        setup(tmp_path)


def test_a_trial_is_asked_once_per_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        "windtunnel.agents.sandbox.criu.find.trial", lambda criu: asked.append(criu.path) or "no"
    )
    program = tmp_path / "criu"
    program.touch()
    criu, cache = Criu(program, (4, 2, 1)), tmp_path / "cache" / "trial.json"
    assert [known_trial(criu, cache), known_trial(criu, cache)] == ["no", "no"]
    assert len(asked) == 1
    os.utime(program, (1, 1))
    known_trial(criu, cache)
    cache.write_text("nonsense")
    known_trial(criu, cache)
    assert len(asked) == 3


@pytest.mark.root
def test_the_trial_tells_a_working_criu_from_a_broken_one(criu: Criu, tmp_path: Path) -> None:
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    assert known_trial(criu, tmp_path / "trial.json") == ""
    assert "CRIU failed" in known_trial(Criu(broken, (4, 2, 1)), tmp_path / "trial.json")
