"""Jobs run between namespaces: tasks in their order, bytes whole, and what strikes a run from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.waiting import killed, until
from windtunnel.base.errors import HostError, ScriptError, UserError
from windtunnel.base.plain import from_plain
from windtunnel.cli.main import app
from windtunnel.linux import LinuxError, namespaces, network, processes
from windtunnel.network.dag.live import GraphRun, run
from windtunnel.network.dag.policy import SCHEDULES, Decision, GraphJob, GraphTask, Observation, decide
from windtunnel.store import eventlog
from windtunnel.store.eventlog import EventLog, LogFailed

LINE = 12.5e6
RESOURCES = {host + end: value for host in "abc" for end, value in (("", 1.0), (".out", LINE), (".in", LINE))}
real = pytest.mark.skipif(network.missing() is not None, reason=network.missing() or "")


def compute(name: str, host: str, seconds: float, *after: str, **more: Any) -> GraphTask:
    return GraphTask(name, "compute", seconds, ((host, 1.0),), after, **more)


def send(name: str, source: str, destination: str, seconds: float, *after: str, **more: Any) -> GraphTask:
    loads = ((f"{source}.out", 1.0), (f"{destination}.in", 1.0))
    return GraphTask(name, "network", seconds * LINE, loads, after, **more)


def example(scale: float) -> GraphJob:
    """8 s by other schedules, 7 s by mxdag, times ``scale``."""
    return GraphJob(
        "example",
        (
            compute("A", "a", scale),
            send("f1", "a", "b", scale, "A"),
            send("f2", "a", "c", scale, "A"),
            compute("B", "b", 5 * scale, "f1"),
            compute("C", "c", scale, "f2"),
        ),
    )


def sleeps(job: GraphJob) -> GraphJob:
    """What takes as long, and no CPU."""
    tasks = [
        replace(task, command=("sleep", str(task.size))) if task.kind == "compute" else task
        for task in job.tasks
    ]
    return replace(job, tasks=tuple(tasks))


def tried(*words: Any, **more: Any) -> GraphRun:
    """`run`, or a skip by name where there are no links or queues."""
    try:
        return run(*words, **more)
    except UserError as error:
        if "cannot be had here" in str(error):
            pytest.skip(str(error))
        raise


@real
def test_the_worked_example_runs_in_its_order_and_its_log_decides_the_same(tmp_path: Path) -> None:
    job, log = sleeps(example(0.03)), EventLog(tmp_path / "log")
    outcome = tried([job], RESOURCES, "mxdag", decided=partial(log.decision, "network.dag", "mxdag"))
    log.close()
    ends = {name: end for (_, name), (_, end) in outcome.tasks.items()}
    begins = {name: begin for (_, name), (begin, _) in outcome.tasks.items()}
    for task in job.tasks:
        assert all(ends[before] <= begins[task.name] for before in task.after)
    assert outcome.jobs["example"] == max(ends.values()) == outcome.mean
    records = eventlog.decisions(tmp_path / "log")
    observations = [from_plain(Observation, record["observation"]) for record in records]
    assert [from_plain(Decision, record["decision"]) for record in records] == list(map(decide, observations))
    assert len(observations) == outcome.decisions
    assert any(
        {share.task: share.priority for share in decide(look).shares} == {"f1": 0, "f2": 1}
        for look in observations
    )
    left = [entry.left for look in observations for entry in look.pending if entry.task.name == "f2"]
    assert left == sorted(left, reverse=True) and left[0] == 0.03 * LINE


@real
@pytest.mark.parametrize("schedule", ["sebf", "mxdag"])
def test_every_schedule_ends_what_there_is(schedule: str) -> None:
    """Two jobs that share processors and lines: a ring, pieces of a pipeline."""
    ring = tuple((f"{host}.{way}", 4 / 3) for host in "abc" for way in ("out", "in"))
    first = GraphJob(
        "one",
        (
            compute("x", "a", 0.02, unit=0.01),
            GraphTask("f", "network", 0.02 * LINE, send("", "a", "b", 1).loads, (), ("x",), unit=0.01 * LINE),
            GraphTask("sum", "network", 0.02 * LINE, ring, ("f",)),
        ),
    )
    other = GraphJob("other", (compute("x", "a", 0.02), send("f", "a", "c", 0.02, "x")), begins=0.01)
    outcome = tried([first, other], RESOURCES, schedule)
    assert set(outcome.jobs) == {"one", "other"} and len(outcome.tasks) == 5
    assert outcome.tasks["other", "x"][0] >= 0.01
    spans = sorted(outcome.tasks[job, "x"] for job in outcome.jobs)
    if schedule != "mxdag":  # pieces of one may come between
        assert spans[0][1] - spans[0][0] >= 0.02 <= spans[1][1] - spans[1][0]


@real
def test_a_command_that_fails_ends_all_in_an_error_that_names_it(capfd: pytest.CaptureFixture[str]) -> None:
    good = compute("good", "b", 1, command=("sleep", "600"))
    for words, said in (
        (["sh", "-c", "echo $WINDTUNNEL_JOB.$WINDTUNNEL_TASK@$WINDTUNNEL_HOST; exit 3"], "status 3"),
        (["sh", "-c", "kill -9 $$"], "was killed by signal 9"),
        (["no-such-program"], "status 127"),
    ):
        bad = compute("bad", "a", 1, command=tuple(words))
        job = GraphJob("job", (good, bad, send("f", "b", "c", 600)))
        with pytest.raises(ScriptError, match=f"job: task bad on a: .*{words[0]}.*{said}"):
            tried([job], RESOURCES, "fair")
        assert agents() == []
    output = capfd.readouterr()
    assert "job.bad@a" in output.err and "no-such-program: No such file" in output.err and not output.out


def agents(parent: int | None = None) -> list[int]:
    pids = processes.descendants(parent or os.getpid())
    return [pid for pid in pids if "agent.py" in processes.command_line(pid)]


LONG = GraphJob(
    "long",
    (
        compute("x", "a", 600, command=("sh", "-c", "setsid sleep 600 & wait")),
        send("f", "a", "b", 600),
        send("g", "c", "b", 600),
    ),
)


@contextmanager
def under_way() -> Iterator[list[BaseException]]:
    """`LONG` runs within the block, until it fails, with what is put into the list."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run([LONG], RESOURCES, "mxdag")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: failed or (len(agents()) == 3 and sleeping(agents())))
    if failed and "cannot be had here" in str(failed[0]):
        thread.join()
        pytest.skip(str(failed[0]))
    try:
        yield failed
        thread.join()
    finally:
        killed(agents())
        thread.join()


