"""One run of ``windtunnel train``, from the user's words to the store: check, launch, narrate, sum up."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic, keys, tls
from windtunnel.base.errors import LessError, ScriptError, UserError
from windtunnel.base.tls import Certificates
from windtunnel.linux.hosts import KUBERNETES, SLURM, in_allocation
from windtunnel.linux.system import adopt_orphans
from windtunnel.store import eventlog
from windtunnel.store.objects import open_files
from windtunnel.training import hosts
from windtunnel.training.elastic import report
from windtunnel.training.elastic.policy.evidence import in_short
from windtunnel.training.elastic.spec import JobSpec
from windtunnel.training.launch import Launched, Preempted, resume

if TYPE_CHECKING:
    from windtunnel.store.runs import StoredRun

CAPABILITY = "training.elastic"
SUMMARY = "summary.json"


def train_and_store(job: JobSpec, out: Path | None, *, as_json: bool = False) -> dict[str, Any]:
    """Run ``job``, keep the run in the store (or in ``out`` alone), print its end: the summary.

    Outside of an allocation a job on Slurm is queued, and one on Kubernetes is printed as manifests.
    ``as_json``: the summary, of a job that failed as well, is all that stdout gets; the ranks print to
    stderr.

    Raises:
        UserError: an option is wrong. ScriptError: the job failed; with the failed rank's traceback.
        LessError: what was asked for could not be reached.
    """
    job.check()
    if job.persist:
        job = replace(job, persist=own_storage(job.persist))
    if job.on == KUBERNETES:
        return _print_manifest(job, as_json)
    queued = job.on == SLURM and not in_allocation()
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: the folder cannot be made ({error.strerror})") from error
        if (out / eventlog.NAME).exists():
            raise UserError(f"--out {out}: there is a run in it already; give a new folder")
        if queued:
            return _queue(job, out, str(out.absolute()), as_json)
        return _launch(partial(Launched, job), out, str(out), as_json)
    from windtunnel.store.runs import Store

    run = Store.open().begin(CAPABILITY, job.plain())
    if queued:
        with run.failing():
            return _queue(job, run.directory, run.id, as_json)
    return _stored(run, partial(Launched, job), as_json, mine=True)


def resume_and_store(
    name: str,
    *,
    as_json: bool = False,
    certificates: tuple[Path | None, ...] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Take over the run ``name`` (as `Store.get` finds it, or its folder), whose launcher is gone, and go on
    as `train_and_store`. ``certificates``: files of this host, see `tls.certificate_files`; those of the run,
    if there are none. ``changes``: of the `JobSpec`, None for what stays.

    Raises:
        UserError: there is no such run, it has ended, or it is running. ScriptError: as above.
    """
    from windtunnel.store.runs import Store

    changes = {**changes, "tls": tls.certificate_files(*certificates) or None}
    begin = partial(resume, **{key: value for key, value in changes.items() if value is not None})
    if any((Path(name) / file).is_file() for file in (eventlog.NAME, hosts.JOB)):
        return _launch(begin, Path(name).absolute(), name, as_json)
    store = Store.open()
    if name == "last":
        name = next((run.id for run in store.list(1, CAPABILITY)), name)
    run = store.get(name)
    if run.capability != CAPABILITY:
        raise UserError(f"{run.id}: this run is one of {run.capability}, only those of train can be resumed")
    return _stored(run, begin, as_json, mine=False)


def _queue(job: JobSpec, folder: Path, name: str, as_json: bool) -> dict[str, Any]:
    queued = hosts.queue(job, folder, name)
    text = f"Slurm     job {queued['slurm_job']}\nRun       {name}\nOutput    {folder / 'slurm.log'}"
    print(json.dumps(queued) if as_json else text)
    return queued


def _print_manifest(job: JobSpec, as_json: bool) -> dict[str, Any]:
    import yaml

    manifest = hosts.manifest(job)
    print(json.dumps(manifest) if as_json else yaml.safe_dump(manifest, sort_keys=False), flush=True)
    return manifest


Begin = Callable[[Path, Callable[[dict[str, Any]], None], int | None], Launched]


def _stored(run: StoredRun, begin: Begin, as_json: bool, *, mine: bool) -> dict[str, Any]:
    """`_launch`; what comes of it is in the store. ``mine``: the run is this process's, also if it cannot be
    begun; else it is so once it has been taken over."""

    def begin_and_take(*arguments: Any) -> Launched:
        nonlocal mine
        launched = begin(*arguments)
        run.take()
        mine = True
        return launched

    try:
        summary = _launch(begin_and_take, run.directory, run.id, as_json)
    except BaseException as error:
        if mine and not isinstance(error, Preempted):
            expected = isinstance(error, UserError | ScriptError | LessError)
            run.fail(str(error) if expected else f"{type(error).__name__}: {error}")
        raise
    run.finish(summary)
    return summary


