"""What a surviving run tells its user: a line for every event that matters, and the sums at the end.

All figures are measured: they are differences of the times in the run's event log.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Event = dict[str, Any]


@dataclass(frozen=True)
class Goodput:
    """``useful``: seconds of steps that count, each step once. ``wall``: seconds from the first generation to
    the end. ``steps``: distinct steps. ``repeated``: steps that were done again after a failure."""

    useful: float
    wall: float
    steps: int
    repeated: int

    @property
    def share(self) -> float | None:
        return self.useful / self.wall if self.steps > 1 and self.wall > 0 else None


def goodput(events: list[Event]) -> Goodput:
    """How much of a run's time went into steps that count, as far as its script reports steps.

    A step takes from the one before it in its generation to its own event; the first of a generation, which
    has none before it, counts as long as the median one.
    """
    begun = next((event["t"] for event in events if event["kind"] == "decided"), 0.0)
    over = events[-1]["t"] if events else 0.0
    times: dict[int, float | None] = {}
    executed = 0
    before: Event | None = None
    for event in (event for event in events if event["kind"] == "step"):
        executed += 1
        same = before is not None and before["generation"] == event["generation"]
        times[event["step"]] = event["t"] - before["t"] if same and before is not None else None
        before = event
    known = [seconds for seconds in times.values() if seconds is not None]
    usual = statistics.median(known) if known else 0.0
    useful = sum(usual if seconds is None else seconds for seconds in times.values())
    return Goodput(useful, max(0.0, over - begun), len(times), executed - len(times))


class Narrator:
    """Turns events into lines, a line only where something changed that a user wants to know."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._recovering = False
        self._restored: list[Event] = []
        self._generation = 0

    def line(self, event: Event) -> str | None:
        """The line for ``event``, None for most."""
        if self._began is None:
            self._began = event["t"]
        text = self._text(event)
        return None if text is None else f"[{event['t'] - self._began:8.2f} s] {text}"

    def _text(self, event: Event) -> str | None:
        kind = event["kind"]
        if kind == "decided":
            return self._decided(event)
        if kind == "step":
            return self._step(event)
        if kind == "restored":
            self._restored.append(event)
            return None
        if kind == "injected":
            return f"injected: {event['fault']}"
        if kind == "lost":
            return _lost(event)
        if kind == "ordered":
            return f"{_machines(event['count'])} ordered ({event.get('reason', 'one is missing')})"
        if kind == "note":
            return f"note: {event['text'].strip().splitlines()[-1]}"
        if kind == "finished":
            return f"finished: {_short(event['reason'])}" if event["status"] == 0 else None
        return None

    def _decided(self, event: Event) -> str:
        membership = event["membership"]
        self._recovering = membership["generation"] > 1
        self._restored = []
        nodes = ", ".join(str(node["id"]) for node in membership["nodes"])
        ranks = len(membership["nodes"]) * membership["per_node"]
        how = ", every process anew" if membership["restart_all"] else ""
        return f"generation {membership['generation']}: {ranks} ranks on machines {nodes}{how}"

    def _step(self, event: Event) -> str | None:
        if not self._recovering:
            return None
        self._recovering = False
        return f"step {event['step']} is done, the first of generation {event['generation']}{self._tiers()}"

    def _tiers(self) -> str:
        tiers: dict[str, list[int]] = {}
        for event in self._restored:
            tiers.setdefault(str(event.get("tier")), []).append(event["rank"])
        if not tiers:
            return ""
        step = self._restored[-1].get("step")
        parts = [f"ranks {_ranks(ranks)} from {tier}" for tier, ranks in sorted(tiers.items())]
        return f" (restored step {step}: {'; '.join(parts)})"


