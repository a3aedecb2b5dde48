"""Reader of a BPF ring buffer: the kernel writes records, this process reads them out of shared memory.

The producer's position and a record's length are written by the kernel with release semantics. Python cannot
load with acquire semantics by itself; a ``membarrier``-like full fence is had by an atomic operation of the C
library's (a lock taken and released), which is enough on machines that reorder loads.

Source: Documentation/bpf/ringbuf.rst of the kernel.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator

from windtunnel.agents.sandbox.live.inspect.fault import InspectError

_BUSY, _DISCARD = 1 << 31, 1 << 30


class Ring:
    """``drain`` must be called by one thread at a time."""

    def __init__(self, fd: int, size: int) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        self.fd, self._size, self._page = fd, size, page
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._producer = mmap.mmap(fd, page + 2 * size, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._fence = threading.Lock()

    def drain(self, timeout: float = 1.0) -> Iterator[bytes]:
        """All records whose call was finished before this one. A record that is being written is waited for;
        raises InspectError when it is not finished in time."""
        at = struct.unpack_from("<Q", self._consumer)[0]
        end = struct.unpack_from("<Q", self._producer)[0]
        deadline = 0.0
        while at < end:
            with self._fence:
                offset = self._page + (at & (self._size - 1))
                length = struct.unpack_from("<I", self._producer, offset)[0]
            if length & _BUSY:
                now = time.monotonic()
                deadline = deadline or now + timeout
                if now > deadline:
                    raise InspectError("the kernel did not finish writing an event")
                time.sleep(0)
                continue
            with self._fence:
                size = length & (_DISCARD - 1)
                record = b"" if length & _DISCARD else self._producer[offset + 8 : offset + 8 + size]
            at += (size + 15) & ~7
            struct.pack_into("<Q", self._consumer, 0, at)
            if record:
                yield record

    def close(self) -> None:
        self._consumer.close()
        self._producer.close()
