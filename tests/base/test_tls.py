"""Connections with certificates: who is refused, and that what passes is encrypted and whole."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.between import between, relay
from support.certificates import Authority, Issued
from windtunnel.base import handshake, tls, wire
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.base.tls import Certificates, Untrusted

KEYS = Keys(b"a secret of the tests")
MARK = b"THE-WEIGHTS-OF-A-SECRET-MODEL"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def host(authority: Authority) -> Issued:
    return authority.issue("host")


@pytest.fixture
def address(host: Issued) -> Iterator[str]:
    """A service that sends every frame back."""

    def serve(sock: socket.socket) -> None:
        while True:
            message, following = wire.receive(sock)
            wire.send(sock, message, wire.rest(sock, following))

    sock = socket.create_server(("127.0.0.1", 0))
    keys = replace(KEYS, tls=host.load())
    listener = Listener(sock, serve, keys=keys, services=lambda: ("x",))
    yield f"127.0.0.1:{sock.getsockname()[1]}"
    listener.close()


def said_back(address: str, keys: Keys, data: bytes = b"") -> bytes:
    with handshake.connect(address, 10.0, keys, "x") as sock:
        wire.send(sock, {"op": "a"}, data)
        message, following = wire.receive(sock)
        assert message == {"op": "a"}
        return bytes(wire.rest(sock, following))


def test_two_hosts_of_a_ca_talk_and_a_listener_learns_nothing(
    address: str, host: Issued, authority: Authority
) -> None:
    other = replace(KEYS, tls=authority.issue("other").load())
    overheard = bytearray()
    data = MARK + os.urandom(3 << 20)
    with between(address, lambda client, server: relay(client, server, overheard)) as through:
        assert said_back(through, other, data) == data
    assert len(overheard) > 2 * len(data) and MARK not in overheard and b'"op"' not in overheard


def test_one_thread_sends_while_another_receives(address: str, host: Issued) -> None:
    """Both are in the midst of it all the time: more is under way than the kernel takes."""
    data, count = os.urandom(1 << 20), 12
    with handshake.connect(address, 30.0, replace(KEYS, tls=host.load()), "x") as sock:

        def send() -> None:
            for at in range(count):
                wire.send(sock, {"at": at}, data)

        sender = threading.Thread(target=send)
        sender.start()
        for at in range(count):
            message, following = wire.receive(sock)
            assert message == {"at": at} and wire.rest(sock, following) == data
        sender.join(30.0)


def refused(address: str, keys: Keys, sentence: str) -> None:
    with pytest.raises(Untrusted, match=sentence):
        said_back(address, keys)


def test_who_has_no_certificate_of_the_ca_is_refused_and_told(
    address: str, host: Issued, authority: Authority, tmp_path: Path
) -> None:
    mine = replace(KEYS, tls=host.load())
    refused(address, KEYS, "asks for TLS; give --tls-cert")
    stranger = Authority(tmp_path / "theirs").issue("stranger")
    refused(address, replace(KEYS, tls=stranger.load()), "certificate is refused: ")  # and so is ours by it
    knows = replace(stranger, ca=host.ca)  # it takes us, but shows a certificate of another CA
    refused(address, replace(KEYS, tls=knows.load()), "refuses this side's certificate .*unknown ca")
    expired = authority.expired("past")
    refused(address, replace(KEYS, tls=expired.load()), "refuses this side's .*expired")
    with pytest.raises(handshake.HandshakeRefused, match="does not know the job's secret"):
        said_back(address, Keys(b"another secret of tests", mine.tls))
    assert said_back(address, mine, b"still there") == b"still there"


def test_what_is_not_tls_1_3_with_a_certificate_gets_no_word_of_ours(address: str, host: Issued) -> None:
    where, _, port = address.rpartition(":")
    for first in (b"GET / HTTP/1.1\r\n\r\n", b"wtunnel1" + bytes(64), b"\x16\x03\x01\xff\xff" + bytes(500)):
        with socket.create_connection((where, int(port)), 10.0) as sock:
            sock.sendall(first)
            with contextlib.suppress(ConnectionResetError):
                assert b"".join(iter(lambda: sock.recv(4096), b""))[:2] in (b"", tls.ALERT[:2])
    for newest, shows in ((ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, False)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = newest
        if shows:
            context.load_cert_chain(host.cert, host.key)
        plain = socket.create_connection((where, int(port)), 10.0)
        with plain, pytest.raises(OSError), context.wrap_socket(plain) as sock:
            sock.sendall(handshake.ClientHandshake(KEYS, "x").hello)
            sock.recv(1)
    assert said_back(address, replace(KEYS, tls=host.load()), b"x") == b"x"


def test_who_connects_with_tls_talks_to_nobody_without(host: Issued) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        listener = Listener(sock.dup(), lambda _: None, keys=KEYS, services=lambda: ("x",))
        refused(f"127.0.0.1:{sock.getsockname()[1]}", replace(KEYS, tls=host.load()), "it may speak without")
        listener.close()


def test_a_certificate_of_the_ca_is_not_enough_in_the_middle(
    address: str, host: Issued, authority: Authority
) -> None:
    """He ends both sides' TLS with a certificate that both take, and passes on all that they say."""
    own = authority.issue("middle").load()
    overheard = bytearray()

    def meddle(client: socket.socket, server: socket.socket) -> None:
        there = own.connected(server, 10.0)
        back = own.accepted(client)
        back.settimeout(10.0)
        back.do_handshake()
        relay(back, there, overheard)

    with (
        between(address, meddle) as through,
        pytest.raises(handshake.HandshakeRefused, match="does not know the job's secret"),
    ):
        said_back(through, replace(KEYS, tls=host.load()), MARK)
    assert overheard and MARK not in overheard


