"""The user's program (a script, a module as ``python -m`` runs it, or a function), and what a step of it is.

Every parameter is updated at most once in a step. A job's step is seldom one call of one optimiser. ZeRO
steps its optimiser once for each group of parameters, Megatron and Muon chain several, a GAN has two, and an
optimiser for each layer steps while backward runs; a wrapper (Accelerate, Lightning, Lookahead) calls the one
inside it. None of these updates a parameter a second time before all of it begins again. So a step has ended
when a parameter is about to be updated a second time; micro-batches, which only accumulate gradients, end
none. The first step tells in which calls a step consists, and the later ones end with the last of these.
Where the program says it by ``windtunnel.step()``, that alone ends steps.

Steps need not be alike: some save, some generate, some talk to other islands. A *period* is the sequence of
steps that repeats.
"""

from __future__ import annotations

import io
import marshal
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType
from typing import Any, Generic, TypeVar

from windtunnel.base.errors import UserError

PROGRAM = "program.pkl"
"""The file with a program, for the processes that run it."""


@dataclass(frozen=True)
class Script:
    """The user's program: a path and its arguments."""

    path: Path
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.path)

    def run(self) -> None:
        """In this process, as ``python`` runs it."""
        path = self.path.resolve()
        sys.argv = [str(path), *self.arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    def check(self) -> None:
        """Raises:
        UserError: the file does not exist, is no file, or cannot be read.
        """
        if not self.path.exists():
            raise UserError(f"script {str(self.path)!r} does not exist")
        if not self.path.is_file():
            raise UserError(f"script {str(self.path)!r} is not a file")
        if not os.access(self.path, os.R_OK):
            raise UserError(f"script {str(self.path)!r} cannot be read")


@dataclass(frozen=True)
class Module:
    """A module's name, ``train`` or ``package.train``, and its arguments; a package is run by its
    ``__main__``."""

    module: str
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"-m {self.module}"

    def run(self) -> None:
        """In this process, as ``python -m`` runs it."""
        sys.argv = [self.module, *self.arguments]  # runpy puts the file's path in the first place
        sys.path.insert(0, os.getcwd())
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    def check(self) -> None:
        """Look whether there is such a module, without importing anything of the user's.

        Raises:
            UserError: there is none, or it is a package that cannot be run.
        """
        here = f"from {Path.cwd()}"
        parts = self.module.split(".")
        is_file = parts[-1] == "py"
        if is_file or not all(part.isidentifier() for part in parts):
            instead = " (give its name, not its file)" if is_file else ""
            raise UserError(f"-m: {self.module!r} is not the name of a module{instead}")
        places: list[str] | None = [str(Path.cwd()), *sys.path]
        spec: ModuleSpec | None = None
        for place in range(len(parts)):
            name = ".".join(parts[: place + 1])
            if places is None:
                raise UserError(f"-m: {'.'.join(parts[:place])!r} is not a package, so it has no {name!r}")
            spec = _find(name, places)
            if spec is None:
                raise UserError(f"-m: there is no module {name!r} to be imported {here}")
            inside = spec.submodule_search_locations
            places = None if inside is None else list(inside)
        if places is not None and _find(f"{self.module}.__main__", places) is None:
            raise UserError(f"-m: {self.module!r} is a package without a __main__.py, which cannot be run")


@dataclass(frozen=True)
class Function:
    """The user's program as a function: called in the process of each rank, with these arguments.

    It goes there by cloudpickle, so it may also be defined in a notebook or in ``__main__``; a function of a
    module is imported there, from this process's ``sys.path``.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        module, name = getattr(self.call, "__module__", None), getattr(self.call, "__qualname__", None)
        return f"{module}.{name}" if module and name else repr(self.call)

    def check(self) -> None:
        """Raises:
        UserError: what is given cannot be called, or cannot be sent to another process.
        """
        if not callable(self.call):
            raise UserError(f"{self.call!r} is no function")
        packed(self)


@dataclass(frozen=True)
class _PackedFunction:
    """A `Function` in another process, which imports nothing of the user's before it is run."""

    name: str
    paths: list[str]
    content: bytes

    def run(self) -> None:
        sys.argv = [self.name]
        sys.path.extend(place for place in self.paths if place not in sys.path)
        call, values = pickle.loads(self.content)
        call(*values)


def _code(code: CodeType) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """How code is pickled for the same Python."""
    return marshal.loads, (marshal.dumps(code),)


Program = Script | Module | Function


def packed(program: Program) -> bytes:
    """A program for another process of this machine: unpickled there, it has ``run()``."""
    if not isinstance(program, Function):
        return pickle.dumps(program)
    from cloudpickle import CloudPickler

    class Pickler(CloudPickler):  # type: ignore[misc]
        """Code goes whole: some versions of cloudpickle leave out the name of its file."""

        dispatch_table = CloudPickler.dispatch_table.new_child({CodeType: _code})

    data = io.BytesIO()
    try:
        Pickler(data).dump((program.call, program.arguments))
    except Exception as error:
        raise UserError(
            f"{program.name} cannot be sent to the process that emulates it: {type(error).__name__}: {error}"
        ) from None
    return pickle.dumps(_PackedFunction(program.name, [path for path in sys.path if path], data.getvalue()))


def run_packed(file: Path) -> None:
    """Run the program in a file in this process."""
    pickle.loads(file.read_bytes()).run()


def _find(name: str, places: list[str]) -> ModuleSpec | None:
    """As the import system would find it; only what was installed with a finder of its own is asked for by
    name."""
    spec = PathFinder.find_spec(name, places)
    for finder in sys.meta_path if spec is None else ():
        ask = getattr(finder, "find_spec", None)
        spec = ask(name, places) if ask is not None else None
        if spec is not None:
            break
    return spec


Mark = TypeVar("Mark")
on_mark: list[Callable[[], None]] = []
"""Called where the program says that a step has ended."""


def step() -> None:
    """Say that a step of training ends here, for loops of which the optimisers' calls do not tell it. It does
    nothing where the program is not emulated."""
    for mark in on_mark:
        mark()


@dataclass
class OptimizerCalls(Generic[Mark]):
    """The calls of optimisers so far. A ``Mark`` is whatever the caller wants to know a place in time by."""

    pattern: tuple[frozenset[int], ...] = ()  # what each call of the first step updates
    current: list[frozenset[int]] = field(default_factory=list)
    last: Mark | None = None  # after the last call of a step that has not ended yet

    def add(self, updated: frozenset[int], mark: Mark) -> list[Mark]:
        """A call has ended that updated these parameters. Returns the ends of steps that are now known."""
        ends = []
        if self.last is not None and any(updated & before for before in self.current):
            self.pattern = self.pattern or tuple(self.current)
            ends.append(self.last)
            self.current = []
        self.current.append(updated)
        self.last = mark
        if tuple(self.current) == self.pattern:
            ends.append(mark)
            self.current, self.last = [], None
        return ends


def follow_steps(
    mark: Callable[[], Mark], ended: Callable[[Mark], None],
    aside: AbstractContextManager[object] = nullcontext(),  # noqa: B008
) -> OptimizerCalls[Mark]:  # fmt: skip
    """Call ``ended`` at the end of each step from now on, with what ``mark`` gave when the last call of an
    optimiser in it had ended, or where the program says that a step ends there. All that is done for it is
    done in ``aside``."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    calls: OptimizerCalls[Mark] = OptimizerCalls()
    marked = False

    def updated(optimizer: Any, *_: Any) -> None:
        with aside:
            parameters = frozenset(id(p) for group in optimizer.param_groups for p in group["params"])
            for end in () if marked else calls.add(parameters or frozenset([id(optimizer)]), mark()):
                ended(end)

    def said() -> None:
        nonlocal marked
        marked = True
        with aside:
            ended(mark())

    register_optimizer_step_post_hook(updated)
    on_mark.append(said)
    return calls


@dataclass(frozen=True)
class Period:
    """``before``: steps that come before the sequence that repeats, the first one with its set-up at least.
    ``length``: steps of that sequence. ``repeats``: it came a second time, whole."""

    before: int
    length: int
    repeats: bool

    @property
    def end(self) -> int:
        """Steps up to the end of the first such sequence."""
        return self.before + self.length


def find_period(kinds: Sequence[Hashable]) -> Period:
    """The shortest story that tells these steps: a beginning, and a sequence that repeats from there. Of
    several that are equally short, that with the longest sequence in which some steps are alike: where none
    is, all but the last may be a beginning."""
    period = Period(0, 1, False)
    for length in range(1, len(kinds)):
        before = len(kinds) - length
        while before > 1 and kinds[before - 1] == kinds[before - 1 + length]:
            before -= 1
        end, alike = before + length, len(set(kinds[before : before + length])) < length
        if length == 1 or end < period.end or (end == period.end and alike):
            period = Period(before, length, len(kinds) >= before + 2 * length)
    return period
