"""A job whose connections are encrypted, from outside: who is no host of it does not get in, and is told."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_helpers import STAYS, environment, kinds, script
from typer.testing import CliRunner

from support.certificates import Authority, Issued
from support.waiting import until
from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.tls import ALERT, Untrusted
from windtunnel.cli.main import app
from windtunnel.store import eventlog
from windtunnel.training import cleanup
from windtunnel.training.launch import launch

WINDTUNNEL = str(Path(sys.executable).with_name("windtunnel"))


class Job:
    """A job on hosts that come by `windtunnel host`, each with a certificate of its own."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.folder, self._authority = folder / "run", authority
        settings: dict[str, Any] = {"hosts": 2, "preload": (), "folder": self.folder, "lease": 5.0}
        given = authority.issue("launcher").paths
        self.launched = launch(script(folder, STAYS), **settings, listen="127.0.0.1:0", tls=given)
        self.lent: list[subprocess.Popen[bytes]] = []

    def lend(self, name: str) -> None:
        words = [WINDTUNNEL, *self.asks, *self._authority.issue(name).options]
        self.lent.append(subprocess.Popen(words, env=environment()))

    @property
    def asks(self) -> list[str]:
        return ["host", self.launched._offer.address, "--secret-file", str(self.folder / "secret")]

    def of(self, kind: str) -> list[dict[str, Any]]:
        return kinds(self.launched.events(), kind)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture
def job(tmp_path: Path, authority: Authority) -> Iterator[Job]:
    job = Job(tmp_path, authority)
    yield job
    job.launched.close()
    for process in job.lent:
        process.terminate()
        process.wait(60)
    cleanup.sweep()


def strike(address: str, service: str, keys: Keys, good: Issued, strangers: list[Keys]) -> None:
    """No words but those of TLS come back; who has no certificate learns why."""
    host, _, port = address.rpartition(":")
    words = wire.frame({"op": "hello", "host": None, "workers": [], "address": "x", "memory": "x"}, 0, None)
    for first in (words, b"GET / HTTP/1.1\r\n\r\n", handshake.ClientHandshake(keys, service).hello):
        with socket.create_connection((host, int(port)), 10.0) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(first)
            assert b"".join(iter(lambda: sock.recv(4096), b"")) in (b"", ALERT)
    for stranger in strangers:
        with pytest.raises(Untrusted):
            handshake.connect(address, 10.0, stranger, service)
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname, older.verify_mode = False, ssl.CERT_NONE
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    older.load_cert_chain(good.cert, good.key)
    plain = socket.create_connection((host, int(port)), 10.0)
    with plain, pytest.raises(OSError), older.wrap_socket(plain):
        pass


def test_only_hosts_with_certificates_of_the_ca_get_in(
    job: Job, authority: Authority, tmp_path: Path
) -> None:
    """The job has a host killed, and goes on, while strangers try every port of it."""
    secret = Keys.read(job.folder / "secret")
    theirs = Authority(tmp_path / "theirs").issue("stranger")
    posing, expired = replace(theirs, ca=authority.ca), authority.expired("past")
    for options, sentence in (
        ([], "asks for TLS; give --tls-cert, --tls-key, --tls-ca"),
        (theirs.options, "certificate is refused"),
        (expired.options, "certificate has expired"),
        (theirs.options[:4], "--tls-ca FILE is missing"),
    ):
        refusal = CliRunner().invoke(app, [*job.asks, *options])
        assert isinstance(refusal.exception, UserError) and sentence in str(refusal.exception)
    for name in ("first", "second"):
        job.lend(name)
    until(lambda: len(job.of("here")) == 2)
    strangers = [secret, *(replace(secret, tls=files.load()) for files in (theirs, posing, expired))]
    good = authority.issue("good")
    memory = [event["memory"] for event in job.of("host.joined")]
    services = {
        job.launched._offer.address: "rpc",
        job.of("started")[-1]["address"]: "rpc",
        **{address: f"memory {address}" for address in memory},
    }
    assert len(services) == 4
    for address, service in services.items():
        strike(address, service, secret, good, strangers)
        insider = replace(secret, tls=good.load())
        handshake.connect(address, 10.0, insider, service).close()  # the port is open to who may come in
    job.lent[0].kill()
    job.lend("third")
    until(lambda: {event["generation"] for event in job.of("here")} >= {2})
    (job.folder / "stop").touch()
    outcome = job.launched.wait(60)
    assert outcome is not None and outcome.status == 0, outcome
    assert [process.wait(60) for process in job.lent] == [-9, 0, 0]
    assert len(job.of("host.joined")) == 3  # nobody else
    for path in (path for path in job.folder.rglob("*") if path.is_file()):
        assert b"PRIVATE KEY" not in path.read_bytes(), path


def test_certificates_that_will_not_do_are_refused_before_anything_starts(
    tmp_path: Path, authority: Authority
) -> None:
    path = str(script(tmp_path, STAYS))
    host = authority.issue("refused")
    other = replace(host, key=authority.issue("other").key)
    for options, sentence in (
        (host.options[:2], "--tls-key FILE is missing"),
        (other.options, "is not the key of --tls-cert"),
        (authority.expired("past").options, "certificate has expired"),
    ):
        refusal = CliRunner().invoke(app, ["train", "--out", str(tmp_path / "run"), *options, path])
        assert isinstance(refusal.exception, UserError) and sentence in str(refusal.exception)
        assert not (tmp_path / "run" / eventlog.NAME).exists()
