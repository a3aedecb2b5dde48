"""Attestation: a real device by way of a hostile host, and drawn evidence. A GPU that users claim, leave and
are killed on, and drawn requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity, drawn
from windtunnel.base.plain import from_plain
from windtunnel.store.eventlog import EventLog
from windtunnel.trust.attest import policy as attest
from windtunnel.trust.gpu import policy as gpu
from windtunnel.trust.gpu import twin as gpu_twin


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
            ("root",),
            listed,
            {"debug": (0,)},
            draw.choice([{}, {"counter": 2, "tier": 0}, {"tier": 1}]),
            ("t",),
        )
        claims = {"debug": int(draw.random() < 0.2), "counter": draw.randrange(4), "tier": draw.randrange(2)}
        quote = attest.Quoted(
            draw.choice("ttu"), draw.random() < 0.9, draw.random() < 0.9, draw.choice("aab"), "a"
        )  # fmt: skip
        yield "allow-list", attest.Evidence(
            allow, draw.choice(["root", "root", "root", ""]), draw.random() < 0.9, draw.random() < 0.9,
            measured, {name: claims[name] for name in draw.sample([*claims], draw.randint(2, 3))},
            draw.choice([None, quote]),
        )  # fmt: skip


def attest_effects(events: Sequence[Event]) -> list[str]:
    """A device that was accepted got M3, or the session; one that was not got nothing, for the claims that
    were named."""
    wrong: list[str] = []
    for event, after in pairwise([*events, {"kind": "the end"}]):
        if event["kind"] == "decision" and "drawn" not in event:
            decision = event["decision"]
            went_on = "session" if event["observation"]["is"] == "Loaded" else "M3"
            decided = (went_on if decision["accept"] else "refused", decision["failing"])
            did = (after.get("did"), after.get("failing"))
            wrong += [f"{did} was done, decided {decided}"] * (did != decided)
    return wrong


def _gpu(folder: Path) -> Sequence[Path]:
    """Users of all paths, one who is refused, one who is killed; then a broker that is."""
    from contextlib import suppress

    import numpy as np

    from support import gpu as support
    from support.waiting import until
    from windtunnel.base.errors import HostError
    from windtunnel.trust.gpu import Denied

    with support.host(folder) as host:
        for path in ("plain", "double", "single", "pipelined"):
            with host.claim(path) as owner:
                support.all_paths(owner)
                with suppress(Denied), host.claim():
                    pass
                for do in ("release", "register"):
                    with suppress(Denied):
                        owner.call(do, pages=(0, 1))
        user = support.writing_user(host)
        until(lambda: support.log(host)[-1].get("request") == "write", "the user's copy")
        user.kill()
        user.wait()
        until(lambda: support.decided(host, "reset"), "the reset")
        with suppress(ConnectionError), host.claim("single") as owner:
            owner.array(np.ones(10))
            host.kill("broker")
        with suppress(HostError):
            host.start("broker")
        log = host.spec["device"]["log"]
    return [log, drawn(folder, "trust.gpu", _requests(random.Random(12)))]


def _requests(draw: random.Random) -> Iterator[tuple[str, Any]]:
    for _ in range(400):
        table = gpu.Table(
            9, draw.choice(["", "b", "b"]), draw.choice(["", "ann", "ann"]), 2,
            draw.choice([(), ((0, 3),), ((0, 2), (4, 9))]), draw.choice([(), ((0, 1),)]),
        )  # fmt: skip
        kind = draw.choice(
            ["bind", "claim", "register", "read", "write", "write", "scrub", "release", "reset"]
        )
        first = draw.randrange(-1, 9)
        request = gpu.Request(
            kind, draw.choice("bbbc"), draw.choice(["ann", "ann", "bob"]), draw.choice([1, 2, 2, 2]),
            (first, first + draw.randrange(4)),
        )  # fmt: skip
        yield "exclusive", gpu.Observation(table, request)


def gpu_effects(events: Sequence[Event]) -> list[str]:
    """What was allowed was done next, to bytes of these pages and for that owner, and what was to be scrubbed
    is zeros; nothing else was done. The log of a killed device may end at a decision."""
    wrong: list[str] = []
    page = gpu_twin.PAGE
    for event, after in pairwise([*events, {"kind": "the end"}]):
        decision = event.get("decision") or {}
        if event["kind"] == "effect" and after["kind"] == "effect":
            wrong.append(f"{after} was not decided")
        if event["kind"] != "decision" or event["capability"] != "trust.gpu" or "drawn" in event:
            continue
        if decision["refusal"]:
            wrong += [f"{decision['refusal']}, and yet {after} was done"] * (after["kind"] == "effect")
            continue
        request = event["observation"]["request"]
        touched, owner = after.get("bytes", [0, 0]), decision["table"]["owner"]
        pages = [touched[0] // page, -(-touched[1] // page)]
        pages = pages if request["kind"] in ("read", "write") else request["pages"]
        did = (after.get("request"), after.get("owner"), pages, after.get("scrubbed"), after.get("left"))
        scrub = [[first * page, end * page] for first, end in decision["scrub"]]
        decided = (request["kind"], owner, request["pages"], scrub, 0)
        wrong += [f"{did} was done, decided {decided}"] * (did != decided)
        wrong += [f"{after['keys']} keys with owner {owner!r}"] * bool(after.get("keys") and not owner)
    return wrong


def gpu_in_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """All requests of the device, from power on."""
    live = [event for event in events if event["kind"] == "decision" and "drawn" not in event]
    observations = [from_plain(gpu.Observation, event["observation"]) for event in live]
    decisions = [from_plain(gpu.Decision, event["decision"]) for event in live]
    requests = [observation.request for observation in observations]
    return list(zip(decisions, gpu_twin.decisions(observations[0].table.size, requests), strict=True))


PARITY = {
    "trust.attest": Parity(_attest, attest_effects),
    "trust.gpu": Parity(_gpu, gpu_effects, gpu_in_twin),
}
GPU, GPU_DEVICE = "trust/gpu/policy.py", "trust/gpu/live/device.py"
POLICY, PROTOCOL = "trust/attest/policy.py", "trust/attest/protocol.py"
MUTANTS = (
    Mutant("trust.attest", POLICY, "claims.get(name, -1) >= least", "claims.get(name, least) >= least"),
    Mutant(
        "trust.attest", POLICY, "allow.measurements.keys() | measured.keys()", "allow.measurements.keys()"
    ),
    Mutant("trust.attest", POLICY, "observation.claimed == observation.loaded", "bool(observation.loaded)"),
    Mutant("trust.attest", POLICY, "quote.key in allow.tpms", "bool(quote.key)"),
    Mutant("trust.attest", POLICY, "quote.pcrs == quote.expected", "bool(quote.pcrs)"),
    Mutant(
        "trust.attest", POLICY, '"tier": int(quote is not None)', '"tier": observation.claims.get("tier", 0)'
    ),
    Mutant(
        "trust.attest", PROTOCOL, "if not decision.accept:", "if decision.failing[1:]:", live=True
    ),
    Mutant("trust.gpu", GPU, "if request.who != table.owner:", "if not request.who:"),
    Mutant("trust.gpu", GPU, "        if table.dirty:", "        if len(table.dirty) > 9:"),
    Mutant("trust.gpu", GPU_DEVICE, "            part.zero_()", "            part[1:].zero_()", live=True),
    Mutant(
        "trust.gpu", GPU_DEVICE, "if decision.refusal:", 'if decision.refusal == "bound":', live=True
    ),
)  # fmt: skip
