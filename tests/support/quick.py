"""Jobs, captures and ``windtunnel`` itself without their imports: what they start is forked from a server
that has them. Tests of how these processes begin and end take real ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import preloaded
from windtunnel.linux import forkserver_client

FORK_SERVER = "windtunnel.linux.forkserver"
CAPTURE = "windtunnel.training.emulate.live.worker"
ABSENT_DEVICE = ("support.absent_device",)
STRANGERS = ("support.strangers",)
LENT = "WINDTUNNEL_TESTS_SERVER"


@contextmanager
def launches(modules: tuple[str, ...] = preloaded.TRAINING) -> Iterator[None]:
    """The fork server of a job that this process launches has imported what ranks need before it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver_client, "subprocess", preloaded.Subprocess(FORK_SERVER, modules))
        yield


@contextmanager
def captures(modules: tuple[str, ...] = ABSENT_DEVICE) -> Iterator[None]:
    """A capture's worker has torch and the absent device before it starts."""
    from windtunnel.training.emulate.live import session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "subprocess", preloaded.Subprocess(CAPTURE, modules))
        yield


def windtunnel(
    *words: str | Path, lent: tuple[str, ...] = preloaded.TRAINING, env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """``windtunnel`` with ``words``, as a process of its own, whose job starts as in `launches`; where
    anything but `preloaded.TRAINING` is ``lent``, its capture as in `captures`. ``env``: beside this
    process's own."""
    command, given = _lending(words, lent, env)
    done = preloaded.run(command, timeout=300.0, **given, **options)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def started(*words: str | Path, **options: Any) -> preloaded.Process:
    """`windtunnel` that runs on; ``options``: of `preloaded.Process`."""
    command, given = _lending(words, preloaded.TRAINING, None)
    return preloaded.Process(command, **given, **options)


def _lending(
    words: tuple[str | Path, ...], lent: tuple[str, ...], env: Mapping[str, str] | None
) -> tuple[list[str | Path], dict[str, Any]]:
    fd = preloaded.server(lent).fileno()
    given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {}), LENT: f"{fd} {','.join(lent)}"}
    return ["-m", "support.quick", *words], {"env": given, "pass_fds": [fd]}


def main() -> None:
    from windtunnel.cli.main import main

    fd, names = os.environ.pop(LENT).split()
    lent = tuple(names.split(","))
    preloaded.adopt(lent, int(fd))
    with launches() if lent == preloaded.TRAINING else captures(lent):
        main()


if __name__ == "__main__":
    main()
