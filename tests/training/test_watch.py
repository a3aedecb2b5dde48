"""The parent of launchers: whom it starts anew, what it prints, with which status it ends. Plain processes
stand for launchers: each does what is written for it, in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import gone, until

CHILDREN = """
import json, os, signal, sys, time
from pathlib import Path
from windtunnel.training import watch
folder, wanted = Path(sys.argv[1]), json.loads(sys.argv[2])
parent = os.getpid()
me = watch.split(wanted["standbys"], wanted.get("run"), again=wanted.get("again", False))
number = 0
while True:  # each launcher has a number
    try: os.close(os.open(folder / f"launcher-{number}", os.O_CREAT | os.O_EXCL)); break
    except FileExistsError: number += 1
(folder / f"is-{number}").write_text(json.dumps([me.run, me.waits, me.host, os.getpid()]))
signal.alarm(60)
for step in wanted["do"][min(number, len(wanted["do"]) - 1)].split():
    if step == "begins": me.begins("the-run")
    elif step == "leads": me.leads()
    elif step == "dies": os.kill(os.getpid(), signal.SIGKILL)
    elif step == "stops": os.kill(os.getpid(), signal.SIGSTOP)
    elif step.startswith("over"):
        (folder / "summary.json").write_text('{"all":\\n "well"}')
        me.over(int(step[4:]), folder / "summary.json")
    elif step.startswith("after"):
        while not (folder / step[5:]).exists(): time.sleep(0.005)
    elif step == "orphan":
        while os.getppid() == parent: time.sleep(0.005)
    else: raise SystemExit(int(step))
"""


def run(folder: Path, *do: str, standbys: tuple[str, ...] = (), **wanted: object) -> subprocess.Popen[str]:
    told = json.dumps({"do": do, "standbys": standbys, **wanted})
    return subprocess.Popen(
        [sys.executable, "-c", CHILDREN, str(folder), told],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def launcher(folder: Path, number: int) -> list[object]:
    found: list[object] = json.loads((folder / f"is-{number}").read_text())
    return found


SUMMARY = '{"all": "well"}\n'


def test_whoever_brings_the_run_to_its_end_the_summary_is_printed_once(tmp_path: Path) -> None:
    """The leader dies, one standby goes on; a stopped launcher does not hold the parent up."""
    process = run(tmp_path, "begins leads dies", "leads over3 3", "over3 3", standbys=("b", "c"))
    assert ended(process)[:2] == (3, SUMMARY)
    assert sorted(str(launcher(tmp_path, n)[2]) for n in (1, 2)) == ["b", "c"]
    assert [launcher(tmp_path, n)[:2] for n in (1, 2)] == [["the-run", True]] * 2


def test_a_launcher_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    status, out, _ = ended(run(tmp_path, "begins leads stops", "leads over0 0", standbys=("b",)))
    assert (status, out) == (0, SUMMARY)
    assert gone(int(str(launcher(tmp_path, 0)[3])))


def test_what_is_killed_is_started_anew_as_a_standby(tmp_path: Path) -> None:
    status, out, err = ended(run(tmp_path, "dies", "begins dies", "leads dies", "over0 0", again=True))
    assert (status, out, err.count("another one goes on")) == (0, SUMMARY, 3)
    assert [launcher(tmp_path, n)[:2] for n in range(4)] == [
        [None, False],
        [None, False],
        ["the-run", True],
        ["the-run", True],
    ]


@pytest.mark.parametrize(
    ("do", "wanted", "status", "said"),
    [
        (("2",), {"standbys": ("b",)}, 2, ""),  # refused before there was a run
        (("begins leads dies",), {}, 128 + signal.SIGKILL, "killed by SIGKILL; none is left"),
        (("dies",), {"run": "x", "standbys": ("b",)}, 137, "the launcher on b was killed by SIGKILL; none"),
        (("dies",), {"again": True}, 137, "none is left"),  # ten times
        (("begins leads 1", "1"), {"standbys": ("b",)}, 1, ""),
    ],
)
def test_without_an_end_of_the_run_the_status_is_a_launchers(
    tmp_path: Path, do: tuple[str, ...], wanted: dict[str, object], status: int, said: str
) -> None:
    found, out, err = ended(run(tmp_path, *do, **{"standbys": (), **wanted}))  # type: ignore[arg-type]
    assert (found, out) == (status, "") and said in err
    assert bool(err) == bool(said)


def test_where_the_parent_is_killed_launchers_print_themselves(tmp_path: Path) -> None:
    process = run(tmp_path, "begins leads orphan over0 0")
    until(lambda: (tmp_path / "is-0").exists())
    process.kill()
    assert ended(process)[:2] == (-signal.SIGKILL, SUMMARY)


def test_a_signal_is_passed_on_and_nobody_is_started_anew(tmp_path: Path) -> None:
    process = run(tmp_path, "begins leads afternever", standbys=("b",), again=True)
    until(lambda: (tmp_path / "is-1").exists())
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process)[:2] == (128 + signal.SIGTERM, "")
