"""Programs that each use one thing of the kernel, and notice whether a restore brought it back.

    python3 -m kinds start STATE NAME...   each as a process of its own; ends when all stand or were refused
    python3 -m kinds check STATE NAME...   asks each once, and prints what it says; later always the same

Both print a line for each: ``NAME ready``, ``NAME right``, ``NAME refused: words``, ``NAME wrong: words``.
Exit status 0: all ready or right; 77: some were refused, the rest is well; 1: some are wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence

from . import descriptors, files, memory, processes, sockets, times
from .ground import Kind, Refused, Wrong

MODULES = (times, files, descriptors, sockets, memory, processes)
WAIT = 30.0


def kinds() -> dict[str, Callable[[], Kind]]:
    """All programs by name, in the order of the files."""
    return {
        name.replace("_", "-"): body
        for module in MODULES
        for name, body in vars(module).items()
        if inspect.isgeneratorfunction(body) and not name.startswith("_")
    }


def main(words: Sequence[str]) -> int:
    known = kinds()
    if words[:1] == ["list"]:
        for name, body in known.items():
            print(f"{name}\t{' '.join((body.__doc__ or '').split())}")
        return 0
    order, state, *names = words
    if not names or order not in ("start", "check") or not known.keys() >= set(names):
        print(__doc__, file=sys.stderr)
        return 2
    os.makedirs(state, exist_ok=True)
    os.chmod(state, 0o777)
    said = {}
    for name in names:
        if order == "start":
            started(state, name, known[name])
        elif not os.path.exists(f"{state}/{name}.verdict"):
            question(state, name)
    for name in names:
        said[name] = answer(state, name, "ready" if order == "start" else "verdict")
        print(name, said[name])
    if any(words.startswith("wrong") for words in said.values()):
        return 1
    return 77 if any(words.startswith("refused") for words in said.values()) else 0


def question(state: str, name: str) -> None:
    """Asks the program; one that is gone listens no more, and its answer will not come."""
    with contextlib.suppress(OSError):
        line = os.open(f"{state}/{name}.go", os.O_WRONLY | os.O_NONBLOCK)
        os.write(line, b"go\n")
        os.close(line)


def started(state: str, name: str, body: Callable[[], Kind]) -> None:
    """A process of its own that belongs to nobody."""
    folder = f"{state}/{name}.d"
    os.mkdir(folder)
    os.chmod(folder, 0o777)
    os.mkfifo(f"{state}/{name}.go", 0o666)
    # held open, so that a question can be put without waiting for the program to listen
    line = os.open(f"{state}/{name}.go", os.O_RDWR)
    sys.stdout.flush()
    middle = os.fork()
    if middle:
        os.close(line)
        os.waitpid(middle, 0)
        return
    os.setsid()
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    # the parent's end is a signal to a program that has asked for it
    while os.getppid() == parent:
        time.sleep(0.001)
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    errors = os.open(f"{state}/{name}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    os.dup2(errors, 2)
    os.close(errors)
    os.close(null)
    report(state, name, "pid", str(os.getpid()))
    try:
        live(state, name, body, line, folder)
    finally:
        os._exit(0)


def live(state: str, name: str, body: Callable[[], Kind], line: int, folder: str) -> None:
    os.chdir(folder)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    steps = body()
    try:
        next(steps)
    except Refused as refused:
        for what in ("ready", "verdict"):
            report(state, name, what, f"refused: {refused}")
        return
    except BaseException as error:
        report(state, name, "ready", f"wrong: {words(error)}")
        return
    report(state, name, "ready", "ready")
    # without the interpreter's own waiting, which a signal of the program's would end
    while not os.read(line, 1):
        pass
    verdict = "right"
    try:
        next(steps, None)
    except BaseException as error:
        verdict = f"wrong: {words(error)}"
    report(state, name, "verdict", verdict)


def words(error: BaseException) -> str:
    if isinstance(error, Wrong):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.line})"


def report(state: str, name: str, what: str, text: str) -> None:
    with open(f"{state}/{name}.{what}.new", "w") as file:
        file.write(text)
    os.rename(f"{state}/{name}.{what}.new", f"{state}/{name}.{what}")


def answer(state: str, name: str, what: str) -> str:
    deadline = time.monotonic() + WAIT
    while True:
        try:
            with open(f"{state}/{name}.{what}") as file:
                return file.read()
        except FileNotFoundError:
            pass
        if not lives(state, name):
            return f"wrong: it ended ({last(state, name)})"
        if time.monotonic() > deadline:
            return f"wrong: it says nothing within {WAIT:g} s"
        time.sleep(0.01)


def lives(state: str, name: str) -> bool:
    """Whether the program's process runs (one that nobody has waited for does not), or answered just now."""
    try:
        with open(f"{state}/{name}.pid") as file:
            pid = file.read()
    except FileNotFoundError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as file:
            ended = file.read().rpartition(") ")[2][0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        ended = True
    return not ended or os.path.exists(f"{state}/{name}.verdict")


def last(state: str, name: str) -> str:
    try:
        with open(f"{state}/{name}.err") as file:
            return (file.read().strip().splitlines() or ["it said nothing"])[-1]
    except FileNotFoundError:
        return "it said nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
