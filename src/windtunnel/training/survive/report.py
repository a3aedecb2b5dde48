"""What a surviving run tells its user: a line for every event that matters, and the sums at the end.

All figures are measured: they are differences of the times in the run's event log.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windtunnel.training.survive.events import PHASES, Event, Recovery, goodput, recoveries

if TYPE_CHECKING:
    from rich.console import Console


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

    found = recoveries(events)
    if found:
        table = Table(box=SIMPLE_HEAD, title="Recoveries, seconds (measured)", title_justify="left")
        table.add_column("failure", overflow="fold", min_width=24)
        for name in (*PHASES, "total", "steps lost"):
            table.add_column(name.replace("_", " "), justify="right")
        for recovery in found:
            cells = [_seconds(recovery.phases[name]) for name in PHASES]
            lost = "–" if recovery.steps_lost is None else str(recovery.steps_lost)
            table.add_row(_failure(recovery), *cells, _seconds(recovery.seconds), lost)
        console.print(table)
    sums = goodput(events)
    if sums.steps > 1:
        console.print(
            f"Goodput {100 * sums.fraction:.1f} % (measured): of {sums.seconds:.2f} s, "
            f"{sums.recovering:.2f} s went into recovering and {sums.redone:.2f} s into "
            f"{sums.steps_redone} steps done again",
            highlight=False,
            soft_wrap=True,
        )


def summary(events: list[Event]) -> dict[str, Any]:
    """The sums of a run as values of JSON (seconds)."""
    return {
        "recoveries": [
            {
                "failure": _failure(recovery),
                "generation": recovery.generation,
                "phases": recovery.phases,
                "seconds": recovery.seconds,
                "steps_lost": recovery.steps_lost,
                "tiers": recovery.tiers,
            }
            for recovery in recoveries(events)
        ],
        "goodput": asdict(goodput(events)),
    }


def _failure(recovery: Recovery) -> str:
    if recovery.fault is not None:
        return recovery.fault
    return _lost(recovery.lost[0]) if recovery.lost else reason_in_short(recovery.cause)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
