"""A training loop with checkpoints: it goes on bit-identical, whatever was lost."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_world import Cluster, FakeJob, together
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.checkpoint.live import storage

STEPS = 8


_building = threading.Lock()  # ranks are threads here and share the generator


def program(seed: int = 0) -> dict[str, Any]:
    with _building:
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "cursor": {"sample": 0}}


def train(state: dict[str, Any]) -> float:
    state["cursor"]["sample"] += 4
    noise = float(np.random.rand()) + random.random()
    loss = state["model"](torch.randn(4, 6) + noise).square().mean()
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    return float(loss.detach())


def seeded() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)


@pytest.mark.parametrize("mode", ["concurrent", "blocking"])
def test_a_continuation_is_bit_identical(folder: Path, mode: str) -> None:
    cluster = Cluster(folder, world=1)
    state = program()
    seeded()
    straight = [train(state) for _ in range(STEPS)]
    final = [value.clone() for value in state["model"].state_dict().values()]

    for lost_after in (1, 4):
        state = program()
        seeded()
        cluster.regroup(1)
        cluster.wipe(0)
        kept: dict[str, Any] = {}
        ck = PeerCheckpointer(FakeJob(cluster, 0, kept), mode=mode)
        assert ck.restore(state) == 0
        losses = []
        for step in range(lost_after + 1):
            losses.append(train(state))
            ck.step(step, state)
        ck.flush()
        train(state)  # a step that is lost with the process

        cluster.regroup(1)
        state = program(seed=5)
        ck = PeerCheckpointer(FakeJob(cluster, 0, kept), mode=mode)
        start = ck.restore(state)
        assert start == lost_after + 1
        assert state["cursor"] == {"sample": 4 * start}
        for step in range(start, STEPS):
            losses.append(train(state))
            ck.step(step, state)
        ck.close()
        assert losses == straight
        assert all(
            torch.equal(a, b) for a, b in zip(final, state["model"].state_dict().values(), strict=True)
        )


def save_some(cluster: Cluster, steps: int, **options: Any) -> list[dict[str, Any]]:
    """Every rank trains alone, from its own seed, and saves; the states at the end."""

    def save(rank: int) -> dict[str, Any]:
        state = program(rank)
        ck = PeerCheckpointer(FakeJob(cluster, rank), rng=False, **options)
        for step in range(ck.restore(state), steps):
            with torch.random.fork_rng():
                torch.manual_seed(step * 10 + rank)
                train(state)
            ck.step(step, state)
        ck.close()
        return state

    return [save(0)] if cluster.world == 1 else together(cluster.world, save)


def restore_all(cluster: Cluster, **options: Any) -> tuple[list[int], list[dict[str, Any]]]:
    states = [program(rank + 50) for rank in range(cluster.world)]

    def restore(rank: int) -> int:
        ck = PeerCheckpointer(FakeJob(cluster, rank), rng=False, **options)
        try:
            return ck.restore(states[rank])
        finally:
            ck._end()

    return together(cluster.world, restore), states


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    same = all(
        torch.equal(x, y)
        for x, y in zip(a["model"].state_dict().values(), b["model"].state_dict().values(), strict=True)
    )
    left, right = a["optimizer"].state_dict()["state"], b["optimizer"].state_dict()["state"]
    return same and all(torch.equal(left[p][k], right[p][k]) for p in left for k in left[p])


def test_corrupt_copies_fall_to_the_next_source_then_to_an_older_step(folder: Path) -> None:
    cluster = Cluster(folder, world=2)
    states = save_some(cluster, 3)
    cluster.flip(1, "rank1", 2)
    cluster.regroup(2)
    starts, restored = restore_all(cluster)
    assert starts == [3, 3] and equal(states[1], restored[1])
    assert any("rank1 of step 2 at place 1" in note for note in cluster.notes())

    cluster.flip(0, "rank1", 2)  # the bad copy was made good by the good one, and serves now
    cluster.regroup(2)
    starts, restored = restore_all(cluster)
    assert starts == [3, 3] and equal(states[1], restored[1])

    for place in (0, 1):  # now both are bad: all go to the step before
        cluster.flip(place, "rank1", 2)
    cluster.regroup(2)
    starts, _ = restore_all(cluster)
    assert starts == [2, 2]


def test_all_copies_bad_begins_anew_and_says_so(folder: Path) -> None:
    cluster = Cluster(folder, world=2)
    save_some(cluster, 3)
    for step in (1, 2):
        for place in (0, 1):
            cluster.flip(place, "rank0", step)
    cluster.regroup(2)
    starts, _ = restore_all(cluster)
    assert starts == [0, 0]
    assert any("nothing can be restored" in note for note in cluster.notes())


def test_a_state_of_another_shape_is_refused_by_all_and_changes_nothing(folder: Path) -> None:
    cluster = Cluster(folder, world=2)
    save_some(cluster, 2)
    cluster.regroup(2)

    def restore(rank: int) -> None:
        state = program(rank)
        if rank == 1:
            state["model"][4] = nn.Linear(16, 5)
        before = state["model"][0].weight.clone()
        ck = PeerCheckpointer(FakeJob(cluster, rank), rng=False)
        with pytest.raises(UserError, match=r"rank 1: .*model/4.weight has shape \(3, 16\)"):
            ck.restore(state)
        assert torch.equal(before, state["model"][0].weight)

    together(2, restore)


def test_what_is_alike_is_shared_and_what_differs_later_is_not(folder: Path) -> None:
    cluster = Cluster(folder, world=2)

    def save(rank: int) -> dict[str, Any]:
        state = program(0)  # the same on both ranks
        ck = PeerCheckpointer(FakeJob(cluster, rank), rng=False)
        for step in range(4):
            if step == 1 and rank == 1:
                with torch.no_grad():
                    state["model"][0].weight.add_(1.0)
            ck.step(step, state)
            if step == 0:
                ck.flush()
                assert cluster.files(rank, "shared", 0)
        ck.close()
        return state

    states = together(2, save)
    assert any("model/0.weight" in note and "equal on all ranks" in note for note in cluster.notes())
    cluster.wipe(1)
    cluster.regroup(2)
    starts, restored = restore_all(cluster)
    assert starts == [4, 4]
    assert torch.equal(restored[1]["model"][0].weight, states[1]["model"][0].weight)
    assert torch.equal(restored[0]["model"][0].weight, states[0]["model"][0].weight)


def test_a_slot_is_not_overwritten_before_the_next_is_committed(folder: Path) -> None:
    cluster = Cluster(folder, world=1, replicate=False)
    state = program()
    ck = PeerCheckpointer(FakeJob(cluster, 0), patience=0.2)
    for step in range(4):
        ck.step(step, state)
    ck._settle()
    # The first two fill the slots; no commit comes, so both stay, and the others are skipped and told.
    assert sorted(ck._slot_steps) == [0, 1]
    assert sum("was not saved" in note for note in cluster.notes()) == 2
    cluster.committed = 1
    ck.step(4, state)
    ck._settle()
    assert sorted(ck._slot_steps) == [1, 4]


def test_who_loads_longer_is_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's shard may lie in storage alone, and the others have theirs at once."""
    waits: dict[str, float | None] = {}
    agree = FakeJob.agree

    def timed(self: FakeJob, key: str, value: Any = None, timeout: float | None = None) -> Any:
        waits[key.partition("/")[0]] = timeout
        return agree(self, key, value, timeout)

    cluster = Cluster(folder, 1)
    ck = PeerCheckpointer(FakeJob(cluster, 0))
    ck.step(0, program())
    ck.flush()
    cluster.regroup(1)
    monkeypatch.setattr(FakeJob, "agree", timed)
    assert PeerCheckpointer(FakeJob(cluster, 0), load=900.0).restore(program()) == 1
    assert waits == {"inventory": None, "loaded": 900.0}


