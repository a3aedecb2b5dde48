"""What a restore does not bring back is what the policy's table names, no more and no less.

Each program holds one kind of thing. Those that CRIU can dump stand in one sandbox, which is dumped, killed
and restored; the others each in one of its own. The programs are right undisturbed, and do notice.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conformance.sandbox import kinds
from conformance.sandbox.kinds.__main__ import kinds as programs
from conformance.sandbox.matrix.features import REFUSED
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import Lack, SandboxLimits, SandboxSpec
from windtunnel.agents.sandbox.policy.standing import LOST

pytestmark = [pytest.mark.root, pytest.mark.xdist_group("kinds")]

FOLDER = Path(kinds.__file__).parent
UNDUMPED = tuple(entry.kind for entry in LOST if not entry.fact)
ALONE = ("tcp-half-closed",)
"""Among many others its connection was ended by the restore, which told so; by itself it comes back."""
SPOILS = ("tcp-not-sent",)
"""Where CRIU fails to restore such a connection, none comes back: `test_not_restorable` has it by itself."""
TOGETHER = tuple(name for name in programs() if name not in (*UNDUMPED, *ALONE))
SECONDS = 120.0


@dataclass(frozen=True)
class Tried:
    """What the programs said at first and after the restore, and what the checkpoint lacked."""

    first: dict[str, str]
    then: dict[str, str]
    lacks: tuple[Lack, ...]


def start(host: Any, name: str, chosen: Sequence[str]) -> tuple[Any, dict[str, str]]:
    """A sandbox in which these programs stand, and what they say."""
    box = host.create(SandboxSpec(name, limits=SandboxLimits(pids=None)))
    box.run("mkdir -p /opt/kinds")
    for file in FOLDER.glob("*.py"):
        box.put(f"/opt/kinds/{file.name}", file.read_bytes())
    return box, ask(box, "start", chosen)


def ask(box: Any, order: str, chosen: Sequence[str]) -> dict[str, str]:
    command = f"( cd /opt && exec python3 -B -m kinds {order} /tmp/state {' '.join(chosen)} 2>&1 )"
    lines = [line.split(" ", 1) for line in box.run(command, timeout=SECONDS).text.splitlines()]
    said = {line[0]: line[-1] for line in lines if line[0] in chosen}
    assert said.keys() == set(chosen), lines
    return said


@pytest.fixture(scope="module")
def tried(host: Any) -> Iterator[Tried]:
    box, first = start(host, "kinds", TOGETHER)
    with pytest.raises(IncompleteError) as less:
        box.checkpoint(full=True)
    assert less.value.manifest is not None and less.value.manifest.image is not None
    box.machine().cgroup.kill()
    box.restore(less.value.manifest.id, allow_less=True)
    yield Tried(first, ask(box, "check", TOGETHER), less.value.lacks)
    host.remove(box.name)


def test_every_kind_of_the_table_is_a_program() -> None:
    assert len({entry.kind for entry in LOST}) == len(LOST)
    assert {entry.kind for entry in LOST} <= programs().keys() | set(SPOILS)


def test_what_sandboxes_are_refused_is_known(tried: Tried) -> None:
    for name, said in tried.first.items():
        assert said == "ready" or (name in REFUSED and re.search(REFUSED[name], said)), (name, said)


def test_what_does_not_come_back_is_what_the_table_names(tried: Tried) -> None:
    wrong = {name: said for name, said in tried.then.items() if said != "right" and name not in REFUSED}
    lost = {entry.kind for entry in LOST if entry.fact and entry.kind not in SPOILS}
    assert {name: said for name, said in wrong.items() if name not in lost} == {}
    assert lost - wrong.keys() == set(), "CRIU brings them back: they are to leave the table"


@pytest.mark.parametrize("kind", [entry.kind for entry in LOST if entry.fact and entry.kind not in SPOILS])
def test_it_is_told_at_the_checkpoint(tried: Tried, kind: str) -> None:
    (lost,) = (entry for entry in LOST if entry.kind == kind)
    assert any(lack.kind == lost.lack and lost.why in lack.why for lack in tried.lacks), tried.lacks


@pytest.mark.parametrize("kind", ALONE)
def test_what_stands_alone_comes_back(host: Any, kind: str) -> None:
    box, said = start(host, f"one-{kind}", [kind])
    assert said == {kind: "ready"}
    checkpoint = box.checkpoint(full=True)
    box.machine().cgroup.kill()
    box.restore(checkpoint.id)
    assert ask(box, "check", [kind]) == {kind: "right"}
    host.remove(box.name)


@pytest.mark.parametrize("kind", UNDUMPED)
def test_what_is_not_dumped_is_told_and_goes_on(host: Any, kind: str) -> None:
    box, said = start(host, f"one-{kind}", [kind])
    assert said == {kind: "ready"}
    with pytest.raises(IncompleteError, match=f"{kind} .process") as less:
        box.checkpoint(full=True)
    assert less.value.manifest is not None and less.value.manifest.image is None
    assert ask(box, "check", [kind]) == {kind: "right"}
    host.remove(box.name)


def asked(order: str, state: Path, *names: str) -> tuple[int, dict[str, str]]:
    """Exit status, and what each program says."""
    done = subprocess.run(
        [sys.executable, "-m", "kinds", order, str(state), *names],
        cwd=FOLDER.parent,
        capture_output=True,
        text=True,
    )
    assert not done.stderr, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    return done.returncode, said


def test_every_program_says_in_words_what_it_is_about() -> None:
    bodies = programs()
    assert len(bodies) > 100 and all((body.__doc__ or "").strip().endswith(".") for body in bodies.values())


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
