"""Sparse sums over ranks that are threads: lossless to the bit, whatever the ranks have; refusals; bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import Threads, on_ranks
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live import sparse
from windtunnel.training.gradsync.live.exchange import WORDS, Peers
from windtunnel.training.gradsync.live.sparse import measure, reduce_with
from windtunnel.training.gradsync.policy.sparse import SCHEMES, Order, slice_length

ORDERED = ("zen", "allgather")
VIEWS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40)


def bits(tensor: Tensor) -> Tensor:
    """As integers, one for all that are no number: which of them a sum gives is left to the processor."""
    whole = tensor.to_dense() if tensor.layout == torch.sparse_coo else tensor
    whole = torch.where(whole.isnan(), torch.full_like(whole, float("nan")), whole)
    return whole.contiguous().view(VIEWS[whole.element_size()])


def ordered_sum(tensors: list[Tensor]) -> Tensor:
    total = torch.zeros(tensors[0].shape, dtype=tensors[0].dtype)
    for tensor in tensors:
        total += tensor.coalesce().to_dense() if tensor.layout == torch.sparse_coo else tensor
    return total


@st.composite
def gradients(draw: st.DrawFn) -> list[Tensor]:
    """One of each rank: COO with duplicates or dense, of any density."""
    world = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    rows, width = draw(st.sampled_from([(1, 1), (7, 3), (300, 4), (1000, 1), (64, 257)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]))
    sparse = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tensors = []
    for _ in range(world):
        density = draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
        there = np.flatnonzero(rng.random(rows) < density)
        if density:
            there = np.append(there, rng.choice([0, rows - 1]))  # the first, the last, and twice perhaps
        values = torch.from_numpy(rng.standard_normal((len(there), width))).to(dtype)
        values[torch.from_numpy(rng.random(values.shape) < 0.1)] = float(rng.choice(SPECIAL))
        index = torch.from_numpy(there)[None]
        coo = torch.sparse_coo_tensor(index, values, (rows, width), check_invariants=False)
        tensors.append(coo if sparse else coo.to_dense())
    return tensors


@settings(max_examples=40)
@given(gradients(), st.sampled_from([*SCHEMES, "auto"]))
def test_sum_is_the_ordered_sum_bit_for_bit(tensors: list[Tensor], scheme: str) -> None:
    """But for the schemes whose order of adding is another: these are alike on all ranks, and close."""
    before = [bits(tensor) for tensor in tensors]
    sums = on_ranks(len(tensors), lambda peers: reduce_with(peers, tensors[peers.rank], scheme))
    expected = ordered_sum(tensors)
    for total in sums:
        assert isinstance(total, Tensor), total
        assert (total.layout, total.shape, total.dtype) == (tensors[0].layout, expected.shape, expected.dtype)
        assert torch.equal(bits(total), bits(sums[0]))
        if scheme in ORDERED:
            assert torch.equal(bits(total), bits(expected))
        elif scheme != "auto":
            loose = 0.1 if expected.element_size() == 2 else 1e-5
            whole = total.to_dense() if total.layout == torch.sparse_coo else total
            torch.testing.assert_close(whole, expected, rtol=loose, atol=loose, equal_nan=True)
        if total.layout == torch.sparse_coo:
            assert total.is_coalesced() and bool((total.indices()[0].diff() > 0).all())
    assert all(torch.equal(bits(tensor), was) for tensor, was in zip(tensors, before, strict=True))


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (5, 0), (3, 2, 2)])
def test_any_shape(shape: tuple[int, ...]) -> None:
    tensors = [torch.full(shape, float(rank)) for rank in range(3)]
    for scheme in SCHEMES:
        for total in on_ranks(3, lambda peers, s=scheme: reduce_with(peers, tensors[peers.rank], s)):
            assert isinstance(total, Tensor), total
            assert torch.equal(total, torch.full(shape, 3.0))


def test_ranks_that_bring_different_things_are_refused_everywhere_before_any_data() -> None:
    base = torch.eye(4)
    cases = [
        (torch.eye(5), "zen", 0, "5x5 float32"),
        (base.half(), "zen", 0, "float16"),
        (base.to_sparse(1), "zen", 0, "sparse in 1"),
        (base, "allgather", 0, "scheme allgather"),
        (base, "zen", 7, "seed 7"),
        (base, "tree", 0, "scheme 'tree'"),
        (base.to_mkldnn(), "zen", 0, "layout"),
    ]
    for tensor, scheme, seed, word in cases:
        sent = []

        def work(peers: Threads, other: tuple = (tensor, scheme, seed), sent: list = sent) -> None:
            mine = other if peers.rank == 1 else (base, "zen", 0)
            try:
                reduce_with(peers, *mine)
            finally:
                sent.append(peers.sent)

        errors = on_ranks(3, work)
        assert all(isinstance(error, UserError) for error in errors), errors
        assert len({str(error) for error in errors}) == 1
        assert "rank 1 has" in str(errors[0]) and word in str(errors[0])
        assert sent == [2 * WORDS] * 3
    with pytest.raises(UserError, match="scheme 'tree'; auto, zen, hierarchy, allgather, dense are accepted"):
        error = on_ranks(1, lambda peers: reduce_with(peers, base, "tree"))[0]
        raise error  # type: ignore[misc]


def test_words_that_are_cut_in_the_midst_of_a_letter_are_compared_all_the_same() -> None:
    """Of a parameter's name, perhaps."""
    long = "x" + "é" * WORDS
    assert on_ranks(2, lambda peers: peers.agree(long)) == [None, None]
    for error in on_ranks(2, lambda peers: peers.agree(long if peers.rank else "none")):
        assert isinstance(error, UserError) and "rank 1 has xé" in str(error)


