"""What is compiled from source of ours: found by its digest, built once, never half."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.base import native
from windtunnel.base.errors import UserError


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "windtunnel"


def test_a_digest_is_of_content_and_flags(tmp_path: Path) -> None:
    source = tmp_path / "a.c"
    source.write_text("int main;")
    first = native.digest([source])
    assert len(first) == 12
    assert native.digest([source], "-O2") != first
    source.write_text("int main; ")
    assert native.digest([source]) != first


def test_what_is_shipped_comes_before_the_cache_and_the_cache_before_a_build(
    cache: Path, tmp_path: Path
) -> None:
    builds = []

    def build(target: Path) -> None:
        builds.append(target)
        target.write_text("built")

    assert native.located(tmp_path, "tool-1", build) == cache / "tool-1"
    assert native.located(tmp_path, "tool-1", build) == cache / "tool-1"
    assert len(builds) == 1 and builds[0] != cache / "tool-1", "it is built under another name"
    (tmp_path / "tool-1").write_text("shipped")
    assert native.located(tmp_path, "tool-1", build) == tmp_path / "tool-1"


def test_a_build_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    def build(target: Path) -> None:
        target.write_text("half")
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        native.located(tmp_path, "tool-1", build)
    assert list(cache.iterdir()) == []


def test_what_is_rebuilt_replaces_what_belonged_to_an_older_source(tmp_path: Path) -> None:
    (tmp_path / "tool-1").write_text("old")
    native.rebuilt(tmp_path, "tool-2", "tool-*", lambda target: target.write_text("new") and None)
    assert [path.name for path in tmp_path.iterdir()] == ["tool-2"]


def test_a_missing_compiler_and_its_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match="install one"):
        native.compiler("CC", "gcc", "no-other-compiler", "there is none: install one")
    with pytest.raises(UserError, match="building the tool failed: wrong"):
        native.compiled(["sh", "-c", "echo wrong >&2; exit 1"], "the tool")
