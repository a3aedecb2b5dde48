"""The work of a step: tokens that several ranks look up together are counted once; of MFU each dtype counts
at its own peak, and it is never more than 1."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from capturing import SCRIPTS, session
from rich.console import Console

from windtunnel.cluster.catalogue import device, device_names
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import UNITS
from windtunnel.report.terminal import print_summary
from windtunnel.training.emulate.graph import DTYPE_BYTES, Operator, TensorMeta
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.program import Function
from windtunnel.training.emulate.run import emulate
from windtunnel.training.emulate.twin.costs.roofline import roofline_seconds
from windtunnel.training.emulate.twin.costs.work import counted_flops, kind_of, units_of
from windtunnel.training.emulate.utilisation import StepWork, measure, utilisation


def work(model, run=None):
    """Nothing is recomputed; ``run``: without the masked half."""
    run = run or model
    return StepWork(1, {name: np.array([model[name]] * 2 + [run[name]] * 2) for name in model})


def test_every_dtype_of_torch_has_a_rate_on_every_device():
    names = {
        str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype
    }
    numbers = {name for name in names if not re.match(r"q|bits|u?int[1-7]$", name)}
    assert numbers <= UNITS.keys() and numbers <= DTYPE_BYTES.keys()
    for name in device_names():
        for dtype in UNITS:
            assert device(name).peak(dtype) > 0
    for dtype in numbers:
        assert DTYPE_BYTES[dtype] == getattr(torch, dtype).itemsize


def test_a_device_without_the_units_computes_in_the_next_wider_ones_and_says_so():
    part = device("a100-80")
    assert part.peak("float8_e5m2") == part.peak("bfloat16")
    used = utilisation(work({"float8_e5m2": 312e12}), 2.0, 1, part)
    assert used.mfu == pytest.approx(0.5)
    assert [note.text for note in used.notes] == [
        "a100-80 has no units for float8_e5m2: its products are costed at the rate of bfloat16"
    ]


def products(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(64, 64, device="cuda")).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("precision", "units"), [("highest", "float32"), ("high", "tf32")])
def test_products_take_tf32_where_the_script_allows_it(precision: str, units: str) -> None:
    where = load_cluster("h100-sxm:1x1")
    with Session(Function(products, (precision,)), where) as capture_session:
        operators = [op for op, _ in capture_session.capture([0])[0].calls() if kind_of(op) == "matmul"]
    assert len(operators) >= 2 and {units_of(op) for op in operators} == {units}
    square = TensorMeta((8192, 8192), "float32")
    op = Operator("aten.mm.default", (square, square), (square,), tf32=units == "tf32")
    rate = counted_flops(op) / roofline_seconds(op, "matmul", where.host.device)
    assert 0.5 * where.host.device.peak(units) < rate < where.host.device.peak(units)


def test_tf32_is_float32_where_there_is_none():
    for name in ("h100-sxm", "v100"):
        part = device(name)
        used = utilisation(work({"tf32": part.peak("tf32")}), 2.0, 1, part)
        assert used.mfu == pytest.approx(0.5) and not used.notes


def test_each_dtype_counts_against_its_own_peak():
    part = device("h100-sxm")
    flops = {"bfloat16": part.peak("bfloat16"), "float8_e4m3fn": 3 * part.peak("float8_e4m3fn")}
    assert utilisation(work(flops), 8.0, 1, part).mfu == pytest.approx((1 + 3) / 8)
    assert utilisation(work(flops), 4.0, 2, part).mfu == pytest.approx(0.5)


def test_causal_attention_counts_in_full_until_that_is_more_than_all():
    part = device("h100-sxm")
    peak = part.peak("bfloat16")
    half = utilisation(work({"bfloat16": 0.9 * peak}, run={"bfloat16": 0.5 * peak}), 1.0, 1, part)
    assert half.mfu == pytest.approx(0.9) and not half.notes
    more = utilisation(work({"bfloat16": 1.2 * peak}, run={"bfloat16": 0.7 * peak}), 1.0, 1, part)
    assert more.mfu == pytest.approx(0.7)
    assert "without its masked half" in more.notes[0].text


def test_more_than_the_peak_is_never_printed():
    part = device("h100-sxm")
    impossible = work({"bfloat16": 8.82 * part.peak("bfloat16")})
    with pytest.raises(RuntimeError, match=r"a mistake of windtunnel's: .* 882% of peak"):
        utilisation(impossible, 1.0, 1, part)
    measured_utilisation = utilisation(impossible, 1.0, 1, part, measured=True)
    assert measured_utilisation.mfu == measured_utilisation.hfu == 1.0
    assert "at 882% of the peak that h100-sxm is said to have" in measured_utilisation.notes[0].text


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [("group", 2), ("mesh", 2), ("lightning", 2), ("data", 4), ("frozen", 4), ("taught", 4), ("several", 4)],
)
def test_tokens_are_counted_once_where_ranks_share_them(kind: str, replicas: int) -> None:
    with session("tokens.py", kind, cluster="h100-sxm:1x4") as capture_session:
        classes = slice_world(capture_session.capture, 4, [0])
    assert measure(classes).tokens == replicas * 3 * 10


def test_tokens_of_a_model_without_a_table_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    summary = emulate(SCRIPTS / "tokens.py", ["none"], "h100-sxm:1x2").summary
    shown = summary.to_json()
    assert shown["tokens_per_iteration"] is shown["tokens_per_second_per_device"] is None
    assert "tokens_per_iteration" not in shown["provenance"]
    with open(tmp_path / "text", "w") as file:
        print_summary(shown, Console(file=file))
    pages = (tmp_path / "text").read_text(), Path(summary.directory, "report.html").read_text()
    assert not any("tokens" in page.lower().replace("tokens.py", "") for page in pages)
    given = Options(tokens=7)
    assert emulate(SCRIPTS / "tokens.py", ["none"], "h100-sxm:1x2", given).summary.tokens_per_iteration == 7
