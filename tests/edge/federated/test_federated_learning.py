"""Splits, models and rounds of the twin, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.edge.federated import data, models, run
from windtunnel.edge.federated.policy import Settings
from windtunnel.edge.federated.twin import rounds


def random() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("split", ["iid", "dirichlet:0.1", "shards:2"])
def test_each_sample_is_one_devices(split: str) -> None:
    federation = data.federation("digits", split, 40, random())
    assert sorted(np.concatenate(federation.parts)) == list(range(len(federation.train.y)))
    assert min(map(len, federation.parts)) >= data.LEAST and len(federation.parts) == 40
    again = data.federation("digits", split, 40, random())
    assert all(np.array_equal(part, other) for part, other in zip(federation.parts, again.parts, strict=True))
    kinds = np.mean([len(set(federation.train.y[part])) for part in federation.parts])
    assert kinds > 9 if split == "iid" else kinds < 5


def test_a_family_of_its_own_and_a_file(tmp_path: Path) -> None:
    federation = data.federation("synthetic:1,1", "iid", 10, random())
    assert federation.train.x.shape[1] == 60 and sorted(np.concatenate(federation.parts)) == list(
        range(len(federation.train.y))
    )
    np.savez(tmp_path / "own.npz", x=np.zeros((50, 2, 2)), y=np.arange(50) % 3)
    own = data.federation(str(tmp_path / "own.npz"), "iid", 5, random())
    assert own.train.x.shape == (40, 4) and own.train.classes == 3


@pytest.mark.parametrize(
    ("what", "split", "devices", "sentence"),
    [
        ("mnist", "iid", 2, "`data` 'mnist'; accepted are digits"),
        ("nowhere.npz", "iid", 2, "accepted is a FILE.npz with arrays x and y"),
        ("digits", "dirichlet", 2, "'dirichlet': accepted are 1 positive numbers"),
        ("digits", "sorted", 2, "`split` 'sorted'; accepted are iid"),
        ("digits", "iid", 2000, "2 each are needed"),
        ("synthetic:1", "iid", 2, "'synthetic:1': accepted are 2 positive numbers"),
    ],
)
def test_what_cannot_be_had_is_refused(what: str, split: str, devices: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        data.federation(what, split, devices, random())


@pytest.mark.parametrize("name", ["softmax", "mlp", "cnn"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    model, draw = models.model(name, 25, 3), random()
    vectors = np.stack([model.initial(draw), model.initial(draw)])
    x, y = draw.normal(size=(2, 4, 25)), draw.integers(0, 3, (2, 4))
    mask = np.array([[1.0, 1, 1, 1], [1, 1, 0, 0]])
    gradient = model.gradient(vectors, x, y, mask)

    def loss(moved: np.ndarray, device: int) -> float:
        scores, _ = model.forward(model.weights(moved), x)
        likely = np.exp(scores[device] - scores[device].max(axis=1, keepdims=True))
        likely /= likely.sum(axis=1, keepdims=True)
        own = -np.log(likely[np.arange(4), y[device]])
        return float((own * mask[device]).sum() / mask[device].sum())

    for device in (0, 1):
        for place in draw.choice(model.size, 12, replace=False):
            step = np.zeros_like(vectors)
            step[device, place] = 1e-6
            slope = (loss(vectors + step, device) - loss(vectors - step, device)) / 2e-6
            assert gradient[device, place] == pytest.approx(slope, abs=1e-5)


def learned(scheme: str, **more: object) -> list[float]:
    federation = data.federation("digits", "dirichlet:0.3", 8, random())
    model = models.model("softmax", 64, 10)
    known = Settings(scheme, groups=3, **more)  # type: ignore[arg-type]
    outcomes = rounds(
        federation, model, known, models.LocalTraining(epochs=1), links=[1e6] * 8, server_link=1e6,
        bytes_each=4.0, count=3, seed=4,
    )  # fmt: skip
    return [done.accuracy for _, _, done in outcomes]


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_with_all_devices_groups_come_to_the_model_of_fedavg(weighting: str) -> None:
    """One epoch in one batch, so that the order of samples is nothing."""
    federation, draw = data.federation("digits", "dirichlet:0.3", 8, random()), random()
    model, training = models.model("softmax", 64, 10), models.LocalTraining(epochs=1, batch=10_000)
    first = np.tile(model.initial(np.random.default_rng((0, 0))), (8, 1))
    trained = models.train(model, first, federation, np.arange(8), training, random=draw)
    weights = [len(part) if weighting == "samples" else 1 for part in federation.parts]
    mean = np.average(trained, axis=0, weights=weights)
    for scheme in ("fedavg", "fedp2p", "hierarchical"):
        known = Settings(scheme, groups=3, weighting=weighting)
        ((_, decision, done),) = rounds(
            federation,
            model,
            known,
            training,
            links=[1e6] * 8,
            server_link=1e6,
            bytes_each=4.0,
            count=1,
            seed=0,
        )
        assert len(decision.groups) == (8 if scheme == "fedavg" else 3)
        np.testing.assert_allclose(done.vector, mean, rtol=0, atol=1e-12)


def test_the_same_seed_learns_the_same_and_gossip_learns_without_a_server() -> None:
    assert learned("fedp2p") == learned("fedp2p")
    gossiped = learned("gossip")
    assert gossiped[-1] > 0.3


def test_the_commands_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    words = [
        "federated",
        "run",
        "--devices",
        "10",
        "--groups",
        "2",
        "--rounds",
        "2",
        "--epochs",
        "1",
        "--json",
    ]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    outcomes = json.loads(shown.stdout)["outcomes"]
    assert [outcome["scheme"] for outcome in outcomes] == ["fedp2p", "fedavg"]
    assert outcomes[1]["last"]["server_bytes"] == 5 * outcomes[0]["last"]["server_bytes"]
    again = CliRunner().invoke(app, ["replay", "last"])
    assert again.exit_code == 0, again.output
    planned = CliRunner().invoke(app, ["federated", "plan", "--json"])
    plans = {row["scheme"]: row for row in json.loads(planned.stdout)["plans"]}
    assert plans["fedp2p"]["pays"] and not plans["fedavg"]["pays"]
    refused = CliRunner().invoke(app, ["federated", "plan", "--server-link", "fast"])
    assert "--server-link 'fast' is not accepted; accepted is a positive number of bytes/s" in str(
        refused.exception
    )


def test_rounds_and_seeds_are_checked() -> None:
    with pytest.raises(UserError, match="`rounds` 0"):
        run(
            data="digits",
            split="iid",
            schemes=["fedavg"],
            devices=4,
            groups=2,
            count=0,
            server_link=1,
            device_link=1,
        )
