"""A launcher that is killed, and the run taken over from another host: how long is training not led?

Two hosts are lent to the job (``windtunnel host``), its log is in a database. The launcher and its
supervisor get SIGKILL at once, as where their host is lost, and ``windtunnel train --resume`` begins on what
takes itself for another host: another host name, so that it cannot see that the leader before is dead and
has to wait for a sign of it; another address; an empty folder. It has the database's URL and the job's
secret. That again and again in one job, each time from yet another host; the time counts from the kill, so
Python's own start is in it. Then the same with a standby (``--standby``) that waits there when the leader
dies, and nobody who types a command.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from benchmarks.harness import jobs
from benchmarks.harness.measure import conditions
from benchmarks.training.checkpoint import TRAINER
from conformance.training.commanded import OUTPUT, Commanded, command, ended, training
from windtunnel.store.sharedlog import SharedLog
from windtunnel.training import cleanup
from windtunnel.training.elastic.events import Event

HOSTS = 2
KILLS = 5
BETWEEN = 20
"""Committed steps between a launcher's first and its death."""
OFFER = re.compile(r"`windtunnel host (\S+)`")
URL = "WINDTUNNEL_LOG"
"""Environment variable, as of the command: the database to try it with, else one in SQLite."""
WAITS = "waits until the launcher of"
ORPHAN = 60
PATIENCE = 120.0


@pytest.mark.root
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="another host name needs root")
@pytest.mark.parametrize("standby", [False, True], ids=["resumed", "standby"])
def test_a_job_whose_launcher_and_supervisor_die_goes_on_from_another_host(
    tmp_path: Path, standby: bool
) -> None:
    found, events = struck(tmp_path, KILLS, standby)
    times = [one.step for one in found]
    print(
        f"first new committed step: median {median(times):.2f} s, slowest {max(times):.2f} s; {conditions()}"
    )
    assert not repeated(events)


@dataclass
class Resumed:
    """One kill: seconds from it until the next supervisor ``leads``, and until the first ``step`` after that
    is committed; ``known``: events in the log by then."""

    leads: float
    step: float
    known: int


def repeated(events: list[Event]) -> list[int]:
    """Committed steps that were done once more: after the commit, and in a later generation than what it
    commits. In the log a step may stand behind its commit, where a launcher that died had not written it
    yet, and a slow rank may end a step that all have committed."""
    steps = {(event["t"], event["step"], event["generation"]) for event in events if event["kind"] == "step"}
    first: dict[int, int] = {}
    for _, step, generation in steps:
        first[step] = min(generation, first.get(step, generation))
    commits = [(event["t"], event["step"]) for event in events if event["kind"] == "committed"]
    return [
        step
        for t, step, generation in sorted(steps)
        if any(at < t and step <= upto and generation > first.get(upto, 0) for at, upto in commits)
    ]


def struck(folder: Path, kills: int, standby: bool) -> tuple[list[Resumed], list[Event]]:
    """A job whose launcher dies so many times; ``standby``: the next one waits for it.

    Raises:
        jobs.Failed: it did not go on, or did not end well.
    """
    url = os.environ.get(URL) or f"sqlite:///{folder / 'log.db'}"
    first = folder / f"run-{secrets.token_hex(4)}"  # in a database with other runs
    found: list[Resumed] = []
    with contextlib.ExitStack() as stack:
        words: list[object] = ["--external-hosts", "--listen", "127.0.0.1:0", "--log", url]
        words += ["--orphan-after", ORPHAN]
        job = stack.enter_context(training(words, first, HOSTS, TRAINER, host="launcher-0"))
        address = jobs.until(job, partial(_offered, job=job), "address for hosts")[1]
        lent = stack.enter_context(_lent(address, folder, first / "secret"))
        for number in range(1, kills + 1):
            enough = partial(_since, known=found[-1].known if found else 0)
            jobs.until(job, enough, "steps", PATIENCE)
            there, before = folder / f"there-{number}", job
            words = ["--resume", first.name, "--log", url, "--secret-file", first / "secret"]
            words += ["--listen", f"127.0.0.{number + 1}:0"]
            words += ["--standby", f"launcher-{number}"] if standby else []
            before.log = SharedLog(url, first.name)
            following = training(words, there, HOSTS, host=f"launcher-{number}")
            if standby:
                job = stack.enter_context(following)
                jobs.until(before, lambda _, job=job: WAITS in job.said(), "standby")  # type: ignore[misc]
            killed = time.time()
            _host_gone(before)
            job = job if standby else stack.enter_context(following)
            leads, step, known = jobs.until(job, partial(_after, number=number), "new step", PATIENCE)
            found.append(Resumed(leads - killed, step - killed, known))
        newest = max(event["step"] for event in job.events() if event["kind"] == "step")
        jobs.end_at(first, newest + BETWEEN)
        jobs.results(job, PATIENCE)
        for process in lent:
            process.wait(PATIENCE)
        return found, job.events()


def _host_gone(job: Commanded) -> None:
    """Launcher and supervisor at once, so that neither can say that the other is gone."""
    launcher, supervisor = job.launcher, job.supervisor
    if launcher is None or supervisor is None:
        raise jobs.Failed("nobody supervises the job")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in {job.process.pid, launcher, supervisor.pid}:
            os.kill(pid, number)
    job.process.wait()


def _offered(_: list[Event], job: Commanded) -> re.Match[str] | None:
    return OFFER.search(job.said())


def _since(events: list[Event], known: int) -> bool:
    """Whether enough steps were committed after the first ``known`` events."""
    return sum(event["kind"] == "committed" for event in events[known:]) >= BETWEEN


def _after(events: list[Event], number: int) -> tuple[float, float, int] | None:
    """When the supervisor with that number led, and when it committed a first step that ranks did since; how
    many events there were."""
    started = [place for place, event in enumerate(events) if event["kind"] == "started"]
    if len(started) <= number:
        return None
    leads = events[started[number]]["t"]
    before = max(e["step"] for e in events[: started[number]] if e["kind"] == "committed")
    for event in events[started[number] :]:
        if event["kind"] == "committed" and event["step"] > before:
            return leads, event["t"], len(events)
    return None


@contextlib.contextmanager
def _lent(address: str, folder: Path, secret: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Hosts of the job that is offered at ``address``; they end with the block."""
    token = f"windtunnel-lent-{secrets.token_hex(3)}"
    words: list[object] = ["host", address, "--secret-file", secret]
    output, env = folder / OUTPUT, {cleanup.TOKEN: token}
    hosts = [command(words, output, host=f"host-{number}", env=env) for number in range(HOSTS)]
    try:
        yield hosts
    finally:
        for host in hosts:
            ended(host)
        cleanup.kill_marked(token)
        cleanup.sweep()
