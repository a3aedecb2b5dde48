"""Launchers that are killed, stopped and followed by others: what lives on, who has the run, what is left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from host_helpers import STAYS, alive, environment, script
from typer.testing import CliRunner

from support.quick import windtunnel
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.linux import network, processes
from windtunnel.store import eventlog
from windtunnel.store.sharedlog import SharedLog
from windtunnel.training import cleanup
from windtunnel.training.elastic.live.supervisor import leadership
from windtunnel.training.launch import resume

LAUNCHER = """
import sys
from pathlib import Path
from windtunnel.base.errors import WindtunnelError
from windtunnel.linux import namespaces
from windtunnel.training.launch import launch, resume
script, folder, options = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3])
if "host" in options:
    namespaces.own_hostname(options.pop("host"))
try:
    if "log" in options:
        from windtunnel.store.sharedlog import SharedLog
        options["log"] = SharedLog(options["log"], "run")
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
        if not options.get("wait"):
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
    made = Launchers(tmp_path)
    yield made
    for process in made.processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    cleanup.kill_marked(made.token)
    cleanup.sweep()


def test_a_killed_launcher_is_followed_by_another(launchers: Launchers, tmp_path: Path) -> None:
    """Property 22 with it: at the end, whoever brings it about, nothing is left."""
    first = launchers.begin()
    token, workers = launchers.token, launchers.workers()
    with pytest.raises(UserError, match=r"this run is running, process \d+ on .* leads it"):
        resume(launchers.folder)
    first.kill()
    first.wait()
    assert token not in cleanup.sweep() and (cleanup.MEMORY / token).exists()
    second = launchers.resume()
    assert launchers.token == token
    until(lambda: len(launchers.of("started")) == 2)
    leader = leadership.FileRecord(launchers.folder).read()
    assert leader.process is not None
    leader.process.kill()  # it keeps its supervisor as the first did
    until(lambda: len(launchers.of("started")) == 3)
    assert len(launchers.of("decided")) == 1 and not launchers.of("lost")
    assert launchers.workers() == workers and all(alive(pid) for pid in workers.values())
    os.kill(workers[1], signal.SIGKILL)
    until(lambda: len(launchers.of("here")) >= 4)  # the fork server lives, too
    launchers.end()
    assert second.wait(60) == 0
    assert launchers.nothing_left()
    assert [e["epoch"] for e in launchers.of("started")] == [1, 2, 3]
    with pytest.raises(UserError, match=r"this run has ended \(all ranks are done\)"):
        resume(launchers.folder)
    with pytest.raises(UserError, match="there is no run to resume"):
        resume(tmp_path)


@pytest.mark.conformance
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


@pytest.mark.conformance
def test_where_nobody_comes_all_ends_by_itself(launchers: Launchers) -> None:
    options = {"network": "netns"} if network.missing() is None else {}
    first = launchers.begin(orphan_after=1.0, **options)
    first.kill()
    first.wait()
    until(launchers.nothing_left)
    bridge = f"wt{launchers.token.rpartition('-')[2]}"
    until(lambda: bridge not in os.listdir("/sys/class/net"))


@pytest.mark.conformance
def test_a_launcher_that_wakes_up_leaves_the_run_to_the_one_that_has_it(launchers: Launchers) -> None:
    first = launchers.begin()
    workers = launchers.workers()
    leader = leadership.FileRecord(launchers.folder).read()
    assert leader.process is not None
    for pid in (first.pid, leader.process.pid):
        os.kill(pid, signal.SIGSTOP)
    second = launchers.resume()
    until(lambda: len(launchers.of("started")) == 2)
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1
    assert first.stdout is not None
    assert "another launcher has this run by now (epoch 2, process " in first.stdout.readline()
    assert launchers.workers() == workers and all(alive(pid) for pid in workers.values())
    launchers.end()
    assert second.wait(60) == 0
    assert len(launchers.of("decided")) == 1 and launchers.nothing_left()


