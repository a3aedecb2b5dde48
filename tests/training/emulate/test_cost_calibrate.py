"""Calibration of the machine that the tests run on: what is measured exists and is found again."""

from datetime import timedelta

import pytest
import torch
import typer
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli import calibrate as verb
from windtunnel.training.emulate import calibrate as live
from windtunnel.training.emulate.calibrate import gloo, measure
from windtunnel.training.emulate.calibrate.operators import (
    OperatorRecorder,
    find_operator,
    grid,
)
from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.profile import read_profile
from windtunnel.training.emulate.twin.costs.work import kind_of


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)
        self.conv = torch.nn.Conv1d(16, 16, 3, padding=1)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 50)

    def forward(self, tokens):
        x = self.conv(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        q = self.norm(x).view(4, 8, 2, 8).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return self.head(torch.nn.functional.gelu(y.transpose(1, 2).reshape(4, 8, 16)) + x)


def record_step(fused):
    torch.manual_seed(0)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=not fused)
    tokens = torch.randint(0, 50, (4, 8))
    with OperatorRecorder() as recorder:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [op for op in recorder.operators if kind_of(op) != "view"]


@pytest.mark.parametrize("fused", [True, False])
def test_every_operator_of_a_training_step_can_be_measured(fused):
    ops = record_step(fused)
    profile = live.measure_operators(ops, seconds=0.2)
    assert "skipped" not in profile.provenance
    for op in ops:
        assert profile.exact(op) > 0
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("quick", [True, False])
def test_the_grid_holds_operators_that_pytorch_has(device, quick):
    parts = grid(quick, device)
    assert set(parts) >= {"matmul", "attention", "norm", "elementwise", "embedding", "optimizer"}
    for ops in parts.values():
        assert ops
        for op in ops:
            schema = find_operator(op.name)._schema
            required = [argument for argument in schema.arguments if not argument.has_default_value()]
            assert len(required) <= len(op.inputs) <= len(schema.arguments), op.name


def test_the_quick_grid_runs_on_a_cpu_without_leaving_anything_out():
    ops = [op for part in grid(True, "cpu").values() for op in part]
    # One of each operator and dtype is enough here: the smallest.
    first = {}
    for op in ops:
        first.setdefault((op.name, op.outputs[0].dtype), op)
    profile = live.measure_operators(list(first.values()), seconds=0.05)
    assert "skipped" not in profile.provenance


@pytest.mark.conformance
@pytest.mark.slow
def test_gloo_is_measured_between_real_processes():
    rows = live.measure_gloo(2, quick=True)
    kinds = {kind for kind, _, _, _ in rows}
    assert kinds == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "all_to_all",
        "send",
        "barrier",
    }
    assert all(world == 2 and seconds > 0 for _, world, _, seconds in rows)


def test_each_operator_of_a_gpu_has_cold_arguments_of_its_own(monkeypatch):
    """Four tensors are taken in turn, however much the operators before it had."""
    scalar = TensorMeta((), "float32")
    ops = [
        Operator("aten.sum.default", (TensorMeta((64, size), "float32", (size, 1)),), (scalar,))
        for size in range(60, 64)
    ]
    monkeypatch.setattr(measure, "MAX_STOCK_BYTES", 5 * 64 * 64 * 4)
    runner, sets = measure._Runner(ops, "cpu"), []

    def seconds(plan):
        arguments = [runner._arguments(plan)[0][0] for _ in range(measure.COPIES)]
        sets.append(len({tensor.data_ptr() for tensor in arguments}))
        return 1e-6

    monkeypatch.setattr(runner, "_gpu_seconds", seconds)
    runner.on_gpu(None)
    assert set(sets) == {measure.COPIES}


def test_a_process_of_gloo_does_not_wait_for_one_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(gloo, "PATIENCE", timedelta(milliseconds=10))
    with pytest.raises(RuntimeError):  # the other one never comes
        gloo._work(str(tmp_path / "store"), 2, 1, 0, [])


def fake_parts(monkeypatch):
    """Calibration with a grid of two parts, and nothing that takes long."""
    x = TensorMeta((4,), "float32", (1,))
    ops = {name: [Operator(f"aten.{name}.default", (x,), (x,))] for name in ("neg", "exp")}
    monkeypatch.setattr(live, "grid", lambda quick, device: ops)
    monkeypatch.setattr(live, "measure_overhead", lambda threads: {"forward": 1e-6})
    monkeypatch.setattr(live, "measure_gloo", lambda world, threads, quick: [("barrier", 2, 0, 1e-4)])
    real = live.measure_operators
    monkeypatch.setattr(
        live, "measure_operators", lambda ops, *args, **more: real(ops, *args, **{**more, "seconds": 0.01})
    )


def run(*words):
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("calibrate")(verb.calibrate)
    return CliRunner().invoke(app, ["calibrate", *words])


def test_the_verb_measures_and_shows_parameters(tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    fake_parts(monkeypatch)
    result = run("cpu", "--quick")
    assert result.exit_code == 0, result.output
    profile = read_profile(tmp_path / "profiles" / "cpu.json")
    assert len(profile.operators) == 2
    assert (profile.host_overhead, profile.collectives) == ({"forward": 1e-6}, [("barrier", 2, 0, 1e-4)])
    shown = run("show", "cpu")
    assert "2 operators measured" in shown.output
    assert "gloo.step_seconds" in shown.output
    assert "gpu.matmul_issue" in run("show", "h200").output


@pytest.mark.parametrize(
    "words",
    [("no-such-device",), ("show", "no-such-device"), ("cpu", "cpu")],
)
def test_wrong_words_are_refused_in_one_sentence(words, tmp_path, monkeypatch):
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    result = run(*words)
    assert isinstance(result.exception, UserError)
    assert "\n" not in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_a_device_that_is_not_there_is_refused():
    result = run("h200")
    assert isinstance(result.exception, UserError)
    assert "h200" in str(result.exception)