def test_a_stranger_who_is_silent_or_slow_has_his_time_in_all(
    host: Issued, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "PATIENCE", 0.3)
    keys = replace(KEYS, tls=host.load())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for words in (b"", b"\x16\x03\x01\x02\x00\x01"):
            with socket.create_connection(listener.getsockname()) as client:
                assert keys.tls is not None
                sock = keys.tls.accepted(listener.accept()[0])
                client.sendall(words)
                with sock, pytest.raises(TimeoutError):
                    handshake.admit(sock, keys, ("x",))


def test_files_that_will_not_do_are_named_at_once(authority: Authority, host: Issued, tmp_path: Path) -> None:
    def fault(issued: Issued, *, verify: bool = False) -> str:
        with pytest.raises(UserError) as caught:
            credentials = issued.load()
            if verify:
                credentials.verify()
        return str(caught.value)

    host.load().verify()
    other = authority.issue("second")
    for at, option in enumerate(tls.OPTIONS):
        paths = [tmp_path / "none" if at == which else Path(path) for which, path in enumerate(host.paths)]
        assert (
            fault(Issued(*paths))
            == f"{option} {tmp_path}/none: it cannot be read (No such file or directory)"
        )
    assert "is not the key of --tls-cert" in fault(replace(host, key=other.key))
    assert "there is no certificate in it" in fault(replace(host, ca=host.key))
    assert "no certificate and key that can be read" in fault(replace(host, key=host.cert_as_key(tmp_path)))
    assert "certificate has expired" in fault(authority.expired("past"), verify=True)
    stranger = Authority(tmp_path / "theirs")
    assert "does not hold against" in fault(replace(host, ca=stranger.ca), verify=True)
    assert "needs a password" in fault(replace(host, key=host.locked(tmp_path)))
    loose = tmp_path / "loose.key"
    loose.write_bytes(host.key.read_bytes())
    loose.chmod(0o644)
    assert "others may read or write the key (mode 0644)" in fault(replace(host, key=loose))
    assert tls.certificate_files(None, None, None) == ()
    with pytest.raises(UserError, match=r"--tls-key FILE is missing: .* together, or none"):
        tls.certificate_files(host.cert, None, host.ca)
    assert Certificates.load(tls.certificate_files(host.cert, host.key, host.ca)).paths == host.paths
    assert "PRIVATE" not in repr(host.load())
