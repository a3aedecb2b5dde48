"""What one rank says to another while each is captured in a process of its own.

A message is a file, written under another name and renamed; the k-th post of a topic is read by the k-th
`read`. Nobody else is pretended: whoever needs what another rank says waits for it, and a rank that does not
run yet is started for that (`worker`), so that a source's values are true also where it is captured later. A
network of processes that only wait for what they read (Kahn 1974, "The semantics of a simple language for
parallel programming") says the same whatever runs first, so the result does not depend on timing; and where
all that run wait for each other, the job would hang too, which is told as an error that names them.

Where every rank says something to all (``all_gather``), only those are heard that are captured before: else
all ranks of the world would have to run.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windtunnel.base import atomic
from windtunnel.training.emulate.live.failure import RankFiles, WouldHang

POLL_SECONDS = 0.002
ANYBODY = -1
ASKED = 16
"""Ranks that would not run otherwise, or not before, that a rank may ask for what they say."""


@dataclass
class Mailbox:
    """``earlier`` are the ranks whose capture comes before this rank's. ``tell`` tells the worker what this
    rank waits for (`MailboxWait`), or that it goes on (None)."""

    files: RankFiles
    earlier: frozenset[int]
    tell: Callable[[MailboxWait | None], None] = lambda want: None
    counts: dict[str, int] = field(default_factory=dict)
    place: str = ""  # where in the program tensors are said: what is said elsewhere is counted without them
    announced: int = 0  # tensors whose values were said
    requested: set[int] = field(default_factory=set)

    def post(self, topic: str, content: Any, *, for_all: bool = False) -> int:
        """Say something under a topic. Returns how often this rank said something under it before.

        ``for_all``: what this rank says, any rank that plays the same part would say too, so that it also
        answers who asks a rank that is not captured.
        """
        data = dump(content)  # may fail: then nothing was said
        number = self.number(f"post {topic}")
        for sender in (self.files.rank, ANYBODY) if for_all else (self.files.rank,):
            atomic.replace(self._path(sender, topic, number), data)
        return number

    def read(self, sender: int, topic: str) -> tuple[bool, Any]:
        """The next thing that ``sender`` says under ``topic``, awaited: (True, content), or (False, None)
        when its capture ends without, or too many ranks would have to run. See `wait`."""
        return self.wait(sender, topic, self.number(f"read {sender} {topic}"))

    def read_earlier(self, sender: int, topic: str, *, last: bool = False) -> tuple[bool, Any]:
        """The same of a rank that is captured before this one; of another what any rank like it has said by
        now, or, as the ``last`` resort, what it says when it is run for that."""
        number = self.number(f"read {sender} {topic}")
        path = self._path(ANYBODY, topic, number)
        if sender not in self.earlier and path.exists():
            return True, pickle.loads(path.read_bytes())
        return self.wait(sender, topic, number) if sender in self.earlier or last else (False, None)

    def hear(self, senders: Sequence[int], topic: str, number: int, own: Any) -> tuple[list[Any], list[int]]:
        """What each of them says in the call of that number, in which all say something (this rank its
        ``own``); and those that are not captured before this one, who are taken to say the same as it."""
        contents, silent = [], []
        for sender in senders:
            available, content = sender == self.files.rank, own
            if sender in self.earlier and not available:
                available, content = self.wait(sender, topic, number)
            contents.append(content if available else own)
            silent += [] if available else [sender]
        return contents, silent

    def wait(self, sender: int, topic: str, number: int) -> tuple[bool, Any]:
        """Wait for the message of that number.

        Raises:
            WouldHang: all ranks that run wait for each other.
        """
        if sender not in self.earlier | self.requested:
            if len(self.requested) == ASKED:
                return False, None
            self.requested.add(sender)
        path = self._path(sender, topic, number)
        done, stuck = RankFiles(self.files.directory, sender).done, self.files.stuck
        want = MailboxWait(sender, topic.partition(" ")[0], str(path))
        waits = False
        while not path.exists():
            if done.exists() and not path.exists():
                break
            if not waits:
                self.tell(want)
                waits = True
            if stuck.exists():
                raise WouldHang(stuck.read_text())
            time.sleep(POLL_SECONDS)
        if waits:
            self.tell(None)
        return (True, pickle.loads(path.read_bytes())) if path.exists() else (False, None)

    def number(self, key: str) -> int:
        """How often it was asked for this key before."""
        number = self.counts.get(key, 0)
        self.counts[key] = number + 1
        return number

    def _path(self, sender: int, topic: str, number: int) -> Path:
        digest = hashlib.sha256(topic.encode()).hexdigest()[:16]
        return self.files.directory / f"{sender}-{digest}-{number}"


@dataclass(frozen=True)
class MailboxWait:
    """A rank waits for the ``sender`` to say something in a call (``kind``), which will lie at ``path``."""

    sender: int
    kind: str
    path: str


def hanging(waiting: dict[int, MailboxWait]) -> str | None:
    """In one sentence, why nothing goes on when only these ranks run and wait; None where something does."""
    for want in waiting.values():
        path = Path(want.path)
        if path.exists() or RankFiles(path.parent, want.sender).done.exists():
            return None
    chain = [min(waiting)]
    while (sender := waiting[chain[-1]].sender) in waiting and sender not in chain:
        chain.append(sender)
    waits = [
        f"rank {rank} for what rank {waiting[rank].sender} says ({waiting[rank].kind})" for rank in chain
    ]
    return f"the job would hang: ranks wait for each other, {', '.join(waits)}"


class _Pickler(pickle.Pickler):
    """A tensor on the device goes as its shape, and its values where the host knows them."""

    def reducer_override(self, value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            and value.is_cuda
            and type(value) in (torch.Tensor, torch.nn.Parameter)
        ):
            shape = (tuple(value.shape), value.stride(), value.dtype, value.device.index)
            return _tensor, (shape, type(value) is torch.nn.Parameter, value.requires_grad)
        return NotImplemented


def _tensor(shape: Any, parameter: bool, requires_grad: bool) -> torch.Tensor:
    size, stride, dtype, index = shape
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", index))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def dump(content: Any) -> bytes:
    """``pickle.dumps``, which raises what it raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(content)
    return buffer.getvalue()
