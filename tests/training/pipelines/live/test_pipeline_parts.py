"""Schedule, samples, the step in doubt, transfers, layers as bytes, files: each by itself."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_problems import Problem, adamw, halving, specs
from torch import Tensor, nn

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.checkpoint import store
from windtunnel.training.elastic import determinism
from windtunnel.training.pipelines.live import layers as copied
from windtunnel.training.pipelines.live.layers import HostLayer, LayerSpec, even_templates, plan_transfers
from windtunnel.training.pipelines.live.stage import LiveStage
from windtunnel.training.pipelines.live.team import Sums
from windtunnel.training.pipelines.live.trainer import SampleOrder
from windtunnel.training.pipelines.model import Layout
from windtunnel.training.pipelines.policy.commit import Standing, resolve
from windtunnel.training.pipelines.policy.planner import StageAction, one_forward_one_backward

torch.set_num_threads(1)
CPU = torch.device("cpu")


def execute(stages: int, microbatches: int) -> list[int]:
    """Run all stages' orders with sends that do not block; the most microbatches in flight at each."""
    orders = [deque(one_forward_one_backward(s, stages, microbatches)) for s in range(stages)]
    arrived: set[tuple[int, str, int]] = {(0, "forward", m) for m in range(microbatches)}
    arrived |= {(stages - 1, "backward", m) for m in range(microbatches)}
    under_way, most = [0] * stages, [0] * stages
    done: list[list[StageAction]] = [[] for _ in range(stages)]
    while any(orders):
        moved = False
        for stage, order in enumerate(orders):
            while order and (stage, order[0].kind, order[0].microbatch) in arrived:
                action = order.popleft()
                forward = action.kind == "forward"
                assert forward or StageAction("forward", action.microbatch) in done[stage]
                done[stage].append(action)
                arrived.add((stage + (1 if forward else -1), action.kind, action.microbatch))
                under_way[stage] += 1 if forward else -1
                most[stage] = max(most[stage], under_way[stage])
                moved = True
        assert moved, "deadlock"
    assert all(len(each) == len(set(each)) == 2 * microbatches for each in done)
    return most


def test_schedule_ends_and_bounds_memory() -> None:
    for stages, microbatches in product(range(1, 7), range(1, 9)):
        most = execute(stages, microbatches)
        assert most == [min(stages - s, microbatches) for s in range(stages)]
    assert [(a.kind[0], a.microbatch) for a in one_forward_one_backward(1, 3, 3)] == [
        ("f", 0), ("f", 1), ("b", 0), ("f", 2), ("b", 1), ("b", 2),
    ]  # fmt: skip


