"""The Open Inference Protocol, version 2, over gRPC. Outputs are raw, as the protocol allows; errors have the
codes that HTTP's have there."""

from __future__ import annotations

from typing import Any

import grpc

from windtunnel import __version__
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.gateway import bounds, described, tensor_of
from windtunnel.serving.variants.live.service import Infeasible, Service, Unanswered, Unknown

# compiled when it is imported: the protocol is the file beside this one
messages, services = grpc.protos_and_services("windtunnel/serving/variants/live/inference.proto")
CODES = (
    (Unknown, grpc.StatusCode.NOT_FOUND), (Infeasible, grpc.StatusCode.FAILED_PRECONDITION),
    (UserError, grpc.StatusCode.INVALID_ARGUMENT), (Unanswered, grpc.StatusCode.UNAVAILABLE),
)  # fmt: skip


class Servicer(services.GRPCInferenceServiceServicer):  # type: ignore[misc,name-defined]
    """Each method is named, and answers, as in the protocol."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return messages.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return messages.ServerReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return messages.ServerMetadataResponse(name="windtunnel", version=__version__)

    async def ModelReady(self, request: Any, context: Any) -> Any:
        return messages.ModelReadyResponse(ready=request.name in await self._told(context, request.name))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        return messages.ModelMetadataResponse(**await self._told(context, request.name, whole=True))

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        try:
            wanted = self._service.named(request.model_name)[0].inputs
            asked, raw = _plain(request)
            inputs = tensor_of(asked, raw, wanted)
            given = {name: getattr(one, one.WhichOneof("parameter_choice") or "", None)
                     for name, one in request.parameters.items()}  # fmt: skip
            variant, made = await self._service.infer(request.model_name, inputs, **bounds(given))
        except (UserError, Unanswered) as fault:
            await _refuse(context, fault)
            raise
        output = self._service.groups[variant].outputs
        tensor = {"name": output.name, "datatype": output.datatype, "shape": made.shape}
        return messages.ModelInferResponse(
            model_name=variant, id=request.id, outputs=[tensor], raw_output_contents=[made.tobytes()]
        )

    async def _told(self, context: Any, name: str, whole: bool = False) -> dict[str, Any]:
        try:
            found = described(self._service, name)
        except Unknown as fault:
            await _refuse(context, fault)
            raise
        return found if whole else {name: True}


def _plain(request: Any) -> tuple[dict[str, Any], bytes]:
    """As the request would be over HTTP."""
    inputs: list[dict[str, Any]] = []
    for one in request.inputs:
        inputs.append({"name": one.name, "datatype": one.datatype, "shape": list(one.shape)})
        filled = one.contents.ListFields()
        if filled:
            inputs[-1]["data"] = list(filled[0][1])
    raw = b"".join(request.raw_input_contents)
    if inputs and raw:
        inputs[0]["parameters"] = {"binary_data_size": len(raw)}
    return {"inputs": inputs}, raw


async def _refuse(context: Any, fault: Exception) -> None:
    await context.abort(next(code for kind, code in CODES if isinstance(fault, kind)), str(fault))


async def listening(service: Service, address: str) -> tuple[Any, int]:
    """A server that answers for the service, and its port.

    Raises:
        UserError: nobody may listen there.
    """
    server = grpc.aio.server()
    services.add_GRPCInferenceServiceServicer_to_server(Servicer(service), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as fault:
        raise UserError(f"variants serve: {address} cannot be listened on") from fault
    await server.start()
    return server, port
