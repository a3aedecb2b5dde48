"""A program of its own: make a listening socket inside a sandbox of this user, and hand it over.

    listener.py PID PORT LINE

``LINE`` is the descriptor of a Unix socket over which the listening one is passed. Only a process with one
thread may enter a user namespace, so the host, which has many, cannot do this itself.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys

NAMESPACES = (("user", 0x10000000), ("net", 0x40000000))


def main(pid: int, port: int, line: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    held = [(os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), flag) for kind, flag in NAMESPACES]
    for namespace, flag in held:
        if libc.setns(namespace, flag) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as plug, socket.socket(fileno=line) as host:
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        plug.bind(("127.0.0.1", port))
        plug.listen(128)
        socket.send_fds(host, [b"s"], [plug.fileno()])


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:4]))
    except OSError as error:
        sys.exit(error.strerror)