def sleeping(parents: list[int]) -> list[int]:
    """Commands of `LONG` that these run."""
    pids = [pid for parent in parents for pid in processes.descendants(parent)]
    return [pid for pid in pids if processes.command_line(pid) == "sleep 600"]


@real
@pytest.mark.parametrize("place", [0, 1], ids=["sends", "receives"])
def test_a_host_that_is_killed_ends_the_run(place: int) -> None:
    with under_way() as failed:
        os.kill(agents()[place], signal.SIGKILL)
    assert isinstance(failed[0], HostError) and f"host {'ab'[place]} is gone" in str(failed[0])
    assert agents() == []


@real
def test_a_full_disk_ends_the_run() -> None:
    log = EventLog(Path("/dev/full"))
    with pytest.raises(LogFailed, match="No space left"):
        tried([LONG], RESOURCES, "fair", decided=partial(log.decision, "network.dag", "fair"))
    log.close()
    assert agents() == []


@real
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_outlives_who_runs_it(number: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from network.dag.test_dag_live import LONG, RESOURCES\n"
        "from windtunnel.network.dag.live import run\n"
        "run([LONG], RESOURCES, 'fair')"
    )
    here = str(Path(__file__).parent.parent.parent)
    own = f"WINDTUNNEL_TRIAL={os.getpid()}-{number}"
    with subprocess.Popen(
        [sys.executable, "-c", code, here], env=os.environ | dict([own.split("=")]), stderr=subprocess.PIPE
    ) as command:
        until(lambda: command.poll() is not None or sleeping(agents(command.pid)))
        if command.poll() is not None:
            assert command.stderr is not None
            message = command.stderr.read().decode()
            assert "cannot be had here" in message or network.missing(), message
            pytest.skip(message.splitlines()[-1])
        inside = [Path(f"/proc/{pid}/ns/net") for pid in agents(command.pid)]
        spaces = {str(link.readlink()) for link in inside}
        assert len(spaces) == 3
        kept = [
            link.open("rb") for link in inside
        ]  # so that no other test's gets the number of one that went
        command.send_signal(number)
        command.wait()
        until(lambda: not processes.carrying(own), "the end of all that it started")
    assert not spaces & set(namespaces_held())
    for file in kept:
        file.close()


