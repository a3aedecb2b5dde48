"""However a job is laid out over ranks, it is the same training: the losses of one process are the truth."""

from __future__ import annotations

from functools import cache

import pytest
from example_runs import losses_by_layout

pytest.importorskip("torch")

STEPS, SEQ = 2, 64
GROUPED = True  # losses of a world are computed once for the tests of all its layouts
EXACT = f"--dtype fp32 --seq {SEQ} --steps {STEPS} "  # bf16 rounds differently for every way of summing

# A process sees four sequences a step; so does every layout, over its data parallel ranks together.
LLAMA = {
    1: ["--ac full", "--ac selective --foreach", "--parallel none", "--batch 2 --grad-accum 2"],
    2: [
        "--batch 2",
        "--batch 1 --parallel ddp --grad-accum 2",
        "--tp 2",
        "--tp 2 --parallel none --no-loss-parallel",
        "--cp 2",
        "--cp 2 --parallel ddp",
        "--pp 2",
        "--pp 2 --schedule gpipe --microbatches 2",
        "--pp 2 --schedule interleaved1f1b",
        "--pp 2 --schedule zerobubble --ac none",
        "--pp 2 --schedule zbv",
    ],
    4: [
        "--pp 2 --tp 2",
        "--batch 2 --pp 2 --schedule interleaved1f1b",
        "--batch 2 --tp 2",
    ],
}
MOE = ["--ep 1", "--ep 2", "--ep 4"]


def command(layout: str, default: str) -> str:
    return EXACT + (layout if "--batch" in layout else f"{layout} {default}")


@cache
def llama(world: int) -> dict[str, list[float]]:
    return losses_by_layout("train_llama", world, [command(x, "--batch 4") for x in LLAMA[world]])


@cache
def llama_truth() -> list[float]:
    return next(iter(losses_by_layout("train_llama", 1, [EXACT + "--batch 4 --ac none"]).values()))


@pytest.mark.conformance
@pytest.mark.parametrize(("world", "layout"), [(w, layout) for w, ls in LLAMA.items() for layout in ls])
def test_llama_trains_alike_in_every_layout(world: int, layout: str) -> None:
    truth = llama_truth()
    assert len(truth) == STEPS
    assert truth[-1] < truth[0] - 0.3
    assert llama(world)[command(layout, "--batch 4")] == pytest.approx(truth, abs=3e-4)


@pytest.mark.conformance
@pytest.mark.slow
def test_experts_train_alike_on_one_rank_and_on_several() -> None:
    # capacity for every token, because which ones are dropped depends on the batch that a rank sees
    flags = f"{EXACT} --capacity 4 --batch"
    (truth,) = losses_by_layout("train_moe", 1, [f"{flags} 4"]).values()
    assert truth[-1] < truth[0] - 0.2
    several = losses_by_layout("train_moe", 4, [f"{flags} 1 {layout}" for layout in MOE])
    assert len(several) == len(MOE)
    for layout, series in several.items():
        # the balance loss is a product of means over a rank's own batch, so not quite the same
        assert series == pytest.approx(truth, abs=5e-3), layout


@pytest.mark.conformance
@pytest.mark.slow
def test_tables_train_alike_on_one_rank_and_on_several() -> None:
    flags = "--dtype fp32 --steps 4 --batch"
    (truth,) = losses_by_layout("train_dlrm", 1, [f"{flags} 128"]).values()
    (series,) = losses_by_layout("train_dlrm", 2, [f"{flags} 64"]).values()
    assert len(truth) == 4
    assert series == pytest.approx(truth, abs=2e-4)
