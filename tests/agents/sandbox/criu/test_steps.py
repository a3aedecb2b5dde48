"""The program beside CRIU: its parts that need no CRIU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from windtunnel.agents.sandbox import criu as sandbox_criu

OPTIONS = ("--gzip", "--no-unquote", "--no-wildcards")


def tar(*words: str, folder: Path | None = None, image: Path) -> None:
    """As CRIU calls it: what is packed is standard input, where the image goes standard output."""
    stdin = os.open(folder if folder is not None else image, os.O_RDONLY)
    with open(image if folder is not None else os.devnull, "wb") as out:
        done = subprocess.run(
            ["tar", *words],
            executable=sandbox_criu.STEPS.locate(),
            stdin=stdin,
            stdout=out,
            stderr=subprocess.PIPE,
            env={"WINDTUNNEL_TAR": shutil.which("tar") or "", "PATH": os.environ["PATH"]},
        )
    os.close(stdin)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("full", [False, True], ids=["empty", "with files"])
def test_a_tmpfs_comes_back_as_it_was(full: bool, tmp_path: Path) -> None:
    before, after, image = tmp_path / "before", tmp_path / "after", tmp_path / "image"
    before.mkdir()
    after.mkdir()
    if full:
        (before / "sem.a").write_bytes(b"held")
        (before / "link").symlink_to("sem.a")
    before.chmod(0o1750)
    os.utime(before, ns=(7, 1_700_000_000_123_456_789))
    tar(
        "--create",
        *OPTIONS,
        "--numeric-owner",
        "--directory",
        "/proc/self/fd/0",
        ".",
        folder=before,
        image=image,
    )
    tar("--extract", *OPTIONS, "--directory", str(after), image=image)
    assert sorted(os.listdir(after)) == (["link", "sem.a"] if full else [])
    assert not full or (after / "link").read_bytes() == b"held"
    assert after.stat().st_mode == before.stat().st_mode
    assert after.stat().st_mtime_ns // 10**9 == before.stat().st_mtime_ns // 10**9


def test_what_nobody_wants_any_more_gets_into_no_group(tmp_path: Path) -> None:
    groups = [tmp_path / "first", tmp_path / "second"]
    for group in groups:
        group.touch()
    note = tmp_path / "wanted"
    script, given = sandbox_criu.script(groups, tmp_path, note)

    def act(step: str) -> int:
        return subprocess.run(
            [script], env=given | {"CRTOOLS_SCRIPT_ACTION": step, "CRTOOLS_INIT_PID": "77"}
        ).returncode

    assert act("setup-namespaces") == 1
    assert [group.read_text() for group in groups] == ["", ""]
    note.touch()
    assert act("post-restore") == 0 and [group.read_text() for group in groups] == ["", ""]
    assert act("setup-namespaces") == 0
    assert [group.read_text() for group in groups] == ["77", "77"]
    (tmp_path / "second").unlink()
    assert act("setup-namespaces") == 1


def test_the_kernel_cache_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    shared, work = tmp_path / "shared", tmp_path / "work"
    shared.mkdir()
    work.mkdir()
    monkeypatch.setattr(sandbox_criu, "SHARED_MEMORY", shared)
    monkeypatch.setattr(sandbox_criu, "is_tmpfs", lambda path: path == str(shared))
    for program in ("one", "other"):
        (tmp_path / program).write_text("#!/bin/sh\n> /run/$(basename $0)\n")
        (tmp_path / program).chmod(0o755)
        assert sandbox_criu.run(tmp_path / program, ["check"], work) == 0
    cache = sandbox_criu.kernel_cache()
    assert cache is not None and list(shared.iterdir()) == [cache]
    assert sorted(file.name for file in cache.iterdir()) == ["one", "other"]
    shutil.rmtree(cache)
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    assert sandbox_criu.kernel_cache() is None
    cache.rmdir()
    cache.symlink_to(tmp_path)
    assert sandbox_criu.kernel_cache() is None
    monkeypatch.setattr(sandbox_criu, "is_tmpfs", lambda path: True)
    assert sandbox_criu.kernel_cache() is None
