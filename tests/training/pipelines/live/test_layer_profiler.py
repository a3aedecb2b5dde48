"""Layers measured on this host: bytes are exact, times are there, and the model stays as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines import measure_layers


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(11, 8), nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4, bias=False)]


def test_bytes_and_times() -> None:
    layers = model()
    tokens = torch.randint(0, 11, (3, 5))
    names = ["embedding", "up", "relu", "dropout", "down"]
    found = measure_layers(layers, tokens, names=names, repeats=3, warm=1)
    assert [layer.name for layer in found] == names
    assert all(layer.forward > 0 and layer.backward > 0 for layer in found)
    up, relu, down = found[1], found[2], found[4]
    parameters = 4 * (8 * 16 + 16)
    assert up.state_bytes == 4 * parameters
    # A linear layer saves its input, a ReLU its output.
    assert up.activation_bytes == 4 * 3 * 5 * 8
    assert relu.activation_bytes == 4 * 3 * 5 * 16
    assert down.activation_bytes == 4 * 3 * 5 * 16 and down.state_bytes == 4 * 4 * 16 * 4
    assert relu.state_bytes == 0
    assert found[0].activation_bytes == 8 * 3 * 5  # The tokens.


def test_the_optimizer_that_will_be_used() -> None:
    layers = [nn.Linear(8, 8, bias=False)]
    given = torch.ones(2, 8)
    plain = measure_layers(layers, given, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), repeats=1, warm=0)
    assert plain[0].state_bytes == 2 * 256
    momentum = measure_layers(
        layers, given, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), repeats=1, warm=0
    )
    assert momentum[0].state_bytes == 3 * 256


def test_frozen_layers_have_no_gradient() -> None:
    layer = nn.Linear(8, 8)
    layer.requires_grad_(False)
    (found,) = measure_layers([layer], torch.ones(2, 8), repeats=1, warm=0)
    assert found.state_bytes == 4 * 72


def test_nothing_is_touched() -> None:
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)]
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    random = torch.get_rng_state()
    given = torch.ones(6, 4)
    measure_layers(layers, given, optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    assert torch.equal(torch.get_rng_state(), random)
    assert not given.requires_grad
    for layer, kept in zip(layers, before, strict=True):
        assert all(p.grad is None for p in layer.parameters())
        assert all(torch.equal(value, kept[key]) for key, value in layer.state_dict().items())


def test_layers_that_are_refused() -> None:
    with pytest.raises(UserError, match=r"layer 1.Linear does not take a tensor of shape \(2, 8\)"):
        measure_layers([nn.Linear(8, 8), nn.Linear(4, 4)], torch.ones(2, 8))
    with pytest.raises(UserError, match=r"layer 0\.LSTM returns a tuple; one tensor is needed"):
        measure_layers([nn.LSTM(8, 8)], torch.ones(2, 8))
    with pytest.raises(UserError, match="1 names for 2 layers"):
        measure_layers([nn.ReLU(), nn.ReLU()], torch.ones(2), names=["a"])
