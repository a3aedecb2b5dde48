"""How a host's processes begin and end: by the specification on their command line, and with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from windtunnel.base.plain import from_plain
from windtunnel.data.files.model import FilesHostSpec
from windtunnel.linux.system import end_with_parent


def run_process(work: Callable[[FilesHostSpec], Coroutine[Any, Any, None]]) -> None:
    """Do ``work`` until SIGTERM, which cancels it, or until whoever started this process is gone."""

    async def until_terminated() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await work(from_plain(FilesHostSpec, json.loads(sys.argv[1])))

    end_with_parent()
    asyncio.run(until_terminated())
