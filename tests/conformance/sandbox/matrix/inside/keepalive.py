"""A client that keeps one HTTP connection: asks once, and again on it when /row/again is there."""

import http.client
import os
import sys
import time

port, path = int(sys.argv[1]), sys.argv[2]
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
for _ in range(200):
    try:
        connection.connect()
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
own = connection.sock.getsockname()


def asked(word: str) -> None:
    connection.request("GET", path)
    answer = connection.getresponse()
    answer.read()
    same = connection.sock is not None and connection.sock.getsockname() == own
    print(word, answer.status if same else "on another connection: lost", flush=True)


asked("first")
while not os.path.exists("/row/again"):
    time.sleep(0.05)
asked("again")
