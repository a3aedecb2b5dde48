"""What the parts of the sandbox exchange: plain data, no behaviour that touches the machine.

A *sandbox* is a process tree with a root of its own. Its life is cut into *turns* (what an agent asks between
two replies of its model). After each turn the policy reads the turn's *effects* and gives it a *class*; the
class says what a *checkpoint* has to hold so that nothing of the turn is lost. A checkpoint is described by
its *manifest*; manifests form a tree (each names its parent), because a sandbox can be rolled back and
forked.

Source: Crab (arXiv 2604.28138), sections 3 to 5; the class *shell* and the gate on dirty pages are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Generic, Literal, TypedDict, TypeVar

from windtunnel.base.options import option, or_none, read_pairs
from windtunnel.base.units import parse_quantity


class TurnClass(IntEnum):
    """What a turn left behind, weakest first. A stronger class covers all that a weaker one covers."""

    NONE = 0
    """Nothing that recovery needs."""
    SHELL = 1
    """Only the state of persistent shells: directory, variables, functions, options, traps."""
    FILES = 2
    """Files, and possibly the state of shells."""
    FULL = 3
    """Memory, descriptors or the set of processes: everything is kept."""

    @property
    def word(self) -> str:
        return self.name.lower()


Change = Literal["created", "modified", "deleted", "renamed", "metadata"]
NETWORKS = ("off", "proxy", "egress")
"""off: loopback alone. proxy: the host's model proxy listens on it. egress: the host's HTTP proxy and name
server do."""


D = TypeVar("D")


class PolicyInput(Generic[D]):
    """An observation, of which the policy makes a ``D``."""


@dataclass(frozen=True)
class FileChange:
    """A path of the sandbox (absolute, as seen inside) whose entry or bytes differ."""

    path: str
    change: Change
    size: int = 0
    """Bytes afterwards, where known."""


@dataclass(frozen=True)
class ProcessEffect:
    """What one process did since the last process image was taken.

    ``pid`` is the host's; ``dirty_pages`` is None where the machine cannot tell. ``inputs`` and ``writes``
    count successful receives and writes (None: unknown). ``cpu`` in seconds.
    """

    pid: int
    command: str
    started: bool = False
    ended: bool = False
    shell: bool = False
    """A persistent shell: its own memory is covered by the shell's state, not by its pages."""
    dirty_pages: int | None = 0
    new_mappings: int = 0
    inputs: int | None = 0
    writes: int | None = 0
    cpu: float = 0.0
    descriptors_changed: bool = False
    settings_changed: bool = False
    """Its limits, priority, CPUs or what else another process may set for it."""


class SandboxPart(Enum):
    """What of a sandbox a doubt is about."""

    FILES = "files alone"
    PROCESSES = "processes, or all"


@dataclass(frozen=True)
class EffectDoubt:
    """Why effects may be incomplete: in which part, and in words."""

    part: SandboxPart
    text: str


@dataclass(frozen=True)
class ShellEffect:
    """A persistent shell that is not as it was last kept. ``busy``: it does not stand at its prompt.

    ``resources``: what a fresh shell cannot be given (descriptors, jobs, a coprocess), though an older image
    of it has it; ``not_replayable``: what no replay brings at all; in words.
    """

    name: str
    busy: bool = False
    gone: bool = False
    resources: tuple[str, ...] = ()
    not_replayable: tuple[str, ...] = ()


@dataclass(frozen=True)
class TurnEffects:
    """All that is seen of one sandbox since the last checkpoint of each part.

    ``files``: net changes since the last snapshot of files (born and gone within the window: absent).
    """

    files: tuple[FileChange, ...] = ()
    files_total: int = 0
    """Number of changed paths; ``files`` may hold fewer."""
    processes: tuple[ProcessEffect, ...] = ()
    shells: tuple[ShellEffect, ...] = ()
    doubts: tuple[EffectDoubt, ...] = ()