@pytest.mark.conformance
@pytest.mark.skipif(os.geteuid() != 0, reason="another host name needs root")
def test_standbys_follow_each_other_and_whoever_was_frozen_finds_itself_fenced(launchers: Launchers) -> None:
    """Each takes itself for another host. Of those that wait exactly one wins; one dies as it takes over."""
    first = launchers.begin(lease=1.0)
    workers, record = launchers.workers(), leadership.FileRecord(launchers.folder)
    waiting = [launchers.resume(wait=True, host=f"standby-{number}") for number in range(3)]
    first.send_signal(signal.SIGSTOP)  # its supervisor goes on, and would get no host
    leader = until(lambda: followed(record, 1))
    second = next(one for one in waiting if one.pid == launcher_of(leader))
    until(lambda: len(launchers.of("started")) == 2)
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1 and first.stdout is not None
    assert "another launcher has this run by now (epoch 2, process " in first.stdout.readline()
    waiting.remove(second)
    assert [one.poll() for one in waiting] == [None, None]
    struck(second.pid, leader)  # its host is gone
    leader = until(lambda: followed(record, 2))
    third = next(one for one in waiting if one.pid == launcher_of(leader))
    struck(third.pid, leader)  # before it could say where it listens
    waiting.remove(third)
    until(lambda: launchers.of("started")[-1]["epoch"] == 4)
    assert launchers.workers() == workers and all(alive(pid) for pid in workers.values())
    os.kill(workers[1], signal.SIGKILL)
    until(lambda: len(launchers.of("here")) >= 4)
    assert [event["generation"] for event in launchers.of("decided")] == [1, 2]
    late = launchers.resume(wait=True)
    launchers.end()
    assert waiting[0].wait(60) == 0
    assert late.wait(60) == 2 and late.stdout is not None
    assert "this run has ended (all ranks are done)" in late.stdout.readline()
    assert launchers.nothing_left()


def followed(record: leadership.FileRecord, epoch: int) -> leadership.Leader | None:
    leader = record.read()
    return leader if leader.epoch > epoch else None


def launcher_of(leader: leadership.Leader) -> int:
    """The process that keeps a supervisor."""
    assert leader.process is not None
    found = processes.look(leader.process.pid)
    assert found is not None
    return found.parent


