"""Training functions for the tests of `run`; what they see goes to the agent as events."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from windtunnel.training.elastic import Job, run
from windtunnel.training.elastic.live.job import LARGEST

LIMIT = 50.0


def trainer(rank: int, report: Any, path: str, folder: str, name: str) -> None:
    os.environ.update(WINDTUNNEL_AGENT=path, WINDTUNNEL_RUN=folder, RANK=str(rank), LOCAL_RANK="0")
    run(globals()[name], timeout=LIMIT)


def sums(job: Job) -> dict[str, Any]:
    total = torch.tensor([float(job.rank)])
    dist.all_reduce(total)
    kept = job.keep("made", lambda: job.generation)
    values = job.agree("who", {"rank": job.rank, "pair": (1, 2)})
    job.step(1, loss=total.item())
    return {"sum": total.item(), "made": kept, "values": {str(r): v for r, v in values.items()}}


def blocked_once(job: Job) -> dict[str, Any]:
    """Blocked for ever in the first generation; sums in the second."""
    job.keep("made", lambda: job.generation)
    if job.generation == 1:
        job.event("blocking")
        dist.recv(torch.zeros(1), (job.rank + 1) % job.world)
    return sums(job)


def victim_of_one(job: Job) -> dict[str, Any]:
    """Rank 2 of the first generation ends; the others are in a chain of receives."""
    if job.generation == 1:
        if job.rank == 2:
            job.event("blocking")
            time.sleep(LIMIT)
        job.event("blocking")
        dist.recv(torch.zeros(1), job.rank + 1)
    return sums(job)


def never_out(job: Job) -> Any:
    """The first process of rank 1 sleeps where nothing wakes it, as in an operation that gloo has lost."""
    if job.generation == 1:
        job.event("blocking")
        if job.rank == 1:
            threading.Event().wait()
        dist.recv(torch.zeros(1), (job.rank + 1) % job.world)
    return sums(job)


def slow_to_leave(job: Job) -> Any:
    """Rank 1 computes for longer than a thread may sleep after a cut; nothing interrupts it."""
    job.keep("made", lambda: job.generation)
    if job.generation == 1:
        job.event("blocking")
        if job.rank == 1:
            until = time.monotonic() + 3.0
            while time.monotonic() < until:
                pass
        dist.recv(torch.zeros(1), (job.rank + 1) % job.world)
    return sums(job)


def in_agreement(job: Job) -> Any:
    if job.generation == 1:
        job.event("blocking")
        job.agree("never")
    return sums(job)


def late(job: Job) -> Any:
    if job.generation == 1:
        try:
            job.agree("never", timeout=0.1)
        except TimeoutError as error:
            job.event("late", text=str(error))
    return sums(job)


def swallows(job: Job) -> Any:
    if job.generation == 1:
        job.event("blocking")
        while True:
            try:
                job.check()
                time.sleep(0.001)
            except Exception:
                job.event("swallowed")
    return sums(job)


def quits(job: Job) -> Any:
    atexit.register((job.folder / "left").touch)
    sys.exit(0)


def refuses(job: Job) -> Any:
    argparse.ArgumentParser("me").parse_args(["--bogus"])


def own_mistake(job: Job) -> Any:
    raise KeyError("the program's own")


def odd_values(job: Job) -> Any:
    large = "x" * LARGEST
    for give in (
        lambda: job.agree("k", torch.ones(1)),
        lambda: job.event("k", x=object()),
        lambda: job.event("k", x=large),
    ):
        try:
            give()
        except TypeError as error:
            job.event("refused", text=str(error))
    try:
        job.at("nowhere")
    except ValueError as error:
        job.event("refused", text=str(error))
    return object


def commits(job: Job) -> Any:
    before = job.decided("commit/7")
    if job.generation == 1:
        values = job.agree("commit/7", job.rank)
        job.event("durable", values=list(values), before=before)
        job.agree("never")
    return before


def steps(job: Job) -> Any:
    for step in range(1, 4):
        job.at("after_local_write", step)
        job.step(step)
    return "all"
