"""What a capture on the CPU counts and writes down, against plain bookkeeping of known sizes."""

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.training.emulate.live.host import StorageMode, Storages, describe


class Ledger:
    """Numbers storages as a capture does, and knows which are alive."""

    def __init__(self) -> None:
        self.alive: dict[int, int] = {}
        self.count = 0

    def alloc(self, size: int) -> int:
        self.count += 1
        self.alive[self.count] = size
        return self.count

    def free(self, number: int) -> None:
        del self.alive[number]


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)  # put back afterwards
    book = Ledger()
    storages = Storages(book.alloc, book.free)
    storages.watch()
    with StorageMode(storages):
        yield book


def test_a_storage_resized_in_place_is_freed_and_made_anew(ledger: Ledger) -> None:
    tensor = torch.empty(256, dtype=torch.float64)
    tensor.untyped_storage().resize_(0)
    assert not ledger.alive
    tensor.untyped_storage().resize_(512)
    assert list(ledger.alive.values()) == [512]
    assert ledger.count == 2
    del tensor
    assert not ledger.alive


def test_meta_tensors_hold_nothing(ledger: Ledger) -> None:
    kept = torch.empty(1 << 20, device="meta") + 1
    assert kept.shape == (1 << 20,)
    assert ledger.count == 0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["make", "view", "drop"]), st.integers(1, 64)), max_size=30))
def test_any_program_against_a_list_of_what_is_held(program: list[tuple[str, int]]) -> None:
    book = Ledger()
    held: list[tuple[torch.Tensor, int]] = []  # tensor, which storage it is of
    with StorageMode(Storages(book.alloc, book.free)):
        for storage, (what, number) in enumerate(program):
            if what == "make":
                held.append((torch.zeros(number, dtype=torch.int16), storage))
            elif what == "view" and held:
                base, name = held[number % len(held)]
                held.append((base[: base.numel() // 2 + 1], name))
                del base
            elif what == "drop" and held:
                del held[number % len(held)]
            sizes = {name: tensor.untyped_storage().nbytes() for tensor, name in held}
            assert sum(book.alive.values()) == sum(sizes.values())
    held.clear()
    gc.collect()
    assert not book.alive


def test_backward_and_optimiser_leave_parameters_gradients_and_state(ledger: Ledger) -> None:
    layer = torch.nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    layer(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    weight = 64 * 32 * 4
    # The weight, its gradient, two moments, and the count of steps.
    assert sorted(ledger.alive.values()) == [4, weight, weight, weight, weight]


def described(func: object, *args: object, **kwargs: object) -> dict[str, object]:
    return describe(func, args, kwargs, func(*args, **kwargs))  # type: ignore[operator]


def test_a_row_has_all_arguments_in_the_order_of_the_schema() -> None:
    row = described(
        torch.ops.aten.addmm.default, torch.ones(3), torch.ones(2, 4), torch.ones(4, 3), alpha=2.5
    )
    assert [arg["s"] if isinstance(arg, dict) else arg for arg in row["i"]] == [[3], [2, 4], [4, 3], 1.0, 1.0]
    assert row["o"] == [{"t": "float32", "s": [2, 3], "d": [3, 1], "c": 1}]


def test_the_value_of_a_number_makes_no_new_row_but_an_exponent_does() -> None:
    x = torch.ones(5)
    add, power = torch.ops.aten.add.Tensor, torch.ops.aten.pow.Tensor_Scalar
    assert described(add, x, 3) == described(add, x, 64)
    assert described(torch.ops.aten.eq.Scalar, x, 0) == described(torch.ops.aten.eq.Scalar, x, 1)
    assert described(power, x, 2) != described(power, x, 3)
    assert described(torch.ops.aten.arange.default, 4) != described(torch.ops.aten.arange.default, 5)


def test_what_returns_nothing_tells_what_it_writes() -> None:
    lists = [[torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(3)]]
    row = described(torch.ops.aten._foreach_add_.List, *lists)
    assert [tensor["s"] for tensor in row["o"]] == [[2], [3]]
