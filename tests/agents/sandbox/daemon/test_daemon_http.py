"""Other languages, and other hosts: the HTTP route as a program of somebody else uses it, and TCP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from agents.sandbox.daemon import fakehost
from support.certificates import Authority
from windtunnel.agents.sandbox.client import connect
from windtunnel.agents.sandbox.daemon.server import run as serve_home
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys

TOKEN = "t0ken-of-the-test"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """URLs of a daemon for TCP and for HTTP."""
    home = tmp_path_factory.mktemp("d")
    with fakehost.daemon(home, "--tcp", "0", "--http", "0", "--token", TOKEN) as process:
        assert process.stdout is not None
        tcp, http = (process.stdout.readline().strip() for _ in range(2))
        yield tcp, http


def ask(url: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {TOKEN}", **headers}
    return httpx.post(f"{url}/v1/{path}", json=body, headers=headers, trust_env=False, timeout=60)


def test_the_life_of_a_sandbox_by_http(served: tuple[str, str]) -> None:
    call = partial(ask, served[1])

    def value(method: str, on: str = "", **given: Any) -> Any:
        answer = call(method, {"on": on, "with": given})
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    assert value("host/create", spec={"name": "h", "limits": {"cpus": 1.5}}) == "h"
    result = value("sandbox/run", "h", command=["printf", "a b"], timeout=60)
    assert (base64.b64decode(result["stdout"]), result["exit_code"]) == (b"a b", 0)
    value("sandbox/put", "h", path="/f", data=base64.b64encode(b"\0\xff").decode())
    assert base64.b64decode(value("sandbox/get", "h", path="/f")) == b"\0\xff"
    assert value("sandbox/spec", "h")["limits"]["cpus"] == 1.5
    turn = value("sandbox/end_turn", "h", request="r")
    assert value("turn/wait", turn, timeout=60)["request"] == "r"
    manifest = value("sandbox/checkpoint", "h", full=True)
    assert manifest["turn_class"] == "full"
    assert value("host/fork", checkpoint=manifest["id"], count=2, name="i") == ["i-1", "i-2"]
    assert [sandbox["name"] for sandbox in value("host/boxes")] == ["h", "i-1", "i-2"]
    value("sandbox/run", "h", command="echo watched > odd")
    less = call("sandbox/checkpoint", {"on": "h"})
    assert (less.status_code, less.json()["error"]) == (417, "IncompleteError")
    assert less.json()["with"]["lacks"][0]["what"] == "odd (process 7 inside)"
    for name in ("h", "i-1", "i-2"):
        value("host/remove", name=name)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("host/create", {"with": {"spec": {"name": "b", "netwrok": "off"}}}, 400, "netwrok"),
        ("host/create", {"with": {}}, 400, "spec"),
        ("host/close", {}, 400, "unknown"),
        ("host/_claimed", {}, 400, "unknown"),
        ("host/boxes", {"with": {"x": 1}}, 400, "'x' is unknown"),
        ("host/boxes", {"over": "a"}, 400, "body"),
        ("host/boxes", [], 400, "body"),
        ("sandbox/get_to", {"on": "a", "with": {"path": "/x", "out": "y"}}, 400, "not accepted"),
        ("sandbox/info", {"on": "nope"}, 400, "unknown"),
        ("turn/wait", {"on": "nope"}, 400, "no turn"),
        ("nonsense/info", {}, 404, "accepted are"),
    ],
)
def test_what_is_no_call_is_refused_in_words(
    served: tuple[str, str], path: str, body: Any, status: int, words: str
) -> None:
    answer = ask(served[1], path, body)
    assert answer.status_code == status and words in answer.json()["text"]


def test_who_does_not_know_the_token_is_refused(served: tuple[str, str]) -> None:
    for wrong in ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
        assert ask(served[1], "host/boxes", Authorization=wrong).status_code == 401


def test_tcp_needs_the_token(served: tuple[str, str]) -> None:
    with connect(served[0], TOKEN) as client:
        assert client.create(SandboxSpec("t")).run("echo hi").stdout == b"hi\n"
        client.remove("t")
    for wrong in ("nope", TOKEN + "x", TOKEN[:-1]):
        with pytest.raises(UserError, match="is missing or wrong"):
            connect(served[0], wrong)


def test_a_connection_is_encrypted_between_those_with_certificates(daemon_home: Path, tmp_path: Path) -> None:
    ours, theirs = (Authority(tmp_path / name).issue("host") for name in ("ours", "theirs"))
    options = ["--tcp", "0", "--token", TOKEN, "--tls", *ours.paths]
    with fakehost.daemon(daemon_home, *options) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with connect(url, TOKEN, tls=ours.paths) as client:
            assert client.boxes() == []
        for tls in (None, theirs.paths):
            with pytest.raises(UserError, match="nobody answers"):
                connect(url, TOKEN, tls=tls)


def test_what_is_open_to_others_or_without_a_token_is_refused(
    daemon_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINDTUNNEL_SANDBOX_TOKEN", raising=False)
    keys, loopback = Keys(TOKEN.encode()), "127.0.0.1:0"
    for listening, words in (
        ({"tcp": loopback}, "--tcp needs a token"),
        ({"http": loopback}, "--http needs a token"),
        ({"tcp": loopback, "keys": Keys(b"short")}, "the token has 5 bytes"),
        ({"http": "0.0.0.0:0", "keys": keys}, "--tls-cert"),
        ({"tcp": "example.org:0", "keys": keys}, "--tls-cert"),
    ):
        with pytest.raises(UserError, match=words):
            serve_home(daemon_home, **listening)
    for url, token, words in (
        ("http://127.0.0.1:1", TOKEN, "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:x", TOKEN, "tcp://HOST:PORT"),
        ("tcp://127.0.0.1:1", None, "needs a token"),
        ("tcp://10.0.0.1:1", TOKEN, "--tls-cert"),
        ("tcp://127.0.0.1:1", "a b", "without spaces"),
    ):
        with pytest.raises(UserError, match=words):
            connect(url, token)
    assert not (daemon_home / "daemon.sock").exists()
