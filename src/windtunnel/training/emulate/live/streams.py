"""``torch.cuda.Stream`` and ``torch.cuda.Event`` on the absent device: the generic ones of any registered
device.

What they do is written down by the device's guard, in C++; an event's time is not known while capturing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def install(native: ctypes.CDLL) -> None:
    """Replace ``torch.cuda``'s streams and events. Call once."""

    class Stream(torch.Stream):
        """``torch.cuda.Stream`` on the absent device."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
            if "stream_id" in kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, device="cuda" if device is None else device, priority=priority)

        def wait_event(self, event: Any) -> None:
            event.wait(self)

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        def __eq__(self, other: object) -> bool:
            return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

        def __hash__(self) -> int:
            return hash(("absent", self.stream_id))

    class Event(torch.Event):
        """``torch.cuda.Event`` on the absent device. Elapsed time is not known while capturing: 1 ms."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any
        ) -> Event:
            return super().__new__(cls, device="cuda", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            super().record(torch.cuda.current_stream() if stream is None else stream)

        def wait(self, stream: Any = None) -> None:
            super().wait(torch.cuda.current_stream() if stream is None else stream)

        def elapsed_time(self, end_event: Any) -> float:
            return 1.0

    cuda: Any = torch.cuda
    for module in (cuda, cuda.streams):
        module.Stream = Stream
        module.Event = Event

    def set_stream(stream: Any) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)

    cuda.set_stream = set_stream
    cuda.current_stream = lambda device=None: Stream(
        stream_id=native.wt_stream(), device_index=native.wt_exchange_device(-1), device_type=1
    )
    cuda.default_stream = lambda device=None: Stream(
        stream_id=0, device_index=native.wt_exchange_device(-1), device_type=1
    )