@dataclass(frozen=True)
class References:
    """Paths inside the sandbox that a process image refers to.

    ``paths``: all of them (open files, working directories, roots, programs, mapped files). ``mapped``: those
    whose size must stay too: mapped files, and files that are open for more than appending.
    """

    paths: frozenset[str] = frozenset()
    mapped: frozenset[str] = frozenset()


class Terms(TypedDict, total=False):
    """What whoever asks for something accepts; it travels with the request to the policy's question.
    ``allow_less``: what cannot be kept, or does not come back, is told and is no error."""

    allow_less: bool


NO_TERMS: Terms = {}
LESS: Terms = {"allow_less": True}


def read_bytes(text: str) -> int:
    """``2G``, ``512M``, or a number of bytes."""
    return int(parse_quantity(text, "bytes of memory"))


@dataclass(frozen=True)
class SandboxLimits:
    """Bounds of one sandbox; None: unbounded. Bytes, and CPUs as a float (1.5 = one and a half).

    ``disk``: beyond the image; 0 is 'auto'.
    """

    memory: int | None = option(
        "2G", "Memory limit, such as 512M or 2G, or 'none'.", kind=str, metavar="SIZE",
        read=or_none(read_bytes, "a size such as 512M or 2G"),
    )  # fmt: skip
    cpus: float | None = option(
        "none",
        "CPU limit, such as 1.5, or 'none'.",
        kind=str,
        metavar="N",
        read=or_none(float, "a number such as 1.5"),
    )
    pids: int | None = option(
        "512", "Processes and threads, or 'none'.", kind=str, metavar="N",
        read=or_none(int, "a number such as 512"),
    )  # fmt: skip
    disk: int | None = option(
        "auto", "Disk limit beyond the image, such as 20G, or 'none'. 'auto': 10G, less in a small pool, "
        "none where a limit cannot be held.",
        kind=str, metavar="SIZE",
        read=or_none(lambda text: 0 if text == "auto" else read_bytes(text), "a size such as 512M or 'auto'"),
    )  # fmt: skip


@dataclass(frozen=True)
class SandboxSpec:
    """How a sandbox is made. ``image`` may also be the name of an image that was imported before."""

    name: str
    image: str = option(
        "host", "'host' (this machine's own programs; 'host+PACKAGE,/FOLDER': more of them), a directory, a "
        "tarball, an OCI layout, or 'docker://NAME' of a registry (by skopeo).",
    )  # fmt: skip
    network: str = option(
        "off", "off: loopback alone. proxy: the model API alone. "
        "egress: public hosts, or those listed, by an HTTP proxy that logs.",
        metavar="off|proxy|egress[:HOST,*.HOST]",
    )  # fmt: skip
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    environment: dict[str, str] = option(  # noqa: RUF009 - a field
        None, "Environment variable of the shells.", kind=list[str], read=read_pairs, flags=("--env",),
        metavar="KEY=VALUE",
    )  # fmt: skip
    workdir: str = option("/workspace", "Working directory of the shells.")
    hostname: str = ""
    services: dict[str, str] = option(  # noqa: RUF009 - a field
        None, "A service to start with the sandbox, and after a restore that lost it.", kind=list[str],
        read=read_pairs, flags=("--service",), metavar="NAME=COMMAND",
    )  # fmt: skip
    proxy_upstream: str = option(
        "", "Base URL of the model API behind --network proxy.", flags=("--upstream",), metavar="URL"
    )
    allow_less: bool = option(
        False, "Report what a checkpoint cannot keep without exit status 3.", flags=("--allow-less",)
    )
    proxy_key_file: str = option(
        "", "File with the API's key. The daemon reads it at each request. Mode 600.", flags=("--key-file",),
        metavar="FILE",
    )  # fmt: skip

    @property
    def terms(self) -> Terms:
        return LESS if self.allow_less else NO_TERMS


