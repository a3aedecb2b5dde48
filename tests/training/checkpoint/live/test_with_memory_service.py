"""The checkpointer on real memory services, one for each host, in one process."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import FakeJob, Regrouped, together
from torch import nn

from support.waiting import until
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live import checkpointer
from windtunnel.training.checkpoint.live.access import Access, MemoryLost
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.memory.service import Holder

sys.path.append(str(Path(__file__).parent.parent / "memory"))
import memory_cluster


class Job(FakeJob):
    """A rank whose agent is a real service."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world, rank)
        self.path = world.hosts.service(self.place).path


class World:
    """Hosts, and the agreements between their ranks; what `FakeJob` asks of a cluster."""

    def __init__(self, folder: Path, hosts: int, per_host: int = 1) -> None:
        from checkpoint_world import Cluster

        self.hosts = memory_cluster.Cluster(folder, hosts, per_host)
        self._plain = Cluster(folder, hosts * per_host, per_host)
        self.regroup()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def regroup(self, places: list[int] | None = None) -> None:
        if places is not None:
            self.hosts.form(places)
        self._plain.world = self.hosts.world
        self._plain.generation = self.hosts.generation

    def lose(self, *gone: int) -> None:
        """Hosts at these places are lost with their memory, new ones take the places."""
        places = list(self.hosts.places)
        for place in gone:
            self.hosts.stop(places[place])
            places[place] = self.hosts.start()
        self.regroup(places)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(job: Any, settings: Any) -> Access | None:
        return Access(job, settings, LocalMemory(job.path, job.rank, job.generation, 10.0))

    monkeypatch.setattr(checkpointer, "attach", attach)


@pytest.fixture
def make(folder: Path, in_memory: None) -> Iterator[Any]:
    worlds: list[World] = []

    def make_world(*args: int) -> World:
        worlds.append(World(folder, *args))
        return worlds[-1]

    yield make_world
    for world in worlds:
        world.hosts.close()


_building = threading.Lock()  # ranks are threads here and share the generator


def program(seed: int) -> dict[str, Any]:
    with _building:
        torch.manual_seed(seed)
        model = nn.Linear(300, 20)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), foreach=False)}


def train(state: dict[str, Any], step: int) -> None:
    x = torch.randn(4, 300, generator=torch.Generator().manual_seed(step))
    state["model"](x).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def run(world: World, rank: int, steps: int, seed: int | None = None, **options: Any) -> tuple[int, Any]:
    """A rank's training function: restore, train up to ``steps``, save each."""
    state = program(rank if seed is None else seed)
    ck = PeerCheckpointer(Job(world, rank), rng=False, patience=20.0, **options)
    start = ck.restore(state)
    for step in range(start, steps):
        train(state, step)
        ck.step(step, state)
    flushed = ck.flush()
    committed = ck.committed()
    ck._end()
    assert flushed or start == steps
    return start, (state["model"].weight.detach().clone(), committed)


def straight(rank: int, steps: int) -> torch.Tensor:
    state = program(rank)
    for step in range(steps):
        train(state, step)
    return state["model"].weight.detach()


def test_going_back_again_within_a_generation_is_committed_again(make: Any) -> None:
    world = make(2)

    def go_back_twice(rank: int) -> torch.Tensor:
        state = program(rank)
        ck = PeerCheckpointer(Job(world, rank), rng=False, patience=5.0)
        assert ck.restore(state) == 0
        for steps in (2, 4):
            for step in range(steps - 2, steps):
                train(state, step)
                ck.step(step, state)
            for _ in range(2):
                train(state, 99)  # what is left behind
                assert ck.restore(state) == steps
                assert ck.flush()  # it has its copies again, and is committed anew
        ck._end()
        return state["model"].weight.detach()

    weights = together(2, go_back_twice)
    assert all(torch.equal(weight, straight(rank, 4)) for rank, weight in enumerate(weights))
    assert not [note for note in world.notes() if "was not saved" in note or "not committed" in note]


@pytest.mark.parametrize("mode", ["concurrent", "idle"])
def test_hosts_are_lost_one_after_the_other(make: Any, mode: str) -> None:
    world = make(3)
    assert [start for start, _ in together(3, lambda r: run(world, r, 4, mode=mode))] == [0, 0, 0]
    needs = [note for note in world.notes() if note.startswith("checkpoints take memory on each host")]
    assert ["2 slots x" in note and "held for others" in note for note in needs] == [True]
    for number, gone in enumerate([1, 0, 2]):
        world.lose(gone)
        steps = 6 + 2 * number
        out = together(3, lambda r, steps=steps: run(world, r, steps, mode=mode))
        assert [start for start, _ in out] == [steps - 2] * 3
        for rank, (_, (weight, committed)) in enumerate(out):
            assert torch.equal(weight, straight(rank, steps))
            assert committed == steps - 1