def struck(launcher: int, leader: leadership.Leader) -> None:
    """Both at once, so that neither can say that the other is gone."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in (launcher, int(leader.holder.split()[0])):
            os.kill(pid, number)


@pytest.mark.conformance
@pytest.mark.parametrize("shared", [False, True])
def test_a_standby_that_loses_the_log_says_so(launchers: Launchers, tmp_path: Path, shared: bool) -> None:
    where = {"log": f"sqlite:///{tmp_path / 'log.db'}"} if shared else {}
    launchers.begin(**where)
    standby = launchers.resume(wait=True, **where)
    if shared:
        (tmp_path / "log.db").write_bytes(b"no database " * 1000)
    else:
        (launchers.folder / leadership.NAME).unlink()
    assert standby.wait(60) == 1 and standby.stdout is not None
    said = standby.stdout.readline()
    assert ("the log cannot be used" if shared else "the run's log is gone; this standby cannot") in said
    if not shared:  # else the leader cannot write it, either
        assert all(alive(pid) for pid in launchers.workers().values())


@pytest.mark.conformance
def test_a_launcher_on_another_host_reads_the_log_in_the_database_and_calls_the_hosts(
    launchers: Launchers, tmp_path: Path
) -> None:
    """It has a folder and an address of its own; only the secret was brought."""
    url = f"sqlite:///{tmp_path / 'log.db'}"
    first = launchers.begin(listen="127.0.0.1:0", log=url)
    workers = launchers.workers()
    first.kill()
    first.wait()
    with pytest.raises(UserError, match=r"the log of this run is in .*log.db, run run; give --log"):
        resume(launchers.folder)
    shutil.copytree(launchers.folder, tmp_path / "there", ignore=lambda *_: ["events.jsonl"])
    launchers.folder, here = tmp_path / "there", launchers.folder
    second = launchers.resume(listen="127.0.0.2:0", log=url)
    os.kill(workers[0], signal.SIGKILL)  # so that somebody must hear of it, and answer
    until(lambda: len(launchers.of("here")) >= 4)
    assert launchers.workers()[1] == workers[1] and launchers.workers()[0] != workers[0]
    log = SharedLog(url, "run")
    assert log.leader()[1]["address"].startswith("127.0.0.2:")
    assert not [event for event in launchers.of("lost") if event["what"] == "host"]
    assert eventlog.read(here / eventlog.NAME) == launchers.all()[: len(eventlog.read(here / eventlog.NAME))]
    (here / "stop").touch()  # where the trainers look
    assert second.wait(60) == 0
    assert [host.wait(60) for host in launchers.lent] == [0, 0]
    assert [json.loads(line) for line in log.lines()] == launchers.all()


@pytest.mark.conformance
def test_a_stopped_supervisor_is_replaced_also_in_a_recovery(launchers: Launchers) -> None:
    first = launchers.begin()
    workers = launchers.workers()
    for epoch in (1, 2):
        leader = leadership.FileRecord(launchers.folder).read()
        process = leader.process
        assert leader.epoch == epoch and process is not None
        os.kill(process.pid, signal.SIGSTOP)
        if epoch == 2:
            os.kill(workers[1], signal.SIGKILL)  # nobody hears of it before there is another supervisor
        until(lambda e=epoch: len(launchers.of("started")) == e + 1)  # type: ignore[misc]
        assert not alive(process.pid)
    until(lambda: len(launchers.of("here")) >= 4)
    assert launchers.workers()[0] == workers[0] and launchers.workers()[1] != workers[1]
    launchers.end()
    assert first.wait(60) == 0
    assert launchers.nothing_left()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "none"], "'none' is not a run"),
        (["--resume", "last"], "there is no last one"),
        (["--resume", "last", "--hosts", "3"], "--hosts is that of the run and cannot be given"),
        (["--standby", "b,,c", "train.py"], "--standby b,,c: accepted are names of hosts"),
        (["--standby", "b,b", "train.py"], "--standby b,b: accepted are names of hosts, each once"),
        (["--resume", "last", "train.py"], "SCRIPT is that of the run and cannot be given"),
        (["--orphan-after", "-1", "train.py"], "--orphan-after -1.0: at least 0"),
    ],
)
def test_wrong_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    found = CliRunner().invoke(app, ["train", *words])
    assert isinstance(found.exception, UserError), found.output
    assert said in str(found.exception)


TRAINS = """
import json, time, torch, torch.distributed as dist
from windtunnel.training.elastic import run
def train(job):
    leader = job.folder / "leader.json"
    for step in range(10):
        while step == 7 and json.loads(leader.read_text())["epoch"] < 3:
            time.sleep(0.01)
        dist.all_reduce(torch.ones(1))
        job.agree(f"step {step}")
        job.step(step)
run(train)
"""


@pytest.mark.conformance
@pytest.mark.slow
def test_a_launcher_that_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command, one result, whatever strikes the control plane; its run in the store is done."""
    struck = ["--inject", "stop-supervisor:step=2", "--inject", "kill-launcher:step=6"]
    words = ["train", "--hosts", "2", *struck, "--resume-auto", "--standby", "b", "--json"]
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    done = windtunnel(*words, script(tmp_path, TRAINS))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["status"], summary["goodput"]["steps"], summary["recoveries"]) == (0, 10, [])
    assert "the launcher was killed by SIGKILL; another one goes on" in done.stderr
    assert "the supervisor was replaced: it is stopped" in done.stderr
    assert done.stderr.count("waits until the launcher of") == 2
    assert done.stderr.count("the run has ended, status 0: all ranks are done") == 1
    assert done.stderr.startswith("windtunnel if this launcher dies, hosts and trainers wait 300 s for")
    run, used = Path(summary["directory"]), summary["goodput"]
    times = [event["t"] for event in eventlog.read(run / eventlog.NAME) if event["kind"] == "step"]
    longest = max(after - before for before, after in pairwise(times))  # nobody led meanwhile
    assert used["waiting"] >= longest - 2 * used["step_seconds"] > 0
    assert [e["epoch"] for e in eventlog.read(run / eventlog.NAME) if e["kind"] == "started"] == [1, 2, 3]
    again = windtunnel("train", "--resume", run.name[:-1])
    assert again.returncode == 2 and "this run has ended (all ranks are done)" in again.stderr
    late = windtunnel("train", "--resume", run.name, "--standby", "c", "--json")
    assert (late.returncode, json.loads(late.stdout)) == (0, summary), late.stderr
    listed = windtunnel("runs", "list", "--json")
    assert [one["status"] for one in json.loads(listed.stdout)] == ["done"]
