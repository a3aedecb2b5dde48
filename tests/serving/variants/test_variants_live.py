"""Variants of a real model, in processes that are killed, asked over both forms of the protocol."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import onnx
import onnx.parser
import pytest

from support.variants import INPUTS, OUTPUTS, WEIGHTS, pids, registered, submitted
from windtunnel.base.errors import LessError, UserError
from windtunnel.serving.variants.live import registry, replica
from windtunnel.serving.variants.live.gateway import HEADER, application
from windtunnel.serving.variants.live.registry import VariantFile
from windtunnel.serving.variants.live.rpc import listening, messages, services
from windtunnel.serving.variants.live.serve import serve
from windtunnel.serving.variants.live.service import Infeasible, VariantsService
from windtunnel.serving.variants.model import Variant
from windtunnel.store.eventlog import EventLog, LogFailed

ONE = {"name": "input", "datatype": "FP32", "shape": [1, 6], "data": INPUTS[0].tolist()}


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[VariantFile]:
    return registered(tmp_path_factory.mktemp("variants"))


def test_a_module_of_torch_becomes_variants_that_do_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    module = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False), torch.nn.Softmax(-1))
    with torch.no_grad():
        module[0].weight.copy_(torch.from_numpy(WEIGHTS.T))
    torch.save(module, tmp_path / "net.pt")
    _, data = submitted(tmp_path)
    monkeypatch.setattr(registry, "THREADS", (1,))
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        entries, left_out = registry.add(
            tmp_path / "net.pt", data, tmp_path / "home", task="sums", architecture="net"
        )
    assert registry.registered(tmp_path / "home") == entries
    assert left_out[0] == "compiled: there is no C++ compiler"
    kinds = {(entry.variant.framework, entry.variant.precision, entry.variant.batch) for entry in entries}
    assert kinds >= {
        (*kind, batch) for kind in (("onnxruntime", "fp32"), ("torch", "eager")) for batch in (1, 8)
    }
    softmax = np.exp(OUTPUTS) / np.exp(OUTPUTS).sum(1, keepdims=True)
    for entry in entries:
        assert entry.variant.load > 0 and entry.variant.latency(8) > 0 and entry.variant.accuracy >= 0.95
        if entry.variant.precision != "int8":
            [output] = replica.program(entry.file, 1)({"input": INPUTS})
            np.testing.assert_allclose(output, softmax, atol=1e-6)

    async def story() -> None:
        async with VariantsService(entries) as service:
            for count in (1, 5):
                name, [(_, output)] = await service.infer("net:eager-t1-b8", {"input": INPUTS[:count]})
                np.testing.assert_allclose(output, softmax[:count], atol=1e-6)
                assert name == "net:eager-t1-b8"

    asyncio.run(story())
    with pytest.raises(UserError, match=r"registered in .* already"):
        registry.add(tmp_path / "net.pt", data, tmp_path / "home", task="sums", architecture="net")


def test_what_is_not_equal_or_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LessError, match=r"net\.pt: refused: .* by 0\.25, 0\.0001 is tolerated"):
        registry.verify([np.zeros((2, 2))], [np.array([[0.0, 0.25], [0, 0]])], "net.pt")
    with pytest.raises(LessError, match="shapes"):
        registry.verify([np.zeros((2, 2))], [np.zeros((2, 3))], "net.pt")
    with pytest.raises(LessError, match="nan"):
        registry.verify([np.zeros(2)], [np.full(2, np.nan)], "net.pt")
    model, data = submitted(tmp_path)
    home = tmp_path / "home"
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(UserError, match="cannot run it"):
        registry.add(tmp_path / "bad.onnx", data, home, task="sums", architecture="bad")
    with pytest.raises(UserError, match="neither ONNX nor"):
        registry.add(data, data, home, task="sums", architecture="bad")
    with pytest.raises(UserError, match=r"not an \.npz"):
        registry.add(model, model, home, task="sums", architecture="bad")
    with pytest.raises(UserError, match=r"name '\.\./bad' is not accepted"):
        registry.add(model, data, home, task="sums", architecture="../bad")
    assert registry.registered(home) == []
    real = registry.accuracy
    monkeypatch.setattr(registry, "accuracy", lambda file, *rest: real(file, *rest) - ("int8" in file.name))
    entries, left_out = registry.add(model, data, home, task="sums", architecture="linear")
    assert {entry.variant.precision for entry in entries} == {"fp32"}
    assert len(left_out) == 2 and "int8: refused" in left_out[1]
    with pytest.raises(
        UserError, match="`policy` 'static' is not accepted; use cheapest, infaas, no-upgrade"
    ):
        VariantsService(entries, policy="static")


def test_a_module_that_takes_words_is_refused(tmp_path: Path) -> None:
    import torch

    torch.save(torch.nn.Linear(2, 2), tmp_path / "net.pt")
    np.savez(tmp_path / "words.npz", inputs=np.array([["a", "b"]] * 16), labels=np.zeros(16, int))
    with pytest.raises(UserError, match=r"torch\.export cannot export it: can't convert"):
        registry.add(tmp_path / "net.pt", tmp_path / "words.npz", tmp_path, task="sums", architecture="net")


@pytest.mark.parametrize(
    ("operators", "outputs", "form"),
    [
        ("output = Add (input, input) second = Identity (input)", ("output", "second"), "for 2 outputs"),
        ("axes = Constant <value_ints = [0]> () mean = ReduceMean (input, axes) output = Sub (input, mean)",
         ("output",), "one item at a time for 1 outputs"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("task", "name"), [("sums", "other"), ("linear", "other"), ("other", "sums")])
def test_models_of_one_name_answer_alike_or_are_refused(
    tmp_path: Path, entries: list[VariantFile], operators: str, outputs: tuple[str, ...], form: str,
    task: str, name: str,
) -> None:  # fmt: skip
    """Requests for the name are counted and answered by whichever variant is chosen."""
    declared = ", ".join(f"float[n, 6] {output}" for output in outputs)
    text = (
        f'<ir_version: 9, opset_import: ["" : 18]> net (float[n, 6] input) => ({declared}) {{ {operators} }}'
    )
    onnx.save(onnx.parser.parse_model(text), tmp_path / "other.onnx")
    home = entries[0].file.parents[1]
    np.savez(tmp_path / "data.npz", inputs=INPUTS, labels=np.zeros(64, int))
    with pytest.raises(UserError, match=rf"other takes .* {form}, and other models of|sums takes .* {form}"):
        registry.add(tmp_path / "other.onnx", tmp_path / "data.npz", home, task=task, architecture=name)
    assert registry.registered(home) == entries


def test_a_log_that_cannot_be_written_ends_the_server_and_nobody_waits(
    entries: list[VariantFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    append, responses = EventLog.append, list[Future[httpx.Response]]()

    def full(log: EventLog, kind: str, **fields: Any) -> None:
        if kind == "runs":
            raise LogFailed("the disk is full")
        append(log, kind, **fields)

    monkeypatch.setattr(EventLog, "append", full)
    with ThreadPoolExecutor(1) as pool:

        def ready(run: str, http: str, rpc: str) -> None:
            url = f"{http}/v2/models/sums/infer"
            responses.append(pool.submit(httpx.post, url, json={"inputs": [ONE]}, timeout=60.0))

        with pytest.raises(LogFailed, match="the disk is full"):
            serve(entries[0].file.parents[1], "127.0.0.1", 0, None, "cheapest", ready=ready)
    assert (responses[0].result().status_code, responses[0].result().json()) == (
        503, {"error": "the disk is full"},
    )  # fmt: skip


def test_addresses_of_a_host_of_ipv6_are_those_that_clients_take(entries: list[VariantFile]) -> None:
    def ready(run: str, http: str, rpc: str) -> None:
        live.append(pool.submit(answers, http, rpc))

    def answers(http: str, rpc: str) -> bool:
        try:
            with grpc.insecure_channel(rpc) as channel:
                stub = services.GRPCInferenceServiceStub(channel)
                by_rpc = stub.ServerLive(messages.ServerLiveRequest(), timeout=60.0, wait_for_ready=True).live
            return bool(by_rpc and httpx.get(f"{http}/v2/health/live", timeout=60.0).json()["live"])
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    live = list[Future[bool]]()
    with ThreadPoolExecutor(1) as pool:
        serve(entries[0].file.parents[1], "::1", 0, 0, "cheapest", ready=ready)
    assert live[0].result()


def test_killed_replicas_lose_nothing_and_double_nothing(entries: list[VariantFile]) -> None:
    async def story() -> None:
        async with VariantsService(entries) as service:
            await service.infer("sums", {"input": INPUTS[:1]}, accuracy=0.9)
            killed = 0

            async def ask(number: int) -> None:
                nonlocal killed
                if number % 60 == 30:
                    for pid in pids(service):
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                            killed += 1
                place = number % 64
                inputs = {"input": INPUTS[place : place + 1]}
                _, [(_, output)] = await service.infer("linear", inputs, background=number % 5 == 0)
                np.testing.assert_allclose(output, OUTPUTS[place : place + 1], atol=0.2)

            for first in range(0, 240, 20):
                await asyncio.gather(*(ask(number) for number in range(first, first + 20)))
            groups = [replicas.group for replicas in service.groups.values()]
            assert killed >= 4 and sum(group.requeued for group in groups) >= 1
            assert sum(group.answered for group in groups) == 241
            with pytest.raises(Infeasible, match=r"no variant does accuracy 0\.999"):
                await service.infer("sums", {"input": INPUTS[:1]}, accuracy=0.999, latency=1e-9)
            with pytest.raises(UserError, match=r"\['none'\] is not accepted; use some of output once"):
                await service.infer("sums", {"input": INPUTS[:1]}, requested=["none"])

    asyncio.run(story())


def test_what_a_hung_replica_was_asked_another_answers(
    entries: list[VariantFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with VariantsService(entries) as service:
            await service.infer("sums", {"input": INPUTS[:1]})
            groups = [replicas.group for replicas in service.groups.values()]
            for pid in pids(service):
                os.kill(pid, signal.SIGSTOP)
            with monkeypatch.context() as impatient:
                impatient.setattr(replica, "PATIENCE", 0.5)
                asked = [service.infer("sums", {"input": INPUTS[at : at + 1]}) for at in range(4)]
                answers = asyncio.gather(*asked)
                while not sum(group.requeued for group in groups):
                    await asyncio.sleep(0.01)
            for at, (_, [(_, output)]) in enumerate(await answers):  # by replicas that may take their time
                np.testing.assert_allclose(output, OUTPUTS[at : at + 1], atol=0.2)
            assert (
                sum(group.answered for group in groups) == 5 and sum(group.requeued for group in groups) >= 1
            )

    asyncio.run(story())


def test_the_protocol_over_http_and_grpc(entries: list[VariantFile]) -> None:
    async def story() -> None:
        async with VariantsService(entries) as service:
            http = httpx.AsyncClient(
                transport=httpx.ASGITransport(application(service)), base_url="http://here"
            )
            async with http:
                await over_http(http, entries[0].variant)
            server, port = await listening(service, "127.0.0.1:0")
            try:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    await over_grpc(services.GRPCInferenceServiceStub(channel), entries[-1].variant)
            finally:
                await server.stop(None)

    asyncio.run(story())


async def over_http(http: httpx.AsyncClient, cold: Variant) -> None:
    sent = {"inputs": [ONE], "parameters": {"latency": cold.latency()}}  # it is loaded for the next ones
    shed = await http.post(f"/v2/models/{cold.name}/infer", json=sent)
    assert shed.status_code == 503 and int(shed.headers["Retry-After"]) >= 1
    assert f"{cold.name}: shed, since {cold.name} would take" in shed.json()["error"]
    assert f'shed_total{{variant="{cold.name}"}} 1\n' in (await http.get("/metrics")).text
    assert (await http.get("/v2")).json()["extensions"] == ["binary_tensor_data"]
    assert (await http.get("/v2/health/ready")).json() == {"ready": True}
    about = (await http.get("/v2/models/sums")).json()
    assert about["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 6]}]
    url = "/v2/models/sums/infer"
    plain = (await http.post(url, json={"id": "a", "inputs": [ONE]})).json()
    assert plain["id"] == "a" and plain["model_name"].startswith("linear:")
    np.testing.assert_allclose(plain["outputs"][0]["data"], OUTPUTS[0], atol=0.2)

    tensor = {**ONE, "shape": [3, 6], "parameters": {"binary_data_size": 72}}
    del tensor["data"]
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True, "latency": 9}}).encode()
    sent = {HEADER: str(len(head))}
    response = await http.post(url, content=head + INPUTS[:3].tobytes(), headers=sent)
    split = int(response.headers[HEADER])
    assert json.loads(response.content[:split])["outputs"][0]["parameters"] == {"binary_data_size": 48}
    values = np.frombuffer(response.content[split:], np.float32).reshape(3, 4)
    np.testing.assert_allclose(values, OUTPUTS[:3], atol=0.2)

    async def refused(status: int, words: str, content: bytes, to: str = url, **headers: str) -> None:
        response = await http.post(to, content=content, headers=headers)
        assert (response.status_code, words in response.json()["error"]) == (status, True), response.text

    def body(**other: object) -> bytes:
        return json.dumps({"inputs": [ONE], **other}).encode()

    await refused(404, "'none' is unknown; accepted are sums, linear", body(), "/v2/models/none/infer")
    await refused(422, "no variant does accuracy 1.5", body(parameters={"accuracy": 1.5}))
    await refused(400, "no JSON", b"{")
    await refused(400, "the request: '[]' is not", b"[]")
    await refused(400, "field parameters.latency: 'soon'", body(parameters={"latency": "soon"}))
    await refused(400, "field inputs: ", b"{}")
    await refused(
        400, "input input of 'INT64' is not accepted; use 'FP32'", body(inputs=[{**ONE, "datatype": "INT64"}])
    )
    await refused(400, "data is not accepted for shape [2, 6]", body(inputs=[{**ONE, "shape": [2, 6]}]))
    await refused(400, "use [-1, 6]", body(inputs=[{**ONE, "shape": [6]}]))
    await refused(400, "binary_data_size 72 is not accepted; 0 bytes follow", head, **sent)
    await refused(400, "the body has", head, **{HEADER: "99999"})
    assert 'answered_total{variant="linear:' in (await http.get("/metrics")).text


async def over_grpc(stub: object, cold: Variant) -> None:
    assert (await stub.ServerLive(messages.ServerLiveRequest())).live  # type: ignore[attr-defined]
    assert (await stub.ModelReady(messages.ModelReadyRequest(name="linear"))).ready  # type: ignore[attr-defined]
    about = await stub.ModelMetadata(messages.ModelMetadataRequest(name="sums"))  # type: ignore[attr-defined]
    assert (about.outputs[0].name, list(about.outputs[0].shape)) == ("output", [-1, 4])
    tensor = {"name": "input", "datatype": "FP32", "shape": [2, 6]}
    raw = messages.ModelInferRequest(
        model_name="sums", id="b", inputs=[tensor], raw_input_contents=[INPUTS[:2].tobytes()]
    )
    filled = messages.ModelInferRequest(
        model_name="sums", inputs=[{**tensor, "contents": {"fp32_contents": INPUTS[:2].ravel()}}]
    )
    for request in (raw, filled):
        response = await stub.ModelInfer(request)  # type: ignore[attr-defined]
        values = np.frombuffer(response.raw_output_contents[0], np.float32).reshape(2, 4)
        np.testing.assert_allclose(values, OUTPUTS[:2], atol=0.2)
        assert response.id == request.id
    bad = {
        grpc.StatusCode.NOT_FOUND: {"model_name": "none"},
        grpc.StatusCode.FAILED_PRECONDITION: {"parameters": {"latency": {"double_param": 1e-9}}},
        grpc.StatusCode.RESOURCE_EXHAUSTED: {
            "model_name": cold.name,
            "parameters": {"latency": {"double_param": 2 * cold.latency(2)}},
        },
        grpc.StatusCode.INVALID_ARGUMENT: {"raw_input_contents": [b"short"]},
    }
    for code, other in bad.items():
        request = messages.ModelInferRequest()
        request.CopyFrom(raw)
        if "raw_input_contents" in other:
            del request.raw_input_contents[:]
        request.MergeFrom(messages.ModelInferRequest(**other))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(request)  # type: ignore[attr-defined]
        assert refused.value.code() == code


def test_while_a_replica_is_stopped_others_answer_and_then_it_goes_on(entries: list[VariantFile]) -> None:
    # a second replica has room on two cores whichever variant was measured as the fastest
    single = [entry for entry in entries if entry.variant.threads == 1]

    async def story() -> None:
        async with VariantsService(single) as service:
            first, _ = await service.infer("sums", {"input": INPUTS[:1]})
            group = service.groups[first].group
            while group.state != "active":  # on a busy host it may have been slow at first
                await asyncio.sleep(0.05)
            [pid] = pids(service)
            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.create_task(service.infer(first, {"input": INPUTS[:1]}))
            while group.state == "active":
                await asyncio.sleep(0.05)
            for at in range(8):
                _, [(_, output)] = await service.infer("sums", {"input": INPUTS[at : at + 1]})
                np.testing.assert_allclose(output, OUTPUTS[at : at + 1], atol=0.2)
            assert not waiting.done()
            os.kill(pid, signal.SIGCONT)
            assert (await waiting)[0] == first
            assert sum(replicas.group.requeued for replicas in service.groups.values()) == 0

    asyncio.run(story())
