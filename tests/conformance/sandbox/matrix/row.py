"""What a row of the matrix is, and what can come of it: plain data.

A row is a program that nobody here wrote, or a feature of the kernel that programs use. Its own check says
whether it is right: a client that asks the server, a compiler that builds the rest, a counter that must be
where it was. The harness (``judge``) takes a checkpoint in the middle of its work, kills everything, brings
it back, forks it twice and lets it go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Literal

INSIDE = Path(__file__).parent / "inside"
"""Small programs that rows bring; each lies in ``/row`` of the sandboxes of rows that name it."""


@dataclass(frozen=True)
class MatrixRow:
    """One program or feature. All commands are shell text, run in the sandbox's shell ``main`` by bash.

    ``start`` is run in the background, its output goes to ``/row/out``. ``ready`` is asked again and again
    until it exits 0: then the work is in its middle. ``check`` exits 0 when all is right; it may be asked
    several times (after the restore, and in two forks), and must not take what it looks for away. ``go_on``
    takes the work further, and then ``end`` (where it is empty: ``check``) decides. Whatever they print is
    shown when they fail. A check is undisturbed work first of all: a row that fails without a checkpoint is
    told as one that does not run here.
    """

    name: str
    kind: Literal["program", "feature"]
    asks: str
    """What the check holds it to, in a few words, for the table."""
    check: str
    start: str = ""
    ready: str = "true"
    go_on: str = ""
    end: str = ""
    setup: str = ""
    """Run in the foreground before ``start``. Exit status 77: the sandbox refuses its programs what the row
    is about, which is as good as promised where ``refused`` fits the words."""
    files: tuple[str, ...] = ()
    """Files that are put into ``/row``."""
    inside: Path = INSIDE
    """The folder from which they come."""
    packages: tuple[str, ...] = ()
    """Debian packages that must be installed on the host; they are part of the image then."""
    distributions: tuple[str, ...] = ()
    """Python distributions of the environment that runs this, with all that they need, in $ROW_PYTHON."""
    refused: str = ""
    """A pattern of the words with which a checkpoint or the ``setup`` refuses; empty: nothing of the row
    should be refused."""
    network: str = "off"
    outside: bool = False
    """Its network is ``egress``, to a server of the host at the port $ROW_OUTSIDE (`outside`)."""
    by_command: bool = False
    """Through the command line and its daemon, so that what is told is exit statuses."""
    seconds: float = 60.0
    """Within which each of the commands must end."""


class Verdict(Enum):
    """``RIGHT`` and ``REFUSED`` are as promised; ``ABSENT`` does not count."""

    RIGHT = "right"
    REFUSED = "refused beforehand"
    TOLD = "wrong, told"
    SILENT = "wrong in silence"
    BROKEN = "does not run here undisturbed"
    ABSENT = "not here"

    @property
    def kept(self) -> bool:
        return self in (Verdict.RIGHT, Verdict.REFUSED)


@dataclass(frozen=True)
class Outcome:
    """How a row ended, with the words that say why; empty where it is right. ``seconds``: the whole row."""

    row: MatrixRow
    verdict: Verdict
    words: str = ""
    seconds: float = 0.0


def folders(distributions: tuple[str, ...]) -> tuple[Path, ...]:
    """Folders and modules that these distributions and all that they need consist of; PackageNotFoundError
    where one is not installed."""
    paths: set[Path] = set()
    visited: set[str] = set()
    todo = list(distributions)
    while todo:
        name = todo.pop()
        if name in visited:
            continue
        visited.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            if name in distributions:
                raise
            continue  # needed only elsewhere, by its marker
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                paths.add(Path(str(distribution.locate_file(top))))
        todo += [_name(line) for line in distribution.requires or () if "extra ==" not in line]
    return tuple(sorted(paths))


def _name(requirement: str) -> str:
    end = next((at for at, letter in enumerate(requirement) if letter in " <>=!~;[("), len(requirement))
    return requirement[:end]