@dataclass(frozen=True)
class TurnResult:
    """What one command did: exact bytes of both outputs, and how it ended.

    ``exit_code`` is None when the command was cut off: ``ended`` then says how.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    seconds: float
    ended: Literal["exit", "timeout", "cancelled", "shell-died", "sandbox-died"] = "exit"
    note: str = ""
    tails: tuple[str, ...] = ()
    """Outputs of which only the end is here: they were passed on whole while the command ran."""

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


@dataclass(frozen=True)
class ShellState:
    """The state of one persistent shell, as it can be replayed into a fresh one.

    ``script`` is what the shell printed about itself (``declare -p`` and the like); ``fingerprint`` is its
    hash less what changes by itself (RANDOM, SECONDS, …).
    """

    name: str
    script: str
    fingerprint: str


LackKind = Literal[
    "processes", "threads", "descriptors", "timers", "locks", "sockets", "mounts", "limits", "directories",
    "environment", "shells", "services", "files", "ipc",
]  # fmt: skip


@dataclass(frozen=True)
class Lack:
    """Something that was wanted and is not there: not kept by a checkpoint, or not brought back by a restore.

    ``what`` it is and whose (``python3 app.py (process 12 inside): periodic timerfd 5``), and ``why``, in
    words. Only what really was there can be lacking: shells, which are replayed, and declared services, which
    start anew, lack nothing by that.
    """

    kind: LackKind
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


Facts = dict[str, dict[str, str]]
"""What holds, in words that are the same after a restore: the value of each name, by kind (`LackKind`)."""


@dataclass(frozen=True)
class ProcessStood:
    """A process as it stood when its image was taken. ``pid``: as seen inside."""

    pid: int
    command: str
    facts: Facts = field(default_factory=dict)


@dataclass(frozen=True)
class ProcessInventory:
    """What stood when a process image was taken, so that a restore of it can be held against it. ``facts``:
    of the sandbox as a whole. ``timestamp``: in seconds since the epoch. ``alarms``: processes, as seen
    inside, for which SIGALRM waited at the end of the dump."""

    processes: tuple[ProcessStood, ...] = ()
    facts: Facts = field(default_factory=dict)
    timestamp: float = 0.0
    alarms: tuple[int, ...] = ()


@dataclass(frozen=True)
class ImagePart:
    """The process image of a checkpoint: which entry of the store holds it, and what it refers to."""

    id: str
    """The checkpoint whose dump this is; later checkpoints that need no newer one name it too."""
    pid: int
    """Host pid of the sandbox's init at the dump (informative)."""
    processes: tuple[str, ...]
    """Command lines, in the order of pids inside."""
    references: tuple[str, ...]
    mapped: tuple[str, ...]
    bytes_raw: int = 0
    bytes_new: int = 0
    """Bytes that this image added to the store, which fills both in."""
    alone: tuple[Lack, ...] = ()
    """What only this image brings back; where it cannot be used, that is lacking (``why`` is empty here)."""
    inventory: ProcessInventory | None = None


@dataclass(frozen=True)
class FilesPart:
    """The files of a checkpoint: the snapshot's name in the pool."""

    id: str
    kind: str
    """``btrfs`` or ``copy``."""
    bytes_new: int = 0


@dataclass(frozen=True)
class CheckpointManifest:
    """One checkpoint. It is complete the moment its file is there, and never changed afterwards.

    ``turn``: number of turns of the sandbox that it covers. ``turn_class``: what it really holds; never FULL
    without a process image. ``required``: what was needed so that nothing is lost. ``restorable``: in words,
    what a restore of this manifest brings back; ``lacks``: what of the sandbox it does not. ``request``: id
    of the model request that was in flight.
    """

    id: str
    box: str
    turn: int
    parent: str | None
    turn_class: TurnClass
    required: TurnClass
    reasons: tuple[str, ...]
    created: float
    """Seconds since the epoch."""
    files: FilesPart | None
    image: ImagePart | None
    shells: tuple[ShellState, ...]
    spec: SandboxSpec
    restorable: tuple[str, ...]
    lacks: tuple[Lack, ...] = ()
    never: tuple[str, ...] = ()
    """What no restore of processes brings back, of any sandbox."""
    freeze_seconds: float = 0.0
    total_seconds: float = 0.0
    request: str = ""
    label: str = ""
    pinned: bool = False

    @property
    def content(self) -> TurnClass:
        """What was made for it: what it names beside is an earlier checkpoint's."""
        if self.image is not None and self.image.id == self.id:
            return TurnClass.FULL
        return TurnClass.FILES if self.files is not None and self.files.id == self.id else TurnClass.SHELL


