"""What a surviving run tells its user: a line for every event that matters, and the sums at the end.

All figures are measured: they are differences of the times in the run's event log.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from windtunnel.base import ranges
from windtunnel.training.elastic.events import PHASES, Event, Recovery, goodput, recoveries
from windtunnel.training.elastic.policy.checkpoints import FAILED, WANTED
from windtunnel.training.elastic.policy.evidence import in_short

if TYPE_CHECKING:
    from rich.console import Console


class Narrator:
    """Turns events into lines, a line only where something changed that a user wants to know."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._recovering = False
        self._restored: list[Event] = []
        self._grouped = False
        self._doubts: set[str] = set()

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
        if kind == "grouped":
            self._grouped = True
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
            return f"{_count(event['count'], 'host')} ordered ({event.get('reason', 'one is missing')})"
        if kind == "guarantee":
            new = [doubt for doubt in event["doubts"] if doubt not in self._doubts]
            self._doubts.update(new)
            return f"after a failure the results may differ in bits: {'; '.join(new)}" if new else None
        if kind == "note":
            return f"note: {_last_line(event['text'])}"
        if kind == FAILED:
            return f"step {event['step']} is not in storage: {_last_line(event['error'])}"
        if kind == "finished":
            return f"finished: {in_short(event['reason'])}" if event["status"] == 0 else None
        return None

    def _decided(self, event: Event) -> str:
        membership = event["membership"]
        self._recovering = True
        self._restored = []
        hosts = ", ".join(str(host["id"]) for host in membership["hosts"])
        ranks = len(membership["hosts"]) * membership["per_host"]
        how = ", every process anew" if membership["restart_all"] else self._of_plain(membership)
        return f"generation {membership['generation']}: {ranks} ranks on hosts {hosts}{how}"

    def _of_plain(self, membership: dict[str, Any]) -> str:
        if self._grouped or membership["generation"] == 1:
            return ""
        return ", every process anew, since the script does not call windtunnel.training.elastic.run"

    def _step(self, event: Event) -> str | None:
        if not self._recovering:
            return None
        self._recovering = False
        if event["generation"] == 1 and self._resumed is None:
            return None
        return f"step {event['step']} is done, the first of generation {event['generation']}{self._tiers()}"

    @property
    def _resumed(self) -> int | None:
        return self._restored[-1].get("step") if self._restored else None

    def _tiers(self) -> str:
        tiers: dict[str, list[int]] = {}
        for event in self._restored:
            tiers.setdefault(str(event.get("tier")), []).append(event["rank"])
        if not tiers:
            return ""
        step = self._resumed
        parts = [f"{_ranks(ranks)} from {tier}" for tier, ranks in sorted(tiers.items())]
        return f" (restored step {step}: {'; '.join(parts)})"


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2].strip()


def _lost(event: Event) -> str:
    evidence = {
        "exit": "it ended",
        "connection": "its connection broke",
        "lease": "nothing came from it",
        "frozen": "it does not move",
    }.get(event["evidence"], event["evidence"])
    if event["evidence"] == "suspect":
        return f"rank {event['rank']} lost its peers: {in_short(event['error'])}"
    if event["what"] == "host":
        place = f" (place {event['place']})" if event.get("place") is not None else ""
        return f"lost host {event['host']}{place}: {event.get('error') or evidence}"
    error = in_short(event.get("error") or "")
    return f"lost rank {event['rank']}: {error or evidence}"


def _count(number: int, what: str) -> str:
    return f"1 {what}" if number == 1 else f"{number} {what}s"


def _ranks(ranks: list[int]) -> str:
    """0, 1, 2, 5 as "ranks 0-2,5"."""
    return f"{'rank' if len(set(ranks)) == 1 else 'ranks'} {ranges.write(ranks)}"


def failed_rank(events: list[Event]) -> Event | None:
    """The loss that ended the run: the last one that was the program's own doing, else the last one."""
    losses = [event for event in events if event["kind"] == "lost"]
    own = [event for event in losses if event.get("own") and event.get("error")]
    return (own or losses)[-1] if losses else None


