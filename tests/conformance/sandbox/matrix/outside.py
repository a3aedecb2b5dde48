"""A server that stands for the world outside: a process of the host, which ``egress`` leads to.

Each connection sends numbers, one a line, each one greater than the one before, and gets them back. A number
that is sent twice on a connection is answered with -1: so a connection that came back in two sandboxes, or
came back as it was, is found.
"""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Counting(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        expected = None
        for line in self.rfile:
            number = int(line)
            if expected is not None and number != expected:
                number = -1
            self.wfile.write(b"%d\n" % number)
            expected = number + 1


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A sandbox that is killed resets its connections."""


@contextmanager
def answering() -> Iterator[int]:
    """The server runs within the block, at this port of the loopback address."""
    with _Server(("127.0.0.1", 0), _Counting) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), name="bench-outside", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
