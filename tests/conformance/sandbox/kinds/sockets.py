"""Sockets, with what is under way in them."""

from __future__ import annotations

import errno
import os
import socket
import struct
import tempfile

from .ground import (
    Kind,
    Wrong,
    asked,
    child,
    ended_well,
    expect,
    in_child,
    nothing_to_read,
    passed,
    readable,
    taken,
)


def _pair(
    family: int = socket.AF_INET, address: str = "127.0.0.1"
) -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket and both ends of a connection to it."""
    server = socket.socket(family)
    server.bind((address, 0))
    server.listen(5)
    client = socket.create_connection(server.getsockname()[:2])
    return server, client, server.accept()[0]


def _whole(channel: socket.socket, size: int) -> bytes:
    """That many bytes, however many pieces they come in."""
    text = b""
    while len(text) < size:
        readable(channel.fileno(), "the connection")
        piece = channel.recv(size - len(text))
        if not piece:
            raise Wrong(f"the connection ended after {len(text)} of {size} bytes")
        text += piece
    return text


def tcp() -> Kind:
    """A connection inside, with unread data both ways, and its options; the server takes further ones."""
    server, client, ours = _pair()
    client.sendall(b"to the server" * 1000)
    ours.sendall(b"to the client" * 1000)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 9, 0))
    yield
    for end, text in ((ours, b"to the server"), (client, b"to the client")):
        expect("unread data", _whole(end, len(text) * 1000), text * 1000)
        nothing_to_read(end.fileno(), "the connection")
    expect("TCP_NODELAY", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), 1)
    expect("SO_KEEPALIVE", ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), 1)
    expect("TCP_KEEPIDLE", ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE), 77)
    big = os.urandom(1 << 20)
    writer = child(lambda: client.sendall(big))
    expect("a megabyte more", _whole(ours, 1 << 20), big)
    ended_well(writer, "its sender")
    again = socket.create_connection(server.getsockname())
    server.accept()[0].sendall(b"hello")
    expect("a new connection", again.recv(10), b"hello")


def tcp_6() -> Kind:
    """A connection inside by IPv6."""
    asked(lambda: socket.socket(socket.AF_INET6).bind(("::1", 0)), "IPv6")
    _, client, ours = _pair(socket.AF_INET6, "::1")
    client.sendall(b"six")
    yield
    expect("unread data", ours.recv(10), b"six")
    ours.sendall(b"back")
    expect("the answer", client.recv(10), b"back")


def tcp_half_closed() -> Kind:
    """A connection that one side has closed for writing, with data unread before its end."""
    _, client, ours = _pair()
    client.sendall(b"question")
    client.shutdown(socket.SHUT_WR)
    _, other, theirs = _pair()
    other.sendall(b"read")
    expect("what was read before", theirs.recv(4), b"read")
    other.shutdown(socket.SHUT_WR)
    yield
    for end in (ours, theirs, client, other):
        end.settimeout(25)
    expect("unread data", ours.recv(100), b"question")
    expect("its end", ours.recv(100), b"")
    expect("the end", theirs.recv(100), b"")
    ours.sendall(b"answer")
    ours.close()
    expect("the answer", client.recv(100), b"answer")
    expect("the answer's end", client.recv(100), b"")
    theirs.sendall(b"too")
    expect("the other answer", other.recv(100), b"too")


def tcp_closed_by_peer() -> Kind:
    """A connection whose other end was closed while data were unread."""
    _, client, ours = _pair()
    client.sendall(b"last words")
    client.close()
    yield
    ours.settimeout(5)
    expect("unread data", ours.recv(100), b"last words")
    expect("its end", ours.recv(100), b"")


def tcp_not_accepted() -> Kind:
    """A connection that waits in the queue of a listening socket."""
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    client.sendall(b"hello")
    yield
    server.settimeout(2)
    client.settimeout(2)
    try:
        ours = server.accept()[0]
        ours.settimeout(2)
        expect("what it sent", ours.recv(10), b"hello")
        ours.sendall(b"back")
        expect("the answer", client.recv(10), b"back")
    except TimeoutError:
        pass
    else:
        return
    try:
        client.recv(10)
    except TimeoutError:
        raise Wrong("the connection is in no queue, and its client is told nothing") from None
    except OSError as error:
        raise Wrong(f"the connection is in no queue; its client is told: {error.strerror}") from None


def tcp_waits() -> Kind:
    """A child that waits in accept, and one in recv."""
    server, client, ours = _pair()

    def accept() -> None:
        expect("what came", server.accept()[0].recv(10), b"to accept")

    def receive() -> None:
        expect("what came", ours.recv(10), b"to recv")

    waiters = child(accept), child(receive)
    yield
    client.sendall(b"to recv")
    socket.create_connection(server.getsockname()).sendall(b"to accept")
    for waiter in waiters:
        ended_well(waiter, "the child that waits")


def udp() -> Kind:
    """UDP sockets, bound and connected."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 300_000)
    size = server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.connect(server.getsockname())
    yield
    client.send(b"question")
    server.settimeout(5)
    text, sender = server.recvfrom(100)
    expect("the question", text, b"question")
    server.sendto(b"answer", sender)
    expect("the answer", client.recv(100), b"answer")
    expect("the buffer", server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), size)


