"""What is drawn from logits, held against sorting them in float64, and what it takes to draw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windtunnel.serving.engine.live.sampling import Sampling, sample


def _logits(rows: int, vocabulary: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(7)) * spread


def _probabilities(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Of each token, float64: of the ``top_k`` likeliest the smallest set that has ``top_p``."""
    values, tokens = torch.softmax(logits.double() / how.temperature, -1).sort(descending=True, stable=True)
    values, tokens = (column[: how.top_k or len(logits)] for column in (values, tokens))
    values = values / values.sum()
    values = values[values.cumsum(-1) - values < how.top_p]
    return torch.zeros(len(logits)).double().index_put((tokens[: len(values)],), values / values.sum())


@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (0.3, 0), (1.0, 12), (0.8, 12), (1.0, 999)])
def test_draws_have_the_probabilities_of_what_top_k_and_top_p_leave(
    spread: float, top_p: float, top_k: int
) -> None:
    (logits,), count = _logits(1, 300, spread), 4000
    how = Sampling(0.8, top_p, seed=3, top_k=top_k)
    wanted = _probabilities(logits, how)
    drawn = sample(logits.expand(count, -1), [(how, 0, number) for number in range(count)])
    counts = torch.bincount(torch.tensor([draw.token for draw in drawn]), minlength=300)
    assert not counts[wanted == 0].any()
    usual = (wanted * (1 - wanted) * count).sqrt()
    assert ((counts - wanted * count).abs() <= 5 * usual + 1).all()


def test_a_row_gets_the_same_whatever_is_in_the_batch() -> None:
    """Other temperatures, other rules, ties as 16 bits have them, and a row of no numbers are beside it."""
    logits = _logits(40, 2000, 2.0).to(torch.bfloat16)
    logits[5] = torch.nan
    hows = [
        Sampling(
            0.2 * (at % 7), (1.0, 0.9, 0.5)[at % 3], seed=at, logprobs=at % 2 or None, top_k=9 * (at % 4)
        )
        for at in range(40)
    ]
    rows = [(how, at, at) for at, how in enumerate(hows)]
    together = sample(logits, rows)
    for at, row in enumerate(rows):
        (alone,) = sample(logits[at : at + 1], [row])
        assert alone.token == together[at].token
    turned = sample(logits.flip(0), rows[::-1])[::-1]
    assert [draw.token for draw in turned] == [draw.token for draw in together]


class _Counted(TorchDispatchMode):
    """Operations, and the most numbers that one of them sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.sorted = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func.overloadpacket in (torch.ops.aten.sort, torch.ops.aten.argsort):
            self.sorted = max(self.sorted, args[0].numel())
        return func(*args, **(kwargs or {}))


def _counted(rows: int, **fields: Any) -> _Counted:
    logits, how = _logits(rows, 20_000, 2.0), Sampling(1.0, **fields)
    with _Counted() as counted:
        sample(logits, [(how, 0, number) for number in range(rows)])
    return counted


def test_rows_are_drawn_at_once_and_no_vocabulary_is_sorted() -> None:
    for fields in ({}, {"top_k": 50}, {"top_k": 50, "top_p": 1.0}):
        assert _counted(32, **fields).operations == _counted(2, **fields).operations > 0
    assert 0 < _counted(8, top_p=0.9).sorted < 2_000
    assert not _counted(8, top_k=50).sorted


def test_log_probabilities_are_those_of_the_model_whatever_is_drawn() -> None:
    logits = _logits(1, 50, 1.0)
    (draw,) = sample(logits, [(Sampling(0.5, 0.5, seed=1, logprobs=3, top_k=5), 0, 0)])
    wanted = torch.log_softmax(logits[0].double(), -1)
    assert draw.logprob == pytest.approx(wanted[draw.token].item(), abs=1e-5)
    values, tokens = wanted.topk(3)
    assert [token for token, _ in draw.top] == tokens.tolist()
    assert [value for _, value in draw.top] == pytest.approx(values.tolist(), abs=1e-5)
