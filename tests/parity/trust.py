"""Attestation: a real device by way of a hostile host, and drawn evidence."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity, drawn
from windtunnel.store.eventlog import EventLog
from windtunnel.trust.attest import policy as attest


def _attest(folder: Path) -> Sequence[Path]:
    from windtunnel.trust.attest import demonstrate

    log = EventLog(folder / "attest.jsonl")
    demonstrate(folder, log)
    log.close()
    return [log.path, drawn(folder, "trust.attest", _evidence(random.Random(11)))]


def _evidence(draw: random.Random) -> Iterator[tuple[str, Any]]:
    def some(least: int = 0) -> dict[str, str]:
        names = draw.sample(["firmware", "kernel", "program", "shield"], draw.randint(least, 4))
        return {name: draw.choice("ab") * 64 for name in names}

    for number in range(200):
        measured = some(1)
        if number % 4 == 0:
            yield "allow-list", attest.Loaded("a", draw.choice("ab"))
            continue
        listed = {name: (digest,) for name, digest in (measured if draw.random() < 0.6 else some()).items()}
        allow = attest.AllowList(
            ("root",), listed, {"debug": (0,)}, draw.choice([{}, {"counter": 2, "tier": 0}, {"tier": 1}])
        )
        claims = {"debug": int(draw.random() < 0.2), "counter": draw.randrange(4), "tier": 0}
        yield "allow-list", attest.Evidence(
            allow, draw.choice(["root", "root", "root", ""]), draw.random() < 0.9, draw.random() < 0.9,
            measured, {name: claims[name] for name in draw.sample([*claims], draw.randint(2, 3))},
        )  # fmt: skip


def attest_effects(events: Sequence[Event]) -> list[str]:
    """A device that was accepted got M3, or the session; one that was not got nothing, for the claims that
    were named."""
    wrong: list[str] = []
    for event, after in pairwise([*events, {"kind": "the end"}]):
        if event["kind"] == "decision" and "drawn" not in event:
            made = event["decision"]
            went_on = "session" if event["observation"]["is"] == "Loaded" else "M3"
            decided = (went_on if made["accept"] else "refused", made["failing"])
            did = (after.get("did"), after.get("failing"))
            wrong += [f"{did} was done, decided {decided}"] * (did != decided)
    return wrong


PARITY = {"trust.attest": Parity(_attest, attest_effects)}
POLICY, PROTOCOL = "trust/attest/policy.py", "trust/attest/protocol.py"
MUTANTS = (
    Mutant("trust.attest", POLICY, "claims.get(name, -1) >= least", "claims.get(name, least) >= least"),
    Mutant(
        "trust.attest", POLICY, "allow.measurements.keys() | measured.keys()", "allow.measurements.keys()"
    ),
    Mutant("trust.attest", POLICY, "observation.claimed == observation.loaded", "bool(observation.loaded)"),
    Mutant(
        "trust.attest", PROTOCOL, "if not decision.accept:", "if decision.failing[1:]:", live=True
    ),
)  # fmt: skip
