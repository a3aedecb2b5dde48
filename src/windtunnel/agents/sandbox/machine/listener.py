"""A socket in a sandbox's network; as a program of its own, in that of a sandbox of an ordinary user:

    listener.py PID USE PORT LINE

makes the socket inside the namespaces of process ``PID`` and hands it over by ``LINE``, the descriptor of a
Unix socket. Only a process with one thread may enter a user namespace, so the host, which has many, cannot.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

NAMESPACES = (("user", 0x10000000), ("net", 0x40000000))


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


def main(pid: int, use: str, port: int, line: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), flag) for kind, flag in NAMESPACES]
    for namespace, flag in namespaces:
        if libc.setns(namespace, flag) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    with open_socket(use, port) as plug, socket.socket(fileno=line) as host:
        socket.send_fds(host, [b"s"], [plug.fileno()])


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    except OSError as error:
        sys.exit(error.strerror or str(error))
