"""Loops that frameworks run, killed at random steps: `examples/elastic_*.py`, each as it stands there.

All their ranks are forked from one server that has imported the frameworks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support import preloaded, quick
from support.preloaded import TRAINING
from windtunnel.training.elastic.events import recoveries
from windtunnel.training.launch import launch

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 18
NEEDS = {
    "accelerate": ("accelerate", "transformers"),
    "hf": ("accelerate", "transformers"),
    "lightning": ("lightning",),
}
IMPORTED = (
    "lightning",
    "accelerate",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "deepspeed",  # Accelerate and the adapter import it where it is installed
)
PRELOAD = (*TRAINING, *(name for name in IMPORTED if find_spec(name.partition(".")[0])))
GROUPED = True


@pytest.fixture(scope="module")
def frameworks() -> Iterator[None]:
    with quick.launches(PRELOAD):
        yield


def ended(name: str, folder: Path, *faults: str) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """What each rank returned, and the run's events."""
    with (folder.parent / f"{folder.name}.output").open("wb") as output:
        launched = launch(
            EXAMPLES / f"elastic_{name}.py",
            folder=folder,
            output=output.fileno(),
            hosts=2,
            lease=10.0,
            frozen_after=2.0,
            faults=faults,
            preload=PRELOAD,
        )
        with launched:
            outcome = launched.wait(170.0)
    assert outcome is not None and outcome.status == 0, Path(output.name).read_text()[-3000:]
    return outcome.results, launched.events()


def rates(events: list[dict[str, Any]]) -> dict[int, set[float]]:
    """The learning rates that each step was done with."""
    by_step: dict[int, set[float]] = {}
    for event in events:
        if event["kind"] == "step":
            by_step.setdefault(event["step"], set()).add(event["lr"])
    return by_step


@pytest.mark.parametrize("name", NEEDS)
def test_the_page_shows_the_lines_that_the_example_changes(name: str) -> None:
    """All of those with a mark and no other, among lines that are there; none that it says are gone is."""
    page = (EXAMPLES.parent / "docs" / "loops.md").read_text()
    diff = page.split(f"`examples/elastic_{name}.py`:")[1].split("```diff\n")[1].split("```")[0].splitlines()
    lines = (EXAMPLES / f"elastic_{name}.py").read_text().splitlines()
    marked = [line.split("  # elastic")[0] for line in lines if "  # elastic" in line]
    assert [line[1:] for line in diff if line[:1] == "+"] == marked
    assert {line[1:] for line in diff if line[:1] == " "} <= set(lines)
    assert not {line[1:] for line in diff if line[:1] == "-"} & set(lines)


@pytest.mark.slow
@pytest.mark.usefixtures("frameworks")
@pytest.mark.parametrize("name", NEEDS)
def test_it_ends_as_one_that_nobody_struck(name: str, tmp_path: Path) -> None:
    """A host is lost, and later a process alone: as many steps, each with its learning rate, and parameters
    (and what the framework logged) that are the same to the bit."""
    if missing := [package for package in NEEDS[name] if not find_spec(package)]:
        pytest.skip(f"needs {', '.join(missing)}: pip install windtunnel[strangers]")
    drawn = random.Random(name)
    first, second = drawn.randrange(1, 12), drawn.randrange(14, STEPS - 1)  # back into the last epoch
    plain, undisturbed = ended(name, tmp_path / "plain")
    struck, events = ended(
        name, tmp_path / "struck", f"kill:host=1,step={first}", f"kill:rank=0,step={second}"
    )
    assert struck == plain
    assert rates(events) == rates(undisturbed)
    assert sorted(rates(events)) == list(range(STEPS))
    assert recoveries(undisturbed) == []
    assert [recovery.complete and (recovery.steps_lost or 0) <= 1 for recovery in recoveries(events)] == [
        True,
        True,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_it_goes_on_after_any_step(name: str, tmp_path: Path) -> None:
    """The first and the last of an epoch, before and after a validation: what it gives then is the rest of
    what one gives that nobody breaks off. Logged means, averaged weights, the scale of gradients (it leaves
    steps out) and what early stopping knows are among it."""
    if missing := [package for package in NEEDS[name] if not find_spec(package)]:
        pytest.skip(f"needs {', '.join(missing)}: pip install windtunnel[strangers]")
    program = Path(__file__).with_name("stepwise.py")
    done = preloaded.run([program, name], modules=PRELOAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    whole, *rests = json.loads(done.stdout.splitlines()[-1])
    assert len(rests) == STEPS if name == "accelerate" else 12 < len(rests) < STEPS  # the others stop early
    for step, rest in enumerate(rests):
        assert rest == whole[-len(rest) :], f"after step {step}"
    assert [len(rest) for rest in rests] == sorted({len(rest) for rest in rests}, reverse=True)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("lightning"), reason="needs lightning: pip install windtunnel[strangers]")
def test_what_cannot_be_brought_back_is_refused() -> None:
    code = """
from types import SimpleNamespace
from lightning import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from windtunnel.training.checkpoint.adapters.lightning import ElasticCallback
callback = ElasticCallback(SimpleNamespace(world=1, rank=0), object())
trainer = Trainer(accelerator="cpu", logger=False, callbacks=[StochasticWeightAveraging(0.1), callback])
callback.setup(trainer, None, "fit")
"""
    done = preloaded.run(["-c", code], modules=PRELOAD)
    assert b"UserError: Trainer: StochasticWeightAveraging is not accepted" in done.stderr
