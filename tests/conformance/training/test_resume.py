"""Launchers that are killed and followed by others: what lives on, who has the run, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.quick import windtunnel
from support.waiting import until
from training.host_helpers import STAYS, alive, environment, script
from windtunnel.base.errors import UserError
from windtunnel.linux import network
from windtunnel.store import eventlog
from windtunnel.training import cleanup
from windtunnel.training.launch import resume

LAUNCHER = """
import sys
from pathlib import Path
from windtunnel.base.errors import WindtunnelError
from windtunnel.training.launch import launch, resume
script, folder, options = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3])
try:
    if script:
        options = {"lease": 5.0, **options}
        launched = launch(script, hosts=2, preload=(), folder=folder, output=2, **options)
    else:
        launched = resume(folder, output=2, **options)
    print(launched.token, launched._offer.address if launched.job.listen else "", flush=True)
    raise SystemExit(launched.wait().status)
except WindtunnelError as error:
    print(error, flush=True)
    raise SystemExit(error.status)
"""


class Launchers:
    """Launchers in processes of their own, of one run in ``folder``; its events and what it has left."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "run"
        self._script = script(tmp_path, STAYS)
        self.processes: list[subprocess.Popen[str]] = []
        self.token = self.offer = ""
        self.lent: list[subprocess.Popen[str]] = []

    def begin(self, **options: Any) -> subprocess.Popen[str]:
        process = self._start(str(self._script), options)
        if "listen" in options:
            self.lent = [self.lend(), self.lend()]
        until(lambda: len(self.of("here")) == 2)
        return process

    def resume(self, **options: Any) -> subprocess.Popen[str]:
        return self._start("", options)

    def _start(self, path: str, options: dict[str, Any]) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LAUNCHER, path, str(self.folder), repr(options)]
        process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        assert process.stdout is not None
        self.token, _, self.offer = process.stdout.readline().strip().partition(" ")
        return process

    def lend(self) -> subprocess.Popen[str]:
        code = "import sys; from pathlib import Path; from windtunnel.training.session import lend;"
        code += "raise SystemExit(lend(sys.argv[1], '', '', Path(sys.argv[2])))"
        command = [sys.executable, "-c", code, self.offer, str(self.folder / "secret")]
        self.processes.append(subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True))
        return self.processes[-1]

    def all(self) -> list[dict[str, Any]]:
        return eventlog.read(self.folder / eventlog.NAME)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.all() if event["kind"] == kind]

    def workers(self) -> dict[int, int]:
        return {event["rank"]: event["pid"] for event in self.of("here")}

    def end(self) -> None:
        (self.folder / "stop").touch()

    def nothing_left(self) -> bool:
        return not cleanup.marked(self.token) and not (cleanup.MEMORY / self.token).exists()


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    launchers = Launchers(tmp_path)
    yield launchers
    for process in launchers.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    cleanup.kill_marked(launchers.token)
    cleanup.sweep()


def test_a_killed_launcher_is_followed_by_another(launchers: Launchers, tmp_path: Path) -> None:
    """Property 22 with it: at the end, whoever brings it about, nothing is left."""
    first = launchers.begin()
    token, workers = launchers.token, launchers.workers()
    with pytest.raises(UserError, match=r"this run is running, process \d+ on .* leads it"):
        resume(launchers.folder)
    for epoch in (2, 3):
        first.kill()
        first.wait()
        assert token not in cleanup.sweep() and (cleanup.MEMORY / token).exists()
        if epoch == 3:
            os.kill(workers[1], signal.SIGKILL)  # nobody hears of it before there is another supervisor
        first = launchers.resume()
        assert launchers.token == token
        until(lambda e=epoch: len(launchers.of("started")) == e)  # type: ignore[misc]
    until(lambda: len(launchers.of("here")) >= 4)  # the fork server lives, too
    assert len(launchers.of("decided")) == 2 and [event["rank"] for event in launchers.of("lost")] == [1]
    assert launchers.workers()[0] == workers[0] and alive(workers[0])
    launchers.end()
    assert first.wait(60) == 0
    assert launchers.nothing_left()
    assert [e["epoch"] for e in launchers.of("started")] == [1, 2, 3]
    with pytest.raises(UserError, match=r"this run has ended \(all ranks are done\)"):
        resume(launchers.folder)
    with pytest.raises(UserError, match="there is no run to resume"):
        resume(tmp_path)