def print_end(events: list[Event], console: Console) -> None:
    """The table of recoveries and the line about goodput."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    storage = stored(events)
    missing = [step for step in storage["wanted"] if step not in storage["durable"]]
    if missing:
        _say(
            console,
            f"{len(missing)} of {_count(len(storage['wanted']), 'checkpoint')} due to storage are not "
            f"there: {'step' if len(missing) == 1 else 'steps'} {', '.join(map(str, missing))}",
        )
    for fault in not_struck(events):
        _say(console, f"{fault} did not strike: no rank came there (without elastic.run there are no steps)")
    complete = [recovery for recovery in recoveries(events) if recovery.complete]
    if complete:
        table = Table(box=SIMPLE_HEAD, title="Recoveries, seconds (measured)", title_justify="left")
        table.add_column("failure", overflow="fold", min_width=24)
        for name in (*PHASES, "total", "steps_lost"):
            table.add_column(name.replace("_", "\n"), justify="right")
        for recovery in complete:
            cells = [_seconds(recovery.phases[name]) for name in PHASES]
            lost = "–" if recovery.steps_lost is None else str(recovery.steps_lost)
            table.add_row(Text(_failure(recovery)), *cells, _seconds(recovery.seconds), lost)
        console.print(table)
    sums = goodput(events)
    if sums.steps > 1:
        _say(
            console,
            f"Goodput {100 * sums.fraction:.1f} % (measured): of {sums.seconds:.2f} s, "
            f"{sums.training:.2f} s are steps that stand; {sums.starting:.2f} s passed before the first, "
            f"{sums.recovering:.2f} s went into recovering, {sums.redone:.2f} s into "
            f"{_count(sums.steps_redone, 'step')} done again, and in {sums.waiting:.2f} s there was no step",
        )


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)


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
        "restored": _restored(events),
        "goodput": asdict(goodput(events)),
        "stored": stored(events),
        "guarantee": guarantee(events),
        "not_struck": not_struck(events),
    }


def not_struck(events: list[Event]) -> list[str]:
    """The job's faults of which none came."""
    struck = {event["fault"] for event in events if event["kind"] == "injected"}
    faults = [event["config"].get("faults", ()) for event in events if event["kind"] == "started"]
    return [text for text in (faults[-1] if faults else ()) if text.strip() not in struck]


def _restored(events: list[Event]) -> list[dict[str, Any]]:
    """What each generation went on from."""
    steps = {event["generation"]: event["step"] for event in events if event["kind"] == "restored"}
    return [{"generation": generation, "step": step} for generation, step in steps.items()]


def stored(events: list[Event]) -> dict[str, list[int]]:
    """The steps that were ``wanted`` in storage, and those of them that are ``durable``."""
    due: list[int] = []
    for event in events:
        if event["kind"] == WANTED:  # what was wanted later on was of a course that is over
            due = [*(step for step in due if step < event["step"]), event["step"]]
    there = {event["step"] for event in events if event["kind"] == "persisted"}
    return {"wanted": due, "durable": [step for step in due if step in there]}


def guarantee(events: list[Event]) -> str:
    """Whether the results are bit for bit those of a run without failures, or why that is not sure."""
    statements = [event for event in events if event["kind"] == "guarantee"]
    reasons = dict.fromkeys(doubt for event in statements for doubt in event["doubts"])
    worlds = [
        len(event_["membership"]["hosts"]) * event_["membership"]["per_host"] for event_ in _formed(events)
    ]
    if len(set(worlds)) > 1 and not all(event["any_world"] for event in statements):
        reasons["the number of ranks changed ({})".format(", ".join(map(str, dict.fromkeys(worlds))))] = None
    if not statements:
        reasons = {"no step was saved by a PeerCheckpointer": None}
    return f"not sure to be bit-identical: {'; '.join(reasons)}" if reasons else "bit-identical"


def _formed(events: list[Event]) -> list[Event]:
    """The decisions of generations that finished a step."""
    worked = {event["generation"] for event in events if event["kind"] == "step"}
    return [event for event in events if event["kind"] == "decided" and event["generation"] in worked]


def _failure(recovery: Recovery) -> str:
    if recovery.fault is not None:
        return recovery.fault
    return _lost(recovery.lost[0]) if recovery.lost else in_short(recovery.cause)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
