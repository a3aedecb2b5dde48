"""Why a rank's script failed: its own traceback for the reader, one sentence that names the line, and
the files in which a rank leaves them.

A traceback is shown as plain Python would print it, without the frames that run the script and without those
of the emulated world in which a call was refused.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_HERE = str(Path(__file__).absolute().parents[3]) + os.sep
SIGN = "windtunnel: "
"""What a refusal's message begins with."""
WITHOUT_DRIVER = (
    "CUDA error: CUDA driver version is insufficient", "CUDA error: no CUDA-capable device is detected",
    "Found no NVIDIA driver", "No CUDA GPUs are available", "0 active drivers",
)  # fmt: skip
"""How a CUDA build complains that there is no driver or, where it is kept from it, no device."""
KERNEL_PACKAGES = "flash_attn", "transformer_engine", "apex", "xformers"
"""Packages of CUDA kernels, of which a part is stood in for (`fused`) or nothing."""


class RankFiles:
    """By which a rank and those that run it tell each other of it. How it ended stands here, not in its exit
    status, which the script may choose as it likes.

    ``log``: its output. ``slice``: what it did. ``reason``: why it failed; ``refused``: there where that is a
    call that cannot be emulated. ``stack``: on which lines its threads stand, when it is asked. ``loop``: the
    loop that waits for what never changes, while it does. ``again``: there where it is to be run with all of
    its micro-batches. ``done``: there when nothing more comes from it. ``stuck``: why it waits for ever."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        self.log, self.reason, self.stack, self.loop = (
            directory / f"{name}-{rank}.txt" for name in ("log", "reason", "stack", "loop")
        )
        self.refused, self.again, self.done, self.stuck = (
            directory / f"{name}-{rank}" for name in ("refused", "again", "done", "stuck")
        )
        self.slice = directory / f"slice-{rank}.pkl"


class WouldHang(BaseException):
    """Ranks wait for each other. Not an error that a script may handle."""


@functools.cache
def is_own(filename: str) -> bool:
    """Whether a file is the user's: not this package's, a library's, Python's or made up (``<string>``)."""
    return not filename.startswith((_HERE, "<")) and re.search(r"/lib(64)?/python3", filename) is None


def own_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's program, ``frame`` or one that called it."""
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def name_place(filename: str, line: int | None, function: str) -> str:
    """A place in the user's program in short: ``train.py:88 in main``."""
    return f"{os.path.basename(filename)}:{line} in {function}"


def place(error: BaseException) -> str | None:
    """The innermost line of the user's program that an exception passed, or None."""
    if isinstance(error, SyntaxError) and error.filename and is_own(error.filename):
        return f"{os.path.basename(error.filename)}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    return name_place(frames[-1].filename, frames[-1].lineno, frames[-1].name) if frames else None


def where(error: BaseException) -> str:
    """`place` as the beginning of a sentence: ``"train.py:88 in main: "``, or nothing."""
    location = place(error)
    return f"{location}: " if location else ""


def is_refusal(error: BaseException) -> bool:
    """Whether it is this package that cannot go on, not the user's program that is wrong."""
    return isinstance(error, NotImplementedError) and str(error).startswith(SIGN)


def lacking(error: BaseException) -> str:
    """What of these packages could not be imported, or was missed by another."""
    if not isinstance(error, ImportError):
        return ""
    if (error.name or "").partition(".")[0] in KERNEL_PACKAGES:
        missed = re.match(r"cannot import name '(\w+)'", str(error))
        return f"{error.name}.{missed[1]}" if missed else str(error.name)
    text = str(error).lower().replace(" ", "").replace("flashattention", "flash_attn")
    return next((package for package in KERNEL_PACKAGES if package in text), "")


def sentence(error: BaseException) -> str:
    """What went wrong and where, in one line."""
    lines = str(error.msg if isinstance(error, SyntaxError) else error).strip().splitlines()
    message = lines[0] if lines else ""
    if is_refusal(error):
        return where(error) + message.removeprefix(SIGN)
    if isinstance(error, WouldHang):
        return where(error) + message
    if package := lacking(error):
        return (
            f"{where(error)}{package} cannot be emulated because its kernels are not known; use PyTorch's own"
        )
    backend = re.match(r"Could not run '(\S+)' with arguments from the '(\w+)' backend", message)
    if backend is not None:
        operator, kind = backend.groups()
        return f"{where(error)}{operator} cannot be emulated because it has no kernel for {kind} tensors"
    text = f"{where(error)}{type(error).__name__}" + (f": {message}" if message else "")
    if message.startswith(WITHOUT_DRIVER):
        text += "; what asks the CUDA runtime itself, past PyTorch's operators, cannot be emulated"
    return text


def show(error: BaseException) -> None:
    """Print the script's traceback to standard error, with the user's and the libraries' frames only; none
    where the sentence says all."""
    if lacking(error):
        return
    trace = traceback.TracebackException.from_exception(error)
    link: traceback.TracebackException | None = trace
    while link is not None:
        frames = [f for f in link.stack if not f.filename.startswith(_HERE) and "runpy" not in f.filename]
        link.stack = traceback.StackSummary.from_list(frames)
        link = link.__cause__ or link.__context__
    print("".join(trace.format()), end="", file=sys.stderr)


def status_of(
    run: Callable[[], None], files: RankFiles,
    overlooks: Callable[[BaseException], bool] = lambda error: False,
) -> int | None:  # fmt: skip
    """Run the user's program. Returns its exit status, None for a failure that the caller ``overlooks``; of
    others the reason is left for the process that asked."""
    try:
        run()
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if status == 0:
            return 0
        if overlooks(stop):
            return None
        if not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
        files.reason.write_text(f"{where(stop)}the script called exit({stop.code!r})")
        return status
    except BaseException as error:
        if overlooks(error):
            return None
        fail(error, files)
        return 1
    return 0


def fail(error: BaseException, files: RankFiles) -> None:
    """Show why the rank fails, and leave it for the process that asked."""
    show(error)
    files.reason.write_text(sentence(error))
    if is_refusal(error):
        files.refused.touch()


def content(path: Path) -> str:
    """What a rank left in one of its files, or nothing."""
    return path.read_text(errors="replace") if path.exists() else ""


def stood_at(log: str) -> str:
    """From a dump of all threads (``faulthandler``), the innermost line of the user's program in the main
    thread."""
    dump = log.rpartition("(most recent call first):")[2]
    for filename, line, function in re.findall(r'File "(.+?)", line (\d+) in (.+)', dump):
        if is_own(filename):
            return name_place(filename, int(line), function)
    return ""


def shorten(log: str, lines: int) -> str:
    """The end of a rank's log, without the frames of this package in a dump of threads."""
    frame_lines = [
        line
        for line in log.strip().splitlines()
        if f'File "{_HERE}' not in line and 'File "<frozen' not in line
    ]
    return "\n".join(frame_lines[-lines:])
