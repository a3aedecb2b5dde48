"""Talk to a service, waiting until it is ready: ask.py PORT /path tells the answer, ask.py PORT gone waits
until nobody listens."""

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
            response = b"".join(iter(lambda: link.recv(4096), b""))
            return response.decode().partition("\r\n\r\n")[2]
    except ConnectionRefusedError:
        return None


limit = time.monotonic() + 30
while time.monotonic() < limit:
    answer = once(sys.argv[1], sys.argv[2])
    if answer is not None:
        sys.stdout.write(answer)
        sys.exit(0)
    time.sleep(0.02)
sys.exit("not ready in 30 s")
