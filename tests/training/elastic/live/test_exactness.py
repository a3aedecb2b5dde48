"""What keeps a run from being bit-identical after a failure is said by the process that sees it, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.elastic import Job
from windtunnel.training.elastic.live import exactness
from windtunnel.training.elastic.live.exactness import doubts


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Events:
    """Stands for the link to the agent."""

    host, memory = 0, ""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def event(self, kind: str, generation: int, **fields: Any) -> None:
        self.sent.append(fields)


def test_each_reason_is_said_once_in_the_life_of_a_process(one_thread: None) -> None:
    link = Events()
    kept: dict[str, Any] = {}
    for _generation in range(2):  # the function that trains is called again, with a new job
        job = Job(0, 2, 0, timeout=1.0, process_state=kept, link=cast(Any, link))
        job.guarantee()
        job.guarantee(["the moon is not saved"], any_world=True)
        torch.set_num_threads(2)
        job.guarantee(["the moon is not saved"])
        torch.set_num_threads(1)
    said = [event["doubts"] for event in link.sent]
    assert said[:2] == [[], ["the moon is not saved"]]
    assert len(said) == 3 and "2 threads" in said[2][0]
    Job(1, 2, 0, timeout=1.0, process_state={}, link=cast(Any, link)).guarantee(["of another rank"])
    assert len(link.sent) == 3


def test_what_ddp_does_not_keep(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "_ddp_init_helper", exactness._plain)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        exactness.settle()
        settled = DistributedDataParallel(nn.Linear(3, 3))
        for _ in range(2):
            settled(torch.ones(1, 3)).sum().backward()
        assert doubts() == []
        state = powerSGD_hook.PowerSGDState(None, 1)
        settled.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        (doubt,) = doubts()
        assert "PowerSGDState" in doubt
        del settled
    finally:
        dist.destroy_process_group()
