"""Replicas on a real Ray cluster of this host, whose actors are killed from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from support.variants import INPUTS, OUTPUTS, pids, registered
from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.cluster import ReplicaActor, ReplicaCluster
from windtunnel.serving.variants.live.service import VariantsService

pytestmark = pytest.mark.conformance


ray = pytest.importorskip("ray", reason="needs ray (extra ray)")


@pytest.fixture(scope="module")
def cluster() -> Iterator[ReplicaCluster]:
    with pytest.raises(UserError, match="no Ray cluster answers there"):
        ReplicaCluster("ray://127.0.0.1:1")
    ray.init(num_cpus=4, include_dashboard=False)
    yield ReplicaCluster("ray")
    ray.shutdown()


def actors() -> list[int]:
    """Their processes, by what Ray calls them."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if f"ray::{ReplicaActor.__name__}" in "".join(process.info["cmdline"] or ())
    ]


def test_actors_answer_and_those_killed_lose_nothing(cluster: ReplicaCluster, tmp_path: Path) -> None:
    entries = registered(tmp_path)

    async def story() -> None:
        async with VariantsService(entries, cluster=cluster) as service:
            await service.infer("sums", {"input": INPUTS[:1]})
            assert pids(service) == [] and actors()
            killed = 0

            async def ask(number: int) -> None:
                nonlocal killed
                if number % 30 == 15:
                    for pid in actors():
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                            killed += 1
                place = number % 64
                _, [(_, output)] = await service.infer("linear", {"input": INPUTS[place : place + 1]})
                np.testing.assert_allclose(output, OUTPUTS[place : place + 1], atol=0.2)

            for first in range(0, 90, 15):
                await asyncio.gather(*(ask(number) for number in range(first, first + 15)))
            groups = [replicas.group for replicas in service.groups.values()]
            assert killed >= 2 and sum(group.requeued for group in groups) >= 1
            assert sum(group.answered for group in groups) == 91

    asyncio.run(story())
