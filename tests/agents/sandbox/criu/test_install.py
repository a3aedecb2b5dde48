"""Setup: the archive's index and its hashes, and that nothing half done stays."""

from __future__ import annotations

import hashlib
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.agents.sandbox.live.criu import Criu, install, setup
from windtunnel.agents.sandbox.live.criu.find import known_trial
from windtunnel.agents.sandbox.live.criu.install import ArchiveError, mirrors, newest
from windtunnel.base.errors import UserError

MIRROR = "http://mirror.invalid/debian"
TARBALL = b"the source"


def index(version: str, content: bytes = TARBALL) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    name = f"criu_{version}.orig.tar.gz"
    return (
        "Package: other\nVersion: 9.9\nDirectory: pool/other\n\n"
        f"Package: criu\nBinary: criu\nVersion: {version}-1\nChecksums-Sha256:\n {digest} 10 {name}\n"
        f" {'0' * 64} 9 {name}.asc\nDirectory: pool/main/c/criu\n\n"
    ).encode()


def mirror(suites: dict[str, bytes], pool: str = "", lie: bool = False) -> Callable[[str], bytes]:
    files = {f"{MIRROR}/pool/main/c/criu/": pool.encode()} if pool else {}
    for suite, text in suites.items():
        packed = lzma.compress(text)
        digest = hashlib.sha256(packed + (b"x" if lie else b"")).hexdigest()
        files[f"{MIRROR}/dists/{suite}/InRelease"] = f"SHA256:\n {digest} 1 main/source/Sources.xz\n".encode()
        files[f"{MIRROR}/dists/{suite}/main/source/Sources.xz"] = packed

    def fetch(url: str) -> bytes:
        if url not in files:
            raise ArchiveError(f"{url} cannot be fetched")
        return files[url]

    return fetch


@pytest.fixture(autouse=True)
def unsigned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "KEYRING", tmp_path / "no-keyring")


def test_mirrors_of_both_formats(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "debian.sources").write_text(
        "Types: deb\n# a remark\nURIs: http://one.invalid/debian\nSuites: bookworm\nComponents: main\n\n"
        "Types: deb\nURIs: http://one.invalid/debian-security\nSuites: x\nComponents: main\n\n"
        "Types: deb\nURIs: http://off.invalid/debian\nSuites: x\nComponents: main\nEnabled: no\n"
    )
    (tmp_path / "sources.list").write_text(
        "deb [arch=amd64 signed-by=/x] https://two.invalid/debian/ sid main contrib\n"
        "# deb http://three.invalid/debian sid main\ndeb http://four.invalid/x stable other\n"
    )
    assert mirrors(tmp_path) == ["http://one.invalid/debian", "https://two.invalid/debian"]


def test_the_first_suite_that_is_new_enough_is_taken_with_its_hash() -> None:
    fetch = mirror({"sid": index("4.1"), "testing": index("4.2.1")})
    source = newest(MIRROR, "criu", (4, 2, 1), fetch)
    assert source.url == f"{MIRROR}/pool/main/c/criu/criu_4.2.1.orig.tar.gz"
    assert "unverified" in source.checked
    assert install.download(source, lambda url: TARBALL) == TARBALL
    with pytest.raises(ArchiveError, match="hash"):
        install.download(source, lambda url: b"another")


def test_an_index_with_another_hash_is_not_used_and_the_pool_is_said_to_be_unverified() -> None:
    pool = '<a href="criu_4.2.1.orig.tar.gz">x</a> <a href="criu_4.10.orig.tar.xz">y</a>'
    source = newest(MIRROR, "criu", (4, 2, 1), mirror({"sid": index("4.3")}, pool, lie=True))
    assert (source.version, source.sha256) == ("4.10", "")
    assert source.checked.startswith("unverified")
    with pytest.raises(ArchiveError, match="no source"):
        newest(MIRROR, "criu", (4, 2, 1), mirror({}, "nothing here"))


def fake_build(text: str) -> Callable[..., Path]:
    def build(work: Path, progress: install.Progress) -> Path:
        program = work / "criu"
        program.write_text(text)
        program.chmod(0o755)
        return program

    return build


def test_a_build_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "missing_packages", lambda: ())
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
            setup(tmp_path, "source")
        assert old.read_text() == before
        assert sorted(file.name for file in tmp_path.rglob("*")) == [".lock", "bin", "criu"]


def test_a_good_one_is_installed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "missing_packages", lambda: ())
    monkeypatch.setattr(install, "trial", lambda criu: "")
    monkeypatch.setattr(install, "build", fake_build("#!/bin/sh\necho Version: 4.2.1\n"))
    made = setup(tmp_path, "source")
    assert made == Criu(tmp_path / "bin" / "criu", (4, 2, 1))
    monkeypatch.setattr(install, "build", None)
    assert setup(tmp_path, "source") == made
    with pytest.raises(UserError, match="auto, source or packages"):
        setup(tmp_path, "magic")  # type: ignore[arg-type]


def test_without_root_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(install, "missing_packages", lambda: ("libnet1-dev",))
    with pytest.raises(CriuError, match=r"as root: apt-get install .* libnet1-dev"):
        setup(tmp_path, "source")


def test_a_trial_is_asked_once_per_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        "windtunnel.agents.sandbox.live.criu.find.trial", lambda criu: asked.append(criu.path) or "no"
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
