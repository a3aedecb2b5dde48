"""Codecs: bytes on the wire, what comes back, and what must never be lost or hidden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live import quantised, sparsified
from windtunnel.training.gradsync.live.codecs import Codec, find, seed_of
from windtunnel.training.gradsync.live.costs import measure
from windtunnel.training.gradsync.live.lowrank import LowRank, nbytes, square

SPECS = (
    "none", "fp16", "bf16", "int8", "fp8", "terngrad", "qsgd:1", "qsgd:7", "qsgd:64", "sign", "onebit",
    "topk:0.05", "threshold:0.05", "dgc:0.05", "dragonn:0.05", "randomk:0.05",
)  # fmt: skip
SPARSE = ("topk:0.05", "threshold:0.05", "dgc:0.05", "dragonn:0.05")


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bytes_of(code: Tensor) -> int:
    return code.numel() * code.element_size()


def decoded(codec: Codec, gradient: Tensor, seed: int = 5) -> Tensor:
    out = torch.full((gradient.numel(),), 7.0)
    codec.decode(codec.encode(gradient, seed), out, seed)
    return out


@pytest.mark.parametrize("spec", SPECS)
def test_every_shape_and_dtype_has_a_code_of_the_bytes_that_are_told(spec: str) -> None:
    codec = find(spec)
    for numel in (0, 1, 2, 3, 7, 8, 9, 511, 512, 513, 5000):
        gradient = noise(numel)
        before = gradient.clone()
        code = codec.encode(gradient, 3)
        assert code.dim() == 1 and bytes_of(code) == codec.nbytes(numel)
        assert codec.summable or (code.dtype == torch.uint8 and codec.nbytes(numel) % 4 == 0)
        # deterministic, and nothing is written to the gradient
        assert torch.equal(code, codec.encode(gradient, 3)) and torch.equal(gradient, before)
        out = torch.empty(numel)
        codec.decode(code, out, 3)
        codec.add(code, out, 3)
        codec.add(code, out, 3, -2.0)
        assert float(out.abs().sum()) <= 1e-5 * float(gradient.abs().sum())
    scalar, strided = torch.tensor(2.5), noise(5000).view(50, 100).T
    assert decoded(codec, scalar).isfinite().all()
    assert torch.equal(decoded(codec, strided), decoded(codec, strided.reshape(-1).clone()))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        gradient = noise(600).to(dtype)
        out = torch.zeros(600, dtype=dtype)
        codec.decode(codec.encode(gradient, 3), out, 3)
        assert out.dtype == dtype
        expected = decoded(codec, gradient.float(), 3)
        assert torch.allclose(out.float(), expected, rtol=1e-2, atol=1e-3)


def test_bytes_are_those_of_the_documented_formats() -> None:
    n = 10_000
    blocks = math.ceil(n / 512)
    told = {spec: find(spec).nbytes(n) for spec in (*SPECS, "powersgd:2")}
    assert told == {
        "none": 4 * n, "fp16": 2 * n, "bf16": 2 * n, "int8": n + 4 * blocks, "fp8": n + 4 * blocks,
        "terngrad": n // 4 + 4 * blocks, "qsgd:1": n // 4 + 4 * blocks, "qsgd:7": n // 2 + 4 * blocks,
        "qsgd:64": n + 4 * blocks, "sign": 1252 + 8, "onebit": 1252 + 8, "randomk:0.05": 4 * 500,
        **dict.fromkeys(SPARSE, 8 * 500), "powersgd:2": 4 * 2 * 200,
    }  # fmt: skip


def test_what_comes_back_is_as_near_as_each_format_allows() -> None:
    gradient = noise(4096)
    blocks = gradient.view(-1, 512).abs().amax(1).repeat_interleave(512)
    bounds = {
        "none": torch.zeros(4096), "fp16": gradient.abs() * 2**-11, "bf16": gradient.abs() * 2**-8,
        "int8": blocks / 127 * 0.501, "fp8": gradient.abs() / 16 + blocks * 2**-17,
        "qsgd:64": blocks / 64 * 1.001, "qsgd:7": blocks / 7 * 1.001, "terngrad": blocks * 1.001,
    }  # fmt: skip
    for spec, bound in bounds.items():
        assert ((decoded(find(spec), gradient) - gradient).abs() <= bound).all(), spec
    assert torch.allclose(decoded(find("sign"), gradient), gradient.sign() * gradient.abs().mean())
    above, below = gradient[gradient >= 0].mean(), gradient[gradient < 0].mean()
    assert torch.allclose(decoded(find("onebit"), gradient), torch.where(gradient >= 0, above, below))


@pytest.mark.parametrize("spec", ("terngrad", "qsgd:7", "qsgd:64"))
def test_codecs_without_feedback_are_true_in_the_mean(spec: str) -> None:
    codec, gradient, total = find(spec), noise(512), torch.zeros(512)
    for step in range(400):
        codec.add(codec.encode(gradient, seed_of(1, step, 0, rank=step % 4)), total)
    levels = {"terngrad": 1, "qsgd:7": 7, "qsgd:64": 64}[spec]
    assert not codec.feedback
    # the mean of 400 values that differ from the truth by a step at most: five deviations
    assert ((total / 400 - gradient).abs() <= 5 * gradient.abs().max() / levels / 2 / 20).all()


@given(
    numel=st.integers(1, 40_000), ratio=st.sampled_from((0.001, 0.01, 0.2, 1.0)), seed=st.integers(0, 2**62),
    kind=st.sampled_from(("normal", "equal", "few", "sorted", "heavy")),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_topk_is_exact(numel: int, ratio: float, seed: int, kind: str) -> None:
    gradient = noise(numel, seed % 1000)
    match kind:
        case "equal":
            gradient = torch.ones(numel)
        case "few":
            gradient = torch.where(noise(numel, 1) > 2.5, gradient, 0.0)
        case "sorted":
            gradient = gradient.sort().values
        case "heavy":
            gradient = gradient**7
    codec = find(f"topk:{ratio}")
    indices, values = sparsified.parts(codec.encode(gradient, seed))
    room = sparsified.kept(numel, ratio)
    assert len(set(indices.tolist())) == room and torch.equal(values, gradient[indices.long()])
    expected = gradient.abs().topk(room).values
    assert torch.equal(values.abs().sort().values, expected.sort().values)


@given(
    numel=st.integers(1, 60_000), ratio=st.sampled_from((0.001, 0.01, 0.1, 1.0)), seed=st.integers(0, 2**62),
    zeros=st.floats(0, 1),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_what_reaches_the_threshold_is_sent_once_in_its_place(
    numel: int, ratio: float, seed: int, zeros: float
) -> None:
    """The compiled pass, the prefix sum and the hash keep one contract."""
    gradient = noise(numel, seed % 1000) * (torch.rand(numel) >= zeros)
    room = sparsified.kept(numel, ratio)
    appended = sparsified.parts(find(f"dragonn:{ratio}").encode(gradient, seed))
    assert torch.equal(appended[1], torch.where(appended[0] < 0, 0.0, gradient[appended[0].clamp(min=0)]))
    for indices in (
        appended[0],
        sparsified.chosen_by_torch(gradient, room, seed, hashed=False),
        sparsified.chosen_by_torch(gradient, room, seed, hashed=True),
    ):
        used = indices[indices >= 0]
        assert len(indices) == room and len(used.unique()) == len(used)
        assert (used < numel).all() and (gradient[used] != 0).all()
        assert len(used) > 0 or not gradient.any()
        if room == numel and indices is appended[0]:
            assert len(used) == int((gradient != 0).sum())
    by_torch = sparsified.chosen_by_torch(gradient, room, seed, hashed=False)
    assert set(by_torch.tolist()) == set(appended[0].tolist())


def test_hashing_keeps_as_many_as_its_load_allows_and_others_the_next_time() -> None:
    numel, room = 200_000, 2_000
    gradient, enough = torch.zeros(numel), 8_000
    chosen = torch.randperm(numel, generator=torch.Generator().manual_seed(1))[:enough]
    gradient[chosen] = 1.0
    found = [
        set(sparsified.chosen_by_torch(gradient, room, seed_of(0, step, 0), hashed=True).tolist())
        for step in range(2)
    ]
    assert [len(one) for one in found] == [room, room]
    assert len(found[0] & found[1]) < 0.5 * room
    # m candidates in a table of L places: (L / m) (1 - exp(-m / L)) are kept
    gradient[chosen[room:]] = 0.0
    kept = int((sparsified.chosen_by_torch(gradient, room, 77, hashed=True) >= 0).sum())
    size = sparsified.TABLE * room
    assert kept / room == pytest.approx(size / room * (1 - math.exp(-room / size)), 0.02)


@pytest.mark.parametrize("spec", SPARSE)
def test_the_first_element_can_be_sent_and_an_index_that_two_ranks_chose_adds_up(spec: str) -> None:
    codec = find(spec)
    mine, other = torch.zeros(100), torch.zeros(100)
    mine[0], other[0], other[99] = 3.0, 4.0, -1.0
    codes = [codec.encode(one, 1) for one in (mine, other)]
    total = torch.zeros(100)
    for code in codes:
        codec.add(code, total)
    assert total[0] == 7.0 and total[99] == -1.0 and total[1:99].abs().sum() == 0
    # codes of ranks that found different numbers are of one size, and lie one behind the other
    gathered = torch.cat(codes)
    assert len(codes[0]) == len(codes[1]) == codec.nbytes(100)
    again = torch.zeros(100)
    for code in gathered.split(codec.nbytes(100)):
        codec.add(code, again)
    assert torch.equal(again, total)
    assert codec.sparse and 0 in sparsified.parts(codes[0])[0]


def test_what_finds_no_room_is_no_fixed_part_of_the_tensor() -> None:
    """Else the last elements of a tensor with many equal ones would never be sent."""
    gradient, sent = torch.ones(5000), torch.zeros(5000)
    codec = find("dragonn:0.01")
    for step in range(300):
        codec.add(codec.encode(gradient, seed_of(0, step, 0)), sent)
    assert (sent > 0).float().mean() > 0.9


def test_summable_codes_add_up_on_the_way() -> None:
    gradients = [noise(3000, rank) for rank in range(4)]
    for spec in ("none", "fp16", "bf16", "randomk:0.05"):
        codec = find(spec)
        assert codec.summable
        codes = [codec.encode(one, 9) for one in gradients]
        out, apart = torch.zeros(3000), torch.zeros(3000)
        codec.decode(torch.stack(codes).sum(0), out, 9)
        for code in codes:
            codec.add(code, apart, 9)
        assert torch.allclose(out, apart, atol=0.1 if spec == "bf16" else 1e-2)
    drawn = sparsified.drawn(3000, 150, 9, torch.device("cpu"))
    assert (drawn.diff() > 0).all() and torch.allclose(out[drawn], sum(gradients)[drawn])  # type: ignore[index]
    assert not torch.equal(drawn, sparsified.drawn(3000, 150, 10, torch.device("cpu")))


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("spec", SPECS)
def test_nan_and_infinity_of_one_rank_are_seen_by_all(spec: str, bad: float) -> None:
    codec = find(spec)
    for numel, place in ((1, 0), (1500, 0), (1500, 700), (50_000, 49_999)):
        gradient = noise(numel)
        gradient[place] = bad
        total = torch.zeros(numel)
        for one in (noise(numel, 1), gradient, noise(numel, 2)):
            codec.add(codec.encode(one, 3), total, 3)
        assert not total.isfinite().all(), numel
        if codec.sparse or codec.lossless or spec in ("fp16", "bf16"):
            assert not total[place].isfinite() and int((~total.isfinite()).sum()) == 1
            room = sparsified.kept(numel, 0.05)
            for hashed in (False, True):
                assert place in sparsified.chosen_by_torch(gradient, room, 3, hashed)
        elif spec in ("int8", "fp8", "terngrad") or spec.startswith("qsgd"):
            block = place // 512 * 512
            assert int((~total.isfinite()).sum()) == len(total[block : block + 512])


def test_small_numbers_and_zeros_make_no_nan() -> None:
    for spec in SPECS:
        for gradient in (torch.zeros(1000), torch.full((1000,), 1e-40), torch.full((1000,), -1e-33)):
            out = decoded(find(spec), gradient)
            assert out.isfinite().all() and out.abs().max() <= 2e-33, spec
    assert decoded(find("fp16"), torch.tensor([70000.0])).isinf().all()  # as documented


def test_what_torch_does_on_other_devices_keeps_the_same_formats() -> None:
    gradient = noise(5003)
    gradient[17] = math.nan
    for levels, width in ((127, 8), (7, 4), (1, 2)):
        theirs = quantised.levels_by_torch(gradient, 3, levels, width, False)
        if levels == 127:
            mine = quantised.encode_levels(gradient, 3, levels, width, False)
            # they may differ where an element lies in the middle of two steps
            assert (theirs != mine).float().mean() < 1e-3 + 512 / 5003
        assert len(theirs) == quantised.block_bytes(5003, width)
        table, split = quantised.levels_table(levels, width), 4 * quantised.scales_of(5003)
        out, out_torch = torch.zeros(5003), torch.zeros(5003)
        quantised.add_blocks(theirs, out, 0, 0.5, table, width)
        scales = theirs[:split].view(torch.float32)
        quantised.add_by_torch(theirs[split:], width, table, scales, 512, out_torch, 0.5)
        assert out[:512].isnan().all() and torch.allclose(out, out_torch, equal_nan=True)
        random = quantised.levels_by_torch(gradient, 3, levels, width, True)
        quantised.add_blocks(random, out.zero_(), 0, 1.0, table, width)
        assert (out - gradient)[512:].abs().max() <= gradient[512:].abs().max() / levels * 1.001
    signs = quantised.encode_signs(gradient[512:], 0, True)
    out, out_torch = torch.zeros(4491), torch.zeros(4491)
    quantised.add_signs(signs, out, 0, 2.0)
    pair, one = signs[:8].view(torch.float32), torch.ones(1)
    quantised.add_by_torch(signs[8:], 1, pair, one, 8 * (len(signs) - 8), out_torch, 2.0)
    assert torch.allclose(out, out_torch) and torch.equal(out.signbit(), gradient[512:].signbit())


def test_a_wrong_spec_is_told_with_what_is_accepted() -> None:
    with pytest.raises(UserError, match=r"'topk' is unknown; accepted are none, .*topk:RATIO"):
        find("topk")
    for spec in ("zip", "none:1", "int8:", "sign:2"):
        with pytest.raises(UserError, match="is unknown; accepted are none, fp16"):
            find(spec)
    for spec, kind in (("topk:0", "above 0"), ("topk:2", "above 0"), ("topk:nan", "above 0"),
                       ("qsgd:200", "1 to 127"), ("powersgd:x", "from 1 on"), ("topk:", "above 0"),
                       ("qsgd:", "1 to 127")):  # fmt: skip
        with pytest.raises(UserError, match=kind):
            find(spec)
    with pytest.raises(UserError, match="fewer than 2\\^31"):
        find("topk:0.01").nbytes(2**31)
    with pytest.raises(UserError, match="two sums"):
        find("powersgd:2").encode(noise(8), 0)


def test_seeds_differ_by_all_that_they_are_made_of() -> None:
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3, 0)
    assert len({seed_of(*one) for one in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0, 1))}) == 5
    assert 0 <= seed_of(7, 8, 9) < 2**62


def two_sums(lows: list[LowRank], gradients: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The sum that all ranks get, and what each has left."""
    first = torch.stack([low.first(one) for low, one in zip(lows, gradients, strict=True)]).sum(0)
    firsts = [first.clone() for _ in lows]
    parts = zip(lows, gradients, firsts, strict=True)
    second = torch.stack([low.second(one, mine) for low, one, mine in parts]).sum(0)
    total = torch.zeros(len(gradients[0]))
    for rank, low in enumerate(lows):
        low.add(firsts[rank], second, gradients[rank], -1 / len(lows))
    lows[0].add(firsts[0], second, total)
    return total, gradients


