"""A model that is registered without torch, and queries to it whose decisions are logged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.registry import VariantFile, add
from windtunnel.serving.variants.live.replica import Replica
from windtunnel.serving.variants.live.service import Unanswered, VariantsService
from windtunnel.store import eventlog
from windtunnel.store.eventlog import EventLog

INPUTS: NDArray[np.float32] = np.random.default_rng(0).standard_normal((64, 6)).astype(np.float32)
WEIGHTS: NDArray[np.float32] = np.random.default_rng(1).standard_normal((6, 4)).astype(np.float32)
OUTPUTS: NDArray[np.float32] = INPUTS @ WEIGHTS


def pids(service: VariantsService) -> list[int]:
    """Of the replicas that live, as processes of this host."""
    return [
        pid for served in service.groups.values() for replica in served.replicas
        if isinstance(replica, Replica) and (pid := replica.process.pid) and replica.process.is_alive()
    ]  # fmt: skip


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


def registered(folder: Path) -> list[VariantFile]:
    model, data = submitted(folder)
    entries, _ = add(model, data, folder / "variants", task="sums", architecture="linear")
    return entries


def asked(folder: Path) -> Path:
    """The log of queries to several variants: one is shed while none is loaded, a replica dies of one, one is
    taken back, and at last nobody asks for long. Seconds are short."""
    entries = registered(folder)
    path = folder / "events.jsonl"

    def said(kind: str) -> bool:
        return any(event["kind"] == kind for event in eventlog.read(path))

    async def ask() -> None:
        log = EventLog(path)
        async with VariantsService(entries, log=log, second=0.01) as service:

            def query(name: str = "sums", **bounds: Any) -> Coroutine[Any, Any, object]:
                return service.infer(name, {"input": INPUTS[:1]}, **bounds)

            with contextlib.suppress(Unanswered):
                await query(latency=2 * max(entry.variant.latency() for entry in entries))
            await asyncio.gather(*(query(entry.variant.name) for entry in (entries[0], entries[-1])))
            await asyncio.gather(*(query(latency=100.0 * at) for at in range(1, 9)), query(background=True))
            with contextlib.suppress(UserError):
                await query(accuracy=2.0)
            with contextlib.suppress(UserError, Unanswered):
                await service.infer("sums", {"input": INPUTS[:1, :3]})
            for pid in pids(service):
                os.kill(pid, signal.SIGKILL)
            await query()
            for pid in pids(service):
                os.kill(pid, signal.SIGKILL)
            back = asyncio.create_task(query())
            await asyncio.sleep(0)
            back.cancel()
            last = asyncio.get_running_loop().time() + 60.0  # where something is wrong it never comes
            while not said("stops") and asyncio.get_running_loop().time() < last:
                await asyncio.sleep(0.05)
        log.close()

    asyncio.run(ask())
    return path
