"""Requests as clients that nobody here wrote send them, and as nobody should: each has its answer by name."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import onnx
import pytest
import uvicorn
from onnx import TensorProto, helper

from windtunnel.base.errors import UserError
from windtunnel.base.web import WebServer, listen
from windtunnel.serving.variants.live import registry
from windtunnel.serving.variants.live.gateway import HEADER, application
from windtunnel.serving.variants.live.rpc import listening, messages, services
from windtunnel.serving.variants.live.service import VariantsService
from windtunnel.serving.variants.live.tensors import InferTensor, Signature, TensorSpec, checked

WORDS = np.array([["a", "b"]] * 16)
COUNTS = np.arange(32).reshape(16, 2)
NUMBERS = {"name": "numbers", "datatype": "INT64", "shape": [1, 2], "data": [3, 4]}
TEXT = {"name": "words", "datatype": "BYTES", "shape": [1, 2], "data": ["x", "y"]}
HALF = {"name": "half", "datatype": "FP16", "shape": [1], "data": [0.5]}
GOOD = [NUMBERS, TEXT, HALF]


def submitted(folder: Path, name: str = "mixed", axis: object = "n", kind: int = TensorProto.FLOAT16) -> Path:
    """Of several inputs and outputs of several types, with an axis that is free beside the first."""
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Add", ["numbers", "numbers"], ["double"]),
        helper.make_node("Identity", ["words"], ["same"]), helper.make_node("Identity", ["half"], ["less"]),
    ]  # fmt: skip
    inputs = [
        value("numbers", TensorProto.INT64, [axis, "m"]), value("words", TensorProto.STRING, [axis, 2]),
        value("half", kind, [axis]),
    ]  # fmt: skip
    outputs = [
        value("double", TensorProto.INT64, [axis, "m"]), value("same", TensorProto.STRING, [axis, 2]),
        value("less", kind, [axis]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, name, inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, folder / f"{name}.onnx")
    return folder / f"{name}.onnx"


def data(folder: Path, **other: object) -> Path:
    given = {
        "numbers": COUNTS,
        "words": WORDS,
        "half": np.ones(16, np.float16),
        "labels": 2 * COUNTS,
        **other,
    }
    np.savez(folder / "data.npz", **{name: array for name, array in given.items() if array is not None})
    return folder / "data.npz"


@dataclass
class Served:
    url: str
    rpc: str
    service: VariantsService


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("mixed")
    entries, _ = registry.add(
        submitted(folder), data(folder), folder / "home", task="mixing", architecture="mixed"
    )
    assert {entry.variant.batch for entry in entries} == {1, 8} and all(
        entry.variant.accuracy == 1 for entry in entries
    )
    service = VariantsService(entries)
    sock = listen("test", "127.0.0.1", 0)
    server = WebServer(uvicorn.Config(application(service), log_config=None))
    ports: list[int] = []
    begun = threading.Event()

    async def both() -> None:
        other, port = await listening(service, "127.0.0.1:0")
        ports.append(port)
        begun.set()
        await server.serve(sockets=[sock])
        await other.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(both()))
    thread.start()
    begun.wait()
    with sock:
        yield Served(f"http://127.0.0.1:{sock.getsockname()[1]}", f"127.0.0.1:{ports[0]}", service)
        server.should_exit = True
        thread.join()


def test_each_malformed_request_over_http_is_refused_by_name(served: Served) -> None:
    def body(*inputs: object, **other: object) -> bytes:
        return json.dumps({"inputs": inputs or GOOD, **other}).encode()

    def but(tensor: dict[str, object], **other: object) -> bytes:
        return body(*({**given, **other} if given is tensor else given for given in GOOD))

    huge = "9" * 5000
    cases = [
        (400, "no JSON", b"\xff\xfe"),
        (400, "no JSON", b"[" * 100_000),
        (400, "not all are within FP16", but(HALF, data=[float("nan")])),
        (400, "no JSON", b'{"inputs": ' + huge.encode() + b"}"),
        (400, "field inputs: ", body(inputs={})),
        (400, "field inputs.0: '3' is not accepted", body(inputs=[3])),
        (400, "use each of 'numbers', 'words', 'half' once", body(NUMBERS, TEXT)),
        (400, "use each of", body(*GOOD, NUMBERS)),
        (400, "use each of", body(*GOOD, {**HALF, "name": "more"})),
        (400, "field inputs.2.name", body(NUMBERS, TEXT, {**HALF, "name": {}})),
        (400, "input numbers of 'INT32' is not accepted; use 'INT64'", but(NUMBERS, datatype="INT32")),
        (400, "field inputs.0.datatype", but(NUMBERS, datatype=[])),
        (400, "shape [1] is not accepted; use [-1, -1]", but(NUMBERS, shape=[1])),
        (400, "field inputs.0.shape.0: '-1'", but(NUMBERS, shape=[-1, -2])),
        (400, "field inputs.0.shape.0: 'True'", but(NUMBERS, shape=[True, 2])),
        (400, "field inputs.0.shape: '2'", but(NUMBERS, shape=2)),
        (400, "field inputs.0.shape.0: '1.0'", but(NUMBERS, shape=[1.0, 2])),
        (400, "2 values came", but(NUMBERS, shape=[1, 2**70])),
        (400, "data is not accepted for shape [0,", but(NUMBERS, shape=[0, 2**70], data=[])),
        (400, "not all are of INT64", but(NUMBERS, data=[3, 1.5])),
        (400, "not all are of INT64", but(NUMBERS, data=[3, "4"])),
        (400, "not all are of INT64", but(NUMBERS, data=[True, False])),
        (400, "not all are", but(NUMBERS, data=[3, 2**64 - 1])),
        (400, "data is not accepted", but(NUMBERS, data=[[3], [4, 5]])),
        (400, "data is not accepted", but(NUMBERS, data=[[3], [4]])),
        (400, "there is none", but(NUMBERS, data=None)),
        (400, "not all are strings", but(TEXT, data=["x", 3])),
        (400, "not all are within FP16", but(HALF, data=[1e6])),
        (400, "0 and 1 items are not accepted", but(HALF, shape=[0], data=[])),
        (400, "binary_data_size 8 is not", but(HALF, parameters={"binary_data_size": 8})),
        (400, "parameters.binary_data_size: '-1' is not", but(HALF, parameters={"binary_data_size": -1})),
        (400, "field inputs.2.parameters", but(HALF, parameters=[])),
        (400, "field id: '3'", body(id=3)),
        (400, "use some of double, same, less once", body(outputs=[{"name": "none"}])),
        (400, "is not accepted", body(outputs=[{"name": "less"}, {"name": "less"}])),
        (400, "field outputs.0.name", body(outputs=[{"name": ["less"]}])),
        (400, "field outputs.0: '1'", body(outputs=[1])),
        (400, "field parameters.accuracy: '-1'", body(parameters={"accuracy": -1})),
        (422, "no variant does accuracy inf", body(parameters={"accuracy": 10**400})),
        (400, "field parameters.background: '1'", body(parameters={"background": 1})),
        (422, "9 items at once, 8 are the most", body(
            {**NUMBERS, "shape": [9, 1], "data": [0] * 9}, {**TEXT, "shape": [9, 2], "data": ["x"] * 18},
            {**HALF, "shape": [9], "data": [0] * 9})),
    ]  # fmt: skip
    with httpx.Client(base_url=served.url) as http:
        for status, words, content in cases:
            response = http.post("/v2/models/mixing/infer", content=content)
            assert (response.status_code, words in response.json().get("error", "")) == (status, True), (
                response.text
            )
        for status, words, header in (
            (400, "the body has", "9" * 5000), (400, "the body has", "-1"), (400, "the body has", "\xb2"),
            (400, "no JSON", "10"), (400, "5 bytes follow", str(len(body()))),
        ):  # fmt: skip
            response = http.post(
                "/v2/models/mixing/infer",
                content=body() + b"bytes",
                headers={HEADER: header.encode("latin1")},
            )
            assert (response.status_code, words in response.json()["error"]) == (status, True), response.text
        short = b"\x09\0\0\0xy"
        tensors = [NUMBERS, {**TEXT, "parameters": {"binary_data_size": len(short)}}, HALF]
        del tensors[1]["data"]
        response = http.post(
            "/v2/models/mixing/infer",
            content=body(*tensors) + short,
            headers={HEADER: str(len(body(*tensors)))},
        )
        assert response.status_code == 400 and "longer than what came" in response.json()["error"]
        assert http.get("/v2/models/mixing/versions/none").status_code == 404
        answer = http.post("/v2/models/mixing/versions/mixed:fp32-t1-b8/infer", content=body(id="x")).json()
    assert answer["model_name"] == "mixed:fp32-t1-b8" and answer["id"] == "x"
    assert [output["data"] for output in answer["outputs"]] == [[6, 8], ["x", "y"], [0.5]]
    assert not any(replicas.group.requeued for replicas in served.service.groups.values())


def test_each_malformed_request_over_grpc_is_refused_by_name(served: Served) -> None:
    def asked(
        *, raw: tuple[bytes, ...] = (), model: str = "mixing", version: str = "", **other: object
    ) -> object:
        fields = {"INT64": "int64_contents", "BYTES": "bytes_contents", "FP16": "fp32_contents"}
        inputs = []
        for tensor in GOOD:
            contents = {fields[str(tensor["datatype"])]: [
                word.encode() if isinstance(word, str) else word for word in tensor["data"]  # type: ignore[attr-defined]
            ]}  # fmt: skip
            kept = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": tensor["shape"]}
            inputs.append({**kept, **({} if raw else {"contents": contents})})
        inputs[0] = {**inputs[0], **other}
        return messages.ModelInferRequest(
            model_name=model, model_version=version, inputs=inputs, raw_input_contents=raw
        )

    numbers, words, half = (np.array([3, 4]).tobytes(), b"\1\0\0\0x\1\0\0\0y", np.float16([0.5]).tobytes())
    none, bad = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
    with grpc.insecure_channel(served.rpc) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        for code, details, request in (
            (none, "unknown", asked(model="none")), (none, "version", asked(version="none")),
            (bad, "2 raw_input_contents came for 3", asked(raw=(numbers, words))),
            (bad, "3 values came", asked(raw=(numbers + b"12345678", words, half))),
            (bad, "data is not accepted", asked(raw=(numbers[:5], words, half))),
            (bad, "longer than what came", asked(raw=(numbers, words[:7], half))),
            (bad, "decode", asked(raw=(numbers, b"\1\0\0\0\xff" * 2, half))),
            (bad, "several contents", asked(raw=(numbers, words, half), contents={"int64_contents": [1]})),
            (bad, "field shape.0: '-1'", asked(shape=[-1, 2])), (bad, "values came", asked(shape=[1, 2**62])),
            (bad, "not all are of INT64", asked(contents={"fp32_contents": [0.5, 1]})),
            (bad, "0 values came", asked(contents={})),
        ):  # fmt: skip
            with pytest.raises(grpc.RpcError) as fault:
                stub.ModelInfer(request)
            assert fault.value.code() == code and details in fault.value.details(), fault.value.details()  # type: ignore[attr-defined]
        for request in (asked(), asked(raw=(numbers, words, half))):
            outputs = stub.ModelInfer(request).raw_output_contents
            assert [*outputs] == [np.array([6, 8]).tobytes(), words, half]


def test_requests_of_different_lengths_wait_together_and_run_apart(served: Served) -> None:
    async def story() -> None:
        async with httpx.AsyncClient(base_url=served.url) as http:
            asked = [
                {**NUMBERS, "shape": [1, size], "data": [*range(size)]} for size in (1, 2, 3, 2, 1, 5) * 4
            ]
            sent = (
                http.post("/v2/models/mixing/infer", json={"inputs": [tensor, TEXT, HALF]})
                for tensor in asked
            )
            for tensor, response in zip(asked, await asyncio.gather(*sent), strict=True):
                assert response.json()["outputs"][0]["data"] == [2 * value for value in tensor["data"]], (
                    response.text
                )

    asyncio.run(story())


def test_whole_numbers_on_both_sides_of_the_sign_bit_are_no_fractions() -> None:
    signature = Signature((TensorSpec("ids", "UINT64", (-1,)),), (), True)

    def ids(values: list[Any]) -> list[int]:
        tensor = InferTensor(name="ids", datatype="UINT64", shape=[len(values)], data=values)
        return checked([tensor], {}, signature)["ids"].tolist()  # type: ignore[no-any-return]

    assert ids([1, 2**63, 2**64 - 1]) == [1, 2**63, 2**64 - 1]
    for wrong in ([1, 2**64], [-1, 2**63], [0.5, 2**63], [1.0]):
        with pytest.raises(UserError, match="data is not accepted"):
            ids(wrong)


def test_models_that_cannot_be_served_are_refused_by_name(tmp_path: Path) -> None:
    def refused(words: str, model: Path, given: Path, task: str = "mixing") -> None:
        with pytest.raises(UserError, match=words):
            registry.add(model, given, tmp_path / "home", task=task, architecture="bad")

    model = submitted(tmp_path)
    refused(r"inputs numbers, half are not accepted; use numbers INT64", model, data(tmp_path, words=None))
    refused(r"half of float32 \(16,\) is not accepted; use n items of half FP16 \[-1\]", model,
            data(tmp_path, half=np.ones(16, np.float32)))  # fmt: skip
    refused(r"words of object \(16, 3\)", model, data(tmp_path, words=np.array([["a"] * 3] * 16)))
    refused("cannot be held against the labels", model, data(tmp_path, labels=np.ones((16, 3), int)))
    refused("cannot be held against the labels", model, data(tmp_path, labels=WORDS))
    refused("do not fit", model, data(tmp_path, labels=np.ones(15, int)))
    few = {"numbers": COUNTS[:5], "words": WORDS[:5], "half": np.ones(5, np.float16), "labels": COUNTS[:5]}
    refused("accepted are n items of each input and n labels, 16 at least", model, data(tmp_path, **few))
    fixed = submitted(tmp_path, "fixed", axis=16)
    refused(r"numbers of int64 \(16, 2\) is not accepted; .* \[16, -1\]", fixed, data(tmp_path))
    bits = submitted(tmp_path, "bits", kind=TensorProto.BFLOAT16)
    refused(r"input half of type tensor\(bfloat16\) is not accepted", bits, data(tmp_path))
    assert registry.registered(tmp_path / "home") == []


def test_an_axis_that_counts_no_items_is_served_one_request_at_a_time(tmp_path: Path) -> None:
    whole = {"numbers": COUNTS[:, None], "words": WORDS[:, None], "half": np.ones((16, 1), np.float16)}
    entries, left_out = registry.add(
        submitted(tmp_path, axis=1), data(tmp_path, **whole), tmp_path, task="mixing", architecture="one"
    )
    assert {entry.variant.batch for entry in entries} == {1} and left_out[-1].startswith("batches: ")
    with pytest.raises(UserError, match=r"and other models of mixing take numbers INT64 \[1, -1\]"):
        registry.add(submitted(tmp_path), data(tmp_path), tmp_path, task="mixing", architecture="other")


def test_the_interface_is_what_its_description_says(served: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_dict(httpx.get(f"{served.url}/openapi.json").json())
    schema.config.base_url = served.url
    tried = set()
    for operation in schema.get_all_operations():
        case = operation.ok().as_strategy()

        @settings(
            max_examples=3, deadline=None, phases=[Phase.generate], derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=case)
        def agrees(case: schemathesis.Case) -> None:
            # which models there are, and which tensors they take, no schema says
            case.call_and_validate(timeout=60, excluded_checks=[positive_data_acceptance])
            tried.add(case.path)

        agrees()
    assert {"/v2/models/{name}/infer", "/v2/models/{name}", "/v2"} <= tried


TRITON = """
import sys
import numpy as np
import tritonclient.grpc, tritonclient.http
sent = {"numbers": (np.arange(6).reshape(3, 2), "INT64"), "half": (np.ones(3, np.float16), "FP16"),
        "words": (np.array([["a", "b"]] * 3, object), "BYTES")}
for url, package, ways in ((sys.argv[1], tritonclient.http, ({"binary_data": True}, {"binary_data": False})),
                           (sys.argv[2], tritonclient.grpc, ({},))):
    client = package.InferenceServerClient(url)
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("mixing")
    for way in ways:
        inputs = [package.InferInput(name, list(array.shape), kind) for name, (array, kind) in sent.items()]
        for tensor in inputs:
            tensor.set_data_from_numpy(sent[tensor.name()][0], **(way if tensor.name() != "half" else {}))
        result = client.infer("mixing", inputs, request_id="7", model_version="mixed:fp32-t1-b8")
        np.testing.assert_array_equal(result.as_numpy("double"), 2 * sent["numbers"][0])
        assert [word.decode() for word in result.as_numpy("same").flat] == ["a", "b"] * 3
        np.testing.assert_array_equal(result.as_numpy("less"), sent["half"][0])
    client.close()
"""


def test_tritons_own_client(served: Served) -> None:
    if importlib.util.find_spec("tritonclient") is None:
        pytest.skip("needs tritonclient[http]")
    # in a process of its own: it has the protocol's messages under the same names
    command = [sys.executable, "-c", TRITON, served.url.removeprefix("http://"), served.rpc]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
