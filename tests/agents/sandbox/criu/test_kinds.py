"""Programs that notice what a restore did not bring back: undisturbed they are right, and they do notice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.live.criu import kinds
from windtunnel.agents.sandbox.live.criu.kinds.__main__ import kinds as programs

pytestmark = pytest.mark.root


def asked(order: str, state: Path, *names: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what each program says."""
    done = subprocess.run(
        [sys.executable, "-m", "kinds", order, str(state), *names],
        cwd=Path(kinds.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return done.returncode, said


def test_every_program_says_in_words_what_it_is_about() -> None:
    found = programs()
    assert len(found) > 100 and all((body.__doc__ or "").strip().endswith(".") for body in found.values())


def test_programs_answer_once_and_name_what_is_not_as_it_was(tmp_path: Path) -> None:
    names = ("pipe", "flock", "umask", "unnamed-file")
    assert asked("start", tmp_path, *names) == (0, dict.fromkeys(names, "ready"))
    # somebody takes away what the pipe held: from now on it is not as it was
    pid = int((tmp_path / "pipe.pid").read_text())
    held = next(
        number
        for number in sorted(os.listdir(f"/proc/{pid}/fd"), key=int)
        if os.readlink(f"/proc/{pid}/fd/{number}").startswith("pipe:")
    )
    with open(f"/proc/{pid}/fd/{held}", "rb") as pipe:
        pipe.read1(7)
    os.kill(int((tmp_path / "umask.pid").read_text()), 9)
    status, said = asked("check", tmp_path, *names)
    assert status == 1
    assert said["flock"] == said["unnamed-file"] == "right"
    assert said["pipe"].startswith("wrong: content:") and said["umask"].startswith("wrong: it ended")
    assert asked("check", tmp_path, "flock", "pipe") == (1, {name: said[name] for name in ("flock", "pipe")})


def test_what_the_kernel_refuses_is_told_apart(tmp_path: Path) -> None:
    status, said = asked("start", tmp_path, "huge-pages", "umask")
    if "refused" not in said["huge-pages"]:
        pytest.skip("this host has huge pages")
    assert status == 77 and said["umask"] == "ready"
    assert asked("check", tmp_path, "huge-pages", "umask") == (77, {**said, "umask": "right"})
