"""One replica: a process that holds one ONNX session, and answers batches over a pipe.

Processes come from a fork server that has ONNX Runtime imported already, so a replica is there as soon as its
file is loaded. A message is (number, array); the answer is (number, array or the error's words, seconds). A
replica ends when its pipe does.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

PATIENCE = 60.0
"""Seconds after which a process that does not answer has hung."""
LOADS = 300.0
"""The same, for one that is being loaded."""
_context = multiprocessing.get_context("forkserver")


class Died(Exception):
    """The process went, or hung, while it was asked; what it was asked may be asked of another."""


class Failed(Exception):
    """The session refused the inputs, and would do so again."""


def session(file: Path, threads: int) -> Any:
    """The file loaded, run by so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


class Replica:
    """A process, from this side. One thread at a time asks it."""

    def __init__(self, file: Path, threads: int) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, str(file), threads), daemon=True)
        self.process.start()
        theirs.close()
        self._asked = 0

    def loaded(self) -> None:
        """Wait until it can answer.

        Raises:
            Died: it cannot.
        """
        self._receive(LOADS)

    def ask(self, inputs: NDArray[Any]) -> tuple[NDArray[Any], float]:
        """The first output, and the seconds that it took there.

        Raises:
            Died: the process went, or has not answered for `PATIENCE` seconds.
            Failed: the inputs were refused.
        """
        self._asked += 1
        try:
            self._pipe.send((self._asked, inputs))
        except OSError as fault:
            raise Died from fault
        number, made, seconds = self._receive(PATIENCE)
        assert number == self._asked
        if isinstance(made, str):
            raise Failed(made)
        return made, seconds

    def _receive(self, seconds: float) -> Any:
        try:
            if not self._pipe.poll(seconds):
                raise Died
            return self._pipe.recv()
        except (EOFError, OSError) as fault:
            raise Died from fault

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def serve(pipe: Connection, file: str, threads: int) -> None:
    """What the process does."""
    loaded = session(Path(file), threads)
    name = loaded.get_inputs()[0].name
    pipe.send((0, None, 0.0))
    while True:
        try:
            number, inputs = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        began = time.perf_counter()
        try:
            made: Any = np.asarray(loaded.run(None, {name: inputs})[0])
        except Exception as fault:  # the runtime's own are no family of exceptions
            made = str(fault).splitlines()[0]
        pipe.send((number, made, time.perf_counter() - began))


_context.set_forkserver_preload([__name__])
