"""A client of a server outside, with numbered messages. A restore ends its connection: then it makes another
one and goes on at the number that had no answer. A connection that hangs, or answers with another number, is
told."""

import http.client
import os
import socket
import time

PATIENCE = 20.0


def connected() -> socket.socket:
    way = http.client.HTTPConnection("127.0.0.1", 3128, timeout=PATIENCE)
    way.set_tunnel("localhost", int(os.environ["ROW_OUTSIDE"]))
    way.connect()
    return way.sock


def main() -> None:
    number = ended = 0
    while True:
        with connected() as plug:  # which is there before this goes on
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
