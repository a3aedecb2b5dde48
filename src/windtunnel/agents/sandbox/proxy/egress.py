"""The way out of a sandbox whose network is ``egress``: one HTTP proxy and one name server, on the host.

The sandbox's own network has a loopback device and nothing else. On it the host listens on port 3128 for
``CONNECT`` and for requests of ``http://`` URLs, and on port 53 for DNS. Both go by one list, and to public
addresses alone, whatever a name resolves to; one that is not public (the host's own, a private network's) is
reached where the list names that address. A name is resolved once, and the address that was judged is
connected to. Nothing of TLS is read. Each decision is a line of ``egress.log`` in the sandbox's folder.

Source: RFC 9110 (section 9.3.6, CONNECT), RFC 9112 (section 3.2.2, absolute-form), RFC 1035 (section 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from windtunnel.agents.sandbox.proxy.upstream import HOP_BY_HOP, named_in_connection
from windtunnel.base.errors import UserError

PROXY_PORT, DNS_PORT = 3128, 53
USUAL_PORTS = (80, 443)
"""Of an entry of the list that names no port."""
MOST = 64
"""Connections of one sandbox and its questions for names, all together."""
LARGEST_HEAD = 16 * 1024
HEAD_SECONDS, CONNECT_SECONDS, TIME_TO_LIVE = 30.0, 15.0, 30
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NOT_PUBLIC = [
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/3"),
        # IPv6's public addresses are in 2000::/3; of these, Teredo and 6to4 hide an IPv4 address
        *("::/3", "4000::/2", "8000::/1", "2001::/32", "2002::/16"),
    )
]
"""IANA's special-purpose addresses, but for those of documents, which lead nowhere."""
LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}$)({LABEL}\.)*{LABEL}")
LINE = re.compile(rb"([A-Z]{1,20}) ([\x21-\x7e]+) HTTP/1\.[01]")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff\t]*)")


class EgressRefused(Exception):
    """The client inside is answered with this status and these words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


# --- the list: entries are a name, *.name, * or an address, each with its port or None ----------------------

Allowed = tuple[tuple[str, int | None], ...]


def parse_allowed(network: str) -> Allowed:
    """The list of ``egress`` (every public host) or ``egress:ENTRY,…``. Raises UserError."""
    entries: list[tuple[str, int | None]] = []
    for text in network.split(":", 1)[1].split(",") if ":" in network else ["*"]:
        name, port = _split_port(text.strip().lower())
        literal = _literal(name)
        if (literal is None and name != "*" and not HOST.fullmatch(name.removeprefix("*."))) or port == 0:
            raise UserError(
                f"sandbox: network {network!r}: {text!r} is not accepted; give host, *.host or an address, "
                "and :port where it is neither 80 nor 443"
            )
        names = ("localhost", "127.0.0.1", "::1") if name == "localhost" else (str(literal or name),)
        entries += [(name, port) for name in names]
    return tuple(entries)


def is_listed(allowed: Allowed, host: str, port: int | None) -> bool:
    """Whether the list has that host, on that port (None: on any)."""
    return any(
        (name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])))
        and (port is None or (port in USUAL_PORTS if at is None else port == at))
        for name, at in allowed
    )


def reachable(
    allowed: Allowed, addresses: list[Address], port: int | None, own: set[Address]
) -> list[Address]:
    """Those addresses that are public, or named by the list. ``own``: the host's, which are not public."""
    literal = tuple(entry for entry in allowed if _literal(entry[0]) is not None)
    return [
        address
        for address in addresses
        if is_listed(literal, str(address), port)
        or (
            address not in own
            and not any(address in net for net in NOT_PUBLIC if net.version == address.version)
        )
    ]


def _split_port(text: str) -> tuple[str, int | None]:
    """``host:port`` or ``[address]:port``; a port that cannot be is 0."""
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?|([^:]*):([^:]*)", text)
    if match is None:
        return text, None
    name, port = (match[1], match[2]) if match[3] is None else (match[3], match[4])
    if port is None:
        return name, None
    return name, int(port) if re.fullmatch(r"[0-9]{1,5}", port) and int(port) < 2**16 else 0


