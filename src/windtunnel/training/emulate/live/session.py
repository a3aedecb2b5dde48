"""Starts the worker, sends it ranks, takes their slices: the capture as the rest of the package sees it."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from windtunnel.base.errors import HangError, ScriptError, UserError
from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.graph import Place, Slice
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.progress import kill_tree
from windtunnel.training.emulate.program import Program, packed

WORKER_LOG = "worker.txt"
MESSAGE = re.compile(r"-?\d+-[0-9a-f]{16}-\d+")
"""The name of a message's file, see `mailbox.Mailbox`."""
LOG_LINES = 120
"""Of a failed script's output that are shown."""
STEPS = {"gpu": 32, "cpu": 5}
"""Steps that are looked at at most while looking for those that repeat, by the kind of the device: what is
not there computes nothing."""
TEMPLATES = True
"""Micro-batches that are like others are not all run; False, to hold the one against the other."""


@dataclass(frozen=True)
class CaptureRequest:
    """Which ranks to run: sent to the worker by `Session`. ``steps``: that are looked at at most. ``least``:
    that are run as they are, and a period more, before it counts. ``marked``: only the program says where
    steps end. ``settled``: up to which step the first rank was captured, and with which period. ``further``:
    the script is run on from its period. ``to_end``: another rank came to its end, so what this one calls
    counts wherever it is left. ``outline``: only the ranks' outlines are wanted. ``templates``: not all
    micro-batches are run, see `chunks`."""

    number: int
    ranks: list[int]
    world_size: int
    devices_per_host: int
    directory: str
    steps: int
    least: int
    marked: bool
    jobs: int
    timeout: float
    earlier: list[int]
    settled: tuple[int, int] | None
    further: bool
    to_end: bool
    outline: bool
    templates: bool