def udp_unread() -> Kind:
    """Datagrams of UDP that were not read yet."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("127.0.0.1", 0))
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.sendto(b"one", server.getsockname())
    client.sendto(b"two", server.getsockname())
    yield
    readable(server.fileno(), "the socket with datagrams", 1)
    expect("datagrams", [server.recv(100), server.recv(100)], [b"one", b"two"])


def unix_stream() -> Kind:
    """Connected Unix sockets with data under way, and a listening one by name."""
    with socket.socket(socket.AF_UNIX) as _:
        pass
    server = socket.socket(socket.AF_UNIX)
    server.bind("door")
    server.listen(3)
    client = socket.socket(socket.AF_UNIX)
    client.connect("door")
    ours = server.accept()[0]
    client.sendall(b"one way")
    ours.sendall(b"the other way")
    left, right = socket.socketpair()
    left.sendall(b"pair")
    yield
    expect("one way", ours.recv(100), b"one way")
    expect("the other way", client.recv(100), b"the other way")
    expect("the pair", right.recv(100), b"pair")
    again = socket.socket(socket.AF_UNIX)
    again.connect("door")
    server.accept()[0].sendall(b"hello")
    expect("a new connection", again.recv(10), b"hello")
    me = struct.unpack("iii", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    expect("who the peer is", me, os.getpid())


def unix_not_accepted() -> Kind:
    """A connection that waits in the queue of a listening Unix socket."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("door")
    server.listen(3)
    client = socket.socket(socket.AF_UNIX)
    client.connect("door")
    client.sendall(b"hello")
    yield
    server.settimeout(5)
    expect("what it sent", server.accept()[0].recv(10), b"hello")