@dataclass(frozen=True)
class TurnRecord:
    """One line of a sandbox's log: a turn, and the checkpoint that covers it.

    ``turn_class``, ``required`` and ``lacks``: as of a manifest. Of a turn whose checkpoint failed nothing is
    kept, and ``lacks`` says why.
    """

    number: int
    turn_class: TurnClass
    required: TurnClass
    reasons: tuple[str, ...]
    checkpoint: str
    started: float
    seconds: float
    decide_seconds: float
    bytes_new: int
    request: str = ""
    lacks: tuple[Lack, ...] = ()


Capability = Literal["root", "criu", "btrfs", "ebpf", "userfaultfd", "cgroup-freezer", "user-namespaces"]


@dataclass(frozen=True)
class Facility:
    """One thing that the host has or lacks, and what follows."""

    name: Capability
    present: bool
    detail: str
    """Version or reason, in words."""
    gives: str
    """What its presence allows."""
    remedy: str = ""
    """The exact command that would supply it; empty where none can."""


# --- what a host tells of its sandboxes: the same data from `SandboxHost`, the daemon and its clients


@dataclass(frozen=True)
class BoxInfo:
    """A sandbox as seen from outside. ``status``: running, dead (its processes are gone) or stopped."""

    name: str
    status: str
    pid: int
    turns: int
    tip: str
    """Its newest checkpoint; empty before the first."""
    image: str
    network: str
    created: float
    processes: tuple[str, ...]
    base: str = ""
    """The checkpoint that it was forked from."""
    lacks: tuple[Lack, ...] = ()
    """What its newest checkpoint or restore did not keep."""


@dataclass(frozen=True)
class FolderEntry:
    """One name in a folder of a sandbox. ``kind``: file, folder, link or other. ``target`` is where a link
    points."""

    name: str
    kind: str
    size: int
    mode: int = 0
    modified: float = 0.0
    target: str = ""


@dataclass(frozen=True)
class Diff:
    """What differs between two checkpoints: files, and command lines that only the second or only the first
    has."""

    files: tuple[FileChange, ...]
    started: tuple[str, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True)
class RestoreReport:
    """What came back (``restored``, in words), what did not, and how long it took (seconds)."""

    checkpoint: str
    turn: int
    restored: tuple[str, ...]
    lacks: tuple[Lack, ...]
    seconds: float


@dataclass(frozen=True)
class Saved:
    """What a notice has made of one sandbox. ``checkpoint``: the newest one, which covers its state now but
    for ``lacks`` (``less``: which is an error); ``whole``: where something lacks, the newest one before,
    which has its processes. ``fault``: why there is no checkpoint of its state now, in words."""

    checkpoint: str
    lacks: tuple[Lack, ...] = ()
    less: bool = False
    whole: str = ""
    fault: str = ""


@dataclass(frozen=True)
class GcReport:
    """What a collection dropped, or would drop."""

    checkpoints: tuple[str, ...]
    leftovers: tuple[str, ...]
    bytes_freed: int


@dataclass(frozen=True)
class SandboxEvent:
    """Something that somebody should hear of a sandbox (empty: of the host). weaker: it lacks something that
    it might have. What goes as it should is in the logs."""

    kind: Literal["failed", "died", "weaker"]
    box: str
    detail: str
