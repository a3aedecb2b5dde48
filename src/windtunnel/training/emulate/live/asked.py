"""Where the user's program asks which rank it is, and what it is told there.

What a launcher says is asked in a few ways: the environment, ``torch.distributed``, a device mesh, a process
group. Each answer that goes straight to a line of the user's own files is written down with the place of the
expression in the source, so that what becomes of it can be read there
(`windtunnel.training.emulate.live.conditions`). What libraries ask for themselves is not: how they treat
ranks is theirs, and witnesses show it.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from windtunnel.training.emulate.graph import Place
from windtunnel.training.emulate.live import failure, machine

VARIABLES = (*machine.RANK, *machine.LOCAL, *machine.HOST)
"""Of the environment, that differ from rank to rank."""
THROUGH = ("os.py", "<frozen os>", "_collections_abc.py", "<frozen _collections_abc>")
"""Files of Python through which the environment is read."""
MOST = 8
"""Answers that are kept of one place."""


@dataclass
class Asked:
    """``told``: for each place, the first answers."""

    told: dict[Place, list[int]] = field(default_factory=dict)
    _own: dict[str, bool] = field(default_factory=dict)
    _places: dict[tuple[CodeType, int], Place] = field(default_factory=dict)
    _before: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))

    def install(self) -> None:
        """Listen from now on. Call once, before the script runs."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d
        from torch.distributed.device_mesh import DeviceMesh

        environment: Any = type(os.environ)
        environment.__getitem__ = self._listen_to_environment(environment.__getitem__)
        for name in ("get_rank", "get_node_local_rank"):
            told = self._listen(getattr(c10d, name))
            for module in (dist, c10d):
                setattr(module, name, told)
        mesh: Any = DeviceMesh
        for name in ("get_rank", "get_local_rank", "get_coordinate"):
            setattr(mesh, name, self._listen(getattr(mesh, name)))
        group: Any = dist.ProcessGroup
        group.rank = self._listen(group.rank)

    def files(self, script: str) -> list[str]:
        """The user's own files that were loaded: the script, and what was imported since."""
        found = dict.fromkeys([str(Path(script).resolve())] if script else [])
        for name in sorted(sys.modules.keys() - self._before):
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and failure.is_own(file):
                found[file] = None
        return list(found)

    def _listen(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def asked(*args: Any, **kwargs: Any) -> Any:
            answer = ask(*args, **kwargs)
            self._write(sys._getframe().f_back, answer)
            return answer

        return asked

    def _listen_to_environment(self, read: Callable[..., str]) -> Callable[..., str]:
        def asked(environment: Any, key: Any) -> str:
            answer = read(environment, key)
            if key in VARIABLES:
                frame: FrameType | None = sys._getframe().f_back
                while frame is not None and frame.f_code.co_filename.endswith(THROUGH):
                    frame = frame.f_back
                self._write(frame, int(answer) if answer.isdigit() else None)
            return answer

        return asked

    def _write(self, frame: FrameType | None, answer: Any) -> None:
        if frame is None:
            return
        code = frame.f_code
        own = self._own.get(code.co_filename)
        if own is None:
            own = self._own[code.co_filename] = failure.is_own(code.co_filename)
        if not own:
            return
        key = (code, frame.f_lasti)
        place = self._places.get(key)
        if place is None:
            line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
            place = Place(code.co_filename, line or 0, end_line or 0, column or 0, end_column or 0)
            self._places[key] = place
        answers = self.told.setdefault(place, [])
        if isinstance(answer, int) and len(answers) < MOST:
            answers.append(answer)
