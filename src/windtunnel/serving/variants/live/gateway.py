"""The Open Inference Protocol, version 2, over HTTP: JSON tensors, and the binary tensor extension.

A model's name is a task, an architecture or a variant, and its versions are variants; ``accuracy``,
``latency`` (seconds), ``cost`` and ``background`` are parameters of an infer request. 404: no such model;
422: none does what is asked; 400: not the protocol; 503: replicas could not answer. See kserve.github.io,
Open Inference Protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from numpy.typing import NDArray
from starlette.exceptions import HTTPException

from windtunnel import __version__
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.service import Infeasible, Service, Unanswered, Unknown
from windtunnel.serving.variants.live.tensors import DATATYPES, Given, Tensor, checked, packed

HEADER = "Inference-Header-Content-Length"
EXTENSIONS = ["binary_tensor_data"]
BOUNDS = {"accuracy": 0.0, "latency": math.inf, "cost": math.inf}
STATUS: dict[type[Exception], int] = {Unknown: 404, Infeasible: 422, UserError: 400, Unanswered: 503}
MODEL = "/v2/models/{name}"
VERSION = f"{MODEL}/versions/{{version}}"


def _form(*required: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required)}


_WORD, _NUMBER = {"type": "string"}, {"type": "number", "minimum": 0}
_TENSOR = _form(
    "name", "datatype", "shape", name=_WORD, datatype={"enum": list(DATATYPES)}, parameters=_form(),
    shape={"type": "array", "items": {"type": "integer", "minimum": 0}},
    data={"type": "array", "items": {}},
)  # fmt: skip
_PARAMETERS = _form(background={"type": "boolean"}, **dict.fromkeys(BOUNDS, _NUMBER))
_OUTPUT = _form("name", name=_WORD, parameters=_form())
_ASKED = _form(
    "inputs", id=_WORD, parameters=_PARAMETERS, inputs={"type": "array", "items": _TENSOR, "minItems": 1},
    outputs={"type": "array", "items": _OUTPUT},
)  # fmt: skip
_BODY = {"required": True, "content": {"application/json": {"schema": _ASKED}}}
_ANSWER = _form("model_name", "outputs", model_name=_WORD, outputs={"type": "array", "items": _TENSOR})
_REFUSED = {"content": {"application/json": {"schema": _form("error", error=_WORD)}}}
_NAMED: dict[int | str, Any] = {404: {"description": "No such model", **_REFUSED}}
_INFER: dict[int | str, Any] = {
    **_NAMED, 400: {"description": "Not the protocol", **_REFUSED},
    422: {"description": "No variant does what is asked", **_REFUSED},
    503: {"description": "Replicas could not answer", **_REFUSED},
    200: {"description": "The outputs", "content": {"application/json": {"schema": _ANSWER},
                                                    "application/octet-stream": {}}},
}  # fmt: skip


def application(service: Service) -> FastAPI:
    """The HTTP side of a service, which begins and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(title="windtunnel variants", version=__version__, lifespan=lifespan)

    async def told(request: Request, fault: Exception) -> JSONResponse:
        if isinstance(fault, HTTPException):
            return JSONResponse({"error": fault.detail}, fault.status_code, fault.headers)
        return JSONResponse({"error": str(fault)}, STATUS[type(fault)])

    for kind in (*STATUS, HTTPException):
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

    @app.get(f"{MODEL}/ready", responses=_NAMED)
    @app.get(f"{VERSION}/ready", responses=_NAMED)
    async def model_ready(name: str, version: str = "") -> dict[str, Any]:
        asked_for(service, name, version)
        return {"name": name, "ready": True}

    @app.get(MODEL, responses=_NAMED)
    @app.get(VERSION, responses=_NAMED)
    async def metadata(name: str, version: str = "") -> dict[str, Any]:
        return described(service, name, version)

    @app.get("/metrics", response_class=PlainTextResponse)
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
        return PlainTextResponse("".join(lines))

    @app.post(f"{MODEL}/infer", responses=_INFER, openapi_extra={"requestBody": _BODY})
    @app.post(f"{VERSION}/infer", responses=_INFER, openapi_extra={"requestBody": _BODY})
    async def infer(request: Request, name: str, version: str = "") -> Response:
        found = asked_for(service, name, version)
        asked, binary = _parsed(await request.body(), request.headers.get(HEADER))
        inputs = checked(_given(asked, binary), service.named(found)[0].entry.signature)
        parameters = _object(asked, "parameters")
        outputs = asked.get("outputs") or []
        if not isinstance(outputs, list) or not all(isinstance(one, dict) for one in outputs):
            raise UserError("field outputs: use a list of JSON objects")
        variant, made = await service.infer(
            found, inputs, wanted=[one.get("name") for one in outputs], **bounds(parameters)
        )
        default = parameters.get("binary_data_output", False)
        binaries = [_object(one, "parameters").get("binary_data", default) for one in outputs]
        return _answer(asked, variant, made, binaries or [default] * len(made))

    return app


