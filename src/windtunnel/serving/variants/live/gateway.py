"""The Open Inference Protocol, version 2, over HTTP: JSON tensors, and the binary tensor extension.

A model's name is a task, an architecture or a variant, and its versions are variants; ``accuracy``,
``latency`` (seconds), ``cost`` and ``background`` are parameters of an infer request. 404: no such model;
422: none does what is asked; 400: not the protocol; 503: replicas could not answer, or (with
``Retry-After``) not in time. See kserve.github.io, Open Inference Protocol.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from windtunnel import __version__
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.service import Infeasible, Unanswered, Unknown, VariantsService
from windtunnel.serving.variants.live.tensors import InferTensor, TensorSpec, checked, packed

HEADER = "Inference-Header-Content-Length"
STATUS: dict[type[Exception], int] = {Unknown: 404, Infeasible: 422, UserError: 400, Unanswered: 503}
MODEL = "/v2/models/{name}"
VERSION = f"{MODEL}/versions/{{version}}"
Bound = Annotated[float, Field(ge=0)]


class InferModel(BaseModel):
    model_config = ConfigDict(strict=True)


class Needs(InferModel):
    """What a request says of itself; ``binary_data_output``: of all its outputs."""

    accuracy: Bound | None = None
    latency: Bound | None = None
    cost: Bound | None = None
    background: bool = False
    binary_data_output: bool = False

    def bounds(self) -> dict[str, Any]:
        """Those that `VariantsService.infer` takes."""
        return self.model_dump(exclude_none=True, exclude={"binary_data_output"})


class OutputParameters(InferModel):
    binary_data: bool | None = None


class RequestedOutput(InferModel):
    """An output that is asked for."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(InferModel):
    """The JSON of an infer request."""

    id: str | None = None
    parameters: Needs = Needs()
    inputs: Annotated[list[InferTensor], Field(min_length=1)]
    outputs: list[RequestedOutput] = []


class InferResponse(BaseModel):
    model_name: str
    id: str | None = None
    outputs: list[InferTensor]


class ErrorBody(BaseModel):
    error: str


_NAMED: dict[int | str, Any] = {404: {"description": "No such model", "model": ErrorBody}}
_INFER: dict[int | str, Any] = {
    **_NAMED, 400: {"description": "Not the protocol", "model": ErrorBody},
    422: {"description": "No variant does what is asked", "model": ErrorBody},
    503: {"description": "Replicas could not answer, or (with Retry-After) not in time", "model": ErrorBody},
    200: {"model": InferResponse, "content": {"application/octet-stream": {}}},
}  # fmt: skip


