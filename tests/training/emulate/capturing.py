"""What the tests of capture share: a session on a small cluster, and events told in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script

SCRIPTS = Path(__file__).parent / "scripts"


@contextmanager
def session(name: str, *arguments: str, cluster: str = "h100-sxm:1x8", **options: Any) -> Iterator[Session]:
    """A session that runs one of the scripts beside the tests."""
    with Session(Script(SCRIPTS / name, arguments), load_cluster(cluster), **options) as capture_session:
        yield capture_session


def cases(name: str) -> list[str]:
    """The cases of a script, of which each rank runs another one."""
    return re.findall(r"^def case_(\w+)", (SCRIPTS / name).read_text(), re.MULTILINE)


def capture(name: str, *arguments: str, ranks: tuple[int, ...] = (0,), **options: Any) -> list[Slice]:
    """Slices of a script for some ranks."""
    with session(name, *arguments, **options) as capture_session:
        return capture_session.capture(ranks)


def steady_events(slice_: Slice) -> np.ndarray:
    """The events of the step that is reported."""
    return slice_.events[slice(*slice_.steady)]


def operator_names(slice_: Slice, events: np.ndarray) -> list[str]:
    """The operators that were issued, in order."""
    return [slice_.operators[e["ref"]].name for e in events if e["kind"] == EventKind.OP]
