"""A client of a server outside, with numbered messages. A restore ends its connection: then it makes another
one and goes on at the number that had no answer. A connection that hangs, or answers with another number, is
told."""

import fcntl
import os
import socket
import struct
import time

GET_ADDRESS = 0x8915
PATIENCE = 20.0


def host() -> str:
    """The address before this sandbox's own is the host's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        said = fcntl.ioctl(any_socket, GET_ADDRESS, struct.pack("256s", b"eth0"))
    return socket.inet_ntoa((int.from_bytes(said[20:24], "big") - 1).to_bytes(4, "big"))


def main() -> None:
    number = ended = 0
    while True:
        with socket.create_connection((host(), int(os.environ["ROW_OUTSIDE"])), PATIENCE) as plug:
            try:
                number = talk(plug, number)
                break
            except (ConnectionError, EOFError) as error:
                ended += 1
                print(f"connection {ended} has ended: {error!r}", flush=True)
    print(f"ended well after {number} messages, {ended} connections before the last", flush=True)


def talk(plug: socket.socket, number: int) -> int:
    with plug.makefile("rb") as answers:
        while not os.path.exists("/row/go"):
            plug.sendall(b"%d\n" % number)
            answer = answers.readline()
            if not answer:
                raise EOFError("the server has closed it")
            if int(answer) != number:
                raise ValueError(f"{answer!r} is no answer to {number}")
            number += 1
            print(number, flush=True)
            time.sleep(0.02)
    return number


main()