def test_storage_that_is_down_holds_up_no_job_that_memory_can_bring_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(url: str) -> list[Any]:
        raise ObjectError("it is down")

    def again() -> PeerCheckpointer:
        cluster.regroup(1)
        return PeerCheckpointer(FakeJob(cluster, 0), persist="memory://down")

    cluster, state = Cluster(folder, 1), program()
    ck = again()
    ck.step(0, state)
    ck.flush()
    monkeypatch.setattr(storage, "steps", steps)
    assert again().restore(state) == 1
    assert "storage cannot be read: it is down; memory has what is needed" in cluster.notes()
    cluster.wipe(0)
    with pytest.raises(ObjectError, match="storage cannot be read: it is down"):
        again().restore(state)


def test_steps_that_do_not_grow_are_refused(folder: Path) -> None:
    """A loop that counts each epoch from 0: of its steps some ranks' copies would be of the epoch before."""
    ck = PeerCheckpointer(FakeJob(Cluster(folder, world=1), 0))
    with pytest.raises(UserError, match="step -1 is the first; numbers that grow from 0"):
        ck.step(-1, program())
    for step in (np.int64(0), 1):
        ck.step(step, program())
    for step in (0, 1):
        with pytest.raises(UserError, match=f"step {step} after step 1; numbers that grow from 0"):
            ck.step(step, program())
    assert ck.restore(program()) == 2
    ck.step(2, program())


