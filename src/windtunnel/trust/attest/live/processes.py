"""Three processes: the verifier is the caller's, a hostile host carries all, a device has the secrets.

The host runs as nobody (where this is root), keeps what it carries in a file, and does one of `ATTACKS`. The
device cannot be read by other processes of its user (prctl(2), PR_SET_DUMPABLE); it adds up numbers that come
as records. Where it has a TPM, the host owns the bus between the two as well. Nothing here is a wall against
root: this shows the protocol, not an enclave.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from windtunnel.base.errors import UserError
from windtunnel.linux.system import checked, libc
from windtunnel.trust.attest.live.tpm import Tpm, swtpm
from windtunnel.trust.attest.messages import AttestationRefused, AttestedSession
from windtunnel.trust.attest.policy import AllowList
from windtunnel.trust.attest.protocol import AttestedDevice, Fuse, Manufacturer, Verifier, measure

if TYPE_CHECKING:
    from windtunnel.store.eventlog import EventLog

LAYERS, LOADS = {"firmware": b"demo firmware", "kernel": b"demo kernel"}, {"program": b"sum of numbers"}
ATTACKS = ("none", "flip", "replay", "reflect", "record", "program")
BUS_ATTACKS = ("tpm none", "tpm nonce", "tpm replay", "tpm key", "tpm flip")
TIERS = {"simulator": ATTACKS, "tpm": (*ATTACKS[:-1], *BUS_ATTACKS, "program", "tpm pcr")}
"""By tier, in turn: the last two swap the program, and put it back as though nothing had been."""
NOBODY, DUMPABLE = 65534, 4


class AttestedMachine(NamedTuple):
    """A host and its device, by their process ids."""

    link: Connection
    host: int
    device: int

    def attest(self, verifier: Verifier) -> AttestedSession:
        """The verifier's side of a new session. Raises Refused."""
        return verifier.finish(self.call(b"3", verifier.check(self.call(b"1", verifier.hello()))))

    def call(self, kind: bytes, message: bytes) -> bytes:
        """What comes back by way of the host for M1 (``kind`` 1), M3 (3), a record (R); A: its attack."""
        self.link.send_bytes(kind + message)
        reply = self.link.recv_bytes()
        if reply[:1] == b"E":
            raise AttestationRefused(*json.loads(reply[1:]))
        return reply[1:]


@contextlib.contextmanager
def machine(fuse: Fuse, log_file: Path, tpms: Sequence[Tpm] = ()) -> Iterator[AttestedMachine]:
    """Both processes, until the block ends. ``log_file``: the file for what the host carries; ``tpms``: the
    device's, and one of the attacker's."""
    spawn = multiprocessing.get_context("spawn")  # a fork would have what the verifier knows
    (verifier, up), (down, device) = spawn.Pipe(), spawn.Pipe()
    host = spawn.Process(target=_host, args=(up, down, log_file))
    chip = spawn.Process(target=_device, args=(device, fuse, tpms))
    with contextlib.ExitStack() as stack:
        for process in (host, chip):
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        for end in (up, down, device):
            end.close()
        yield AttestedMachine(verifier, host.pid or 0, chip.pid or 0)