def _launch(begin: Begin, folder: Path, name: str, as_json: bool) -> dict[str, Any]:
    """``name``: by which the run can be resumed."""
    narrator = report.Narrator()

    def narrate(event: dict[str, Any]) -> None:
        line = narrator.line(event)
        if line is not None:
            # One write, so that it does not mix with the trainers' lines.
            _say(line)

    adopt_orphans()
    # stdout is for the one object of JSON alone
    own = redirect_stdout(sys.stderr) if as_json else nullcontext()
    with (
        own,
        _terminable(by_engine=(folder / hosts.JOB).is_file()),
        begin(folder, narrate, 2 if as_json else None) as launched,
    ):
        wait = f"hosts and trainers wait {launched.job.orphan_after:g} s"
        _say(f"if this launcher dies, {wait} for `windtunnel train --resume {name}`")
        outcome = launched.wait()
        events = launched.events()
    assert outcome is not None
    _tell_end(events, folder)
    summary = {
        "status": outcome.status,
        "reason": outcome.reason,
        "results": outcome.results,
        **report.summary(events),
        "wall_time_s": events[-1]["t"] - events[0]["t"],
        "directory": str(folder),
    }
    atomic.replace(folder / SUMMARY, json.dumps(summary, indent=1) + "\n")
    if as_json:
        print(json.dumps(summary), flush=True)
    if outcome.status == LessError.status:
        raise LessError(f"the job ended: {in_short(outcome.reason)}")
    if outcome.status != 0:
        lost = report.failed_rank(events) or {}
        raise ScriptError(f"the job failed: {in_short(outcome.reason)}", lost.get("error") or "")
    return summary


def _tell_end(events: list[dict[str, Any]], folder: Path) -> None:
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.width = max(console.width, 140)  # what is piped is searched, so it is not folded
    report.print_end(events, console)
    console.print(
        f"More: events in {folder / 'events.jsonl'}, what each rank printed in {folder / 'logs'}",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _say(text: str) -> None:
    os.write(2, f"windtunnel {text}\n".encode())


@contextmanager
def _terminable(*, by_engine: bool) -> Iterator[None]:
    """SIGTERM and SIGHUP end this launcher as Ctrl-C does; a second one does not disturb the cleaning up.
    ``by_engine``: an engine runs this launcher, and may do so again after its SIGTERM."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        numbers.append(signal.SIGHUP)

    def end(number: int, _: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        if by_engine and number == signal.SIGTERM:
            os.write(2, b"windtunnel: stopped by SIGTERM; the run is left to the next launcher\n")
            raise Preempted
        os.write(2, b"windtunnel: interrupted; every process of the run is ended\n")
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, end)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def lend(
    launcher: str,
    address: str,
    domain: str,
    secret_file: Path | None = None,
    certificates: tuple[Path | None, ...] = (),
) -> int:
    """Be a host of the job that the ``launcher`` has begun: the exit status. ``certificates``: files of this
    host, see `tls.certificate_files`.

    Raises:
        UserError: there is no secret, or another than the job's, or no certificate that it takes; nobody
            listens there; the script is not on this host.
    """
    secret = keys.Keys.from_option(secret_file)
    if secret is None:
        raise UserError(
            f"host {launcher}: the secret of that job is needed; give --secret-file FILE (its launcher keeps "
            f"it in the file {keys.NAME} of the run's folder), or the environment variable {keys.VARIABLE}"
        )
    os.environ.pop(keys.VARIABLE, None)  # the trainers have no use for it
    files = tls.certificate_files(*certificates)
    return hosts.lend(
        launcher, replace(secret, tls=Certificates.load(files) if files else None), address, domain
    )


def own_storage(url: str) -> str:
    """``url``, absolute where it is a path, once a file was written there and removed again.

    Raises:
        UserError: nothing can be written there; said now, not at the first checkpoint. Or checkpoints of
            another run are in it, which are neither taken for this one's nor silently passed over.
    """
    if "://" not in url:
        url = str(Path(url).absolute())
    files = open_files(url)
    name = f"probe-{os.getpid()}"
    try:
        files.write(name, b"")
        files.remove(name)
    except Exception as error:  # whatever a library of object storage raises
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(f"`persist` {url}: nothing can be written there ({why})") from error
    if steps := stored_steps(url, "`persist`"):
        raise UserError(
            f"`persist` {url}: step {steps[-1]} of another run is in it; storage without checkpoints"
            " is accepted, and --resume goes on with that run"
        )
    return url


def stored_steps(url: str, option: str) -> list[int]:
    """The whole checkpoints in storage, oldest first.

    Raises:
        UserError: it cannot be read.
    """
    from windtunnel.store.objects.files import ObjectError
    from windtunnel.training.checkpoint.live import storage

    try:
        return [step.step for step in storage.steps(url) if not step.bad]
    except (ObjectError, OSError) as error:
        raise UserError(f"{option} {url}: it cannot be read ({error})") from error
