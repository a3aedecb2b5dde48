"""A model that is registered without torch, and queries to it whose decisions are logged."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.registry import Entry, add
from windtunnel.serving.variants.live.service import Service
from windtunnel.store.eventlog import EventLog

INPUTS: NDArray[np.float32] = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
WEIGHTS: NDArray[np.float32] = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
OUTPUTS: NDArray[np.float32] = INPUTS @ WEIGHTS


def submitted(folder: Path) -> tuple[Path, Path]:
    """A linear model as ONNX, and data that it is always right about."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["input", "weights"], ["output"])], "linear",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(WEIGHTS, "weights")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / "linear.onnx")
    np.savez(folder / "data.npz", inputs=INPUTS, labels=OUTPUTS.argmax(1))
    return folder / "linear.onnx", folder / "data.npz"


def registered(folder: Path) -> list[Entry]:
    model, data = submitted(folder)
    entries, _ = add(model, data, folder / "variants", task="sums", architecture="linear")
    return entries


def asked(folder: Path) -> Path:
    """The log of some queries, among them to two loaded variants at once."""
    entries = registered(folder)
    path = folder / "events.jsonl"

    async def ask() -> None:
        log = EventLog(path)
        async with Service(entries, log=log) as service:
            for one in (entries[0], entries[-1]):
                await service.infer(one.variant.name, {"input": INPUTS[:1]})
            for latency in (100.0, 200.0, 300.0):  # each without recent ones
                await service.infer("sums", {"input": INPUTS[:1]}, latency=latency)
            with contextlib.suppress(UserError):
                await service.infer("sums", {"input": INPUTS[:1]}, accuracy=2.0)
        log.close()

    asyncio.run(ask())
    return path
