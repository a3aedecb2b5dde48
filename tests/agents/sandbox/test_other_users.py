"""Processes of users other than root come back as they were."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.linux import processes

pytestmark = pytest.mark.root

START = """cd /workspace; chmod 777 .; mkfifo -m 666 a.in a.out b.in b.out c.in c.out d.in d.out
cat > answer <<'END'
mine=$(date +%N)$$
echo $mine > $1.is
while read -r line < $1.in; do echo "$mine $(id -u) $(id -G) $(ulimit -Sn) $(ulimit -Hn)" > $1.out; done
END
(setpriv --reuid=1001 --regid=1001 --groups=5,1001,2002 sh answer a &)
(ulimit -n 100; ulimit -Sc 0; ulimit -u 50; setpriv --reuid=1002 --regid=100 --clear-groups sh answer b &)
(ulimit -Sn 64; setpriv --reuid=1003 --regid=1003 --clear-groups sh -c 'ulimit -Sn 90; . ./answer' sh c &)
(echo 500 > /proc/self/oom_score_adj
 setpriv --ruid=1004 --regid=6 --clear-groups --bounding-set=-kill \\
    nice -n 7 ionice -c 2 -n 6 taskset 1 sh answer d &)
for name in a b c d; do until [ -s $name.is ]; do sleep 0.01; done; done"""
ASK = (
    "for name in a b c d; do echo go > $name.in; read -r said < $name.out; echo $(cat $name.is) = $said; done"
)
STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")


def standing(box: Any) -> dict[int, list[object]]:
    """Of each process, by its number inside: who it is, what it may, and how much."""
    processes_inside: dict[int, list[object]] = {}
    for pid in box.machine().cgroup.pids():
        folder = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        processes_inside[processes.inner_pid(pid)] = [
            processes.command_line(pid),
            [status[field] for field in STATUS],
            (folder / "limits").read_text(),
            (folder / "oom_score_adj").read_text(),
            os.getpriority(os.PRIO_PROCESS, pid),
            os.sched_getaffinity(pid),
            subprocess.run(["ionice", "-p", str(pid)], capture_output=True, text=True).stdout,
        ]
    return processes_inside


def test_a_tree_of_several_users_comes_back_with_its_groups_and_limits(make: Callable[..., Any]) -> None:
    box = make()
    assert box.run(START, timeout=60).stderr == b""
    answers = box.run(ASK, timeout=60).text
    assert len({line.split()[3] for line in answers.splitlines()}) == 4, answers
    until(lambda: len(standing(box)) == 6, "answers' helpers to end")
    before = standing(box)
    manifest = box.checkpoint()
    assert manifest.turn_class is TurnClass.FULL and manifest.image is not None, manifest.lacks
    box.machine().cgroup.kill()
    until(lambda: box.info().status != "running")
    box.restore()
    assert standing(box) == before
    again = box.run("cd /workspace; " + ASK, timeout=60).text
    assert again == answers
    for line in again.splitlines():
        kept, answer = line.split(" = ")
        assert answer.split()[0] == kept, "its memory is that of before"
