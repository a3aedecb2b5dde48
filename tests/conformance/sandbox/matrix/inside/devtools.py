"""What an expression in the page of a browser is, asked by its debugger: devtools.py EXPRESSION WANTED."""

import base64
import json
import os
import socket
import sys
import urllib.request
from typing import Any

PORT = 9222


class Page:
    """A WebSocket to the first page, as far as RFC 6455 is needed for it."""

    def __init__(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/json", timeout=10) as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        path = page["webSocketDebuggerUrl"].split(str(PORT), 1)[1]
        self._socket = socket.create_connection(("127.0.0.1", PORT), timeout=20)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{PORT}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._file = self._socket.makefile("rb")
        while self._file.readline().strip():
            pass

    def asked(self, expression: str) -> Any:
        given = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        self._send(json.dumps({"id": 1, "method": "Runtime.evaluate", "params": given}).encode())
        while True:
            message = json.loads(self._receive())
            if message.get("id") == 1:
                return message["result"]["result"].get("value")

    def _send(self, data: bytes) -> None:
        mask = os.urandom(4)
        head = bytes([0x81, 0x80 | 126]) + len(data).to_bytes(2, "big")
        self._socket.sendall(head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(data)))

    def _receive(self) -> bytes:
        length = self._file.read(2)[1] & 127
        if length >= 126:
            length = int.from_bytes(self._file.read(2 if length == 126 else 8), "big")
        return self._file.read(length)


value = Page().asked(sys.argv[1])
said = value if isinstance(value, str) else json.dumps(value)
print(said)
sys.exit(said != sys.argv[2])
