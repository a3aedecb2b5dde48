"""Four loops that others wrote (plain DDP, Hugging Face's Trainer, Lightning, Accelerate), killed at random
steps: do they end as if nothing had happened, and how soon do they go on?

Two emulated hosts of one rank each, gloo on CPU. One run of each loop is undisturbed. In another one hosts
(their memory with them) and processes alone are killed in turn, at steps that a seed chooses; it must end
with the same steps at the same learning rates, and with parameters that are the same to the bit. A process
that takes a lost one's place is forked from one that has the framework imported, as `windtunnel train` does
it for PyTorch; without that it would import for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.harness import jobs
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.training.elastic.events import PHASES, Event, recoveries
from windtunnel.training.elastic.spec import PRELOAD

PROGRAM = Path(__file__).parent / "programs" / "foreign_loop.py"
SEED = 29
STEPS = 48  # four epochs
LOOPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("plain DDP", ("torchdata.stateful_dataloader",)),
    "hf": ("Hugging Face's Trainer", ("transformers", "accelerate")),
    "lightning": ("Lightning", ("lightning",)),
    "accelerate": ("Accelerate", ("accelerate",)),
}
"""Of each its name, and the modules that it needs."""
ADAPTED = {"hf": "huggingface", "lightning": "lightning", "accelerate": "accelerate"}


def loops_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    kills = 2 if quick else 6
    for loop, (name, modules) in LOOPS.items():
        missing = [module for module in modules if not find_spec(module.partition(".")[0])]
        if missing:
            yield left_out(name, f"{missing[0].partition('.')[0]} is not installed")
            continue
        with scratch() as folder:
            faults = strikes(loop, kills)
            plain, undisturbed = ended(loop, folder / "plain", ())
            struck, events = ended(loop, folder / "struck", faults)
        yield from rows(name, faults, plain == struck, rates(undisturbed) == rates(events), events)


def strikes(loop: str, kills: int) -> tuple[str, ...]:
    """Faults at different steps: a host, a process, and so on."""
    draw = Random(f"{SEED}/{loop}")
    steps = sorted(draw.sample(range(1, STEPS), kills))
    kinds = ("host", "rank")
    return tuple(f"kill:{kinds[i % 2]}={draw.randrange(2)},step={step}" for i, step in enumerate(steps))


def ended(loop: str, folder: Path, faults: tuple[str, ...]) -> tuple[dict[int, Any], list[Event]]:
    """What the ranks returned, and the run's events.

    Raises:
        jobs.Failed: it did not end well, or not in time.
    """
    adapter = f"windtunnel.training.checkpoint.adapters.{ADAPTED.get(loop)}"
    modules = (adapter,) if loop in ADAPTED else LOOPS[loop][1]
    words = ["--loop", loop, "--steps", STEPS]
    return jobs.finished(PROGRAM, words, folder, hosts=2, faults=faults, preload=(*PRELOAD, *modules))


def rates(events: list[Event]) -> dict[int, set[float]]:
    """The learning rates that each step was done with."""
    found: dict[int, set[float]] = {}
    for event in events:
        if event["kind"] == "step":
            found.setdefault(event["step"], set()).add(event["lr"])
    return found


def rows(
    name: str, faults: tuple[str, ...], same: bool, same_rates: bool, events: list[Event]
) -> Iterator[Row]:
    """One loop's figures."""
    found = [one for one in recoveries(events) if one.complete]
    struck = len({event["fault"] for event in events if event["kind"] == "injected"})
    steps = len(rates(events))
    right = same and same_rates and steps == STEPS and struck == len(faults)
    yield figure(
        f"{name}: parameters, steps and learning rates as undisturbed", "yes/no", float(right), "yes",
        met=right, note=f"{struck} kills; parameters {'equal' if same else 'DIFFER'}, learning rates"
        f" {'equal' if same_rates else 'DIFFER'}, {steps} of {STEPS} steps; {conditions()}",
    )  # fmt: skip
    lost = max((one.steps_lost or 0 for one in found), default=0)
    yield figure(f"{name}: steps done again by a failure, most", "steps", float(lost), "at most 1")
    known = [one for one in found if one.injected is not None]
    seconds = [one.seconds for one in known if one.seconds is not None]
    parts = [
        f"{phase} {median([one.phases[phase] or 0.0 for one in known]) * 1e3:.0f} ms"
        for phase in (PHASES if known else ())
    ]
    yield figure(
        f"{name}: from the kill to the first new step (median)", "s",
        quantile(seconds, 0.5) if seconds else None,
        note=f"{len(seconds)} recoveries, slowest {max(seconds, default=0.0):.2f} s; {', '.join(parts)}",
    )  # fmt: skip