def unix_datagram() -> Kind:
    """Unix datagram and seqpacket sockets keep the borders of messages under way."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    server.bind("box")
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.connect("box")
    client.send(b"one")
    client.send(b"second")
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.send(b"first")
    left.send(b"next")
    yield
    expect("datagrams", [server.recv(100), server.recv(100)], [b"one", b"second"])
    expect("packets", [right.recv(100), right.recv(100)], [b"first", b"next"])
    client.send(b"again")
    expect("a new one", server.recv(100), b"again")


def unix_abstract() -> Kind:
    """Abstract Unix sockets, listening and connected."""
    name = f"\0windtunnel-{os.getpid()}"
    server = socket.socket(socket.AF_UNIX)
    server.bind(name)
    server.listen(3)
    client = socket.socket(socket.AF_UNIX)
    client.connect(name)
    ours = server.accept()[0]
    ours.sendall(b"hello")
    yield
    expect("data", client.recv(10), b"hello")

    def other() -> None:
        again = socket.socket(socket.AF_UNIX)
        again.connect(name)
        again.sendall(b"new")

    in_child(other, "a new connection by the abstract name")
    expect("what it sent", server.accept()[0].recv(10), b"new")


def unix_deleted_name() -> Kind:
    """A listening Unix socket whose file was deleted, and one in a folder that was replaced."""
    server = socket.socket(socket.AF_UNIX)
    server.bind("door")
    server.listen(3)
    client = socket.socket(socket.AF_UNIX)
    client.connect("door")
    ours = server.accept()[0]
    os.unlink("door")
    yield
    ours.sendall(b"hello")
    expect("data", client.recv(10), b"hello")
    expect("whether the name is back", os.path.exists("door"), False)


def descriptors_received() -> Kind:
    """Descriptors that came over a socket from a child that is gone."""
    left, right = socket.socketpair()

    def send() -> None:
        with open("data", "w+") as file:
            file.write("passed on")
            file.flush()
            passed(left, file.fileno())
        reader, writer = os.pipe()
        os.write(writer, b"in the pipe")
        passed(left, reader)

    in_child(send, "the sender")
    (_, file), (_, reader) = taken(right), taken(right)
    yield
    expect("the file", os.pread(file, 100, 0), b"passed on")
    expect("the pipe", os.read(reader, 100), b"in the pipe")
    expect("the pipe's end", os.read(reader, 100), b"")


def descriptors_under_way() -> Kind:
    """Descriptors under way in a message that nobody has read yet, between two processes."""
    left, right = socket.socketpair()
    with open("data", "w+") as file:
        file.write("under way")
        file.flush()
        passed(left, file.fileno(), b"take this")
    reader, writer = os.pipe()
    passed(left, reader, b"and this")
    os.close(reader)
    yield
    readable(right.fileno(), "the message")
    message, descriptor = taken(right)
    expect("what came first", (message, os.pread(descriptor, 100, 0)), (b"take this", b"under way"))
    message, descriptor = taken(right)
    os.write(writer, b"hello")
    expect("what came next", (message, os.read(descriptor, 10)), (b"and this", b"hello"))


def netlink() -> Kind:
    """A netlink socket of routes, as getaddrinfo and event loops have it."""
    line = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    line.bind((0, 0))
    yield
    line.settimeout(5)
    line.send(struct.pack("IHHIIB15x", 32, 18, 0x301, 1, 0, 0))
    expect("the answer's kind", struct.unpack_from("IHH", line.recv(65536))[1], 16)


def packet_socket() -> Kind:
    """A packet socket."""
    asked(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x300), "AF_PACKET")
    yield


def crypto_socket() -> Kind:
    """A socket of the kernel's own cryptography (AF_ALG)."""
    asked(lambda: socket.socket(38, socket.SOCK_SEQPACKET), "AF_ALG")
    yield


def machine_socket() -> Kind:
    """A socket between virtual machines (AF_VSOCK)."""
    asked(lambda: socket.socket(40, socket.SOCK_STREAM), "AF_VSOCK")
    yield


def unix_peer_is_gone() -> Kind:
    """Unix sockets whose other end is closed, with data left."""
    left, right = socket.socketpair()
    left.sendall(b"left behind")
    left.close()
    folder = tempfile.mkdtemp(dir=".")
    other = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.bind(f"{folder}/box")
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.connect(f"{folder}/box")
    other.close()
    yield
    expect("data", right.recv(100), b"left behind")
    expect("the end", right.recv(100), b"")
    try:
        sender.send(b"x")
    except OSError as error:
        expect("the error of a lost peer", errno.errorcode.get(error.errno or 0), "ECONNREFUSED")
        return
    raise Wrong("a datagram was sent to nobody")
