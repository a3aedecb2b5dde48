"""The control plane: claims of real workers on a real database, agents on this host."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity import Event, Mutant, Parity, drawn
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.control.node import policy as node
from windtunnel.control.node.agents import ActuatorLoop, Prediction
from windtunnel.store import eventlog

# --- node: what an agent may do on a host, and what it learns


def lend(folder: Path) -> list[Path]:
    """A loan, a model that stands still, harm that is undone, and health again; and drawn observations."""
    from support import node as support
    from support.waiting import until
    from windtunnel.control.node import Groups, HarvestModel, run

    log = folder / "live.jsonl"
    with support.groups(busy=True) as (primary, elastic, _):
        model = HarvestModel(Groups(primary, elastic))
        actuator = support.Lending(Groups(primary, elastic), folder=folder)
        with run(model, actuator, support.SCHEDULE, log=log) as agent:
            until(lambda: len(support.effects(log, "predict")) > 5, "loans")
            os.kill(agent.model.pid or 0, signal.SIGSTOP)
            since = len(eventlog.read(log))
            until(lambda: support.effects(log, "default", since), "the default")
            os.kill(agent.model.pid or 0, signal.SIGCONT)
            (folder / "ill").touch()
            until(lambda: support.effects(log, "mitigate"), "the harm undone")
            (folder / "ill").unlink()
            until(lambda: support.effects(log, "resume"), "health again")
    return [log, drawn(folder, "control.node", _turns(random.Random(8)))]


def _turns(draw: random.Random) -> Iterator[tuple[str, Any]]:
    for number in range(150):
        policy = "unguarded" if number % 10 == 0 else "guarded"
        elapsed = draw.choice([0.1, 0.5, 0.6])
        since, trusted = draw.choice([None, 4.0, 5.0, 8.0]), draw.random() < 0.7
        yield policy, node.Epoch(10.0, draw.choice([3, 5, 6]), 5, elapsed, 0.5, trusted, since, 5.0)
        yield policy, node.Turn(
            10.0, draw.choice([0, 3, 4]), draw.choice([9.5, 10.0, 10.5]), 3, draw.choice([8.5, 9.0, 9.9]),
            draw.choice([None, True, True, False]), draw.choice([None, None, 4.0, 5.0, 8.0]), 1.0, 5.0,
            draw.random() < 0.8, draw.random() < 0.8,
        )  # fmt: skip
    forecast, before = node.Forecast((), 0.0), tuple[float, ...]()
    scanned, frequency = node.Scanned(), node.Frequency()
    for number in range(80):
        load = draw.choice([1.0, 1.5, 3.0])
        values = node.features([load, load * draw.random(), load], 4.0)
        epoch = node.Harvest(forecast.weights, before, forecast.need, load, values, 9, 4.0)
        yield "guarded", epoch
        forecast, before = node.decide(epoch), values
        share = draw.choice([0.0, 0.02, 0.5, 0.5, 1.0])
        accessed = tuple(draw.random() < share for _ in range(8 if number % 20 else 7))
        draws = tuple(round(draw.random(), 3) for _ in range(3))
        scan = node.Memory(scanned, 2.0, accessed, 6.0, draws)
        yield "guarded", scan
        scanned = node.decide(scan)
        level, activity = draw.randrange(3), draw.choice([0.0, 0.2, 0.25, 0.6, 1.0])
        efficiency = round(draw.choice([0.3, 0.4, 0.5]) * (1 + level * (activity - 0.5)), 4)
        clock = node.Overclock(frequency, level, activity, efficiency, (draw.random(), draw.random()))
        yield "guarded", clock
        frequency = node.decide(clock)


def lent(events: Sequence[Event]) -> list[str]:
    """The model published what it had forecast, or the default; the actuator did what was decided, with what
    was published, and the kernel then said so."""
    live = [event for event in events if "who" in event]
    published = {row["sequence"]: row["value"] for row in live if row["who"] == "model" and "did" in row}
    wrong: list[str] = []
    for who in ("model", "actuator"):
        rows = [row for row in live if row["who"] == who]
        need, pending = None, None
        for row in rows:
            decision = row.get("decision", {})
            match decision.get("is"):
                case "Forecast":
                    need = decision["need"]
                case "Publish" | "Action":
                    wrong += [f"{pending} was not done"] if pending else []
                    kind = decision.get("publish", decision.get("kind"))
                    pending = (kind, decision.get("sequence")) if kind not in ("", "wait") else None
            if row["kind"] != "effect":
                continue
            value, did = row["value"], row["did"]
            if pending is None or did != pending[0] or pending[1] not in (None, row["sequence"]):
                wrong.append(f"{did} was done, decided {pending}")
            expected = published.get(row["sequence"]) if who == "actuator" else need
            if value != (expected if did in ("predict", "prediction") else None):
                wrong.append(f"{did} of {row['sequence']} had {value}, not {expected}")
            cores = next(
                each["observation"]["cores"] for each in live if "cores" in each.get("observation", {})
            )
            loan = 0.02 if value is None else max(0.02, min(1.5, cores - value))
            if who == "actuator" and abs(row["lent"] - loan) > 1e-6:
                wrong.append(f"{row['lent']} cores were lent, decided {loan}")
            pending = None
    return wrong


def node_in_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """The loop of the actuator with the clock, slot and assessments of live; the model with its peaks."""
    live = [event for event in events if "who" in event and event["kind"] == "decision"]
    pairs: list[tuple[Any, Any]] = []
    turns = [row for row in live if row["who"] == "actuator"]
    decisions: list[Any] = []

    def ask(observation: Any) -> Any:
        decisions.append(node.decide(observation))
        return decisions[-1]

    class Host:
        healthy: bool | None = None

        def act(self, _: Any) -> dict[str, Any]:
            return {}

        def assess(self) -> bool:
            return bool(self.healthy)

        def mitigate(self) -> dict[str, Any]:
            return {}

        clean_up = mitigate

    from support.node import SCHEDULE

    host = Host()
    loop = ActuatorLoop(host, SCHEDULE, node.Guards(), ask)
    for row in turns:
        observation = row["observation"]
        host.healthy = observation["healthy"]
        loop.turn(
            observation["now"],
            Prediction(observation["sequence"], observation["expires"], None)
            if observation["sequence"]
            else None,
        )
        pairs.append((row["decision"], to_plain(decisions[-1], tag=True)))
    last = node.Forecast((), 0.0)
    for row in live:
        if row["observation"]["is"] == "Harvest":
            harvest = {name: value for name, value in row["observation"].items() if name != "is"}
            epoch = replace(from_plain(node.Harvest, harvest), weights=last.weights, need=last.need)
            last = node.decide(epoch)
            pairs.append((row["decision"], to_plain(last, tag=True)))
    return pairs


PARITY: dict[str, Parity] = {"control.node": Parity(lend, lent, node_in_twin, root=True)}


def _mutant(file: str, rule: str, other: str, *, live: bool = False) -> Mutant:
    return Mutant("control.node", f"control/node/{file}", rule, other, live)


MUTANTS: tuple[Mutant, ...] = (
    _mutant("policy.py", "turn.now < turn.expires", "turn.now <= turn.expires"),
    _mutant("policy.py", "turn.mitigated >= turn.hold", "turn.mitigated > turn.hold"),
    _mutant("policy.py", "UNDER * excess", "excess"),
    _mutant("policy.py", "epoch.efficiency / nominal[state] - 1", "epoch.efficiency - nominal[state]"),
    _mutant("live/cpu.py", "max(LEAST,", "max(2 * LEAST,", live=True),
    _mutant("agents.py", "now + schedule.valid, value)", "now + schedule.valid, 0.25)", live=True),
)