def asked_for(service: Service, name: str, version: str) -> str:
    """What the service calls it.

    Raises:
        Unknown: there is no such model, or it has no such version.
    """
    groups = service.named(name)
    if version and version not in {one.variant.name for one in groups}:
        raise Unknown(f"version {version!r} of model {name!r} is unknown; versions are names of variants")
    return version or name


def described(service: Service, name: str, version: str = "") -> dict[str, Any]:
    """A model's metadata."""
    groups = service.named(asked_for(service, name, version))
    signature = groups[0].entry.signature
    inputs, outputs = (
        [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in some]
        for some in (signature.inputs, signature.outputs)
    )
    platforms = {"onnxruntime": "onnx_onnxruntime", "torch": "pytorch_torch"}
    return {
        "name": name, "versions": [one.variant.name for one in groups],
        "platform": platforms[groups[0].variant.framework], "inputs": inputs, "outputs": outputs,
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
            raise UserError(f"parameter {name}: {str(value)[:50]!r} is not accepted; use a number from 0")
        found[name] = float(min(value, 1e300)) if value != math.inf else math.inf
    background = parameters.get("background", False)
    if not isinstance(background, bool):
        raise UserError(f"parameter background: {background!r} is not accepted; use true or false")
    return {**found, "background": background}


def _parsed(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON part and what follows it."""
    length = len(body)
    if header is not None:
        if not (header.isascii() and header.isdigit()) or int(header[:20]) > len(body):
            raise UserError(f"{HEADER} {header[:50]!r} is not accepted; the body has {len(body)} bytes")
        length = int(header)
    try:
        asked = json.loads(body[:length], parse_constant=_no_json)
    except (ValueError, RecursionError) as fault:
        raise UserError(f"the request is no JSON: {fault}") from fault
    if not isinstance(asked, dict):
        raise UserError("the request is no JSON object")
    if not isinstance(asked.get("id", ""), str):
        raise UserError("field id is no string")
    return asked, body[length:]


def _no_json(word: str) -> None:
    raise ValueError(f"it has no {word}")


def _object(of: dict[str, Any], name: str) -> dict[str, Any]:
    found = of.get(name, {})
    if not isinstance(found, dict):
        raise UserError(f"field {name} is no JSON object")
    return found


def _given(asked: dict[str, Any], binary: bytes) -> list[Given]:
    """The inputs, each with its part of what followed the JSON."""
    inputs = asked.get("inputs")
    if not isinstance(inputs, list) or not all(isinstance(one, dict) for one in inputs):
        raise UserError("field inputs: use a list of JSON objects")
    made, at = [], 0
    for one in inputs:
        size, raw = _object(one, "parameters").get("binary_data_size"), None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(binary) - at or "data" in one:
                raise UserError(f"input {str(one.get('name'))[:50]}: binary_data_size {str(size)[:50]} is not"
                                f" accepted; {len(binary) - at} bytes follow, and no data")  # fmt: skip
            raw, at = binary[at : at + size], at + size
        made.append(Given(one.get("name"), one.get("datatype"), one.get("shape"), one.get("data"), raw))
    if at < len(binary):
        raise UserError(f"{len(binary)} bytes follow the JSON; the inputs have binary_data_size {at}")
    return made


def _answer(
    asked: dict[str, Any], variant: str, made: Sequence[tuple[Tensor, NDArray[Any]]], binary: Sequence[Any]
) -> Response:
    answer: dict[str, Any] = {"model_name": variant, "outputs": []}
    if "id" in asked:
        answer["id"] = asked["id"]
    behind = []
    for (wanted, array), packs in zip(made, binary, strict=True):
        output: dict[str, Any] = {
            "name": wanted.name,
            "datatype": wanted.datatype,
            "shape": list(array.shape),
        }
        if packs:
            behind.append(packed(array))
            output["parameters"] = {"binary_data_size": len(behind[-1])}
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"output {wanted.name} has values that JSON has not; use binary_data")
        else:
            output["data"] = array.ravel().tolist()
        answer["outputs"].append(output)
    head = json.dumps(answer).encode()
    if not behind:
        return Response(head, media_type="application/json")
    headers = {HEADER: str(len(head))}
    return Response(b"".join((head, *behind)), media_type="application/octet-stream", headers=headers)
