"""What user, broker and device say to each other, and the memory through which data pass.

A connection begins with the exchange of `trust.attest`; what follows are sealed requests and answers, so
whoever owns the transport can only cut it. (Not `base.rpc`: the end of a connection is the end of who was
there, and the server must know.) A claim gives user, broker and device one key that needs the secrets a, b, c
of all,

    a → A = aG       b, A → bA       c, A, bA → C = cG, cA, key = c(bA)       b(cA) = key       a(bC) = key

from which each two have keys for both directions. Data lie in memory that the host can read and write: chunks
of `CHUNK` bytes and a tag, each sealed with the count of chunks before it, so none is taken twice or moved.
They are copied out of there before they are opened: the host could change them between check and use.

Source: Jang et al., HIX (ASPLOS 2019): attested session of user and GPU enclave, three-party Diffie-Hellman,
single copy through untrusted shared memory.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from windtunnel.base.errors import HostError, UserError
from windtunnel.trust.attest import AttestationRefused, AttestedDevice, Verifier

CHUNK, TAG, WINDOW = 1 << 18, 16, 128
"""Bytes that are sealed at once, of their tag, and for how many such chunks the shared memory has room."""
PEAL = 16
"""Chunks for which the other side is woken once; what is no more than these goes as a whole."""
LONGEST = 1 << 20
"""Bytes of a message at most."""
Fields = dict[str, Any]
Handler = Callable[[str, Fields], Fields]
"""Answers a request of the peer of that name, of which ``do`` says what it is: ended, once he has."""


class Denied(HostError):
    """The device does not allow a request. ``refusal``: as in `policy.Decision`."""

    def __init__(self, message: str = "", refusal: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal


class GpuLink:
    """The caller's side of a connection to ``address``, for one thread at a time.

    Raises:
        ConnectionError: nobody answers there.
        Refused: ``verifier`` does not accept what runs there.
    """

    def __init__(self, address: str, verifier: Verifier) -> None:
        with _connected():
            self._connection = Client(address, "AF_UNIX")
            m3 = verifier.check(self._ask(verifier.hello()))
            self._session = verifier.finish(self._ask(m3))

    def call(self, do: str, **fields: Any) -> Fields:
        """`send` and `receive`."""
        self.send(do, **fields)
        return self.receive()

    def send(self, do: str, **fields: Any) -> None:
        """A request, of which the answer is received later, in the order of requests."""
        with _connected():
            record = self._session.seal("request", json.dumps({"do": do, **fields}).encode())
            self._connection.send_bytes(record)

    def receive(self) -> Fields:
        """The next answer.

        Raises:
            Denied: the device does not allow it.
            UserError: the request is none.
            ConnectionError: the other side has ended.
        """
        with _connected():
            answer: Fields = json.loads(self._session.open(self._connection.recv_bytes(LONGEST), "answer"))
        if "bad" in answer:
            raise UserError(answer["bad"])
        if "refusal" in answer:
            raise Denied(answer["text"], answer["refusal"])
        return answer

    def _ask(self, message: bytes) -> bytes:
        self._connection.send_bytes(message)
        return self._connection.recv_bytes(LONGEST)

    def close(self) -> None:
        self._connection.close()

    def answered(self, pipe: int) -> bool:
        """Wait for that pipe, or for an answer or the end of the other side: whether it was that."""
        return self._connection in wait([pipe, self._connection])


@contextlib.contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise ConnectionError(f"the other side has ended ({error or 'its connection is closed'})") from error


def serve(address: str, boot: Callable[[], AttestedDevice], handle: Handler) -> None:
    """Prove what runs here to each who connects, and hand his requests to ``handle``, until the process ends,
    or the one that started it. Standard output says when it can be reached."""
    with Listener(address, "AF_UNIX") as listener:
        os.chmod(address, 0o600)
        print("{}", flush=True)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), boot(), handle), daemon=True).start()


def _end_with_parent() -> None:
    """Who started this process keeps its standard input open."""
    sys.stdin.buffer.read()
    os._exit(0)


def _answer(connection: Connection, device: AttestedDevice, handle: Handler) -> None:
    name = ""
    with contextlib.suppress(EOFError, OSError, AttestationRefused), connection:
        try:
            connection.send_bytes(device.answer(connection.recv_bytes(LONGEST)))
            connection.send_bytes(device.accept(connection.recv_bytes(LONGEST)))
            assert device.session is not None
            name = device.session.identity.hex()[:8]
            while True:
                request = json.loads(device.session.open(connection.recv_bytes(LONGEST), "request"))
                try:
                    answer = handle(name, request)
                except Denied as error:
                    answer = {"refusal": error.refusal, "text": str(error)}
                except (UserError, TypeError, KeyError, ValueError, AttributeError) as error:
                    answer = {"bad": str(error) or type(error).__name__}
                connection.send_bytes(device.session.seal("answer", json.dumps(answer).encode()))
        finally:
            if name:
                handle(name, {"do": "ended"})


class Party:
    """One of the three who make the key of a claim. ``public``: 32 bytes as hex, for the others."""

    def __init__(self) -> None:
        self._own = X25519PrivateKey.generate()
        self.public = self._own.public_key().public_bytes_raw().hex()

    def times(self, point: str) -> str:
        """The own secret times a point of the others; ValueError where it is none of the large group."""
        return self._own.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(point))).hex()


class Seal:
    """One direction between two of the three. ``shared``: the key of all; ``way``: such as user>device."""

    def __init__(self, shared: str, way: str) -> None:
        kdf = HKDF(SHA256(), 32, None, b"windtunnel trust.gpu v1 " + way.encode())
        self._cipher, self._count = AESGCM(kdf.derive(bytes.fromhex(shared))), 0
        self._own = memoryview(bytearray(CHUNK + TAG))

    def put(self, data: memoryview | bytes, about: str, out: memoryview) -> None:
        """Seal the next chunk into ``out``. ``about``: what both sides know of it."""
        self._count += 1
        sealed = self._own[: len(data) + TAG]
        self._cipher.encrypt_into(self._count.to_bytes(12, "big"), data, about.encode(), sealed)
        out[:] = sealed

    def take(self, sealed: memoryview, about: str, out: memoryview) -> None:
        """Open what the other side has sealed next into ``out``.

        Raises:
            Denied: this is something else; zeros are in ``out``.
        """
        self._count += 1
        own = self._own[: len(sealed)]
        own[:] = sealed
        try:
            self._cipher.decrypt_into(self._count.to_bytes(12, "big"), own, about.encode(), out)
        except InvalidTag:
            out[:] = bytes(len(out))
            raise Denied(f"chunk {self._count} is not what was sealed for {about}", "changed") from None


class SharedWindow:
    """Memory that the host can see: ``WINDOW`` places for a chunk and its tag, a file at ``path``."""

    def __init__(self, path: str) -> None:
        self.path, size = Path(path), WINDOW * (CHUNK + TAG)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._memory = memoryview(mmap.mmap(file.fileno(), size, flags))

    def place(self, number: int, length: int) -> memoryview:
        """The first ``length`` bytes of a place."""
        at = number * (CHUNK + TAG)
        return self._memory[at : at + length]


class Bells:
    """Says by chunk how far the other side is, user or device: numbers in a pipe for each direction, which
    ends with who rings. The host may ring wrongly; then tags do not hold, or nobody goes on.

    Raises:
        Denied: the user, whose side is there first, has none.
    """

    def __init__(self, shared: Path, user: bool) -> None:
        into, out = (shared.with_name(f"bell-{way}") for way in ("in", "out"))
        for path in (into, out) if user else ():
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
        try:
            self._rings = os.open(into if user else out, os.O_RDWR if user else os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            raise Denied("the user has no bells", "ended") from None
        self.hears = os.open(out if user else into, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(self.hears, not user)
        self._last_number = -1  # numbers only go up: those for a refused request are passed over

    def ring(self, number: int, last: bool) -> None:
        """That chunk is in its place: the other side is woken for every `PEAL` of them, and for the last.
        Raises Denied: it has ended."""
        if (number + 1) % PEAL and not last:
            return
        try:
            os.write(self._rings, number.to_bytes(8, "big"))
        except BrokenPipeError:
            raise Denied("the other side has ended", "ended") from None

    def there(self, number: int) -> bool:
        """Whether that chunk is. The device waits for it, or for the user's end."""
        with contextlib.suppress(BlockingIOError):
            while self._last_number < number and (rung := os.read(self.hears, 8)):
                self._last_number = int.from_bytes(rung, "big")
        return self._last_number >= number

    def close(self) -> None:
        for pipe in (self._rings, self.hears):
            os.close(pipe)


def chunks(offset: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(place, offset, length) of each chunk of ``length`` bytes at ``offset``."""
    for number, at in enumerate(range(offset, offset + length, CHUNK)):
        yield number, at, min(CHUNK, offset + length - at)