def test_replicas_are_not_sent_and_serve_a_new_host(make: Any) -> None:
    world = make(2)
    together(2, lambda r: run(world, r, 3, seed=0))
    shards = {c.shard.name for m in world.hosts.ranks for c in m.copies()}
    assert shards == {"rank0", "rank1", "shared"}
    world.lose(0)
    out = together(2, lambda r: run(world, r, 3, seed=5))
    assert [start for start, _ in out] == [3, 3]
    assert all(torch.equal(weight, straight(0, 3)) for _, (weight, _) in out)


def test_all_copies_lost_falls_to_storage_for_everybody(make: Any, tmp_path: Path) -> None:
    world = make(2)
    url = str(tmp_path)
    together(2, lambda r: run(world, r, 5, persist=url, persist_every=2))
    from windtunnel.training.checkpoint.live import storage

    until(lambda: [s.step for s in storage.steps(url) if not s.bad][-1:] == [3])
    world.lose(0, 1)
    out = together(2, lambda r: run(world, r, 6, persist=url, persist_every=100))
    assert [start for start, _ in out] == [4, 4]
    assert all(torch.equal(weight, straight(rank, 6)) for rank, (_, (weight, _)) in enumerate(out))
    tiers = {event["tier"] for event in world.events if event["kind"] == "restored"}
    assert tiers == {"storage"}


def test_a_second_loss_while_the_restored_step_lacks_copies(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 2 is complete at home everywhere, but rank 2's copy does not get through; host 0 is lost, all
    go back to step 2. Nobody may overwrite step 1 before rank 2's copy is there: host 2 is lost next."""
    put, blocked = Holder._put, threading.Event()

    def held_up(self: Holder, sock: Any, message: dict[str, Any], raw: bytes) -> Any:
        if not blocked.is_set() and (message["shard"]["name"], message["shard"]["step"]) == ("rank2", 2):
            return {"answer": "wait"}
        return put(self, sock, message, raw)

    monkeypatch.setattr(Holder, "_put", held_up)
    world = make(4)

    def resume(rank: int, steps: int) -> int:
        state = program(rank)
        ck = PeerCheckpointer(Job(world, rank), rng=False, patience=20.0)
        start = ck.restore(state)
        with contextlib.suppress(Regrouped, MemoryLost):
            for step in range(start, steps):
                train(state, step)
                ck.step(step, state)
            ck._settle()
        ck._end()
        return start

    def kept() -> set[tuple[int, str, int]]:
        return {(c.place, c.shard.name, c.shard.step) for m in world.hosts.ranks for c in m.copies()}

    assert together(4, lambda r: resume(r, 3)) == [0] * 4
    # Step 2 can only be gone back to where the lost host's shard of it has come to its neighbour.
    copies = {(1, "rank0", 2), (0, "rank1", 2), (2, "rank3", 2)}
    until(lambda: copies <= kept())
    assert {(r, f"rank{r}", 2) for r in range(4)} <= kept() and (3, "rank2", 2) not in kept()
    waits: Counter[int] = Counter()
    wait_committed = LocalMemory.wait_committed

    def counted(self: LocalMemory, step: int, timeout: float) -> bool:
        committed = wait_committed(self, step, timeout)
        waits[self._caller.rank] += 1
        return committed

    world.lose(0)
    monkeypatch.setattr(LocalMemory, "wait_committed", counted)
    jobs = [threading.Thread(target=resume, args=(r, 5)) for r in range(4)]
    for job in jobs:
        job.start()
    # The new host has its copy again, all but rank 2's are there.
    until(lambda: {(0, "rank0", 2), (0, "rank1", 2)} <= kept())
    # Each rank wants to save a step, was refused a slot and has heard, more than once, that it must wait on.
    until(lambda: all(waits[rank] > 1 for rank in range(4)))
    assert {(r, f"rank{r}", 1) for r in range(1, 4)} <= kept()
    assert [memory.committed() for memory in world.hosts.ranks] == [-1] * 4
    world.lose(2)
    for job in jobs:
        job.join(30.0)
    blocked.set()
    out = together(4, lambda r: run(world, r, 6))
    assert [start for start, _ in out] == [2] * 4
    assert all(torch.equal(weight, straight(rank, 6)) for rank, (_, (weight, _)) in enumerate(out))
