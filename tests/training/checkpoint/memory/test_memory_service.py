"""Memory services that replicate, commit and repair, over real sockets."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from memory_cluster import DIGEST, LAYOUT, Cluster, content, fill

from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live.memory import LocalMemory, StaleGeneration
from windtunnel.training.checkpoint.live.memory.messages import Pace, Reservation
from windtunnel.training.checkpoint.live.memory.state import Ledger
from windtunnel.training.checkpoint.live.slot import CopyError

N = 10_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(*args: int, **options: object) -> Cluster:
        clusters.append(Cluster(tmp_path / f"c{len(clusters)}", *args, **options))  # type: ignore[arg-type]
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


def test_saved_shards_reach_their_holders_and_are_committed(cluster: Callable[..., Cluster]) -> None:
    c = cluster(4)
    c.reserve()
    for step in range(5):
        c.save(step, step % 2)
        c.wait(step)
    assert [c.holders(f"rank{r}", 4) for r in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m.committed() for m in c.ranks] == [4] * 4
    assert c.decided == [f"checkpoint/{step}/1.0" for step in range(5)]
    assert {tuple(value) for value in c.posts["checkpoint/4/1.0"].values()} == {("course",)}
    assert c.ranks[1].layout(DIGEST) == LAYOUT


def test_what_is_posted_takes_no_memory_any_more() -> None:
    ledger = Ledger()
    for step in range(1000):
        ledger.saved(0, step, "rank0", [1], 3)
        assert ledger.done(0, step, ["rank0"]) is None
        ledger.arrived(0, step, "rank0", 1)
        assert [ledger.done(0, step, ["rank0"]) for _ in range(2)] == [3, None]
    assert ledger == Ledger()


def test_several_ranks_of_a_host_and_shared_state(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2, 2)
    c.reserve()
    shared = {}
    for rank in (0, 2):
        shared[rank] = c.ranks[rank].reserve(Reservation("shared", 500, DIGEST, copies=1), LAYOUT)
    for rank in (0, 2):
        fill(shared[rank][0], "shared", 0, 500, 4, 1, has_shared=True)
        c.ranks[rank].saved("shared", 0, 0)
    c.save(0, 0, has_shared=True)
    c.wait(0)
    assert c.holders("shared", 0) == [0, 1]
    assert [c.holders(f"rank{r}", 0) for r in range(4)] == [[0, 1]] * 4


def test_a_step_is_committed_only_when_every_rank_has_all_copies(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2)
    c.reserve()
    c.save(0, 0, ranks=[0])
    until(lambda: c.holders("rank0", 0) == [0, 1])
    until(lambda: list(c.posts.get("checkpoint/0/1.0", ())) == [0])
    assert [memory.committed() for memory in c.ranks] == [-1, -1]
    c.save(0, 0, ranks=[1])
    c.wait(0)


def test_a_holder_keeps_the_committed_step_until_the_next_is(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2)
    c.reserve()
    c.save(0, 0)
    c.wait(0)
    c.save(1, 1, ranks=[0])
    until(lambda: c.holders("rank0", 1) == [0, 1])
    # Rank 0 breaks the rule: its own copy of step 0 survives at the holder until step 1 is committed.
    c.save(2, 1, ranks=[0])
    c.holders("rank0", 2)
    assert c.holders("rank0", 0) == [0, 1]
    c.save(1, 1, ranks=[1])


def test_lost_replicas_are_made_again_within_one_checkpoint(cluster: Callable[..., Cluster]) -> None:
    c = cluster(4)
    c.reserve()
    for step in (0, 1):
        c.save(step, step)
        c.wait(step)
    c.stop(1)
    c.form([0, c.start(), 2, 3])
    # The new host's own shard is read from its holder.
    into = memoryview(bytearray(N))
    c.ranks[1].fetch(0, "rank1", 1, into)
    assert bytes(into) == content("rank1", 1, N)
    # The step that all go back to is committed again when all copies are there again, and not before.
    c.go_back(1, ranks=[0, 2, 3])
    until(lambda: c.holders("rank0", 1) == [0, 1])
    assert [m.committed() for m in c.ranks] == [-1] * 4
    c.go_back(1, ranks=[1])
    c.wait(1)
    assert [len(c.holders(f"rank{r}", 1)) for r in range(4)] == [2] * 4
    assert [slot.header.shard.step for slot in c.slots[0, "rank0"] if slot.header] == [0, 1]
    c.save(2, 0, ranks=[0, 2, 3])
    c.save(2, 1, ranks=[1])
    c.wait(2)
    assert [len(c.holders(f"rank{r}", 2)) for r in range(4)] == [2] * 4


def test_a_new_owner_does_not_cost_the_last_copy_of_the_step_gone_back_to(
    cluster: Callable[..., Cluster],
) -> None:
    c = cluster(2)
    c.reserve()
    c.save(0, 0)
    c.wait(0)
    c.save(1, 1)
    c.wait(1)
    c.stop(1)
    c.form([0, c.start()])
    for memory in c.ranks:
        memory.restored(0, 1)
    c.reserve()
    c.save(1, 0, ranks=[1])
    until(lambda: c.holders("rank1", 1) == [0, 1])
    assert c.holders("rank1", 0) == [0]


def test_slots_of_another_world_go_when_a_step_of_the_new_one_is_committed(
    cluster: Callable[..., Cluster],
) -> None:
    c = cluster(3)
    c.reserve(kind="ring")
    for step in (0, 1):
        c.save(step, step)
        c.wait(step)
    c.stop(2)
    c.form([0, 1])
    for memory in c.ranks:
        memory.restored(1, 1)
    c.reserve()
    c.save(2, 0, ranks=[0])
    until(lambda: c.holders("rank0", 2) == [0, 1])
    assert {copy.shard.world for copy in c.ranks[0].copies()} == {2, 3}
    assert c.holders("rank2", 1) == [0]
    c.save(2, 0, ranks=[1])
    c.wait(2)
    assert {copy.shard.world for memory in c.ranks for copy in memory.copies()} == {2}
    assert not list((c.folder / "n0").glob("rank?.3.*"))


def test_shards_that_grow_get_new_slots_and_the_old_ones_go_later(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2)
    c.reserve(1000)
    c.save(0, 0, 1000)
    c.wait(0)
    c.reserve(3000)
    assert c.holders("rank0", 0) == [0, 1]
    c.save(1, 0, 3000)
    c.wait(1)
    assert c.holders("rank0", 1) == [0, 1] and c.holders("rank0", 0) == []


def test_shards_that_grow_before_the_step_gone_back_to_is_committed_again_do_not_cost_it(
    cluster: Callable[..., Cluster],
) -> None:
    it = cluster(2)
    it.reserve()
    it.save(0, 0)
    it.wait(0)
    it.form(it.places)
    late = "checkpoint/0/2.1"
    it.deaf.add(late)
    it.go_back(0)
    until(lambda: len(it.posts.get(late, {})) == it.world)
    it.reserve(20_000)
    it.deaf.clear()
    it.post(late, 0, {"course": 1})
    it.wait(0)
    assert it.holders("rank0", 0) == it.holders("rank1", 0) == [0, 1]
    it.save(1, 0, 20_000)
    it.wait(1)
    assert it.holders("rank0", 0) == []


def test_what_a_stale_generation_says_is_refused(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2)
    c.reserve()
    old = LocalMemory(c.service(0).path, 0, 1)
    c.form(c.places)
    for request in (
        lambda: old.saved("rank0", 0, 0),
        lambda: old.reserve(Reservation("rank0", N, DIGEST), LAYOUT),
        lambda: old.restored(3, 1),
    ):
        with pytest.raises(StaleGeneration):
            request()
    old.close()


def test_a_wiped_memory_counts_as_empty_and_is_filled_again(cluster: Callable[..., Cluster]) -> None:
    c = cluster(2)
    c.reserve()
    c.save(0, 0)
    c.wait(0)
    for path in (c.folder / "n0").iterdir():
        if path.is_file():
            path.unlink()
    assert c.ranks[0].copies() == []
    with pytest.raises(CopyError):
        c.ranks[1].fetch(0, "rank0", 0, memoryview(bytearray(N)))
    with pytest.raises(CopyError, match="wiped"):
        c.save(1, 1, ranks=[0])
    c.form(c.places)
    c.reserve()
    c.save(1, 1)
    c.wait(1)
    assert c.holders("rank0", 1) == [0, 1]


def test_what_does_not_fit_is_refused_with_the_sum(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = cluster(2)
    monkeypatch.setattr(
        "windtunnel.training.checkpoint.live.memory.folder.free", lambda folder: (50_000, "free here")
    )
    with pytest.raises(
        UserError, match=r"2 slots x \(20 kB of its own \+ 20 kB held for others\).* 50 kB are"
    ):
        c.ranks[0].reserve(Reservation("rank0", 20_000, DIGEST), LAYOUT)
    assert not list(c.folder.glob("n*/*.slot"))
    c.reserve(1000)


def test_who_comes_back_to_slots_that_are_there_needs_no_more_memory(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the peers' shards are smaller than its own, and the sum takes them for as large."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pair = cluster(2)
    pair.reserve(20_000, [0])
    pair.reserve(10_000, [1])
    memory = "windtunnel.training.checkpoint.live.memory.folder"
    monkeypatch.setattr(f"{memory}.free", lambda folder: (0, "free here"))
    monkeypatch.setattr(f"{memory}.atomic.replace", full)
    pair.form(pair.places)
    pair.reserve(20_000, [0])
    pair.reserve(10_000, [1])
    with pytest.raises(UserError, match="0 B are free here"):
        pair.reserve(40_000, [0])


def test_bad_requests_are_refused_in_words(cluster: Callable[..., Cluster]) -> None:
    c = cluster(1)
    with pytest.raises(UserError, match="name"):
        c.ranks[0].reserve(Reservation("../x", N, DIGEST), LAYOUT)
    with pytest.raises(UserError, match="mode"):
        c.ranks[0].reserve(Reservation("rank0", N, DIGEST, pace=Pace("fast")), LAYOUT)
    with pytest.raises(CopyError, match="reserved"):
        c.ranks[0].saved("rank0", 0, 0)
    with pytest.raises(CopyError, match="no place"):
        c.ranks[0].fetch(7, "rank0", 0, memoryview(bytearray(1)))


def test_steps_go_to_storage_when_they_are_committed(cluster: Callable[..., Cluster], tmp_path: Path) -> None:
    storage = pytest.importorskip("windtunnel.training.checkpoint.live.storage")
    c = cluster(2, 2)
    c.reserve()
    url = str(tmp_path / "store")
    c.save(0, 0, ranks=[0, 1, 2])
    for rank in (0, 1, 2):
        c.ranks[rank].persist(0, url)
    c.save(0, 0, ranks=[3])
    c.ranks[3].persist(0, url)
    c.wait(0)
    for step in (1, 2):  # its slots are overwritten while storage is still busy
        c.save(step, step % 2)
        c.wait(step)
    until(lambda: any(kind == "persisted" for kind, _ in c.contexts[0].events))
    (step,) = storage.steps(url)
    assert (step.step, len(step.shards), step.bad) == (0, 4, "")
    into = memoryview(bytearray(N))
    storage.read_shard(url, step.shards[3], into)
    assert bytes(into) == content("rank3", 0, N)
    assert storage.layout(url, step.shards[3]) == LAYOUT


def test_a_copy_of_an_abandoned_course_that_is_equal_counts_as_of_the_new_one(
    cluster: Callable[..., Cluster],
) -> None:
    """Else a restore, which takes all shards from one course, would not find it when its owner is lost."""
    c = cluster(2)
    c.reserve()
    c.save(0, 0)
    c.wait(0)
    c.save(1, 1, ranks=[0])
    until(lambda: c.holders("rank0", 1) == [0, 1])
    c.form(c.places)
    c.go_back(0)
    c.wait(0)
    c.save(1, 1)
    c.wait(1)
    held = {(copy.place, copy.shard) for m in c.ranks for copy in m.copies() if copy.shard.step == 1}
    held_shards = {(place, shard.name, shard.generation) for place, shard in held}
    assert held_shards == {(place, f"rank{rank}", 2) for place in (0, 1) for rank in (0, 1)}