def test_hosts_that_went_with_the_launcher_are_started_anew(launchers: Launchers) -> None:
    first = launchers.begin()
    first.kill()
    first.wait()
    cleanup.kill_marked(launchers.token)
    second = launchers.resume()
    until(lambda: len(launchers.of("here")) == 4)
    assert {event["host"] for event in launchers.of("lost")} == {0, 1}
    launchers.end()
    assert second.wait(60) == 0
    assert launchers.nothing_left()


def test_where_nobody_comes_all_ends_by_itself(launchers: Launchers) -> None:
    options = {"network": "netns"} if network.missing() is None else {}
    first = launchers.begin(orphan_after=1.0, **options)
    first.kill()
    first.wait()
    until(launchers.nothing_left)
    bridge = f"wt{launchers.token.rpartition('-')[2]}"
    until(lambda: bridge not in os.listdir("/sys/class/net"))


def test_a_launcher_that_stands_still_keeps_the_run(launchers: Launchers) -> None:
    """Whoever wants to take it over ends it first; hosts that were silent meanwhile are not lost."""
    first = launchers.begin()
    workers = launchers.workers()
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match=f"this run is running, process {first.pid} on .* leads it"):
        resume(launchers.folder)
    time.sleep(6.0)  # more than a lease
    first.send_signal(signal.SIGCONT)
    launchers.end()
    assert first.wait(60) == 0
    assert launchers.workers() == workers and len(launchers.of("decided")) == 1
    assert launchers.nothing_left()


def test_hosts_that_are_not_ours_find_the_next_launcher(launchers: Launchers) -> None:
    first = launchers.begin(listen="127.0.0.1:0")
    workers = launchers.workers()
    first.kill()
    first.wait()
    second = launchers.resume()
    os.kill(workers[0], signal.SIGKILL)  # so that somebody must hear of it, and answer
    until(lambda: len(launchers.of("here")) >= 4)
    assert launchers.workers()[1] == workers[1] and launchers.workers()[0] != workers[0]
    assert not [event for event in launchers.of("lost") if event["what"] == "host"]
    launchers.end()
    assert second.wait(60) == 0
    assert [host.wait(60) for host in launchers.lent] == [0, 0]


TRAINS = """
import time, torch, torch.distributed as dist
from windtunnel.store import eventlog
from windtunnel.training.elastic import run
def train(job):
    for step in range(10):
        while step == 7 and (job.folder / eventlog.NAME).read_text().count('"kind":"started"') < 2:
            time.sleep(0.05)
        dist.all_reduce(torch.ones(1))
        job.agree(f"step {step}")
        job.step(step)
run(train)
"""


@pytest.mark.slow
def test_the_command_goes_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As whoever watches it would start it; its run in the store is done."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    words = ["train", "--hosts", "2", "--inject", "kill-launcher:step=5", "--json"]
    first = windtunnel(*words, script(tmp_path, TRAINS))
    assert first.returncode == -signal.SIGKILL
    assert first.stderr.startswith("windtunnel if this launcher dies, hosts and trainers wait 300 s for")
    done = windtunnel("train", "--resume", "last", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["goodput"]["steps"], summary["recoveries"]) == (0, 10, [])
    run, used = Path(summary["directory"]), summary["goodput"]
    events = eventlog.read(run / eventlog.NAME)
    times = [event["t"] for event in events if event["kind"] == "step"]
    longest = max(after - before for before, after in pairwise(times))  # nobody led meanwhile
    assert used["waiting"] >= longest - 2 * used["step_seconds"] > 0
    assert [event["epoch"] for event in events if event["kind"] == "started"] == [1, 2]
    again = windtunnel("train", "--resume", run.name[:-1])
    assert again.returncode == 2 and "this run has ended (all ranks are done)" in again.stderr
    listed = windtunnel("runs", "list", "--json")
    assert [row["status"] for row in json.loads(listed.stdout)] == ["done"]
