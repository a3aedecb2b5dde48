"""One replica: a process that holds one loaded model, and answers batches over a pipe.

Processes come from a fork server that has the runtimes imported already, so a replica is there as soon as its
file is loaded. A message is arrays; the answer is arrays or the error's words, and seconds. A replica ends
when its pipe does.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from windtunnel.serving.variants.live.tensors import Arrays

PATIENCE = 60.0
"""Seconds after which a process that does not answer has hung."""
LOADS = 300.0
"""The same, for one that is being loaded."""
COMPILED = ".compiled.pt2"
"""How the file of a model ends that torch's Inductor compiled; other ``.pt2`` are exported programs."""
TORCH = ("torch._inductor.package", "networkx")
"""What loading one of these imports."""
Program = Callable[[Arrays], list[NDArray[Any]]]
"""Inputs to outputs, both in the model's order."""
_context = multiprocessing.get_context("forkserver")


class Died(Exception):
    """The process went, or hung, while it was asked; what it was asked may be asked of another."""


class Failed(Exception):
    """The model refused the inputs, and would do so again."""


def preload(*frameworks: str) -> None:
    """What the fork server imports, where it does not run yet."""
    _context.set_forkserver_preload([__name__, *(TORCH if "torch" in frameworks else ())])


def session(file: Path, threads: int) -> Any:
    """An ONNX file loaded, run by so many threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def program(file: Path, threads: int) -> Program:
    """A variant's file loaded, by what it ends in; 0 threads: as the runtime will."""
    if file.suffix == ".onnx":
        loaded = session(file, threads)
        return lambda inputs: [np.asarray(output) for output in loaded.run(None, dict(inputs))]
    import torch

    if threads:
        torch.set_num_threads(threads)
    run: Callable[..., Any]
    if file.name.endswith(COMPILED):
        from torch._inductor import aoti_load_package

        run = aoti_load_package(str(file))
    else:
        run = torch.export.load(file).module()

    def answer(inputs: Arrays) -> list[NDArray[Any]]:
        with torch.inference_mode():
            return arrays(run(*(torch.tensor(array) for array in inputs.values())))

    return answer


def arrays(outputs: Any) -> list[NDArray[Any]]:
    """What a module gave: one tensor, or several."""
    return [tensor.numpy() for tensor in (outputs if isinstance(outputs, tuple | list) else (outputs,))]


class Replica:
    """A process, from this side. One thread at a time asks it."""

    def __init__(self, file: Path, threads: int) -> None:
        self._pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, str(file), threads), daemon=True)
        self.process.start()
        theirs.close()

    def loaded(self) -> None:
        """Wait until it can answer.

        Raises:
            Died: it cannot.
        """
        self._receive(LOADS)

    def ask(self, inputs: Arrays) -> tuple[list[NDArray[Any]], float]:
        """The outputs, and the seconds that they took there.

        Raises:
            Died: the process went, or has not answered for `PATIENCE` seconds.
            Failed: the inputs were refused.
        """
        try:
            self._pipe.send(inputs)
        except OSError as fault:
            raise Died from fault
        outputs, seconds = self._receive(PATIENCE)
        if isinstance(outputs, str):
            raise Failed(outputs)
        return outputs, seconds

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
    run = program(Path(file), threads)
    pipe.send(None)
    while True:
        try:
            inputs = pipe.recv()
        except (EOFError, OSError, KeyboardInterrupt):
            return
        pipe.send(timed(run, inputs))


def timed(run: Program, inputs: Arrays) -> tuple[list[NDArray[Any]] | str, float]:
    """The outputs, or why there are none; and the seconds."""
    began = time.perf_counter()
    try:
        outputs: list[NDArray[Any]] | str = run(inputs)
    except Exception as fault:  # the runtimes' own are no family of exceptions
        outputs = next(iter(str(fault).splitlines()), type(fault).__name__)
    return outputs, time.perf_counter() - began


preload()
