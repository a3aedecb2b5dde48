"""What a checkpoint or a restore lacks, as the command line tells it: by its exit status and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.preloaded import SANDBOX, run
from windtunnel.agents.sandbox.client import connect
from windtunnel.agents.sandbox.context import SandboxLog
from windtunnel.agents.sandbox.errors import LessError
from windtunnel.agents.sandbox.model import Lack, SandboxSpec, TurnClass

pytestmark = pytest.mark.root
MAIN = "import sys; from windtunnel.cli.main import main; main()"
REFUSED = (
    "head -c 65M /dev/zero > /workspace/big; sleep 4321 < /workspace/big >/dev/null 2>&1 & "
    "until grep -q sleep /proc/$!/comm; do :; done; rm /workspace/big; cd /tmp; X=5"
)
"""Leaves a process that CRIU refuses: it holds a deleted file of more than an image takes."""
Cli = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def cli(own_home: Path) -> Iterator[Cli]:
    """``windtunnel sandbox``: its exit status, its JSON (None where it printed none), and what it said."""

    def call(*words: str) -> tuple[int, Any, str]:
        done = run(["-c", MAIN, "sandbox", "--home", own_home, *words], modules=SANDBOX)
        printed = json.loads(done.stdout) if done.stdout.startswith((b"{", b"[")) else None
        return done.returncode, printed, done.stderr.decode()

    with connect(own_home) as client:
        client.create(SandboxSpec("a", services={"web": "sleep 98765"}))
        yield call
        client.down()


def test_a_process_that_criu_refuses(own_home: Path, cli: Cli) -> None:
    status, _, said = cli("exec", "a", "--", REFUSED)
    assert status == 3 and "sleep 4321" in said and "deleted file /workspace/big" in said, said
    _, log, _ = cli("log", "a", "--json")
    (turn,) = log["turns"]
    assert (turn["wanted"], turn["turn_class"]) == ("full", "files")
    (lack,) = turn["lacks"]
    assert lack["kind"] == "processes" and "sleep 4321" in lack["what"] and "deleted file" in lack["why"]

    status, kept, _ = cli("checkpoint", "a", "--json")
    assert (status, kept["wanted"], kept["turn_class"], kept["lacks"]) == (3, "full", "files", [lack])
    assert kept["kept"] == ["files", "state of shell main"] and kept["image"] is None

    # it is known beforehand what would lack: nothing is touched
    status, back, _ = cli("restore", "a", "--json")
    assert (status, back["lacks"], back["restored"]) == (3, [lack], [])
    _, (box,), _ = cli("ls", "--json")
    assert box["status"] == "running" and "sleep 4321" in box["processes"]
    assert cli("stop", "a")[0] == 0
    assert cli("restore", "a")[0] == cli("fork", kept["id"], "--name", "f")[0] == 3
    _, (box,), _ = cli("ls", "--json")
    assert box["status"] == "stopped", "and no fork is left"

    status, back, _ = cli("restore", "a", "--allow-less", "--json")
    assert (status, back["lacks"]) == (0, [lack])
    assert back["restored"] == [
        "files",
        "state of shell main",
        "service web, started anew without its memory",
    ]
    status, forks, _ = cli("fork", kept["id"], "--name", "f", "--allow-less", "--json")
    assert (status, forks[0]["lacks"]) == (0, [lack])
    with connect(own_home) as client:
        assert client.get("f").run("pwd; echo $X").stdout == b"/tmp\n5\n"
    # what lacked is gone; what stands now is kept whole
    status, kept, _ = cli("checkpoint", "a", "--json")
    assert (status, kept["turn_class"], kept["lacks"]) == (0, "full", [])


def test_a_sandbox_that_allows_less_is_told_all_the_same(cli: Cli) -> None:
    assert cli("create", "b", "--allow-less")[0] == 0
    status, _, said = cli("exec", "b", "--", REFUSED)
    assert status == 0 and "not kept: sleep 4321" in said, said
    status, saved, _ = cli("notice", "30", "--json")
    assert (status, saved["a"]["lacks"], len(saved["b"]["lacks"])) == (0, [], 1)
    cli("exec", "a", "--", REFUSED)
    status, saved, _ = cli("notice", "30", "--json")
    assert (status, saved["a"]["less"], saved["b"]["less"]) == (3, True, False)


def test_a_sentence_with_its_details_names_each_lack_once(tmp_path: Path) -> None:
    lacks = [Lack("processes", f"program {number}", "it is watched") for number in range(3)]
    log = SandboxLog("", "semantic", tmp_path, lambda event: None)
    with pytest.raises(LessError) as error:
        log.hold("the checkpoint", lacks, wanted=TurnClass.FULL, kept=TurnClass.FILES)
    said = f"{error.value.details} {error.value}"
    assert [said.count(one.what) for one in lacks] == [1, 1, 1]
