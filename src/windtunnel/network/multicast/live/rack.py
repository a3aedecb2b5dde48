"""What a rack does: take what its feeder sends, relay it where the rules say so, ask for what it lacks.

Data come over a splitter, or in answer to a request over the electrical network; either way a packet is kept
and relayed when it comes for the first time. Every datagram bears the 64-bit token of its multicast: what is
of another one, or forged without it, is counted and forgotten, and the whole is held against a digest. Who
can read the wire can forge.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from windtunnel.linux.network import INTERFACE
from windtunnel.network.multicast.live.racks import LARGEST, Message, address
from windtunnel.network.multicast.policy import decide
from windtunnel.network.multicast.policy.repair import GIVE_UP, MOST, WAIT, MissingPackets
from windtunnel.store.eventlog import EventLog

HEAD = struct.Struct("!4sQBI")
MAGIC, DATA, REQUEST = b"wtmc", 0, 1
PAYLOAD, PORT, BUFFER = 8192, 7100, 1 << 22
PATIENCE, TURN, WAITING = 0.02, 32, 4096
"""Seconds that a hop may take before something is missed; datagrams of a socket at a time; answers that wait
at most: what is asked for beyond that is asked for again."""
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # SO_…, which Python does not name
AHEAD = 0.05
"""Seconds of its port's rate that a rack hands to the kernel ahead (which counts twice as much, for its own
bookkeeping): a relay that gets no CPU for so long does not leave its port idle. Its queue holds more."""
EVERYONE = ("255.255.255.255", PORT)


def port(device: str, rate: float) -> socket.socket:
    """A socket of one device alone."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, max(4 * PAYLOAD, min(BUFFER, int(rate * AHEAD))))
    sock.bind(("", PORT))
    sock.setblocking(False)
    return sock


def serve(rack: int, control: socket.socket, parts: Mapping[str, Callable[[Message], Message]]) -> None:
    """Do what the controller says, until it is gone: take part in a multicast, or do another of ``parts``."""
    sockets: dict[str, socket.socket] = {}
    while data := control.recv(LARGEST):
        message = json.loads(data)
        if message["op"] in parts:
            control.send(json.dumps(parts[message["op"]](message)).encode())
        elif message["op"] == "take":
            for device in (INTERFACE, "tx", *(f"rx{place}" for place in range(message["p"]))):
                if device not in sockets:
                    sockets[device] = port(device, message["rate"])
            try:
                response = RackTransfer(rack, control, sockets, message).run()
            except OSError as error:
                response = {"op": "failed", "why": f"rack {rack}: {error}"}
            control.send(json.dumps(response).encode())