def _lost(event: Event) -> str:
    evidence = {
        "exit": "it ended",
        "connection": "its connection broke",
        "lease": "nothing came from it",
        "frozen": "it does not move",
        "suspect": "its peers lost it",
    }.get(event["evidence"], event["evidence"])
    if event["what"] == "node":
        place = f" (place {event['place']})" if event.get("place") is not None else ""
        return f"lost machine {event['node']}{place}: {evidence}"
    error = _short(event.get("error") or "")
    return f"lost rank {event['rank']}: {error or evidence}"


def _short(text: str) -> str:
    """A failure in one line: what ended, and the last line of its traceback."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if len(lines) < 2:
        return lines[0] if lines else ""
    return f"{lines[0].partition(': Traceback')[0]}: {lines[-1]}"


def _machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def _ranks(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "0-2,5"."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def failed_rank(events: list[Event]) -> Event | None:
    """The loss that ended the run: the last one that was the program's own doing, else the last one."""
    losses = [event for event in events if event["kind"] == "lost"]
    own = [event for event in losses if event.get("own") and event.get("error")]
    return (own or losses)[-1] if losses else None


def reason_in_short(reason: str) -> str:
    """A reason that holds tracebacks, in one line."""
    return _short(reason) if "\n" in reason else reason


def print_end(events: list[Event], console: Console) -> None:
    """The table of recoveries and the line about goodput."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = recoveries_of(events)
    if rows:
        table = Table(box=SIMPLE_HEAD, title="Recoveries, seconds (measured)", title_justify="left")
        table.add_column("failure")
        for name in PHASES:
            table.add_column(name, justify="right")
        for row in rows:
            cells = ["–" if row[name] is None else f"{row[name]:.3f}" for name in PHASES]
            table.add_row(row["failure"], *cells)
        console.print(table)
    found = goodput(events)
    if found.share is not None:
        console.print(
            f"Goodput {100 * found.share:.1f} % (measured): {found.useful:.2f} s of {found.wall:.2f} s in "
            f"{found.steps} steps that count, {found.repeated} steps done again",
            highlight=False,
            soft_wrap=True,
        )


PHASES = ("detect", "decide", "regroup", "load", "first step", "total")


def recoveries_of(events: list[Event]) -> list[dict[str, Any]]:
    """What each recovery took: a row for each generation that a loss led to and that came to a step.

    Seconds. ``detect``: from the injection (None where it was not injected) to the first loss in the log;
    ``decide``: to the generation; ``regroup``: to the last rank's new group; ``load``: to the last rank's
    restored state; ``first step``: to the first step event; ``total``: from the first of these.
    """
    rows = []
    pending: list[Event] = []
    decided: Event | None = None
    for event in events:
        kind = event["kind"]
        if kind in ("injected", "lost"):
            pending.append(event)
        elif kind == "decided":
            decided = event
        elif kind == "step" and decided is not None and event["generation"] == decided["generation"]:
            if any(loss["kind"] == "lost" for loss in pending):
                rows.append(_row(pending, decided, event, events))
                pending = []
            decided = None
    return rows


def _row(pending: list[Event], decided: Event, step: Event, events: list[Event]) -> dict[str, Any]:
    lost = next(event for event in pending if event["kind"] == "lost")
    injected = next(
        (event for event in pending if event["kind"] == "injected" and event["t"] <= lost["t"]), None
    )
    mine = [event for event in events if event["generation"] == decided["generation"]]
    grouped = max((event["t"] for event in mine if event["kind"] == "grouped"), default=None)
    loaded = max((event["t"] for event in mine if event["kind"] == "restored"), default=None)
    before_step = loaded or grouped or decided["t"]
    row: dict[str, Any] = {
        "failure": injected["fault"] if injected else _lost(lost),
        "generation": decided["generation"],
        "detect": lost["t"] - injected["t"] if injected else None,
        "decide": decided["t"] - lost["t"],
        "regroup": grouped - decided["t"] if grouped else None,
        "load": loaded - grouped if loaded and grouped else None,
        "first step": step["t"] - before_step,
        "total": step["t"] - (injected or lost)["t"],
    }
    return row