def demonstrate(folder: Path, log: EventLog | None = None, tier: str = "simulator") -> list[dict[str, Any]]:
    """Of each attack in `TIERS`: whether it was refused, and for which claims. ``folder``: for what is
    carried. Raises UserError: there is no such tier. HostError: there is no TPM."""
    if tier not in TIERS:
        raise UserError(f"`tier`: {tier!r} is unknown; accepted are {', '.join(TIERS)}")
    maker, rows = Manufacturer(), list[dict[str, Any]]()
    with contextlib.ExitStack() as stack:
        names = ("tpm", "other") if tier == "tpm" else ()
        tpms = [stack.enter_context(swtpm(folder / name)) for name in names]
        allow = AllowList(
            (maker.root,), {name: (measure(part),) for name, part in {**LAYERS, **LOADS}.items()},
            least={"tier": len(tpms[:1])}, tpms=tuple(tpm.key for tpm in tpms[:1]),
        )  # fmt: skip
        attacked = stack.enter_context(machine(maker.fuse(), folder / "carried", tpms))
        for attack in TIERS[tier]:
            attacked.call(b"A", attack.encode())
            rows.append({"attack": attack, "refused": False, "failing": (), "sum": None})
            try:
                session = attacked.attest(Verifier(allow, {"data": os.urandom(32)}, log=log))
                answer = session.open(attacked.call(b"R", session.seal("numbers", b"[1, 2, 3]")), "sum")
                rows[-1]["sum"] = int(answer)
            except AttestationRefused as error:
                rows[-1] |= {"refused": True, "failing": error.failing}
    return rows


@dataclass(frozen=True)
class _Bus(Tpm):
    """The device's way to its TPM. Whoever owns it does one of `BUS_ATTACKS`, and has a TPM beside it into
    which the same goes. ``kept``: the attack, and the first quote."""

    other: Tpm
    quotes: dict[str, bytes] = field(default_factory=dict)

    def extend(self, pcr: int, measured: str) -> None:
        super().extend(pcr, measured)
        self.other.extend(pcr, measured)

    def quote(self, nonce: bytes) -> bytes:
        attack = self.quotes.get("attack", b"").decode()
        if attack == "tpm key":
            return self.other.quote(nonce)
        right = super().quote(bytes(32) if attack == "tpm nonce" else nonce)
        first, flipped = self.quotes.setdefault("first", right), right[:-1] + bytes([right[-1] ^ 1])
        return {"tpm none": b"", "tpm replay": first, "tpm flip": flipped}.get(attack, right)


def _device(link: Connection, fuse: Fuse, tpms: Sequence[Tpm]) -> None:
    checked(libc.prctl(DUMPABLE, 0, 0, 0, 0), "prctl")
    bus = _Bus(tpms[0].folder, tpms[1]) if tpms else None
    device = AttestedDevice.boot(fuse, LAYERS, LOADS, tpm=bus)

    def attack(name: bytes) -> None:
        if bus is not None:
            bus.quotes["attack"] = name

    def record(sealed: bytes) -> bytes:
        if device.session is None:
            raise AttestationRefused("a record came before the session", ["record.order"])
        return device.session.seal("sum", b"%d" % sum(json.loads(device.session.open(sealed, "numbers"))))

    calls: dict[bytes, Callable[[bytes], bytes | None]] = {
        b"1": device.answer, b"3": device.accept, b"R": record, b"A": attack,
        b"L": partial(device.load, "program"),
    }  # fmt: skip
    with contextlib.suppress(EOFError):  # the host went
        while request := link.recv_bytes():
            try:
                link.send_bytes(b"." + (calls[request[:1]](request[1:]) or b""))
            except AttestationRefused as error:
                link.send_bytes(b"E" + json.dumps([str(error), error.failing]).encode())


def _host(up: Connection, down: Connection, log_file: Path) -> None:
    first, attack, file = dict[bytes, bytes](), b"", log_file.open("wb", buffering=0)
    before = {b"program3": b"Lleaks", b"tpm pcr1": b"L" + LOADS["program"]}
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with contextlib.suppress(EOFError):  # the verifier went
        while request := up.recv_bytes():
            kind, reply = request[:1], b"."
            if kind == b"A":
                attack = request[1:]
            for sent in filter(None, (before.get(attack + kind), request)):
                down.send_bytes(sent)
                reply = down.recv_bytes()
            file.write(request + reply)
            old, flipped = first.setdefault(kind, reply), reply[:-1] + bytes([reply[-1] ^ 1])
            replies = {b"replay1": old, b"recordR": old, b"reflect1": b"." + request[1:], b"flip1": flipped}
            up.send_bytes(replies.get(attack + kind, reply))
