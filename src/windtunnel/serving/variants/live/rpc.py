"""The Open Inference Protocol, version 2, over gRPC. Outputs are raw, as the protocol allows; errors have the
codes that HTTP's have there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.runtime_version import VersionError
from pydantic import ValidationError

from windtunnel import __version__
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.gateway import Needs, described, model_or_variant, sentence
from windtunnel.serving.variants.live.service import Infeasible, Unanswered, Unknown, VariantsService
from windtunnel.serving.variants.live.tensors import InferTensor, checked, packed

# compiled when it is imported: the protocol is the file beside this one
try:
    messages, services = grpc.protos_and_services("windtunnel/serving/variants/live/inference.proto")
except VersionError as error:
    raise UserError(f"gRPC: protobuf is older than grpcio-tools writes for; upgrade it: {error}") from error
CODES = (
    (Unknown, grpc.StatusCode.NOT_FOUND), (Infeasible, grpc.StatusCode.FAILED_PRECONDITION),
    (UserError, grpc.StatusCode.INVALID_ARGUMENT), (Unanswered, grpc.StatusCode.UNAVAILABLE),
)  # fmt: skip


@asynccontextmanager
async def refusing(context: Any) -> AsyncIterator[None]:
    """What a request is refused for, as gRPC tells it."""
    try:
        yield
    except (UserError, Unanswered, ValidationError) as fault:
        reason = sentence(fault) if isinstance(fault, ValidationError) else fault
        codes = [code for kind, code in CODES if isinstance(reason, kind)]
        shed = [grpc.StatusCode.RESOURCE_EXHAUSTED] if getattr(reason, "after", 0.0) else []
        await context.abort((shed + codes)[0], str(reason))


class Servicer(services.GRPCInferenceServiceServicer):  # type: ignore[misc,name-defined]
    """Each method is named, and answers, as in the protocol."""

    def __init__(self, service: VariantsService) -> None:
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return messages.ServerMetadataResponse(name="windtunnel", version=__version__)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        async with refusing(context):
            model_or_variant(self._service, request.name, request.version)
            return messages.ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        async with refusing(context):
            metadata = described(self._service, request.name, request.version)
            return messages.ModelMetadataResponse(**metadata)

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        async with refusing(context):
            model = model_or_variant(self._service, request.model_name, request.model_version)
            inputs = checked(*_infer_inputs(request), self._service.named(model)[0].entry.signature)
            parameters = {name: getattr(parameter, parameter.WhichOneof("parameter_choice") or "", None)
                    for name, parameter in request.parameters.items()}  # fmt: skip
            bounds = Needs.model_validate(parameters).bounds()
            requested = [output.name for output in request.outputs]
            variant, results = await self._service.infer(model, inputs, requested=requested, **bounds)
            outputs = [
                {"name": tensor.name, "datatype": tensor.datatype, "shape": array.shape}
                for tensor, array in results
            ]
            return messages.ModelInferResponse(
                model_name=variant, id=request.id, outputs=outputs,
                raw_output_contents=[packed(array) for _, array in results],
            )  # fmt: skip


def _infer_inputs(request: Any) -> tuple[list[InferTensor], dict[str, bytes]]:
    """The inputs; values come in each of them, or the bytes of all beside them."""
    raw, inputs = list(request.raw_input_contents), []
    if raw and len(raw) != len(request.inputs):
        raise UserError(f"{len(raw)} raw_input_contents came for {len(request.inputs)} inputs")
    for tensor in request.inputs:
        filled = tensor.contents.ListFields()
        if len(filled) + bool(raw) > 1:
            raise UserError(f"input {tensor.name!r} has several contents; use one")
        data = list(filled[0][1]) if filled else []
        inputs.append(
            InferTensor(name=tensor.name, datatype=tensor.datatype, shape=list(tensor.shape), data=data)
        )
    return inputs, {tensor.name: content for tensor, content in zip(request.inputs, raw, strict=bool(raw))}


async def listening(service: VariantsService, address: str) -> tuple[Any, int]:
    """A server that answers for the service, and its port.

    Raises:
        UserError: nobody may listen there.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])  # images are larger than 4 MB
    services.add_GRPCInferenceServiceServicer_to_server(Servicer(service), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as fault:
        raise UserError(f"variants serve: {address} cannot be listened on") from fault
    await server.start()
    return server, port
