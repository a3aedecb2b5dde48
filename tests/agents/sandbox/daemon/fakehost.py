"""A host for the tests of the daemon: it really runs commands, with bash and folders in place of namespaces.

What it knows is on disk, so that another process can go on with it. Run as a program it is a daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from windtunnel.agents.sandbox.checks import checked_spec
from windtunnel.agents.sandbox.daemon import keys_of, server
from windtunnel.agents.sandbox.daemon.server import end, run
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied
from windtunnel.agents.sandbox.model import (
    BoxInfo,
    CheckpointManifest,
    Diff,
    FileChange,
    FilesPart,
    FolderEntry,
    GcReport,
    Lack,
    RestoreReport,
    SandboxSpec,
    Saved,
    TurnClass,
    TurnRecord,
    TurnResult,
)
from windtunnel.agents.sandbox.protocol import SandboxHistory
from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain

if TYPE_CHECKING:
    from support.preloaded import Process


TAIL = 64 * 2**10
"""Bytes of each output that a result holds where the output was passed on."""


class FakePending:
    """The checkpoint of a turn: done when the file ``hold`` of the sandbox is gone."""

    def __init__(self, box: FakeBox, turn: TurnRecord) -> None:
        self._box, self._turn = box, turn
        self.promoted = False

    @property
    def done(self) -> bool:
        return self.promoted or not (self._box.files / "hold").exists()

    def promote(self) -> None:
        self.promoted = True

    def wait(self, timeout: float | None = None) -> TurnRecord:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.done:
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError("not done")
            time.sleep(0.01)
        if (self._box.files / "broken").exists():
            raise OSError(errno.ENOSPC, "no space left for the checkpoint")
        return self._turn


@dataclass(frozen=True)
class State:
    """What the next process knows of a sandbox."""

    spec: SandboxSpec
    status: str = "running"
    turns: tuple[TurnRecord, ...] = ()
    checkpoints: tuple[CheckpointManifest, ...] = ()
    base: str = ""


class FakeBox:
    def __init__(self, folder: Path, state: State | None = None) -> None:
        self.name, self.folder, self.files = folder.name, folder, folder / "files"
        self._lock = threading.RLock()
        self._shells: dict[str, threading.Lock] = {}
        self.files.mkdir(parents=True, exist_ok=True)
        self.state = state or from_plain(State, json.loads((folder / "state").read_text()))
        self.save()

    def save(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        atomic.replace(self.folder / "state", json.dumps(to_plain(self.state)))

    @property
    def spec(self) -> SandboxSpec:
        return self.state.spec

    @property
    def tip(self) -> str:
        return self.state.checkpoints[-1].id if self.state.checkpoints else ""

    @property
    def turns(self) -> int:
        return len(self.state.turns)

    def info(self) -> BoxInfo:
        image, network, state = self.spec.image, self.spec.network, self.state
        pid, turns = os.getpid(), self.turns
        return BoxInfo(
            self.name, state.status, pid, turns, self.tip, image, network, 1.0, ("sh",), state.base
        )

    def path(self, inside: str) -> Path:
        if not inside.startswith("/"):
            raise UserError(f"sandbox: path {inside!r} is not absolute")
        return self.files / inside.lstrip("/")

    def run(
        self, command: str | Sequence[str], *, shell: str = "main", stdin: Any = None, **ends: Any
    ) -> TurnResult:
        with self._lock:
            lock = self._shells.setdefault(shell, threading.Lock())
        with lock:
            if self.state.status != "running":
                raise SandboxDied(f"sandbox {self.name} is dead: its processes are gone")
            process = subprocess.Popen(
                ["bash", "-c", command if isinstance(command, str) else shlex.join(command)],
                cwd=self.files,
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, **self.spec.environment, "SHELL_NAME": shell},
            )
            if stdin is not None:
                threading.Thread(target=_feed, args=(process, stdin), daemon=True).start()
            return _watched(process, **ends)

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(target) as part, part.open("wb") as out:
            shutil.copyfileobj(io.BytesIO(data) if isinstance(data, bytes) else data, out, 1 << 16)
            part.chmod(mode)

    def get(self, path: str) -> bytes:
        out = io.BytesIO()
        self.get_to(path, out)
        return out.getvalue()

    def get_to(self, path: str, out: IO[bytes]) -> None:
        if not self.path(path).is_file():
            raise UserError(f"sandbox: {path} is no file")
        with self.path(path).open("rb") as source:
            shutil.copyfileobj(source, out, 1 << 16)

    def listdir(self, path: str) -> list[FolderEntry]:
        return [
            FolderEntry(
                entry.name,
                "link" if entry.is_symlink() else "folder" if entry.is_dir() else "file",
                entry.lstat().st_size,
                entry.lstat().st_mode,
                target=str(entry.readlink()) if entry.is_symlink() else "",
            )
            for entry in sorted(self.path(path).iterdir())
        ]

    def port(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def end_turn(self, request: str = "", *, urgent: bool = False) -> FakePending:
        with self._lock:
            number, reasons = self.turns + 1, ("modified /a",)
            turn = TurnRecord(
                number, TurnClass.FILES, TurnClass.FILES, reasons, "c", 1.0, 0.5, 0.1, 7, request
            )
            self.save(turns=(*self.state.turns, turn))
            return FakePending(self, turn)

    def wait(self, timeout: float | None = None) -> None:
        return None

    def _lacks(self) -> tuple[Lack, ...]:
        """What the file ``odd`` of the sandbox says."""
        odd = self.files / "odd"
        return (Lack("processes", "odd (process 7 inside)", odd.read_text()),) if odd.exists() else ()

    def checkpoint(
        self, label: str = "", *, full: bool = False, pin: bool = False, allow_less: bool = False
    ) -> CheckpointManifest:
        with self._lock:
            number = len(self.state.checkpoints)
            manifest = CheckpointManifest(
                id=f"c{number + 1}-{uuid.uuid4().hex[:6]}",
                box=self.name,
                turn=self.turns,
                parent=self.tip or self.state.base or None,
                turn_class=TurnClass.FULL if full else TurnClass.FILES,
                required=TurnClass.FULL if full else TurnClass.FILES,
                reasons=("asked for",),
                created=1000.0 + number,
                files=FilesPart("f", "copy", 4096),
                image=None,
                shells=(),
                spec=self.spec,
                restorable=("files",),
                lacks=self._lacks(),
                label=label,
                pinned=pin,
            )
            shutil.copytree(self.files, self.folder / "snapshots" / manifest.id)
            self.save(checkpoints=(*self.state.checkpoints, manifest))
            if manifest.lacks and not allow_less:
                raise IncompleteError("odd is not kept", manifest.lacks, manifest=manifest)
            return manifest

    def restore(self, checkpoint: str = "", *, allow_less: bool = False) -> RestoreReport:
        with self._lock:
            known = [manifest.id for manifest in self.state.checkpoints]
            matches = [id for id in known if id.startswith(checkpoint)] if checkpoint else known[-1:]
            if not matches:
                raise UserError(f"sandbox {self.name}: checkpoint {checkpoint!r} is unknown")
            shutil.rmtree(self.files)
            shutil.copytree(self.folder / "snapshots" / matches[0], self.files)
            report = RestoreReport(matches[0], 1, ("files",), self._lacks(), 0.25)
            less = bool(report.lacks) and not allow_less
            self.save(status="stopped" if less else "running")
            if less:
                raise IncompleteError("odd does not come back", report.lacks, report=report)
            return report

    rollback = restore

    def log(self) -> SandboxHistory:
        return SandboxHistory(self.state.checkpoints, self.state.turns)

    def diff(self, older: str, newer: str = "") -> Diff:
        return Diff((FileChange("/a", "modified", 3),), ("new",), ())

    def stop(self) -> None:
        self.save(status="stopped")


def _watched(
    process: subprocess.Popen[bytes],
    timeout: float | None = None,
    cancel: threading.Event | None = None,
    on_output: Callable[[str, bytes], None] | None = None,
) -> TurnResult:
    """What comes of a command, cut off where that is due."""
    begin, sizes, outputs = time.monotonic(), Counter[str](), {"stdout": b"", "stderr": b""}
    ended: Any = "exit"
    with process, selectors.DefaultSelector() as selector:
        for name in outputs:
            selector.register(getattr(process, name), selectors.EVENT_READ, name)
        while selector.get_map():
            for key, _ in selector.select(0.02):
                data = os.read(key.fd, 1 << 20)  # in pieces no larger than the real host's
                if data == b"":
                    selector.unregister(key.fileobj)
                    continue
                sizes[key.data] += len(data)
                outputs[key.data] = (outputs[key.data] + data)[-TAIL if on_output else 0 :]
                while on_output is not None:
                    with contextlib.suppress(BlockingIOError):
                        on_output(key.data, data)
                        break
            if ended == "exit" and cancel is not None and cancel.is_set():
                ended = "cancelled"
            elif ended == "exit" and timeout is not None and time.monotonic() - begin > timeout:
                ended = "timeout"
            if ended != "exit":
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    status = process.returncode if ended == "exit" else None
    tails = tuple(name for name in outputs if on_output is not None and sizes[name] > TAIL)
    return TurnResult(*outputs.values(), status, time.monotonic() - begin, ended, "", tails)


def _feed(process: subprocess.Popen[bytes], stdin: Any) -> None:
    source = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as pipe:
        while piece := source.read1(1 << 16):
            pipe.write(piece)
            pipe.flush()


class FakeHost:
    def __init__(self, home: Path) -> None:
        self.folder = home / "fake"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._boxes = {file.parent.name: FakeBox(file.parent) for file in self.folder.glob("*/state")}

    def create(self, spec: SandboxSpec, base: str = "") -> FakeBox:
        checked_spec(spec)
        faults: dict[str, Exception] = {
            "full": OSError(errno.ENOSPC, "No space left on device"), "bug": KeyError("surprise"),
            "missing": UserError(f"sandbox: image {spec.image!r} is unknown"),
        }  # fmt: skip
        if spec.image in faults:
            raise faults[spec.image]
        self._boxes[spec.name] = FakeBox(self.folder / spec.name, State(spec, base=base))
        return self._boxes[spec.name]

    def get(self, name: str) -> FakeBox:
        if name not in self._boxes:
            existing = ", ".join(self._boxes) or "none yet"
            raise UserError(f"sandbox: {name!r} is unknown; there are: {existing}")
        return self._boxes[name]

    def boxes(self) -> list[BoxInfo]:
        return [self._boxes[name].info() for name in sorted(self._boxes)]

    def remove(self, name: str) -> None:
        shutil.rmtree(self._boxes.pop(name).folder)

    def fork(
        self, checkpoint: str, count: int = 1, *, name: str = "", allow_less: bool = False
    ) -> list[FakeBox]:
        every = ((box, manifest.id) for box in self._boxes.values() for manifest in box.state.checkpoints)
        source, id = next((box, id) for box, id in every if checkpoint in (id, box.name))
        forks = []
        several = [f"{name or source.name}-{number + 1}" for number in range(count)]
        for each in [name] if name and count == 1 else several:
            box = self.create(replace(source.spec, name=each), id)
            shutil.copytree(source.folder / "snapshots" / id, box.files, dirs_exist_ok=True)
            forks.append(box)
        return forks

    def import_(self, url: str, name: str, *, key_file: str = "", allow_less: bool = False) -> FakeBox:
        return self.create(SandboxSpec(name=name, image=url))

    def export(self, checkpoint: str, url: str, *, allow_less: bool = False) -> CheckpointManifest:
        return self._boxes[checkpoint].state.checkpoints[-1]

    def notice(self, seconds: float) -> dict[str, Saved]:
        manifests = {name: box.checkpoint("notice", allow_less=True) for name, box in self._boxes.items()}
        return {
            name: Saved(manifest.id, manifest.lacks, bool(manifest.lacks))
            for name, manifest in manifests.items()
        }

    def gc(self, *, dry_run: bool = False) -> GcReport:
        return GcReport(("old",), ("mount /x",), 0 if dry_run else 4096)

    def close(self) -> None:
        return None


def open_host(home: Path, *_: Any) -> FakeHost:
    return FakeHost(home)


@contextlib.contextmanager
def daemon(home: Path, *arguments: str) -> Iterator[Process]:
    """A daemon of ``home`` in a process of its own, ready; it is killed at the end if it still runs."""
    from support import preloaded  # the daemon that this file is needs none of the tests

    command = [__file__, "--home", home, *arguments]
    process = preloaded.Process(command, modules=preloaded.SANDBOX, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().strip() == str(home / "daemon.sock")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--tcp")
    parser.add_argument("--http")
    parser.add_argument("--tls", nargs=3)
    parser.add_argument("--token", default="")
    parser.add_argument("--idle", type=float)
    given = parser.parse_args()
    server.open_host = open_host
    with (given.home / "starts").open("a") as starts:
        starts.write(f"{os.getpid()}\n")
    try:
        run(
            given.home,
            keys=keys_of(given.token, given.tls),
            tcp=given.tcp,
            http=given.http,
            idle_seconds=given.idle,
            ready=lambda where: print(where, flush=True),
        )
    except UserError as error:
        print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        end(2)
    end(0)


if __name__ == "__main__":
    main()