class Session:
    """Captures ranks of one program on one cluster. A context manager: the worker and its files end with it.

    Raises:
        UserError: the script does not exist, or PyTorch is not installed.
        ScriptError: the script raised, exited with a status, or hung (`HangError`: it did not get on for
            ``timeout`` seconds, see `progress`).
    """

    def __init__(
        self, program: Program, cluster: Cluster, *, jobs: int = 2, timeout: float = 900.0,
        progress: Callable[[int, int], None] | None = None, steps: int | None = None,
    ) -> None:  # fmt: skip
        program.check()
        self.program, self.cluster = program, cluster
        self.jobs, self.timeout = jobs, timeout
        self.progress = progress
        self.captured: list[int] = []
        self.checked: list[int] = []
        # ran because another rank waited for what they say; not asked for yet
        self.run_for_others: set[int] = set()
        self.steps = steps or STEPS[cluster.host.device.kind]
        self.least = steps or 0  # steps that the first rank runs as they are before its period counts
        self.marked = False  # steps end where the program says so
        self.settled: tuple[int, int] | None = None  # the steps to run on other ranks, and the period
        self.ended: bool | None = None  # whether the script comes to its end soon after the steady step
        self.refused: dict[int, str] = {}  # ranks that could not be checked, and why
        self.rank_answers: dict[
            Place, dict[int, list[int]]
        ] = {}  # of captured ranks: what each was told where
        self.files: tuple[str, ...] = ()
        self.seconds: list[float] = []  # that the process of each captured rank took
        self.requests = 0
        self.directory = Path()
        self._scratch: tempfile.TemporaryDirectory[str]  # from when it is entered on, as the worker
        self._worker: subprocess.Popen[str]

    def __enter__(self) -> Session:
        self._scratch = tempfile.TemporaryDirectory(prefix="windtunnel-")
        self.directory = Path(self._scratch.name)
        job_file = self.directory / "job.pkl"
        job_file.write_bytes(pickle.dumps((self.cluster.host.device, packed(self.program))))
        with open(Path(self._scratch.name, WORKER_LOG), "w") as log:
            self._worker = subprocess.Popen(
                [sys.executable, "-m", "windtunnel.training.emulate.live.worker", str(job_file)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The worker has nothing of its own to finish. What the ranks started may have left its group.
        kill_tree(self._worker.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.wait()
        assert self._worker.stdin and self._worker.stdout
        with contextlib.suppress(BrokenPipeError):
            self._worker.stdin.close()
        self._worker.stdout.close()
        self._scratch.cleanup()

    def capture(self, ranks: Sequence[int]) -> list[Slice]:
        """Run the script as each of ``ranks`` and return their slices, in that order.

        A rank that another one waits for runs with it, once: its slice is kept until it is asked for.
        """
        if not self.captured and len(ranks) > 1:
            # How the first rank ends tells how far the others are to be followed.
            return self.capture(ranks[:1]) + self.capture(ranks[1:])
        slices = self._run_slices(ranks)
        if not self.captured and slices[0].varies:
            # Later steps are others, or end elsewhere. What was written for or by this run is not read again.
            self.least, self.marked = slices[0].varies, slices[0].marked
            self._begin_anew()
            slices = self._run_slices(ranks)
        self.captured.extend(ranks)
        for slice_ in slices:
            for place, answers in slice_.rank_answers.items():
                self.rank_answers.setdefault(place, {})[slice_.rank] = answers
            self.files = tuple(dict.fromkeys((*self.files, *slice_.files)))
        if self.ended is None and slices:
            self.ended = slices[0].ended
            if slices[0].settled or not self.ended:
                # The first rank has shown the steps that repeat: the others stop at their end.
                self.settled = len(slices[0].steps), slices[0].period
            if self.least:
                self.run_for_others.clear()  # they were run as far as the first one, and not as far as these
        return slices

    def messages(self) -> dict[str, bytes]:
        """What the captured ranks said to others, as files of their mailbox."""
        return {
            path.name: path.read_bytes() for path in self.directory.iterdir() if MESSAGE.fullmatch(path.name)
        }

    def _run_slices(self, ranks: Sequence[int]) -> list[Slice]:
        self._run([rank for rank in ranks if rank not in self.run_for_others], outline=False)
        self.run_for_others.difference_update(ranks)
        return [self._slice(rank) for rank in ranks]

    def _begin_anew(self) -> None:
        self.directory = self.directory / "again"
        self.directory.mkdir()
        self.run_for_others.clear()

    def check(self, ranks: Sequence[int]) -> list[Slice | None]:
        """Run the script as each of ``ranks`` for what it calls of other ranks: slices that are outlines, in
        that order; None for a rank that calls what cannot be emulated (``refused`` says what)."""
        self._run(ranks, outline=True)
        self.checked.extend(ranks)
        self.run_for_others.difference_update(ranks)
        return [None if rank in self.refused else self._slice(rank) for rank in ranks]

    def _run(self, ranks: Sequence[int], outline: bool) -> None:
        assert self._worker.stdin and self._worker.stdout
        directory = self.directory
        self.requests += 1
        # Steps of a device that is not there cost little, so the script may be run on from a steady one.
        follows = self.cluster.host.device.kind == "gpu" and self.ended is not False
        request = CaptureRequest(
            number=self.requests, ranks=list(ranks), world_size=self.cluster.world_size,
            devices_per_host=self.cluster.devices_per_host, directory=str(directory), steps=self.steps,
            least=self.least if self.settled is None else 0, marked=self.marked, jobs=self.jobs,
            timeout=self.timeout, earlier=[*self.captured, *self.checked, *sorted(self.run_for_others)],
            settled=self.settled, further=follows, to_end=bool(self.ended), outline=outline,
            templates=TEMPLATES,
        )  # fmt: skip
        try:
            self._worker.stdin.write(json.dumps(asdict(request)) + "\n")
            self._worker.stdin.flush()
        except BrokenPipeError:
            raise self._worker_died() from None
        done = 0
        for line in self._worker.stdout:
            message: dict[str, Any] = json.loads(line)
            if message["request"] != self.requests:
                continue  # of a request that failed before all of its ranks had ended
            if message.get("end"):
                break
            rank = message["rank"]
            files = RankFiles(directory, rank)
            if message["status"] == 0 or (self.ended is None and files.slice.exists()):
                pass  # or it died beyond its steady step, run on only to see whether the script has an end
            elif outline and files.refused.exists():
                self.refused[rank] = failure.content(files.reason)
            else:
                raise _failure(message, files)
            self.seconds.append(message["seconds"])
            if rank not in ranks:
                if not outline:
                    self.run_for_others.add(rank)
                continue
            done += 1
            if self.progress is not None:
                self.progress(done, len(ranks))
        if done < len(ranks):
            raise self._worker_died()

    def _slice(self, rank: int) -> Slice:
        path = RankFiles(self.directory, rank).slice
        if not path.exists():
            raise ScriptError(
                f"the script ended by itself as rank {rank} (os._exit?) before its steps were seen"
            )
        slice_: Slice = pickle.loads(path.read_bytes())
        path.unlink()
        return slice_

    def _worker_died(self) -> Exception:
        self._worker.wait()
        details = Path(self._scratch.name, WORKER_LOG).read_text(errors="replace")
        last = details.strip().splitlines()[-1] if details.strip() else ""
        if last.startswith("windtunnel.base.errors.UserError: "):
            return UserError(last.removeprefix("windtunnel.base.errors.UserError: "))
        status = self._worker.returncode
        how = f"killed by signal {-status}" if status < 0 else f"with status {status}"
        return ScriptError(f"the process that runs the script ended early, {how} (out of memory?)", details)


def _failure(message: dict[str, Any], files: RankFiles) -> ScriptError:
    """What happened to a rank, from its exit status, its log and what it left."""
    rank, status = message["rank"], message["status"]
    tail = failure.shorten(failure.content(files.log), LOG_LINES)
    if message["hung"]:
        dump = failure.content(files.stack)
        place = failure.stood_at(dump)
        at = f" at {place}" if place else ""
        seconds = max(1.0, message["quiet"])
        did = f"it stood{at}"
        if loop := failure.content(files.loop):
            did = f"the loop at {loop} read the same of the device, and did nothing new"
        return HangError(
            f"the script hung as rank {rank}: for {seconds:.0f} s {did}",
            f"{tail}\n{failure.shorten(dump, LOG_LINES)}",
        )
    if reason := failure.content(files.reason):
        return ScriptError(f"{reason} (as rank {rank})", tail)
    if status == -9:
        return ScriptError(f"rank {rank} was killed (SIGKILL; out of memory?)", tail)
    if status < 0:
        return ScriptError(f"the script died of signal {-status} as rank {rank}", tail)
    return ScriptError(f"the script ended with status {status} as rank {rank}", tail)