def application(service: VariantsService) -> FastAPI:
    """The HTTP side of a service, which begins and ends with it."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service:
            yield

    app = FastAPI(title="windtunnel variants", version=__version__, lifespan=lifespan)

    async def error_response(request: Request, fault: Exception) -> JSONResponse:
        if isinstance(fault, HTTPException):
            return JSONResponse({"error": fault.detail}, fault.status_code, fault.headers)
        after = math.ceil(getattr(fault, "after", 0.0))
        headers = {"Retry-After": str(after)} if after else None
        return JSONResponse({"error": str(fault)}, STATUS[type(fault)], headers)

    for kind in (*STATUS, HTTPException):
        app.add_exception_handler(kind, error_response)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        return {"name": "windtunnel", "version": __version__, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"ready": True}

    @app.get(f"{MODEL}/ready", responses=_NAMED)
    @app.get(f"{VERSION}/ready", responses=_NAMED)
    async def model_ready(name: str, version: str = "") -> dict[str, Any]:
        model_or_variant(service, name, version)
        return {"name": name, "ready": True}

    @app.get(MODEL, responses=_NAMED)
    @app.get(VERSION, responses=_NAMED)
    async def metadata(name: str, version: str = "") -> dict[str, Any]:
        return described(service, name, version)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        figures = {
            "replicas": lambda pool: pool.ready, "answered_total": lambda pool: pool.answered,
            "late_total": lambda pool: pool.missed, "requeued_total": lambda pool: pool.requeued,
            "shed_total": lambda pool: service.desk.shed[pool.variant.name],
            "waiting": lambda pool: len(pool.queue) + len(pool.background),
        }  # fmt: skip
        return "".join(
            f'windtunnel_variant_{key}{{variant="{name}"}} {figure(group.group)}\n'
            for name, group in service.groups.items() for key, figure in figures.items()
        )  # fmt: skip

    schema = InferRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    parts = schema.pop("$defs")
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    @app.post(f"{MODEL}/infer", responses=_INFER, openapi_extra=body)
    @app.post(f"{VERSION}/infer", responses=_INFER, openapi_extra=body)
    async def infer(request: Request, name: str, version: str = "") -> Response:
        model = model_or_variant(service, name, version)
        inference, raw = _parsed(await request.body(), request.headers.get(HEADER))
        inputs = checked(inference.inputs, raw, service.named(model)[0].entry.signature)
        requested, needs = inference.outputs, inference.parameters
        variant, outputs = await service.infer(
            model, inputs, requested=[output.name for output in requested], **needs.bounds()
        )
        flags = [output.parameters.binary_data for output in requested] or [None] * len(outputs)
        binary = [needs.binary_data_output if output is None else output for output in flags]
        return _answer(inference.id, variant, outputs, binary)

    app.openapi()["components"]["schemas"] |= parts
    return app


def model_or_variant(service: VariantsService, name: str, version: str) -> str:
    """What the service calls it.

    Raises:
        Unknown: there is no such model, or it has no such version.
    """
    groups = service.named(name)
    if version and version not in {group.variant.name for group in groups}:
        raise Unknown(f"version {version!r} of model {name!r} is unknown; versions are names of variants")
    return version or name


def described(service: VariantsService, name: str, version: str = "") -> dict[str, Any]:
    """A model's metadata."""
    groups = service.named(model_or_variant(service, name, version))
    signature = groups[0].entry.signature
    inputs, outputs = (
        [{"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)} for tensor in some]
        for some in (signature.inputs, signature.outputs)
    )
    platforms = {"onnxruntime": "onnx_onnxruntime", "torch": "pytorch_torch"}
    return {
        "name": name, "versions": [group.variant.name for group in groups],
        "platform": platforms[groups[0].variant.framework], "inputs": inputs, "outputs": outputs,
    }  # fmt: skip


def sentence(fault: ValidationError) -> UserError:
    """What is wrong, with the first field that is."""
    first = fault.errors()[0]
    if first["type"] == "json_invalid":
        return UserError(f"the request is no JSON: {first['msg']}")
    place = f"field {'.'.join(map(str, first['loc']))}" if first["loc"] else "the request"
    return UserError(f"{place}: {str(first['input'])[:50]!r} is not accepted: {first['msg']}")


def _parsed(body: bytes, header: str | None) -> tuple[InferRequest, dict[str, bytes]]:
    """The JSON part, and of what follows it each input's."""
    try:
        at = len(body) if header is None else int(header)
        if not 0 <= at <= len(body):
            raise ValueError
    except ValueError:
        words = f"{HEADER} {str(header)[:50]!r} is not accepted; the body has {len(body)} bytes"
        raise UserError(words) from None
    try:
        request = InferRequest.model_validate_json(body[:at])
    except ValidationError as fault:
        raise sentence(fault) from fault
    raw = {}
    for tensor in request.inputs:
        size = tensor.parameters.binary_data_size
        if size is not None:
            if size > len(body) - at or tensor.data is not None:
                raise UserError(
                    f"input {tensor.name[:50]}: binary_data_size {str(size)[:50]} is not accepted;"
                    f" {len(body) - at} bytes follow, and no data"
                )
            raw[tensor.name], at = body[at : at + size], at + size
    if at < len(body):
        raise UserError(f"{len(body) - at} bytes follow that no input's binary_data_size counts")
    return request, raw


def _answer(
    id: str | None, variant: str, outputs: Sequence[tuple[TensorSpec, NDArray[Any]]], binary: Sequence[bool]
) -> Response:
    answer: dict[str, Any] = {"model_name": variant, "outputs": []}
    if id is not None:
        answer["id"] = id
    behind = []
    for (spec, array), packs in zip(outputs, binary, strict=True):
        output: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype}
        output["shape"] = list(array.shape)
        if packs:
            behind.append(packed(array))
            output["parameters"] = {"binary_data_size": len(behind[-1])}
        elif array.dtype.kind == "f" and not np.isfinite(array).all():
            raise UserError(f"output {spec.name} has values that JSON has not; use binary_data")
        else:
            output["data"] = array.ravel().tolist()
        answer["outputs"].append(output)
    head = json.dumps(answer).encode()
    if not behind:
        return Response(head, media_type="application/json")
    headers = {HEADER: str(len(head))}
    return Response(b"".join((head, *behind)), media_type="application/octet-stream", headers=headers)