@given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_each_sample_once_an_epoch(samples: int, microbatches: int, size: int, seed: int) -> None:
    order = SampleOrder(samples, microbatches, size, seed)
    steps = -(-2 * samples // (microbatches * size))
    used = [i for s in range(steps) for m in range(microbatches) for i in order.microbatch(s, m)]
    assert sorted(used[:samples]) == sorted(used[samples : 2 * samples]) == list(range(samples))
    whole = [i for m in range(microbatches) for i in order.microbatch(1, m)]
    assert whole == determinism.samples(seed, samples, microbatches * size, microbatches * size)
    # Whoever asks for another microbatch first gets the same
    again = SampleOrder(samples, microbatches, size, seed)
    assert again.microbatch(steps - 1, microbatches - 1) == order.microbatch(steps - 1, microbatches - 1)


def standing(host: int, versions: dict[int, int], **more: object) -> Standing:
    return replace(Standing(host, era=1, versions=versions), **more)  # type: ignore[arg-type]


def test_step_in_doubt_for_every_subset() -> None:
    """Three hosts prepared step 4. Whoever is left, in whichever states: one conclusion, and nobody that
    has the layer at the newest version is left out."""
    for fate in product(["gone", "prepared", "knows", "applied"], repeat=3):
        left = {}
        for host, how in enumerate(fate):
            if how == "applied":
                left[host] = standing(host, {host: 5})
            elif how != "gone":
                left[host] = standing(host, {host: 4}, pending=4, committed=how == "knows")
        if not left:
            continue
        committed = any(how in ("applied", "knows") for how in fate)
        resolution = resolve(left, 3)
        assert resolution.version == (5 if committed else 4)
        assert {rank for ranks in resolution.holders.values() for rank in ranks} == set(left)
        if committed and "prepared" in fate:
            assert resolution.apply == 4


def test_stale_states_do_not_count() -> None:
    old = replace(standing(0, {0: 9, 1: 9}), era=1)
    new = replace(standing(1, {0: 3}), era=7)
    behind = replace(standing(2, {0: 2, 1: 2}), era=7)
    assert resolve({0: old, 1: new, 2: behind}, 2).holders == {0: (1,), 1: ()}
    assert resolve({0: Standing(0), 1: Standing(1)}, 2).version is None


def test_standing_over_json() -> None:
    said = standing(3, {0: 2, 5: 2}, layout=Layout(((1, 2), (3,)), (2, 4)), since=9, nbytes={0: 7, 5: 8})
    import json

    assert from_plain(Standing, json.loads(json.dumps(to_plain(said)))) == said


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_transfers_bring_what_is_needed(ranks: int, layers: int, rng: object) -> None:
    choose = rng.random  # type: ignore[attr-defined]
    holders = {i: tuple(r for r in range(ranks) if choose() < 0.5) for i in range(layers)}
    needed = {r: [i for i in range(layers) if choose() < 0.5] for r in range(ranks)}
    planned = plan_transfers(needed, holders, {i: i + 1 for i in range(layers)})
    assert all(t.source in holders[t.layer] for t in planned)
    got = {(t.target, t.layer) for t in planned}
    assert got == {(r, i) for r in needed for i in needed[r] if holders[i] and r not in holders[i]}
    assert len(got) == len(planned)


def test_load_is_spread() -> None:
    planned = plan_transfers({2: [0, 1]}, {0: (0, 1), 1: (0, 1)}, {0: 10, 1: 9})
    assert {t.source for t in planned} == {0, 1}


class Odd(nn.Module):
    """Parameters of several dtypes, one without dimensions, one frozen, one empty; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, 5, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.randn(()))
        self.c = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("mask", torch.tensor([True, False]))


def odd(seed: int = 1) -> HostLayer:
    return HostLayer(2, LayerSpec("odd", Odd), seed, adamw, halving, CPU)


def gradient(layer: HostLayer, seed: int) -> Tensor:
    count = sum(p.numel() for p in layer.parameters)
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layer_as_bytes() -> None:
    first, second = odd(), odd(2)
    assert first.digest() != second.digest()
    for seed in range(3):
        first.apply(gradient(first, seed))
    whole = first.pack()
    assert len(whole.data) >= first.nbytes()
    second.unpack(whole)
    assert second.digest() == first.digest() and second.version == 3
    assert isinstance(second.scheduler.milestones, Counter)  # type: ignore[union-attr]
    # It goes on alike, also after its own trip
    for layer in (first, second):
        layer.apply(gradient(layer, 9))
    assert second.digest() == first.digest()


def test_layer_refuses_another_layers_state() -> None:
    stranger = HostLayer(0, specs()[0], 0, adamw, halving, CPU)
    with pytest.raises(UserError, match="of layer 'odd'; 'first' is needed"):
        stranger.unpack(odd().pack())


def test_statistics_of_batches_are_refused() -> None:
    spec = LayerSpec("norm", lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    with pytest.raises(UserError, match="layer norm: BatchNorm1d '1' tracks statistics"):
        HostLayer(0, spec, 0, adamw, None, CPU)


def test_skipped_step_moves_only_the_schedule() -> None:
    layer = odd()
    before = layer.module.a.clone()
    layer.apply(None)
    layer.apply(None)
    assert torch.equal(layer.module.a, before)
    assert layer.version == 2 and layer.optimizer is not None
    assert layer.optimizer.param_groups[0]["lr"] == 0.005


def test_stage_cuts_do_not_show() -> None:
    """One stage of all layers, and two stages with a hand-over between: equal bits."""
    layers = [HostLayer(i, spec, 0, adamw, None, CPU) for i, spec in enumerate(specs())]
    x, target = torch.randn(2, 8), torch.tensor([1, 2])

    def gradients(cut: int) -> list[Tensor]:
        by_layer: dict[int, list[Tensor]] = {}

        def sink(layer: HostLayer, parts: list[Tensor]) -> None:
            by_layer[layer.index] = parts

        head, tail = LiveStage(layers[:cut], 0, None), LiveStage(layers[cut:], 0, None)
        first = head.forward(3, 1, (x,))
        handed = tuple(t.detach().requires_grad_(t.requires_grad) for t in first.layers[-1].outputs)
        second = tail.forward(3, 1, handed)
        tail.loss(second, target, nn.functional.cross_entropy)
        head.backward(first, tail.backward(second, [], sink, 0.25), sink, 0.25)
        return [g for i in sorted(by_layer) for g in by_layer[i]]

    whole = gradients(1)
    for cut in range(2, 6):
        assert all(torch.equal(a, b) for a, b in zip(whole, gradients(cut), strict=True))


def test_sums_in_any_grouping() -> None:
    """What one host sums is what it sums in any other order of its microbatches."""
    layer = odd()
    rows = [gradient(layer, seed).float() for seed in range(5)]
    totals = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        sums = Sums("fixed", {2: None}, 5)
        for m in order:
            sums.add(layer, list(rows[m].split([p.numel() for p in layer.parameters])))
        sums.start(layer)
        totals.append(sums.finish(layer))
    assert torch.equal(totals[0], totals[1])
    assert torch.allclose(totals[0].double(), sum(row.double() for row in rows), atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "overflow", "nonfinite"),
    [
        (1e6, False, False),
        (2.0**22 / 5, True, False),
        (float("inf"), False, True),
        (float("nan"), False, True),
    ],
)
def test_range_of_fixed_point(value: float, overflow: bool, nonfinite: bool) -> None:
    layer = HostLayer(0, specs()[0], 0, adamw, None, CPU)
    sums = Sums("fixed", {0: None}, 5)
    if value == 1e6:
        value = 2.0**22 / 5 * 0.99
    sums.add(layer, [torch.full((128,), value), torch.zeros(16)])
    assert (sums.overflow, sums.nonfinite) == (overflow, nonfinite)


def test_layers_in_storage_are_whole_or_do_not_count(tmp_path: Path) -> None:
    layer, job, url = odd(), Alone(), str(tmp_path)
    layer.index = 0
    for step in (1, 2, 3):
        store(job, url, step, {"rank0": layer.pack()}, 1, str(step), job.generation, keep=2)
    newest, other = copied.saved_steps(url)
    assert (newest.step, other.step) == (3, 2)
    again = odd(2)
    again.unpack(copied.read_layer(url, newest, 0, ["odd"]))
    assert again.digest() == layer.digest()
    with pytest.raises(UserError, match="of layer 'odd'; 'another' is needed"):
        copied.read_layer(url, newest, 0, ["another"])
    with pytest.raises(UserError, match="has 1 layers; the model has 2"):
        copied.read_layer(url, newest, 0, ["odd", "even"])
    file = next(tmp_path.glob("steps/*3-1/rank0.*"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"layer odd cannot be read: .*rank0 of step 3 is damaged"):
        copied.read_layer(url, newest, 0, ["odd"])
    file.with_name("complete").write_text("{")
    assert copied.saved_steps(url) == [other]


class Alone:
    """A job of one rank, as far as storage needs one."""

    rank, generation = 0, 1

    def agree(self, key: str, value: object = None) -> dict[int, object]:
        return {0: value}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"reduction": "quick"}, "reduction 'quick'; accepted: 'float', 'fixed'"),
        ({"nonfinite": "hope"}, "nonfinite 'hope'; accepted"),
        ({"microbatches": 0}, "microbatches is 0; accepted: a positive number"),
        ({"size": -1}, "microbatch_size is -1"),
        ({"largest": 9}, "templates for 2 to 9 hosts; accepted: 1 to 6, the layers"),
    ],
)
def test_bad_values_are_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(UserError, match=text):
        Problem().but(**changes).trainer()


def test_templates_for_another_model_are_refused() -> None:
    trainer = Problem().trainer()
    with pytest.raises(UserError, match="is for 5 layers; the model has 6"):
        type(trainer)(
            specs(), adamw, nn.functional.cross_entropy, lambda _: (None, None), samples=1, microbatches=1,
            microbatch_size=1, templates=even_templates(specs()[:5]),
        )  # fmt: skip


def test_no_torch_until_it_is_used() -> None:
    import subprocess
    import sys

    code = "import sys, windtunnel.training.pipelines; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