def test_powersgd_finds_a_sum_of_low_rank_and_keeps_what_it_lacks() -> None:
    shapes = {"w": (40, 6, 10), "b": (40,), "tiny": (2, 2), "v": (30, 50)}
    generator = torch.Generator().manual_seed(0)
    numel = sum(math.prod(one) for one in shapes.values())
    gradients = [torch.randn(numel, generator=generator) for _ in range(3)]
    low_rank = torch.randn(40, 2, generator=generator) @ torch.randn(2, 60, generator=generator)
    for one in gradients:
        one[:2400] = low_rank.view(-1) / 3
    truth = sum(gradients)
    lows = [LowRank(2, shapes, seed=4) for _ in range(3)]
    assert bytes_of(lows[0].first(gradients[0])) + 4 * 2 * (60 + 50) == nbytes(2, list(shapes.values()))
    total, left = two_sums(lows, [one.clone() for one in gradients])
    assert torch.allclose(total + sum(left), truth, atol=1e-4)  # type: ignore[arg-type]
    assert torch.allclose(total[:2444], truth[:2444], atol=1e-4)  # type: ignore[index]
    # begun from where it ended, the power iteration gets nearer to the best factors of rank 2
    errors = []
    for _ in range(8):
        total, _ = two_sums(lows, [one.clone() for one in gradients])
        errors.append(float((total - truth).norm()))
    values = torch.linalg.svdvals(truth[2444:].view(30, 50))  # type: ignore[index]
    assert errors[-1] < errors[0] and errors[-1] == pytest.approx(float(values[2:].norm()), rel=0.05)
    # a NaN reaches all, and is forgotten
    state = lows[0].state_dict()
    spoilt = [one.clone() for one in gradients]
    spoilt[1][2500] = math.nan
    total, _ = two_sums(lows, spoilt)
    assert total[2444:].isnan().all() and total[:2444].isfinite().all()
    assert all(one.isfinite().all() for one in lows[0].state_dict().values())
    fresh = LowRank(2, shapes)
    fresh.load_state_dict(state)
    assert torch.equal(fresh.state_dict()["w"], state["w"])
    with pytest.raises(UserError, match="the same rank"):
        LowRank(1, shapes).load_state_dict(state)


def test_powersgd_of_zeros_and_of_nothing() -> None:
    assert square(12) == (3, 4) and square(13) == (13,) and square(0) == (0,)
    lows = [LowRank(3, {"a": (8, 9)})]
    total, _ = two_sums(lows, [torch.zeros(72)])
    assert torch.equal(total, torch.zeros(72))
    truth = torch.outer(noise(8), noise(9, 1)).view(-1)
    total, _ = two_sums(lows, [truth.clone()])
    assert torch.allclose(total, truth, atol=1e-4)
    total, _ = two_sums([LowRank(2, {})], [torch.zeros(0)])
    assert len(total) == 0


def test_costs_have_what_a_profile_needs() -> None:
    costs = measure(("fp16", "topk:0.05", "powersgd:1"), (100, 1000), repeats=1)
    assert [(one.codec, one.summable) for one in costs] == [
        ("fp16", True), ("topk:0.05", False), ("powersgd:1", True),
    ]  # fmt: skip
    for cost in costs:
        assert [point.numel for point in cost.points] == [100, 1000]
        assert all(one.encode > 0 and one.decode > 0 for one in cost.points)
        assert cost.points[1].nbytes == find(cost.codec).nbytes(1000)
