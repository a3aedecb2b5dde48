"""Which subvolume comes from which, so that two of them can be compared by what each wrote since they parted.

btrfs itself knows only the direct parent, and forgets it when the parent is removed. So each live root and
each snapshot has a note with the chain of its origins: (identity, generation up to which both are the
same). A note that is missing or belongs to an earlier subvolume of the same name only makes the comparison
slower.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from windtunnel.agents.sandbox.live.files import btrfs

LONGEST = 64

Chain = list[tuple[str, int]]


def note(notes: Path, made: Path, kind: str, name: str, origin: Chain) -> None:
    """Remember that the subvolume ``made`` was just snapshotted from one whose chain is ``origin``."""
    own = btrfs.subvolume(made)
    chain = [(identity, min(generation, own.born)) for identity, generation in origin][:LONGEST]
    text = json.dumps({"of": own.uuid.hex(), "chain": chain})
    (notes / f"{kind}-{name}").write_text(text, encoding="ascii")


def note_if_room(notes: Path, made: Path, kind: str, name: str, origin: Chain) -> None:
    """The same where the disk may be full: what was made is good without its note."""
    with suppress(OSError):
        note(notes, made, kind, name, origin)


def previous(notes: Path, path: Path, name: str) -> int:
    """The generation up to which snapshot ``name`` is the same as an older snapshot or its image; 0: none
    known.

    The first origin of a snapshot is the live root, which has all that the snapshot has."""
    origins = chain(notes, path, "snaps", name)[2:]
    return origins[0][1] if origins else 0


def chain(notes: Path, path: Path, kind: str, name: str) -> Chain:
    """The subvolume's own identity, then its origins, nearest first."""
    own = btrfs.subvolume(path)
    start: Chain = [(own.uuid.hex(), 2**63)]
    try:
        found = json.loads((notes / f"{kind}-{name}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        found = {}
    if found.get("of") == own.uuid.hex():
        return start + [(identity, generation) for identity, generation in found["chain"]]
    return [*start, (own.parent.hex(), own.born)] if any(own.parent) else start


def forget(notes: Path, kind: str, name: str) -> None:
    (notes / f"{kind}-{name}").unlink(missing_ok=True)


def parted(first: Chain, second: Chain) -> int | None:
    """The generation up to which both subvolumes are the same; None where they share no origin."""
    others = dict(reversed(second))
    for identity, generation in first:
        if identity in others:
            return min(generation, others[identity])
    return None