def test_what_was_due_to_storage_and_is_not_saved_is_told(folder: Path) -> None:
    cluster = Cluster(folder, world=1, replicate=False)
    ck = PeerCheckpointer(FakeJob(cluster, 0), patience=0.2, persist="memory://due", persist_every=2)
    for step in range(6):
        ck.step(step, program())
    ck._settle()
    kinds = [(event["kind"], event["step"]) for event in cluster.events if "storage" in event["kind"]]
    wanted, failed = "storage.wanted", "storage.failed"
    assert kinds == [(wanted, 1), (wanted, 3), (failed, 3), (wanted, 5), (failed, 5)]
    assert cluster.persisted == [1]


def test_a_write_to_storage_that_ended_with_its_generation_is_made_up_for(folder: Path) -> None:
    """Step 1 was due, and is not in storage when the job goes on from step 2, the last one."""
    cluster = Cluster(folder, world=2)
    options: dict[str, Any] = {"persist": "memory://due", "persist_every": 2, "rng": False}

    def go_on(rank: int) -> int:
        state = program(rank)
        ck = PeerCheckpointer(FakeJob(cluster, rank), **options)
        start = ck.restore(state)
        for step in range(start, 3):
            ck.step(step, state)
        ck.close()
        return start

    assert together(2, go_on) == [0, 0]
    commits = [{"step": 2, "course": cluster.generation}]
    cluster.log = {"committed": commits, "persisted": [], "newest": 2, "due": 1}
    for persisted, due in (([], [2, 2]), ([{"step": 1, "course": 1, "check": "known"}], [])):
        cluster.log["persisted"] = persisted
        cluster.persisted.clear()
        cluster.events.clear()
        cluster.regroup(2)
        assert together(2, go_on) == [3, 3]
        assert cluster.persisted == due
        wanted = [event["step"] for event in cluster.events if event["kind"] == "storage.wanted"]
        assert wanted == due[:1]


def test_steps_that_only_some_ranks_saved_do_not_block_for_ever(folder: Path) -> None:
    cluster = Cluster(folder, world=2, replicate=False)
    meet = threading.Barrier(2, timeout=30)

    def save(rank: int) -> list[int]:
        ck = PeerCheckpointer(FakeJob(cluster, rank), patience=1.0, rng=False)
        for step in range(5):
            meet.wait()
            if step != 2 or rank == 0:  # rank 1 gave step 2 up alone
                ck.step(step, program(rank))
                ck._settle()
            meet.wait()
            cluster.committed = min(step, 1)
        return ck._slot_steps

    # Step 2 of rank 0 and step 3 of rank 1 can never be committed: step 4 goes in their place.
    assert together(2, save) == [[4, 1], [4, 1]]
    assert sum("was not saved" in note for note in cluster.notes()) == 1


def test_a_loader_is_in_the_state_or_its_absence_is_told(folder: Path) -> None:
    cluster = Cluster(folder, world=1)
    samples: Any = range(6)

    def doubts(inside: bool) -> set[str]:
        cluster.regroup(1)
        cluster.events.clear()
        state = program()
        loader = (StatefulDataLoader if inside else DataLoader)(samples, shuffle=True)
        ck = PeerCheckpointer(FakeJob(cluster, 0))
        first = ck.restore(state | {"loader": loader} if inside else state)
        for step, _ in enumerate(loader, first):
            train(state)
            ck.step(step, state | {"loader": loader} if inside else state)
            ck.flush()
        return {doubt for event in cluster.events for doubt in event.get("doubts", ())}

    assert doubts(inside=True) == set()
    (doubt,) = doubts(inside=False)
    assert "a loader that is not in the state" in doubt


def test_a_plain_loader_in_the_state_is_refused_by_both(folder: Path) -> None:
    samples: Any = range(6)
    state = program()
    ck = PeerCheckpointer(FakeJob(Cluster(folder, world=1), 0))
    ck.restore(state)
    state["loader"] = DataLoader(samples, shuffle=True)
    for call in (lambda: ck.step(0, state), lambda: ck.restore(state)):
        with pytest.raises(UserError, match=r"state loader: .* StatefulDataLoader"):
            call()


@pytest.mark.parametrize("stretch", [1, 7])
def test_storage_is_due_at_the_next_save_whatever_their_interval(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stretch: int
) -> None:
    """In idle mode one checkpoint may take several steps: each hundred has its one in storage."""
    cluster = Cluster(folder, world=1)
    ck = PeerCheckpointer(FakeJob(cluster, 0), persist="memory://due", persist_every=100)
    monkeypatch.setattr(ck, "_interval", lambda: stretch)
    state = {"weight": torch.ones(2)}
    for step in range(420):
        ck.step(step, state)
    ck._end()
    assert [(step + 1) // 100 for step in cluster.persisted] == [1, 2, 3, 4]
