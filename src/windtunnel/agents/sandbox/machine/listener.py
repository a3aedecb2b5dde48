"""A socket in a sandbox's network; as a program of its own, in that of a sandbox of an ordinary user:

    nsenter … listener.py USE PORT LINE

makes the socket in the namespaces that it was started in and hands it over by ``LINE``, the descriptor of a
Unix socket. Only a process with one thread may enter a user namespace, so the host, which has many, cannot.
"""

from __future__ import annotations

import socket
import sys


def open_socket(use: str, port: int) -> socket.socket:
    """``use``: "listen on", "receive on" (by UDP) or "connect to" that port of the loopback address. Raises
    OSError."""
    plug = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if use == "receive on" else socket.SOCK_STREAM)
    try:
        if use == "connect to":
            plug.settimeout(10.0)
            plug.connect(("127.0.0.1", port))
            return plug
        if use == "listen on":
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plug.bind(("127.0.0.1", port))
        if use == "listen on":
            plug.listen(128)
    except BaseException:
        plug.close()
        raise
    return plug


if __name__ == "__main__":
    try:
        with (
            open_socket(sys.argv[1], int(sys.argv[2])) as made,
            socket.socket(fileno=int(sys.argv[3])) as host,
        ):
            socket.send_fds(host, [b"s"], [made.fileno()])
    except OSError as error:
        sys.exit(error.strerror or str(error))