def _literal(text: str) -> Address | None:
    """The address that ``text`` is; an IPv4 address in IPv6's form is that IPv4 address."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


# --- requests -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The head of a request to the proxy. ``sent``: the head that its host gets, empty for a tunnel;
    ``length``: bytes of body that go with it."""

    host: str
    port: int
    sent: bytes = b""
    length: int = 0


def read_head(text: bytes) -> Head:
    """Understand the head of a request, with its empty line. Raises EgressRefused."""
    first, *lines = text[:-4].split(b"\r\n")
    line, fields = LINE.fullmatch(first), [FIELD.fullmatch(line) for line in lines]
    if line is None or None in fields:
        raise EgressRefused(400, "the request is malformed")
    method, target = line[1], line[2].decode("ascii")
    if method == b"CONNECT":
        host, port = _split_port(target.lower())
        return Head(_host(host), port or 0)
    try:
        url = urlsplit(target)
        host, port = url.hostname or "", url.port or 80
    except ValueError:
        raise EgressRefused(400, "the request's URL is malformed") from None
    if url.scheme != "http" or "@" in url.netloc:
        raise EgressRefused(400, "this is a proxy: use CONNECT, or ask for an http:// URL")
    headers = [
        (field[1].decode("latin-1").lower(), field[2].decode("latin-1").strip()) for field in fields if field
    ]
    lengths = [value for name, value in headers if name == "content-length"]
    if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,18}", length) for length in lengths):
        raise EgressRefused(400, "content-length is malformed")
    if any(name == "transfer-encoding" for name, _ in headers):
        raise EgressRefused(411, "for http:// URLs, requests have a content-length; use https://")
    # what an upgrade offers is not taken up, as RFC 9110 (section 7.8) lets a server: the answer is HTTP/1.1
    left = (HOP_BY_HOP | named_in_connection(headers) | {"host"}) - {"content-length"}
    forwarded = [(name, value) for name, value in headers if name not in left and name[:6] != "proxy-"]
    forwarded = [("host", url.netloc), ("connection", "close"), *forwarded]
    path = f"{url.path or '/'}{'?' if url.query else ''}{url.query}"
    head = [f"{method.decode()} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in forwarded)]
    sent = "\r\n".join([*head, "", ""]).encode("latin-1")
    return Head(_host(host), port, sent, int(lengths[0]) if lengths else 0)


def _host(text: str) -> str:
    host = str(_literal(text) or text.removesuffix("."))
    if _literal(host) is None and not HOST.fullmatch(host):
        raise EgressRefused(400, "the name of the host is malformed")
    return host


async def _addresses(host: str) -> list[Address]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    every = [_literal(str(entry[4][0])) for entry in entries]
    return list(dict.fromkeys(address for address in every if address is not None))


def _own_addresses() -> set[Address]:
    every = [_literal(entry.address) for entries in psutil.net_if_addrs().values() for entry in entries]
    return {address for address in every if address is not None}


class Egress(asyncio.DatagramProtocol):
    """The way out of one sandbox. Lives on an event loop."""

    def __init__(self, network: str, log_file: Path) -> None:
        self._allowed = parse_allowed(network)
        self._handler = RotatingFileHandler(log_file, maxBytes=2**20, backupCount=1, delay=True)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        self._log = logging.Logger("egress")
        self._log.addHandler(self._handler)
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._names: asyncio.DatagramTransport | None = None

    async def listen(self, proxy: socket.socket, names: socket.socket) -> None:
        """Let the sandbox out by these sockets."""
        self._server = await asyncio.start_server(self._connected, sock=proxy, limit=LARGEST_HEAD)
        await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, sock=names)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._names is not None:
            self._names.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._handler.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- the proxy
    # ------------------------------------------------------------------------------------------

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._spawn(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        what = "a request"
        try:
            if len(self._tasks) > MOST:
                raise EgressRefused(503, f"more than {MOST} connections are under way")
            async with asyncio.timeout(HEAD_SECONDS):
                head = read_head(await reader.readuntil(b"\r\n\r\n"))
            what = f"{head.host}:{head.port}"
            from_host, to_host = await self._connect(head.host, head.port)
            self._log.info("allowed: %s", what)
            with contextlib.closing(to_host):
                if head.sent:
                    to_host.write(head.sent)
                    await copy_stream(reader, to_host, head.length)
                    await copy_stream(from_host, writer)
                else:
                    writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                    await asyncio.gather(copy_stream(reader, to_host), copy_stream(from_host, writer))
        except EgressRefused as refusal:
            self._log.info("refused: %s: %s", what, refusal)
            _refuse(writer, refusal.status, str(refusal))
        except asyncio.LimitOverrunError:
            _refuse(writer, 431, f"the request's head has more than {LARGEST_HEAD} bytes")
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass  # one end has gone, or says nothing
        finally:
            writer.close()

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first address that answers. Raises EgressRefused."""
        if not is_listed(self._allowed, host, port):
            raise EgressRefused(403, f"{host}:{port} is not on the list of this sandbox's network")
        try:
            addresses = await _addresses(host)
        except OSError as error:
            raise EgressRefused(502, f"{host} is not known: {error.strerror}") from None
        fit = reachable(self._allowed, addresses, port, _own_addresses())
        if not fit:
            words = ", ".join(map(str, addresses[:3]))
            raise EgressRefused(
                403, f"{host} is {words}, not a public address; the list must name the address"
            )
        fault = ""
        for address in fit[:4]:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(str(address), port)
            except (OSError, TimeoutError) as error:
                fault = str(error) or "it does not answer"
                continue
            # one that has gone without a word is found out
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return reader, writer
        raise EgressRefused(502, f"{host}:{port} cannot be reached: {fault}")

    # --- the name server
    # ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._names = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        if len(self._tasks) < MOST:
            self._spawn(self._answer(data, address))

    async def _answer(self, data: bytes, address: tuple[str, int]) -> None:
        """Answer a question for A or AAAA; another, or of a name that is not on the list, with none."""
        try:
            number, flags, questions = struct.unpack_from(">HHH", data)
            place, labels = 12, []
            while size := data[place]:
                labels.append(data[place + 1 : place + 1 + size].decode("ascii").lower())
                place += 1 + size
            kind, group = struct.unpack_from(">HH", data, place + 1)
        except (struct.error, IndexError, UnicodeDecodeError):
            return
        if flags & 0xF800 or questions != 1 or group != 1:
            return
        name, addresses, code = ".".join(labels), list[Address](), 0
        if not HOST.fullmatch(name) or not is_listed(self._allowed, name, None):
            self._log.info("refused: the name %s", ascii(name))
            code = 5
        elif version := {1: 4, 28: 6}.get(kind):
            with contextlib.suppress(OSError):
                every = reachable(self._allowed, await _addresses(name), None, _own_addresses())
                addresses = [entry for entry in every if entry.version == version][:8]
        reply = struct.pack(">HHHHHH", number, 0x8080 | flags & 0x0100 | code, 1, len(addresses), 0, 0)
        reply += data[12 : place + 5]
        for entry in addresses:
            reply += struct.pack(">HHHIH", 0xC00C, kind, 1, TIME_TO_LIVE, len(entry.packed)) + entry.packed
        if self._names is not None:
            self._names.sendto(reply, address)


async def copy_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None = None
) -> None:
    """All that comes, and its end; or ``length`` bytes. Raises OSError."""
    left = length
    while left != 0 and (data := await reader.read(min(left or 2**16, 2**16))):
        left = None if left is None else left - len(data)
        writer.write(data)
        await writer.drain()
    if left is None and writer.can_write_eof():
        writer.write_eof()


def _refuse(writer: asyncio.StreamWriter, status: int, words: str) -> None:
    # as the reason too: of a refused CONNECT most clients show nothing else
    reason, body = words.encode("ascii", "replace").decode(), f"windtunnel: {words}\n".encode()
    head = f"HTTP/1.1 {status} {reason}\r\ncontent-type: text/plain\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
