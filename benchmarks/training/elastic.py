"""Four loops that others wrote (plain DDP, Hugging Face's Trainer, Lightning, Accelerate), killed at random
steps: do they end as if nothing had happened, and how soon do they go on?

The programs are the examples. Two emulated hosts of one rank each, gloo on CPU. One run of each is
undisturbed. In another one hosts (their memory with them) and processes alone are killed in turn, at steps
that a seed chooses; it must end with the same steps, losses and learning rates, and with parameters that are
the same to the bit. A process that takes a lost one's place is forked from one that has the framework
imported, as `windtunnel train` does it for PyTorch; without that it would import for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from random import Random
from typing import Any

from benchmarks import ROOT
from benchmarks.harness import jobs
from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.spec import PRELOAD

SEED = 29
ADAPTERS = "windtunnel.training.checkpoint.adapters"
LLAMA = "transformers.models.llama.modeling_llama"
LOOPS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], list[str]]] = {
    "plain DDP": ("plain", ("torchdata",), ("torchdata.stateful_dataloader",), []),
    "Hugging Face's Trainer": ("hf", ("transformers", "accelerate"), (f"{ADAPTERS}.huggingface", LLAMA), []),
    "Lightning": ("lightning", ("lightning",), (f"{ADAPTERS}.lightning",), []),
    "Accelerate": (
        "accelerate", ("accelerate", "transformers"), (f"{ADAPTERS}.accelerate", LLAMA), ["--cpu"],
    ),
}  # fmt: skip
"""Of each its example, the packages that it needs, what is imported before it forks, and its arguments."""


def loops_rows(quick: bool) -> Iterator[Row]:
    for name, (example, packages, preload, words) in LOOPS.items():
        if missing := next((package for package in packages if not find_spec(package)), None):
            yield left_out(name, f"{missing} is not installed")
            continue
        program = ROOT / "examples" / f"elastic_{example}.py"
        options: dict[str, Any] = {"hosts": 2, "preload": (*PRELOAD, *preload)}
        with scratch() as folder:
            undisturbed, calm = jobs.finished(program, words, folder / "plain", **options)
            options["faults"] = faults = strikes(example, len(step_figures(calm)), 2 if quick else 6)
            struck, events = jobs.finished(program, words, folder / "struck", **options)
        yield from rows(
            name, faults, undisturbed == struck, step_figures(calm) == step_figures(events), events
        )


def strikes(loop: str, steps: int, kills: int) -> tuple[str, ...]:
    """Faults at different steps, with one between them: a host, a process, and so on."""
    draw, kinds = Random(f"{SEED}/{loop}"), ("host", "rank")
    at = sorted(2 * step for step in draw.sample(range(1, steps // 2), kills))
    return tuple(f"kill:{kinds[i % 2]}={draw.randrange(2)},step={step}" for i, step in enumerate(at))


def step_figures(events: list[Event]) -> dict[int, set[tuple[Any, Any]]]:
    """Loss and learning rate of each step, as its loop tells them."""
    figures: dict[int, set[tuple[Any, Any]]] = {}
    for event in events:
        if event["kind"] == "step":
            figures.setdefault(event["step"], set()).add((event.get("loss"), event.get("lr")))
    return figures


def rows(
    name: str, faults: tuple[str, ...], same: bool, same_steps: bool, events: list[Event]
) -> Iterator[Row]:
    """One loop's figures."""
    recovered = jobs.complete(events)
    struck = len({event["fault"] for event in events if event["kind"] == "injected"})
    right = same and same_steps and struck == len(faults)
    yield figure(
        f"{name}: parameters, steps and learning rates as undisturbed", "yes/no", float(right), "yes",
        passed=right, note=f"{struck} kills in {len(step_figures(events))} steps; results"
        f" {'equal' if same else 'DIFFER'}, losses and rates {'equal' if same_steps else 'DIFFER'}",
    )  # fmt: skip
    lost = max((recovery.steps_lost or 0 for recovery in recovered), default=0)
    yield figure(f"{name}: steps done again by a failure, most", "steps", lost, "at most 1")
    injected = [recovery for recovery in recovered if recovery.injected is not None]
    total = f"{name}: from the kill to the first new step (median)"
    yield from jobs.recovery_rows(total, f"{name}, phase ", injected)
