"""How soon do survivors work in a new group, in the same process, after a rank is killed or freezes?

Jobs of 4, 6 and 8 ranks, each on an emulated host, do nothing but all-reduce. Ranks are struck by SIGKILL;
the host's agent starts another process in the lost one's place (forked from one that has torch), and the
survivors, cut out of the dead group, form the next one with it. Time runs from the signal until the last
rank of all has its new group, tried by a barrier. A frozen rank (SIGSTOP) holds its connections open; it is
noticed by its missing signs of life, so the lease is told apart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from statistics import median

from benchmarks.harness import jobs
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row
from benchmarks.training.checkpoint import PROGRAMS
from windtunnel.training.elastic.events import Event, Recovery, recoveries
from windtunnel.training.launch import Launched

row = partial(Row, "regroup")
TARGET = 0.2  # seconds from SIGKILL to a working group
LEASE = 1.0  # seconds without a sign of life
SEED = 17


def regroup_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    kills, stops = (4, 1) if quick else (12, 3)
    with scratch() as folder:
        for ranks in (4,) if quick else (4, 6, 8):
            found, same = strike(folder / str(ranks), ranks, kills, stops)
            yield from rows(ranks, found, same)


def strike(folder: Path, ranks: int, kills: int, stops: int) -> tuple[list[Recovery], bool]:
    """Kill and stop ranks of a job, one after the other: its recoveries, and whether the survivors kept their
    processes.

    Raises:
        jobs.Failed: the job did not come back, or did not end well.
    """
    draw = Random(SEED + ranks)
    same = True
    program, options = PROGRAMS / "regroup_trainer.py", {"lease": LEASE, "frozen_after": LEASE}
    with jobs.running(program, [], folder, hosts=ranks, **options) as launched:
        for number in range(kills + stops):
            pids = standing(launched, ranks)
            time.sleep(draw.uniform(0.1, 0.3))
            rank = draw.randrange(ranks)
            generation = jobs.generation(launched.events())
            (launched.kill_worker if number < kills else launched.stop_worker)(rank)
            jobs.until(launched, lambda e, g=generation: jobs.generation(e) > g, "new generation", 30.0)  # type: ignore[misc]
            after = standing(launched, ranks)
            same &= all(after[other] == pid for other, pid in pids.items() if other != rank)
        jobs.end_soon(launched)
        return recoveries(launched.events()), same


def standing(launched: Launched, ranks: int) -> dict[int, int]:
    """Wait until all ranks of the newest generation are grouped and step: their process ids."""
    jobs.until(launched, lambda events: _stands(events, ranks), "group of all ranks")
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        with contextlib.suppress(KeyError):
            pids = {rank: launched.places()[rank]["workers"][rank] for rank in range(ranks)}
            if all(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids.values()):
                return pids
        time.sleep(0.01)
    raise jobs.Failed("the agents do not say who works for them")


def rows(ranks: int, found: list[Recovery], same: bool) -> Iterator[Row]:
    """One size's figures."""
    killed = [r for r in found if r.complete and r.injected is not None and _evidence(r) == "exit"]
    frozen = [r for r in found if r.complete and r.injected is not None and _evidence(r) == "frozen"]
    total = [r.grouped - r.injected for r in killed if r.grouped is not None and r.injected is not None]
    split = ", ".join(
        f"{name} {1e3 * median(r.phases[name] or 0.0 for r in killed):.0f} ms"
        for name in (("detect", "decide", "regroup") if killed else ())
    )
    kept = "survivors kept their processes" if same else "survivors were started anew"
    middle = quantile(total, 0.5)
    yield row(
        f"{ranks} ranks, SIGKILL of one: until all have a new group (median)", "s", middle,
        target=f"at most {TARGET:g} s", met=middle <= TARGET and same,
        note=f"{len(total)} kills; {split}; {kept}, the replacement is in the group; {conditions()}",
    )  # fmt: skip
    yield row(f"{ranks} ranks, SIGKILL: slowest", "s", max(total, default=None))
    since = [r.grouped - r.detected for r in frozen if r.grouped is not None]
    if since:
        noticed = median([r.detected - r.injected for r in frozen if r.injected is not None])
        yield row(
            f"{ranks} ranks, SIGSTOP of one: from its detection until all have a new group (median)", "s",
            quantile(since, 0.5),
            note=f"{len(since)} stops; detected after {noticed:.2f} s, the lease is {LEASE:g} s",
        )  # fmt: skip


def _stands(events: list[Event], ranks: int) -> bool:
    generation = jobs.generation(events)
    mine = [event for event in events if event["generation"] == generation]
    grouped = {event["rank"] for event in mine if event["kind"] == "grouped"}
    return len(grouped) == ranks and any(event["kind"] == "step" for event in mine)


def _evidence(recovery: Recovery) -> str:
    return str(recovery.lost[0]["evidence"]) if recovery.lost else ""