def namespaces_held() -> Iterator[str]:
    """The network namespaces that processes or files hold."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield os.readlink(f"/proc/{pid}/ns/net")
        except OSError:
            continue
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        yield line.split()[3]


@real
def test_the_verb_runs_a_file_and_says_what_was_emulated(tmp_path: Path) -> None:
    mark, tasks = (
        tmp_path / "mark",
        "{x: {compute: 10 ms, host: a, command: [touch, MARK]}, y: {compute: 10 ms,",
    )
    # one after the other: two that end at once may be one decision
    tasks += " host: b, after: x}, f: {send: 1 MB, from: a, to: b, after: [x, y]}}"
    file = tmp_path / "jobs.yaml"
    host = "{processors: 1, nic: 200 Mb/s}"
    words = ["network", "dag", "run", str(file), "--live"]

    def invoked(tasks: str, *more: str) -> str:
        file.write_text(
            f"version: 1\nresources: {{a: {host}, b: {host}, core: 1 Gb/s}}\njobs: {{j: {{tasks: {tasks}}}}}"
        )
        try:
            return CliRunner().invoke(app, [*words, *more], catch_exceptions=False).output
        except UserError as error:
            if "cannot be had here" in str(error):
                pytest.skip(str(error))
            raise

    report = json.loads(invoked(tasks.replace("MARK", str(mark)), "--schedule", "all", "--json"))
    assert mark.exists() and set(report["runs"]) == set(SCHEDULES)
    for outcome in report["runs"].values():
        assert (
            outcome["emulated"] == pytest.approx(0.06)
            and outcome["jobs"]["j"] == outcome["tasks"]["j"]["f"][1]
        )
        assert 0 <= outcome["short"] < 1 and outcome["deciding"] > 0 and outcome["decisions"] >= 3
    assert "measured; emulated 60.0 ms" in invoked(tasks.replace("MARK", str(mark)))
    with pytest.raises(ScriptError, match="task x on a: touch /none/there ended with status 1"):
        invoked(tasks.replace("MARK", "/none/there"))
    with pytest.raises(UserError, match=r"accepted are one HOST\.out"):
        invoked("{f: {send: 1 MB, loads: {a.out: 1, core: 1}}}")
    with pytest.raises(UserError, match="has a command, accepted is that with compute"):
        invoked("{f: {send: 1 MB, from: a, to: b, command: [x]}}")


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*tasks: GraphTask) -> str:
        with pytest.raises(UserError) as error:
            run([GraphJob("j", tasks)], {**RESOURCES, "core": 1e9}, "fair")
        return str(error.value)

    monkeypatch.setattr(network, "missing", lambda: None)
    flow = GraphTask("f", "network", 1.0, (("a.out", 1.0), ("core", 1.0), ("b.in", 1.0)))
    assert "task f loads a.out, core, b.in; accepted are one HOST.out" in refused(flow)
    uneven = GraphTask("f", "network", 1.0, (("a.out", 1.0), ("b.in", 2.0)))
    assert "each as many times" in refused(uneven)
    pieces = compute("x", "a", 2.0, unit=1.0, command=("true",))
    fed = GraphTask("f", "network", 2.0, send("", "a", "b", 1).loads, (), ("x",), unit=1.0)
    assert "x#1 is a piece of a command" in refused(pieces, fed)
    many = [compute(f"x{number}", "a", 1.0) for number in range(4097)]
    assert "4097 flows and processes, accepted are at most 4096" in refused(*many)

    def forbidden(*_: Any) -> None:
        raise LinuxError("Operation not permitted")

    monkeypatch.setattr(namespaces, "apart", forbidden)
    said = refused(compute("x", "a", 1.0))
    assert "cannot be had here (Operation not permitted); accepted without is the twin" in said
    monkeypatch.setattr(network, "missing", lambda: "network namespaces need root")
    assert "need root; accepted without is the twin" in refused(compute("x", "a", 1.0))
