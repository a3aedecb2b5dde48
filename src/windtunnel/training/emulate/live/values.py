"""The values of small tensors go from rank to rank.

Sizes, counts, flags and seeds travel in tensors that are broadcast, scattered, sent and gathered. Where the
sender's host knows what is in such a tensor (it came from the host), the receiver gets just that. On the
device nothing waits for it: the receiver's tensor holds a promise, and the sender is asked when the host
reads it. So nobody waits for weights or losses, whose values nobody knows. Tensors on the host (gloo) are
filled at once.

The native library calls in here with the small tensors of c10d's operators (`native/collectives.cpp`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.world import WorldView
from windtunnel.training.emulate.policy.groups import ranks_words

KINDS = ("broadcast", "scatter", "send", "all_gather", "gather")  # as in collectives.cpp
BROADCAST, SCATTER, SEND, ALL_GATHER, GATHER = range(5)

Place = ctypes.c_int64  # in the group
Data = ctypes.c_void_p
Say = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Place, Data, ctypes.c_int64)
Promise = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, Place, Data, ctypes.c_int64)
Keep = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, Data, ctypes.c_int64)


_callbacks: list[Any] = []  # the native library holds no reference


def install(world: WorldView, native: ctypes.CDLL) -> None:
    """Be called by the native library. Call once."""
    values = Values(world)
    calls = ((Say, values.say), (Promise, values.promise), (Keep, values.keep))
    _callbacks[:] = [kind(values.guarded(call)) for kind, call in calls]
    native.wt_values(*_callbacks)


@dataclass
class Values:
    """What is promised to this rank. ``promises[n - 1]`` finds the bytes of promise n, or None."""

    world: WorldView
    promises: list[Callable[[], bytes | None]] = field(default_factory=list)
    kept: dict[int, bytes | None] = field(default_factory=dict)

    def guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            try:
                return call(*args)
            except BaseException as error:  # an exception does not pass through C++
                failure.show(error)
                failure.tell(self.world.mailbox.directory, self.world.rank, failure.sentence(error))
                os._exit(1)

        return guarded

    def say(self, kind: int, name: bytes, to: int, data: int | None, size: int) -> None:
        """This rank says ``size`` bytes at ``data``, or that nobody knows them (None), to the place ``to`` of
        the group, or to all of it (-1)."""
        _, topic = self._topic(kind, name, to)
        self.world.mailbox.known += data is not None
        self.world.mailbox.post(topic, ctypes.string_at(data, size) if data else None)

    def promise(self, kind: int, name: bytes, place: int, own: int | None, size: int) -> int:
        """What the rank at ``place`` of the group says is promised; of a gather what all say (-1), where this
        rank says ``size`` bytes at ``own``. Returns the promise's number, from 1."""
        mailbox, rank = self.world.mailbox, self.world.rank
        ranks, topic = self._topic(kind, name, -1)
        if kind in (ALL_GATHER, GATHER):
            senders = ranks if place < 0 else [ranks[place]]
            return self._add(self._gathered(kind, ranks, senders, topic, own, size))
        if kind in (SCATTER, SEND):
            topic = self._topic(kind, name, ranks.index(rank))[1]
        sender = ranks[place]
        number = mailbox.number(f"read {sender} {topic}")
        return self._add(lambda: mailbox.wait(sender, topic, number)[1])

    def _add(self, find: Callable[[], bytes | None]) -> int:
        self.promises.append(find)
        return len(self.promises)

    def _gathered(
        self, kind: int, ranks: list[int], senders: list[int], topic: str, own: int | None, size: int
    ) -> Callable[[], bytes | None]:
        mailbox, rank = self.world.mailbox, self.world.rank
        later = [one for one in ranks if one != rank and one not in mailbox.earlier]
        number = mailbox.counts[f"post {topic}"] - 1  # all say something in this call, as this rank just did
        mine = ctypes.string_at(own, size) if own else None

        def find() -> bytes | None:
            parts: list[bytes | None] = []
            silent = []
            for sender in senders:
                known, part = (True, mine)
                if sender != rank:
                    heard = sender in mailbox.earlier
                    known, part = mailbox.wait(sender, topic, number) if heard else (False, None)
                parts.append(part if known else mine)
                silent.extend([] if known else [sender])
            if silent and mine is not None:  # one sentence, whichever of them is asked for
                self.world.note(
                    f"{KINDS[kind]}: ranks that have not run are taken to hold the values that the one that "
                    "asks holds itself",
                    NoteKind.APPROXIMATION,
                    f"rank {rank} of {ranks_words(later or silent)}",
                )
            return None if None in parts else b"".join(part or b"" for part in parts)

        return find

    def keep(self, promise: int, into: int, size: int) -> int:
        """Write what was promised to ``into``; 0 where nobody knows it."""
        if promise not in self.kept:
            self.kept[promise] = self.promises[promise - 1]()
        said = self.kept[promise]
        if said is None or len(said) != size:
            return 0
        ctypes.memmove(into, said, size)
        return 1

    def _topic(self, kind: int, name: bytes, to: int) -> tuple[list[int], str]:
        """The group's ranks, and what a message is called."""
        group = self.world.groups[self.world.names[name.decode()]]
        place = self.world.mailbox.place
        return list(group.ranks), f"{KINDS[kind]} {place}{group.label} {group.ranks} {to}"
