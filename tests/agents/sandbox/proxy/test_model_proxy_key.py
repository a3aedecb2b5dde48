"""The API key lies on the host alone: which header tells it, what is refused, and that it is nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, chat, plain
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.proxy import HostProxy, with_address
from windtunnel.agents.sandbox.proxy.upstream import CREDENTIALS, Upstream, key_header, read_key
from windtunnel.base.errors import UserError

KEY = "sk-hunter2-0123456789"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return written(tmp_path / "key", KEY + "\n")


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("path", "sent", "header"),
    [
        ("/v1/chat/completions", {}, ("authorization", f"Bearer {KEY}")),
        ("/v1/chat/completions", {"Authorization": "Bearer dummy"}, ("authorization", f"Bearer {KEY}")),
        ("/v1/messages", {"x-api-key": "dummy", "Authorization": "Bearer x"}, ("x-api-key", KEY)),
        ("/v1/messages/count_tokens", {}, ("x-api-key", KEY)),
        ("/v1/models", {"anthropic-version": "2023-06-01"}, ("x-api-key", KEY)),
        ("/openai/deployments/a/chat/completions", {"api-key": "dummy"}, ("api-key", KEY)),
    ],
)
def test_key_is_told_as_the_api_wants_it(path: str, sent: dict[str, str], header: tuple[str, str]) -> None:
    name, value = key_header(KEY, path, frozenset(key.lower() for key in sent))
    assert (name, value) == header


def test_key_replaces_what_the_agent_sent_and_can_be_changed(
    bench: Bench, proxy: HostProxy, key_file: Path
) -> None:
    box = bench.serve(proxy, FakeBox(), upstream=Upstream(bench.model.url, key_file=key_file))
    dummies = {"Authorization": "Bearer dummy", "x-api-key": "dummy"}
    bench.ask(box, chat("one"), **dummies).reply()
    written(key_file, "second")
    bench.ask(box, chat("two"), **dummies).reply()
    written(key_file, "X-Own: Token third")
    bench.ask(box, chat("three"), **dummies).reply()
    sent = [
        {k: v for k, v in call.headers.items() if k in {*CREDENTIALS, "x-own"}} for call in bench.model.calls
    ]
    assert sent == [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": "Bearer second"},
        {"x-own": "Token third"},
    ]


def test_key_that_others_can_read_is_used_no_more(bench: Bench, proxy: HostProxy, key_file: Path) -> None:
    box = bench.serve(proxy, FakeBox(), upstream=Upstream(bench.model.url, key_file=key_file))
    asked = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    assert plain(bench.ports[box.name], asked)[0] == 200
    key_file.chmod(0o640)
    status, body = plain(bench.ports[box.name], asked)
    assert (status, b"readable by nobody else" in body) == (503, True)
    key_file.unlink()
    status, body = plain(bench.ports[box.name], asked)
    assert (status, b"cannot be read: No such file" in body) == (503, True)
    assert KEY.encode() not in body
    assert len(bench.model.calls) == 1


def test_files_that_hold_no_key_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for text in ("", "two\nlines", "two words", "a: \x01", "k" * 20_000, "tab\there", "ké"):
        with pytest.raises(UserError, match="must hold one line") as refused:
            read_key(written(file, text))
        assert not text or text not in str(refused.value)
    for mode in (0o644, 0o604, 0o660, 0o601):
        with pytest.raises(UserError, match="readable by nobody else"):
            read_key(written(file, KEY, mode))
    if os.geteuid() == 0:
        os.chown(written(file, KEY), 1000, 1000)
        with pytest.raises(UserError, match="must belong to user 0"):
            read_key(file)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(UserError, match="not a regular file"):
        read_key(file)
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_key(tmp_path)


def test_a_sandbox_is_not_made_with_a_key_that_cannot_be_used(key_file: Path) -> None:
    spec = SandboxSpec("a", network="proxy", proxy_upstream="https://host", proxy_key_file=str(key_file))
    assert with_address(spec).proxy_key_file == str(key_file)
    key_file.chmod(0o644)
    with pytest.raises(UserError, match="readable by nobody else"):
        with_address(spec)
    with pytest.raises(UserError, match="absolute"):
        with_address(SandboxSpec("a", network="proxy", proxy_upstream="https://host", proxy_key_file="key"))
    with pytest.raises(UserError, match="network 'proxy'"):
        with_address(SandboxSpec("a", proxy_key_file=str(key_file)))
