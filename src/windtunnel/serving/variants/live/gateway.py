"""The Open Inference Protocol, version 2, over HTTP: JSON tensors, and the binary tensor extension.

A model's name is a task, an architecture or a variant; ``accuracy``, ``latency`` (seconds), ``cost`` and
``background`` are parameters of an infer request. 404: no such model; 422: none does what is asked; 400: not
the protocol; 503: replicas could not answer. See kserve.github.io, Open Inference Protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from windtunnel import __version__
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.service import Infeasible, Service, Tensor, Unanswered, Unknown

NUMPY = {
    "FP32": np.float32, "FP64": np.float64, "FP16": np.float16, "INT64": np.int64, "INT32": np.int32,
    "UINT8": np.uint8, "INT8": np.int8, "BOOL": np.bool_,
}  # fmt: skip
HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data"]
BOUNDS = {"accuracy": 0.0, "latency": math.inf, "cost": math.inf}
STATUS: dict[type[Exception], int] = {Unknown: 404, Infeasible: 422, UserError: 400, Unanswered: 503}


def application(service: Service) -> FastAPI:
    """The HTTP side of a service, which begins and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(title="windtunnel variants", version=__version__, lifespan=lifespan)

    async def told(request: Request, fault: Exception) -> JSONResponse:
        return JSONResponse({"error": str(fault)}, STATUS[type(fault)])

    for kind in STATUS:
        app.add_exception_handler(kind, told)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "windtunnel", "version": __version__, "extensions": EXTENSIONS}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.get("/v2/models/{name}/ready")
    async def model_ready(name: str) -> dict[str, Any]:
        service.named(name)
        return {"name": name, "ready": True}

    @app.get("/v2/models/{name}")
    async def metadata(name: str) -> dict[str, Any]:
        return described(service, name)

    @app.get("/metrics")
    async def metrics() -> Response:
        lines = []
        for name, one in service.groups.items():
            group = one.group
            figures = {
                "replicas": group.ready,
                "answered_total": group.answered,
                "requeued_total": group.requeued,
                "waiting": len(group.queue) + len(group.background),
            }
            lines += [
                f'windtunnel_variant_{key}{{variant="{name}"}} {value}\n' for key, value in figures.items()
            ]
        return Response("".join(lines), media_type="text/plain")

    @app.post("/v2/models/{name}/infer")
    async def infer(name: str, request: Request) -> Response:
        groups = service.named(name)
        asked, binary = _parsed(await request.body(), request.headers.get(HEADER))
        inputs = tensor_of(asked, binary, groups[0].inputs)
        parameters = _object(asked, "parameters")
        variant, made = await service.infer(name, inputs, **bounds(parameters))
        return _answer(asked, variant, groups[0].outputs, made, parameters)

    return app


def described(service: Service, name: str) -> dict[str, Any]:
    """A model's metadata."""
    groups = service.named(name)
    tensors = [
        {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)}
        for one in (groups[0].inputs, groups[0].outputs)
    ]
    return {
        "name": name, "versions": [one.variant.name for one in groups], "platform": "onnx_onnxruntime",
        "inputs": tensors[:1], "outputs": tensors[1:],
    }  # fmt: skip


def bounds(parameters: dict[str, Any]) -> dict[str, Any]:
    """What a request says it needs.

    Raises:
        UserError: something that is no such number.
    """
    found: dict[str, Any] = {}
    for name, default in BOUNDS.items():
        value = parameters.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise UserError(f"parameter {name}: {value!r} is not accepted; use a number from 0")
        found[name] = float(value)
    background = parameters.get("background", False)
    if not isinstance(background, bool):
        raise UserError(f"parameter background: {background!r} is not accepted; use true or false")
    return {**found, "background": background}


def _parsed(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON part and what follows it."""
    length = len(body)
    if header is not None:
        if not header.isdigit() or int(header) > len(body):
            raise UserError(f"{HEADER} {header!r} is not accepted; the body has {len(body)} bytes")
        length = int(header)
    try:
        asked = json.loads(body[:length])
    except (ValueError, RecursionError) as fault:
        raise UserError(f"the request is no JSON: {fault}") from fault
    if not isinstance(asked, dict):
        raise UserError("the request is no JSON object")
    return asked, body[length:]


def _object(of: dict[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name, {})
    if not isinstance(found, dict):
        raise UserError(f"field {name} is no JSON object")
    return found


def tensor_of(asked: dict[str, Any], binary: bytes, wanted: Tensor) -> NDArray[Any]:
    """The one input of a request.

    Raises:
        UserError: it is missing, of another name or type, or has another number of values than its shape.
    """
    given = asked.get("inputs")
    if not isinstance(given, list) or len(given) != 1 or not isinstance(given[0], dict):
        raise UserError(f"field inputs: exactly one tensor is accepted, {wanted.name!r}")
    one = given[0]
    if one.get("name") != wanted.name or one.get("datatype") != wanted.datatype:
        raise UserError(
            f"input {one.get('name')!r} of {one.get('datatype')!r} is not accepted; use {wanted.name!r} of"
            f" {wanted.datatype!r}"
        )
    shape = one.get("shape")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise UserError(f"input {wanted.name}: shape {shape!r} is not accepted; use whole numbers")
    kind = np.dtype(NUMPY[wanted.datatype])
    size = _object(one, "parameters").get("binary_data_size")
    try:
        if size is None:
            return np.array(one["data"], dtype=kind).reshape(shape)
        if size != len(binary):
            raise ValueError(f"binary_data_size {size!r}, and {len(binary)} bytes follow")
        return np.frombuffer(binary, kind).reshape(shape)
    except (ValueError, TypeError, KeyError, OverflowError) as fault:
        raise UserError(f"input {wanted.name}: data is not accepted for shape {shape}: {fault}") from fault


def _answer(
    asked: dict[str, Any], variant: str, wanted: Tensor, made: NDArray[Any], parameters: dict[str, Any]
) -> Response:
    output: dict[str, Any] = {"name": wanted.name, "datatype": wanted.datatype, "shape": list(made.shape)}
    answer: dict[str, Any] = {"model_name": variant, "outputs": [output]}
    if isinstance(asked.get("id"), str):
        answer["id"] = asked["id"]
    outputs = asked.get("outputs")
    first = outputs[0] if isinstance(outputs, list) and outputs and isinstance(outputs[0], dict) else {}
    if not _object(first, "parameters").get("binary_data", parameters.get("binary_data_output", False)):
        output["data"] = made.ravel().tolist()
        return Response(json.dumps(answer), media_type="application/json")
    data = made.tobytes()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps(answer).encode()
    return Response(head + data, media_type="application/octet-stream", headers={HEADER: str(len(head))})
