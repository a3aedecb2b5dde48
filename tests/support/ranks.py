"""The ranks of a job as torchrun would start them, forked from a server that has torch imported."""

from __future__ import annotations

import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.preloaded import TRAINING, Process

OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_alone(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """``command`` (a script, or ``-m module``, and arguments) as a script that nothing launched."""
    # The system chooses a port that is free, which nobody else has to know.
    return _run(command, [{"MASTER_PORT": "0"}], **options)


def run_ranks(command: Sequence[str | Path], world: int, **options: Any) -> subprocess.CompletedProcess[str]:
    """``command`` as every rank of ``world``: the status of the first that failed, and what all printed.
    Ranks meet at a store of this process, as at torchrun's."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world)}
    common |= {"LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    try:
        return _run(command, own, **options)
    finally:
        del store


def _run(
    command: Sequence[str | Path],
    own: Sequence[Mapping[str, str]],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300.0,
    modules: tuple[str, ...] = TRAINING,
) -> subprocess.CompletedProcess[str]:
    given = {key: value for key, value in (os.environ if env is None else env).items() if key not in OWN}
    given["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as err:
        ranks = [
            Process(command, modules=modules, env=given | variables, cwd=cwd, stdout=out, stderr=err)
            for variables in own
        ]
        try:
            status = _ended(ranks, timeout, command)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([*map(str, command)], status, *texts)


def _ended(ranks: list[Process], timeout: float, command: Any) -> int:
    """The first status that is not 0, as soon as there is one; 0 when all have ended well."""
    last = time.monotonic() + timeout
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            waiting.register(rank, selectors.EVENT_READ)
        while waiting.get_map():
            ready = waiting.select(max(0.0, last - time.monotonic()))
            if not ready:
                raise subprocess.TimeoutExpired(command, timeout)
            for key, _ in ready:
                waiting.unregister(key.fileobj)
                status = key.fileobj.wait()  # type: ignore[union-attr]
                if status != 0:
                    return status
    return 0
