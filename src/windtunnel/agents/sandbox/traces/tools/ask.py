"""Talk to what runs in the background, waiting until it is ready: ask.py PORT /path tells the answer,
ask.py PORT gone waits until nobody listens, ask.py lines FILE N waits until the file has N lines."""

import socket
import sys
import time


def once(first: str, second: str) -> str | None:
    """The answer, or None when it is not there yet."""
    if second == "gone":
        try:
            socket.create_connection(("127.0.0.1", int(first)), 5).close()
        except OSError:
            return "gone\n"
        return None
    try:
        with socket.create_connection(("127.0.0.1", int(first)), 20) as link:
            link.sendall(f"GET {second} HTTP/1.0\r\n\r\n".encode())
            said = b"".join(iter(lambda: link.recv(4096), b""))
            return said.decode().partition("\r\n\r\n")[2]
    except ConnectionRefusedError:
        return None


def lines(path: str, number: int) -> str | None:
    try:
        with open(path) as file:
            return f"{number}\n" if len(file.readlines()) >= number else None
    except FileNotFoundError:
        return None


limit = time.monotonic() + 30
while time.monotonic() < limit:
    answer = (
        lines(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "lines" else once(sys.argv[1], sys.argv[2])
    )
    if answer is not None:
        sys.stdout.write(answer)
        sys.exit(0)
    time.sleep(0.02)
sys.exit("not ready in 30 s")
