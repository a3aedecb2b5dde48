"""Codecs: bytes on the wire, what comes back, and what must never be lost or hidden."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.formats import room_of
from windtunnel.training.gradsync.live import codecs
from windtunnel.training.gradsync.live.codecs import Codec, find
from windtunnel.training.gradsync.live.profile import codec_costs, codec_sizes

SPECS = ("none", "fp16", "bf16", "int8", "sign", "dragonn:0.05")


def noise(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bytes_of(code: Tensor) -> int:
    return code.numel() * code.element_size()


def decoded(codec: Codec, gradient: Tensor, seed: int = 5) -> Tensor:
    out = torch.full((gradient.numel(),), 7.0)
    codec.decode(codec.encode(gradient, seed), out)
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
        codec.decode(code, out)
        codec.add(code, out)
        codec.add(code, out, -2.0)
        assert float(out.abs().sum()) <= 1e-5 * float(gradient.abs().sum())
    scalar, strided = torch.tensor(2.5), noise(5000).view(50, 100).T
    assert decoded(codec, scalar).isfinite().all()
    assert torch.equal(decoded(codec, strided), decoded(codec, strided.reshape(-1).clone()))
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        gradient = noise(600).to(dtype)
        out = torch.zeros(600, dtype=dtype)
        codec.decode(codec.encode(gradient, 3), out)
        assert out.dtype == dtype
        expected = decoded(codec, gradient.float(), 3)
        assert torch.allclose(out.float(), expected, rtol=1e-2, atol=1e-3)


def test_bytes_are_those_of_the_documented_formats() -> None:
    n = 10_000
    blocks = math.ceil(n / 512)
    assert {spec: find(spec).nbytes(n) for spec in SPECS} == {
        "none": 4 * n, "fp16": 2 * n, "bf16": 2 * n, "int8": n + 4 * blocks, "sign": 1252 + 8,
        "dragonn:0.05": 8 * 500,
    }  # fmt: skip


def test_what_comes_back_is_as_near_as_each_format_allows() -> None:
    gradient = noise(4096)
    blocks = gradient.view(-1, 512).abs().amax(1).repeat_interleave(512)
    bounds = {
        "none": torch.zeros(4096), "fp16": gradient.abs() * 2**-11, "bf16": gradient.abs() * 2**-8,
        "int8": blocks / 127 * 0.501,
    }  # fmt: skip
    for spec, bound in bounds.items():
        assert ((decoded(find(spec), gradient) - gradient).abs() <= bound).all(), spec
    assert torch.allclose(decoded(find("sign"), gradient), gradient.sign() * gradient.abs().mean())


@given(
    numel=st.integers(1, 60_000), ratio=st.sampled_from((0.001, 0.01, 0.1, 1.0)), seed=st.integers(0, 2**62),
    zeros=st.floats(0, 1),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_what_reaches_the_threshold_is_sent_once_in_its_place(
    numel: int, ratio: float, seed: int, zeros: float
) -> None:
    """The compiled pass and the hash keep one contract."""
    gradient = noise(numel, seed % 1000) * (torch.rand(numel) >= zeros)
    room = room_of(numel, ratio)
    appended = codecs.parts(find(f"dragonn:{ratio}").encode(gradient, seed))
    assert torch.equal(appended[1], torch.where(appended[0] < 0, 0.0, gradient[appended[0].clamp(min=0)]))
    for indices in (appended[0], codecs.chosen_by_hash(gradient, room, seed)):
        used = indices[indices >= 0]
        assert len(indices) == room and len(used.unique()) == len(used)
        assert (used < numel).all() and (gradient[used] != 0).all()
        assert len(used) > 0 or not gradient.any()
        if room == numel and indices is appended[0]:
            assert len(used) == int((gradient != 0).sum())


def test_the_first_element_can_be_sent_and_an_index_that_two_ranks_chose_adds_up() -> None:
    codec = find("dragonn:0.05")
    mine, other = torch.zeros(100), torch.zeros(100)
    mine[0], other[0], other[99] = 3.0, 4.0, -1.0
    codes = [codec.encode(gradient, 1) for gradient in (mine, other)]
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
    assert 0 in codecs.parts(codes[0])[0]


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("spec", SPECS)
def test_nan_and_infinity_of_one_rank_are_seen_by_all(spec: str, bad: float) -> None:
    codec = find(spec)
    for numel, place in ((1, 0), (1500, 0), (1500, 700), (50_000, 49_999)):
        gradient = noise(numel)
        gradient[place] = bad
        total = torch.zeros(numel)
        for tensor in (noise(numel, 1), gradient, noise(numel, 2)):
            codec.add(codec.encode(tensor, 3), total)
        assert not total.isfinite().all(), numel
        if spec not in ("int8", "sign"):
            assert not total[place].isfinite() and int((~total.isfinite()).sum()) == 1
            assert place in codecs.chosen_by_hash(gradient, room_of(numel, 0.05), 3)
        elif spec == "int8":
            block = place // 512 * 512
            assert int((~total.isfinite()).sum()) == len(total[block : block + 512])


def test_small_numbers_and_zeros_make_no_nan() -> None:
    for spec in SPECS:
        for gradient in (torch.zeros(1000), torch.full((1000,), 1e-40), torch.full((1000,), -1e-33)):
            out = decoded(find(spec), gradient)
            assert out.isfinite().all() and out.abs().max() <= 2e-33, spec
    assert decoded(find("fp16"), torch.tensor([70000.0])).isinf().all()  # as documented


def test_a_wrong_spec_is_told_with_what_is_accepted() -> None:
    with pytest.raises(UserError, match=r"'dragonn' is unknown; accepted are none, .*dragonn:RATIO"):
        find("dragonn")
    for spec in ("zip", "none:1", "int8:", "sign:2"):
        with pytest.raises(UserError, match="is unknown; accepted are none, fp16"):
            find(spec)
    for spec in ("dragonn:0", "dragonn:2", "dragonn:nan", "dragonn:", "dragonn:x"):
        with pytest.raises(UserError, match="above 0"):
            find(spec)
    with pytest.raises(UserError, match="fewer than 2\\^31"):
        find("dragonn:0.01").nbytes(2**31)
    many = torch.zeros(1).expand(2**31)  # of which no memory is taken
    with pytest.raises(UserError, match="fewer than 2\\^31"):
        codecs.encode_largest(many, 0, 0.01)


def test_costs_have_what_a_profile_needs() -> None:
    costs = codec_costs(("fp16", "dragonn:0.05"), (100, 1000), torch.device("cpu"), repeats=1)
    assert [(cost.codec, cost.summable) for cost in costs] == [
        ("fp16", True), ("dragonn:0.05", False),
    ]  # fmt: skip
    for cost in costs:
        assert [point.numel for point in cost.points] == [100, 1000]
        assert all(point.encode > 0 and point.decode > 0 for point in cost.points)
        assert cost.points[1].nbytes == find(cost.codec).nbytes(1000)


def test_codecs_are_timed_on_sizes_that_each_of_them_takes() -> None:
    """Also for a job whose gradients, all together, are more than a sparse code can number."""
    assert codec_sizes(1 << 24) == [1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24]
    assert codec_sizes(100) == [1, 12, 100]
    most = max(codec_sizes(3 << 31))
    assert all(find(spec).nbytes(most) for spec in SPECS)
