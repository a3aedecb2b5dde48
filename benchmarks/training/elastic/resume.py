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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.harness.measure import conditions, median, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.checkpoint import harness
from benchmarks.training.elastic.commanded import OUTPUT, Commanded, command, ended, training
from windtunnel.store.sharedlog import SharedLog
from windtunnel.training import cleanup
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.live.supervisor.leadership import TERM

SECTION = "resume"
HOSTS = 2
KILLS = 5
MOST = 5.0
"""Seconds until the first new step, at most."""
BETWEEN = 20
"""Committed steps between a launcher's first and its death."""
OFFER = re.compile(r"`windtunnel host (\S+)`")
URL = "WINDTUNNEL_LOG"
"""Environment variable, as of the command: the database to try it with, else one in SQLite."""
WAITS = "waits until the launcher of"
ORPHAN = 60
PATIENCE = 120.0


@dataclass
class Resumed:
    """One kill: seconds from it until the next supervisor ``leads``, and until the first ``step`` after that
    is committed; ``known``: events in the log by then."""

    leads: float
    step: float
    known: int


def resume_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    if os.geteuid() != 0:
        yield left_out(SECTION, "launcher killed and resumed", "another host name needs root")
        return
    for standby in (False, True):
        load = conditions()
        with scratch() as folder:
            found, events = struck(folder, 1 if quick else KILLS, standby)
        yield from rows(found, events, standby, load)


def rows(found: list[Resumed], events: list[Event], standby: bool, load: str) -> Iterator[Row]:
    """The figures of ``found``, and of all ``events`` of that job."""
    kills = len(found)
    slowest = max(one.step for one in found)
    middle = median(one.step for one in found)
    how = "a standby waits on another host" if standby else "resumed on another host"
    yield Row(
        SECTION, f"control plane killed, {how}: first new committed step, median", "s",
        measured=middle, target=f"≤ {MOST:g} s", met=middle is not None and middle <= MOST,
        note=f"{kills} kills, slowest {slowest:.2f} s; {TERM:g} s of it wait for a sign of the one before;"
        f" {found[-1].known} events in the log at the last; {load}",
    )  # fmt: skip
    yield Row(
        SECTION, f"… {how}: until the new supervisor leads, median", "s",
        measured=median(one.leads for one in found),
    )  # fmt: skip
    again = repeated(events)
    groups = len({event["generation"] for event in events if event["kind"] == "decided"})
    yield Row(
        SECTION, f"… {how}: steps done again", "steps", measured=again, target="0", met=again == 0,
        note=f"of {steps(events)}; {groups - 1} times the ranks had to form a new group",
    )  # fmt: skip


def repeated(events: list[Event]) -> int:
    """Steps that were done more than once; one that was only told twice has the same time."""
    done = Counter(step for step, _ in {(e["step"], e["t"]) for e in events if e["kind"] == "step"})
    return sum(count - 1 for count in done.values())


def steps(events: list[Event]) -> int:
    return len({event["step"] for event in events if event["kind"] == "step"})


def struck(folder: Path, kills: int, standby: bool) -> tuple[list[Resumed], list[Event]]:
    """A job whose launcher dies so many times; ``standby``: the next one waits for it.

    Raises:
        harness.Failed: it did not go on, or did not end well.
    """
    url = os.environ.get(URL) or f"sqlite:///{folder / 'log.db'}"
    first = folder / f"run-{secrets.token_hex(4)}"  # in a database with other runs
    found: list[Resumed] = []
    with contextlib.ExitStack() as stack:
        words: list[object] = ["--external-hosts", "--listen", "127.0.0.1:0", "--log", url]
        words += ["--orphan-after", ORPHAN]
        job = stack.enter_context(training(words, first, HOSTS, "fsdp_trainer", host="launcher-0"))
        address = harness.until(job, partial(_offered, job=job), "address for hosts")[1]
        lent = stack.enter_context(_lent(address, folder, first / "secret"))
        for number in range(1, kills + 1):
            enough = partial(_since, known=found[-1].known if found else 0)
            harness.until(job, enough, "steps", PATIENCE)
            there, before = folder / f"there-{number}", job
            words = ["--resume", first.name, "--log", url, "--secret-file", first / "secret"]
            words += ["--listen", f"127.0.0.{number + 1}:0"]
            words += ["--standby", f"launcher-{number}"] if standby else []
            before.log = SharedLog(url, first.name)
            following = training(words, there, HOSTS, host=f"launcher-{number}")
            if standby:
                job = stack.enter_context(following)
                harness.until(before, lambda _, job=job: WAITS in job.said(), "standby")  # type: ignore[misc]
            killed = time.time()
            _host_gone(before)
            job = job if standby else stack.enter_context(following)
            leads, step, known = harness.until(job, partial(_after, number=number), "new step", PATIENCE)
            found.append(Resumed(leads - killed, step - killed, known))
        newest = max(event["step"] for event in job.events() if event["kind"] == "step")
        harness.end_at(first, newest + BETWEEN)
        harness.ended(job, PATIENCE)
        for process in lent:
            process.wait(PATIENCE)
        return found, job.events()


def _host_gone(job: Commanded) -> None:
    """Launcher and supervisor at once, so that neither can say that the other is gone."""
    launcher, supervisor = job.launcher, job.supervisor
    if launcher is None or supervisor is None:
        raise harness.Failed("nobody supervises the job")
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
