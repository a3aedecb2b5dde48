"""The methods of `protocol` for other languages, by one route: ``POST /v1/{part}/{method}``.

``part`` is ``daemon``, ``host``, ``sandbox`` or ``turn`` (the checkpoint under way that ``end_turn`` named).
The body is a JSON object: ``on`` names the sandbox or the turn, ``with`` holds the arguments by their names;
bytes are base64. The answer is ``{"value": …}``, or ``{"error": class, "text": sentence}`` with another
status than 200.

May ask whoever knows the token, and only under a name that is this host's: a page in the user's browser can
make a name of its own mean 127.0.0.1, but its requests then carry that name in ``Host``.
"""

from __future__ import annotations

import base64
import hmac
import json
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any

from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, PendingTurn
from windtunnel.base.calls import LARGEST
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.rpc import Service

PARTS = {"daemon": AnyDaemon, "host": AnyHost, "sandbox": AnySandbox, "turn": PendingTurn}
STATUS = {"UserError": 400, "SandboxDied": 410, "LessError": 417, "TimeoutError": 504}


class HttpServer(ThreadingTCPServer):
    """Listens on ``host``; the token is the secret of ``keys``. Raises UserError: nobody may listen there."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, service: Service, keys: Keys, host: str, port: int) -> None:
        self.service, self.expected, self.host = service, b"Bearer " + keys.secret, host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._tls: ssl.SSLContext | None = None
        if keys.tls is not None:  # a client needs the token, and no certificate
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*keys.tls.paths[:2])
        try:
            super().__init__((host.strip("[]"), port), _Request)
        except OSError as error:
            raise UserError(f"serve: {host}:{port} cannot be listened on ({error.strerror})") from error
        scheme = "http" if self._tls is None else "https"
        self.url = f"{scheme}://{host}:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.05,), name="sandbox-http", daemon=True).start()

    def get_request(self) -> tuple[socket.socket, Any]:
        accepted, address = super().get_request()
        if self._tls is not None:  # its first use makes the handshake, in the thread of the connection
            accepted = self._tls.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        return accepted, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client has gone, or speaks something else."""

    def close(self) -> None:
        """Take no more connections."""
        self.shutdown()
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    server: HttpServer
    protocol_version = "HTTP/1.1"
    timeout = 75.0  # seconds that a connection waits for its next request

    def do_POST(self) -> None:
        status, answer = self._refusal() or self._performed()
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def _refusal(self) -> tuple[int, dict[str, Any]] | None:
        """For a request whose body is not read; the connection ends with it."""
        name, length = self.headers.get("host", ""), self.headers.get("content-length", "")
        given = self.headers.get("authorization", "").encode("latin-1")
        self.close_connection = True
        if not named_here(name, self.server.host):
            return _refused(403, f"host name {name!r} is not accepted here")
        if not hmac.compare_digest(given, self.server.expected):
            return _refused(401, "the token is missing or wrong; send 'Authorization: Bearer TOKEN'")
        if not length.isdecimal() or int(length) > LARGEST:
            return _refused(411, f"a body needs its length; at most {LARGEST} bytes are accepted")
        self.close_connection = False
        return None

    def _performed(self) -> tuple[int, dict[str, Any]]:
        data = self.rfile.read(int(self.headers["content-length"]))
        _, version, part, name = (*self.path.split("/"), "", "", "")[:4]
        if version != "v1" or part not in PARTS:
            return _refused(404, f"part {part!r} is unknown; accepted are {', '.join(PARTS)}")
        try:
            body = json.loads(data or b"{}")
            on, given = body.get("on", ""), body.get("with", {})
            if not isinstance(on, str) or not isinstance(given, dict) or body.keys() - {"on", "with"}:
                raise ValueError
        except (ValueError, AttributeError):
            return _refused(400, 'the body is not accepted; send {"on": NAME, "with": {ARGUMENT: VALUE, …}}')
        with self.server.service.at_work():
            answer, raw = self.server.service.perform(
                {"do": f"{PARTS[part].__name__}.{name}", "on": on, "with": given}
            )
        if raw:
            answer = {"value": base64.b64encode(raw).decode()}
        return STATUS.get(answer["error"], 500) if "error" in answer else 200, answer


def named_here(given: str, host: str) -> bool:
    """Whether a ``Host`` header names an address, localhost, or the name that was bound."""
    name = given.rsplit("]", 1)[0].removeprefix("[") if given.startswith("[") else given.rsplit(":", 1)[0]
    name = name.lower().rstrip(".")
    if name in ("localhost", host.lower()):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _refused(status: int, sentence: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": "UserError", "text": f"sandbox: {sentence}"}
