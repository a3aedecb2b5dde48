"""Requests are read strictly: what two servers could read as two different requests is refused.

uvicorn's reader (h11) follows the RFC where that is lenient: line feeds without carriage returns, folded
headers, ``Content-Length`` beside ``Transfer-Encoding``, or twice. Here the head of each request is looked at
before the reader gets it. A refusal is an answer in words, and ends that connection alone.

Source: RFC 9112, sections 2.2, 3, 5.2, 6.1 and 6.3.
"""

from __future__ import annotations

import re
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from windtunnel.agents.sandbox.proxy.upstream import fault_body

END = re.compile(rb"\n\r?\n")
"""Where the reader takes a head to end."""
LINE = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+ ([\x21-\x7e]+) HTTP/1\.[01]")
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x21-\x7e\x80-\xff \t]*)")
LARGEST = 64 * 1024
ONCE = (b"host", b"content-length", b"transfer-encoding")


def head_fault(head: bytes) -> str:
    """What is wrong with the head of a request (up to and with its empty line), in words; empty: nothing."""
    if len(head) > LARGEST:
        return f"its head has more than {LARGEST} bytes"
    if not head.endswith(b"\r\n\r\n") or re.search(rb"(?<!\r)\n|\r(?!\n)", head):
        return "a line does not end with CR and LF"
    first, *lines = head[:-4].split(b"\r\n")
    line = LINE.fullmatch(first)
    if line is None:
        return "the request line is malformed"
    if not line[1].startswith(b"/"):
        return "the request's target must be a path"
    seen: dict[bytes, list[bytes]] = {}
    for text in lines:
        field = FIELD.fullmatch(text)
        if field is None:
            return "a header is folded" if text[:1] in (b" ", b"\t") else "a header is malformed"
        seen.setdefault(field[1].lower(), []).append(field[2].strip(b" \t"))
    for name in ONCE:
        if len(seen.get(name, ())) > 1:
            return f"header {name.decode()} is given more than once"
    length, coding = seen.get(b"content-length"), seen.get(b"transfer-encoding")
    if length and coding:
        return "the body's length is given twice: content-length and transfer-encoding"
    if length and not re.fullmatch(rb"[0-9]{1,18}", length[0]):
        return "content-length is no number"
    if coding and (coding[0].lower() != b"chunked" or first.endswith(b"1.0")):
        return "transfer-encoding is not accepted; only chunked is, in HTTP/1.1"
    return ""


class _Reader(h11.Connection):
    """h11, with every head looked at before it is read."""

    fault = target = ""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            waiting = self.trailing_data[0]
            end = END.search(waiting)
            if end is not None:
                self.fault = head_fault(waiting[: end.end()])
                if self.fault:
                    raise h11.RemoteProtocolError(self.fault)
                self.target = waiting.split(b" ", 2)[1].decode("ascii")
        return super().next_event()


class StrictProtocol(H11Protocol):
    """uvicorn's connection with that reader. The scope of a request has its whole target, as it was sent,
    under ``target``."""

    conn: _Reader

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _Reader(h11.SERVER, max_incomplete_event_size=LARGEST)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.scope is not None:
            # the newest request's task has not run yet
            cast(dict[str, Any], self.scope).setdefault("target", self.conn.target)

    def send_400_response(self, msg: str) -> None:
        body = fault_body("bad_request", f"the request is refused: {self.conn.fault or 'it is malformed'}")
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            said = self.conn.send(h11.Response(status_code=400, headers=headers, reason=b"Bad Request"))
            self.transport.write((said or b"") + (self.conn.send(h11.Data(data=body)) or b""))
        except h11.LocalProtocolError:
            pass  # the reply has begun already: that it breaks off says enough
        self.transport.close()
