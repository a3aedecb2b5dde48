"""The step in doubt: what the survivors of a failure do with gradients that were prepared.

A step has two phases. *Prepare*: forwards, backwards, gradient sums; the host then holds what it is going
to apply, and says so under the key ``commit/{era}/{step}``. When all have said so, the supervisor writes the
record, then tells them: the step is *committed*, and each applies what it prepared. So after a failure

- there is a record: all hosts had prepared. Survivors that have not applied the step apply it now.
- some survivor has applied the step: it had seen the record. The same.
- neither: nobody can have applied it, and nobody ever will, since an agreement of a generation ends with it.
  Prepared gradients are dropped, and the step is done again with the same samples.

An *era* begins when the job begins, and when it falls back to a checkpoint, since steps then are done a
second time and must not be taken for committed by the records of the first. States of an older era are stale.
Pure: `resolve` gets what all hosts said, and says the same on all of them. (The idea is two-phase commit
with a coordinator that does not fail for good, Gray, 1978.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from windtunnel.training.pipelines.model import Layout


@dataclass(frozen=True)
class Standing:
    """What one host says when it comes into a generation.

    ``host``: its id. ``versions``: of the layers it holds, by index; ``nbytes`` of their state. ``pending``:
    the step that it has prepared and not applied, None for none; ``committed``: there is a record of it.
    ``layout``: the last one it knows, made in generation ``since``. ``settings``: digest of what must be the
    same on all hosts.
    """

    host: int
    era: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    nbytes: dict[int, int] = field(default_factory=dict)
    pending: int | None = None
    committed: bool = False
    layout: Layout | None = None
    since: int = 0
    settings: str = ""


@dataclass(frozen=True)
class Resolution:
    """What all hosts conclude from what they said.

    ``version``: steps applied, None where nobody holds anything. ``apply``: the step whose prepared gradients
    are to be applied now by those who have them, None for none. ``holders``: ranks that then hold each layer
    at ``version``, ascending.
    """

    era: int
    version: int | None
    apply: int | None
    holders: dict[int, tuple[int, ...]]


def resolve(standings: Mapping[int, Standing], layers: int) -> Resolution:
    """Settle the step in doubt. ``standings``: by rank; ``layers``: how many the model has."""
    era = max(standing.era for standing in standings.values())
    present = {rank: s for rank, s in standings.items() if s.era == era and s.versions}
    if not present:
        return Resolution(era, None, None, dict.fromkeys(range(layers), ()))
    newest = max(max(s.versions.values()) for s in present.values())
    pending = {s.pending for s in present.values() if s.pending is not None}
    committed = {s.pending for s in present.values() if s.pending is not None and s.committed}
    # A version is the number of steps applied: version s + 1 says that step s was.
    apply = next((step for step in sorted(pending) if step in committed or newest == step + 1), None)
    version = newest if apply is None else max(newest, apply + 1)
    holders: dict[int, list[int]] = {index: [] for index in range(layers)}
    for rank, standing in sorted(present.items()):
        for index, has in standing.versions.items():
            if apply is not None and standing.pending == apply and has == apply:
                has += 1
            if has == version:
                holders[index].append(rank)
    return Resolution(era, version, apply, {index: tuple(ranks) for index, ranks in holders.items()})


def commit_key(era: int, step: int) -> str:
    """The durable key of a step's commit."""
    return f"commit/{era}/{step}"