class RackTransfer:
    """One multicast at one rack. Raises OSError: it has no room for the data (here, and `run`)."""

    def __init__(
        self, rack: int, control: socket.socket, sockets: Mapping[str, socket.socket], spec: Message
    ) -> None:
        self._rack, self._control, self._spec = rack, control, spec
        self._plain, self._out = sockets[INTERFACE], sockets["tx"]
        self._ins = {plug.fileno(): plug for name, plug in sockets.items() if name != "tx"}
        for sock in self._ins.values():  # what an earlier multicast has left
            while _received(sock) is not None:
                pass
        self._draw = random.Random(f"{spec['seed']} {rack}")
        self._log = EventLog(Path(spec["log"])) if spec["log"] else None
        self._count = -(-spec["size"] // PAYLOAD)
        self._relay: deque[int] = deque()
        self._answers: deque[tuple[int, int]] = deque()
        self._follow(spec)
        source = rack == spec["source"]
        self._have = bytearray([source]) * self._count
        self._got: int = self._count if source else 0
        self._next: int = self._got
        self._missing: dict[int, None] = {}
        self._since, self._requests = time.monotonic(), 0
        counted = ("refused", "twice", "asked", "answered", "relayed")
        self._report: Message = {"op": "whole"} | dict.fromkeys(counted, 0)
        self._part: Path | None = None
        if source:
            self._file = os.open(spec["file"], os.O_RDONLY)
        elif spec["out"]:
            self._part = Path(spec["out"]) / f"rack-{rack}" / (Path(spec["file"]).name + ".part")
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        else:
            self._file = os.memfd_create("multicast")
        try:
            if not source and spec["size"]:
                os.posix_fallocate(self._file, 0, spec["size"])  # a full disk is told before anything is sent
        except OSError as error:
            self._leave()
            error.filename = str(self._part or "memory")
            raise

    def _leave(self) -> None:
        os.close(self._file)
        if self._part is not None:
            self._part.unlink(missing_ok=True)

    def _follow(self, rules: Message) -> None:
        self._rules = {name: rules[name] for name in ("feeder", "hop", "relay", "gone")}

    def run(self) -> Message:
        """Until the controller says that it has ended; what there was to count."""
        waiting = select.poll()
        for fd in (self._control.fileno(), *self._ins):
            waiting.register(fd, select.POLLIN)
        self._control.send(json.dumps({"op": "ready"}).encode())
        try:
            self._whole()
            while True:
                mask = select.POLLOUT if self._relay else 0
                waiting.register(self._out.fileno(), mask)
                waiting.register(self._plain.fileno(), select.POLLIN | bool(self._answers) * select.POLLOUT)
                for fd, _ in waiting.poll(5 if self._got < self._count else 100):
                    if fd == self._control.fileno() and not self._command():
                        self._did(feeder=self._rules["feeder"], relayed=self._report["relayed"])
                        return self._report | {"op": "ended"}
                    if fd in self._ins:
                        self._take(self._ins[fd])
                self._send()
                if self._got < self._count:
                    self._miss()
        finally:
            self._leave()

    def _command(self) -> bool:
        command = json.loads(self._control.recv(LARGEST) or b'{"op": "end"}')
        if command["op"] == "go":
            self._relay.extend(range(self._count))
        elif command["op"] == "rules":
            self._follow(command)
            self._requests, self._since = 0, time.monotonic()
        return bool(command["op"] != "end")

    def _take(self, sock: socket.socket) -> None:
        for _ in range(TURN):
            packet = _received(sock)
            if packet is None:
                return
            if self._spec["loss"] and self._draw.random() < self._spec["loss"]:
                continue
            magic, token, kind, number = (
                HEAD.unpack_from(packet) if len(packet) >= HEAD.size else (b"", 0, 0, 0)
            )
            if magic != MAGIC or token != self._spec["token"]:
                self._report["refused"] += 1
            elif kind == REQUEST:
                self._answer(number, packet)
            elif kind == DATA and number < self._count and len(packet) == HEAD.size + self._size(number):
                self._keep(number, packet)
            else:
                self._report["refused"] += 1

    def _size(self, number: int) -> int:
        return min(PAYLOAD, int(self._spec["size"]) - number * PAYLOAD)

    def _keep(self, number: int, packet: bytes) -> None:
        if self._have[number]:
            self._report["twice"] += 1
            return
        os.pwrite(self._file, memoryview(packet)[HEAD.size :], number * PAYLOAD)
        self._have[number] = 1
        self._got += 1
        if number >= self._next:
            if number > self._next and not self._missing:
                self._requests, self._since = 0, time.monotonic()
            self._missing.update(dict.fromkeys(range(self._next, number)))
            self._next = number + 1
            if not self._missing:
                self._requests, self._since = 0, time.monotonic()
        else:
            self._missing.pop(number, None)
            self._requests = 0
        if self._rules["relay"]:
            self._relay.append(number)
        self._whole()

    def _whole(self) -> None:
        if self._got < self._count or self._rack == self._spec["source"]:
            return
        self._report["at"], digest = time.monotonic(), hashlib.sha256()
        for at in range(0, self._spec["size"], 1 << 20):
            digest.update(os.pread(self._file, min(1 << 20, self._spec["size"] - at), at))
        self._report["same"] = digest.hexdigest() == self._spec["digest"]
        if self._part is not None and self._report["same"]:
            os.fsync(self._file)
            os.replace(self._part, self._part.with_suffix(""))
            self._part = None
        self._control.send(json.dumps(self._report).encode())

    def _miss(self) -> None:
        """What the policy says about what is lacking, now."""
        rest = range(self._next, min(self._count, self._next + MOST))
        missing = tuple(sorted(self._missing)[:MOST] or rest)
        lacking = MissingPackets(
            self._spec["source"], self._rules["feeder"], self._rules["hop"], missing, bool(self._missing),
            time.monotonic() - self._since, self._requests, PATIENCE, tuple(self._rules["gone"]),
        )  # fmt: skip
        repair = decide(lacking)
        if repair.ask == WAIT:
            return
        if self._log is not None:
            self._log.decision("network.multicast", "packed", lacking, repair, rack=self._rack)
        if repair.ask == GIVE_UP:
            raise TimeoutError(f"{self._requests} requests for what it lacks were in vain")
        self._requests, self._since = self._requests + 1, time.monotonic()
        self._report["asked"] += len(repair.packets)
        head = HEAD.pack(MAGIC, self._spec["token"], REQUEST, self._rack)
        numbers = struct.pack(f"!{len(repair.packets)}I", *repair.packets)
        self._did(ask=repair.ask, packets=_numbers(numbers))
        with suppress(OSError):  # lost, as datagrams are
            self._plain.sendto(head + numbers, (address(repair.ask), PORT))

    def _did(self, **what: Any) -> None:
        if self._log is not None:
            self._log.append("effect", rack=self._rack, **what)

    def _answer(self, rack: int, packet: bytes) -> None:
        for number in _numbers(packet[HEAD.size :]):
            if number < self._count and self._have[number] and len(self._answers) < WAITING:
                self._answers.append((rack, number))

    def _send(self) -> None:
        """As much as the ports take."""
        for queue, out in ((self._relay, self._out), (self._answers, self._plain)):
            try:
                for _ in range(min(len(queue), TURN)):
                    first: Any = queue[0]
                    number = first if out is self._out else first[1]
                    to = EVERYONE if out is self._out else (address(first[0]), PORT)
                    data = os.pread(self._file, self._size(number), number * PAYLOAD)
                    out.sendmsg([HEAD.pack(MAGIC, self._spec["token"], DATA, number), data], (), 0, to)
                    queue.popleft()
                    self._report["relayed" if out is self._out else "answered"] += 1
            except BlockingIOError:
                pass


def _numbers(numbers: bytes) -> tuple[int, ...]:
    """The packets that a request asks for."""
    return struct.unpack(f"!{len(numbers) // 4}I", numbers[: len(numbers) // 4 * 4])


def _received(sock: socket.socket) -> bytes | None:
    try:
        return sock.recv(HEAD.size + PAYLOAD + 1)
    except OSError:
        return None