@settings(max_examples=40)
@given(gradients(), st.booleans())
def test_messages_are_as_long_as_their_form_says(tensors: list[Tensor], bitmap: bool) -> None:
    """And hold what went in: count, values, zeros up to four bytes, and the shorter form of positions."""
    for tensor in tensors:
        there = sparse.units_of(tensor)
        message = sparse.pack(there, bitmap=bitmap)
        count, value_bytes = len(there.indices), there.values.numel() * there.values.element_size()
        index = min(4 * count, -(-there.total // 8)) if bitmap else 4 * count
        assert len(message) == (8 + -(-value_bytes // 4) * 4 + index if count else 0)
        back = sparse.unpack(message, there)
        assert torch.equal(back.indices, there.indices) and back.total == there.total
        assert torch.equal(bits(back.values), bits(there.values))


@settings(max_examples=30)
@given(st.integers(1, 5000), st.integers(1, 17), st.integers(0, 2**31))
def test_no_unit_is_lost_or_doubled(total: int, parts: int, seed: int) -> None:
    """The order of units is a permutation, and has an inverse; arrays of NumPy and torch give the same."""
    every = np.arange(total)
    for order in (Order(total, seed), Order(total, None)):
        places = order.places(every)
        assert np.array_equal(np.sort(places), every)
        assert np.array_equal(order.units_at(places), every)
        assert torch.equal(order.places(torch.from_numpy(every)), torch.from_numpy(places))
        assert torch.equal(order.units_at(torch.from_numpy(places)), torch.from_numpy(every))
        assert places.max() // slice_length(total, parts) < parts


def test_measured_sparsity() -> None:
    """Two pairs of ranks, alike in a pair and with nothing in common between them, all in the first half."""
    total, world = 100_000, 4
    sets = [torch.arange(rank // 2, total // 2, 20) for rank in range(world)]

    def work(peers: Peers) -> object:
        mine = sparse.Units(sets[peers.rank], torch.ones(len(sets[peers.rank]), 2), total)
        return measure(peers, mine, sample=1000)

    measurements = on_ranks(world, work)
    assert all(measurement == measurements[0] for measurement in measurements)
    sparsity = measurements[0]
    assert sparsity.density == pytest.approx(0.025) and sparsity.units == total and sparsity.width == 2
    assert sparsity.growth == pytest.approx((1.0, 2.0), rel=0.1)
