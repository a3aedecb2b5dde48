"""Storage: round trips, and everything that is refused by name."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.store.objects import ObjectError
from windtunnel.store.objects.files import open_files
from windtunnel.store.objects.manifest import seal
from windtunnel.training.checkpoint.live import storage
from windtunnel.training.checkpoint.live.storage import (
    Written,
    complete_step,
    layout,
    prune,
    read_shard,
    step_folder,
    steps,
    write_shard,
)
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.policy.restore import plan_restore


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PART", 64)


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/run"


BLOB = b"lies here"
DIGEST = xxhash.xxh3_128_hexdigest(BLOB)


def put(
    url: str, step: int, shard: str, data: bytes, *, world: int = 1, shared: bool = False, generation: int = 1
) -> Written:
    checksum = xxhash.xxh3_128_hexdigest(data)
    about = Shard(shard, step, world, shared, generation, DIGEST, len(data), checksum)
    return write_shard(url, about, memoryview(data))


def finish(url: str, *shards: Written) -> None:
    complete_step(url, shards, {DIGEST: BLOB})


def whole(url: str, step: int, data: bytes, generation: int = 1) -> None:
    finish(url, put(url, step, "rank0", data, generation=generation))


def listed(url: str, step: int, shard: str = "rank0") -> Shard:
    return [
        it
        for checkpoint in steps(url)
        if checkpoint.step == step
        for it in checkpoint.shards
        if it.name == shard
    ][-1]


def get(url: str, step: int, shard: str = "rank0") -> bytes:
    it = listed(url, step, shard)
    into = bytearray(it.nbytes)
    assert read_shard(url, it, memoryview(into)) == xxhash.xxh3_128(into).hexdigest()
    return bytes(into)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_what_goes_in_comes_out(url: str, size: int, small_parts: None) -> None:
    data = os.urandom(size)
    own = put(url, 4, "rank0", data, shared=True)
    shared = put(url, 4, "shared", b"all alike", shared=True)
    assert [checkpoint.bad != "" for checkpoint in steps(url)] == [True]
    finish(url, shared, own)
    assert get(url, 4) == data
    assert get(url, 4, "shared") == b"all alike"
    (checkpoint,) = steps(url)
    assert layout(url, checkpoint.shards[0]) == BLOB
    assert (checkpoint.step, checkpoint.generation, checkpoint.bad) == (4, 1, "")
    assert checkpoint.shards == (own.shard, shared.shard)
    assert plan_restore([], [checkpoint]).step == 4


def test_courses_of_a_step_do_not_meet(url: str) -> None:
    old = put(url, 5, "rank0", b"old", world=2)
    new = [put(url, 5, f"rank{rank}", b"new", world=2, generation=2) for rank in range(2)]
    with pytest.raises(ObjectError, match=r"step 5 cannot be completed: rank1 is missing"):
        finish(url, old)
    with pytest.raises(ObjectError, match="rank1 is of another checkpoint"):
        finish(url, old, new[1])
    finish(url, *new)
    assert get(url, 5) == b"new"
    assert [(checkpoint.step, checkpoint.generation) for checkpoint in steps(url) if not checkpoint.bad] == [
        (5, 2)
    ]


def test_a_complete_step_is_not_changed(url: str) -> None:
    whole(url, 5, b"one")
    whole(url, 5, b"one")
    with pytest.raises(ObjectError, match="step 5 of generation 1 is complete with another rank0"):
        put(url, 5, "rank0", b"two")
    assert get(url, 5) == b"one"


def test_what_memory_damaged_is_not_stored(url: str) -> None:
    shard = Shard("rank0", 5, 1, False, 1, DIGEST, 7, xxhash.xxh3_128_hexdigest(b"flopped"))
    with pytest.raises(ObjectError, match="rank0 of step 5 is damaged in memory"):
        write_shard(url, shard, memoryview(b"flipped"))
    assert open_files(url).names(step_folder(5, 1)) == []


def saved(tmp_path: Path) -> tuple[str, Path]:
    url = str(tmp_path / "run")
    for step in (1, 2):
        whole(url, step, bytes([step]) * 200)
    return url, next((tmp_path / "run/steps").glob("*2-1"))


def usable(url: str) -> list[int]:
    """The steps that a restore would find, with what fails while reading left out."""
    readable = [checkpoint.step for checkpoint in steps(url) if not checkpoint.bad]
    for step in list(readable):
        try:
            get(url, step)
        except ObjectError:
            readable.remove(step)
    return readable


@pytest.mark.parametrize("name", ["complete", "rank0.00000"])
def test_truncated_at_any_byte(tmp_path: Path, name: str) -> None:
    url, folder = saved(tmp_path)
    whole = (folder / name).read_bytes()
    for length in range(len(whole)):
        (folder / name).write_bytes(whole[:length])
        assert usable(url) == [1], length
    (folder / name).write_bytes(whole)
    assert usable(url) == [1, 2]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_found(tmp_path: Path, data: st.DataObject) -> None:
    url, _ = saved(tmp_path / uuid.uuid4().hex)
    root = Path(url)
    files = [p for p in sorted(root.rglob("*")) if p.is_file()]
    path = files[data.draw(st.integers(0, len(files) - 1))]
    blob = bytearray(path.read_bytes())
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(blob)
    for it in [it for checkpoint in steps(url) if not checkpoint.bad for it in checkpoint.shards]:
        try:
            assert layout(url, it) == BLOB
        except ObjectError as error:
            assert path.suffix == ".layout", error
    for step in usable(url):
        assert get(url, step) == bytes([step]) * 200
    if path.suffix != ".layout":
        assert len(usable(url)) == 1


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(path.read_bytes())
    change(body)
    path.write_bytes(seal(body["kind"], body["version"], body["value"]))


def test_other_versions_are_refused_by_name(tmp_path: Path) -> None:
    url, folder = saved(tmp_path)
    resealed(folder / "complete", lambda body: body.update(version=1))
    assert steps(url)[-1].bad.endswith("2-1/complete has version 1; version 2 is read")
    assert get(url, 1)


def test_foreign_and_torn_steps_are_told(tmp_path: Path) -> None:
    url, folder = saved(tmp_path)
    steps_folder = Path(url) / "steps"
    (steps_folder / "notes").mkdir()
    (folder / "complete").write_text('{"format":"something else"}')
    (folder.with_name("000000000009-4")).mkdir()
    (folder.with_name("000000000007-1")).mkdir()
    (folder.with_name("000000000007-1") / "complete").write_bytes(
        (folder.with_name("000000000001-1") / "complete").read_bytes()
    )
    bad = {checkpoint.step: checkpoint.bad for checkpoint in steps(url) if checkpoint.bad}
    assert bad[-1] == "steps/notes is not a step of a checkpoint"
    assert "it is no step of a checkpoint" in bad[2]
    assert "9-4 was not completed" in bad[9]
    assert "is of another step" in bad[7]
    assert plan_restore([], steps(url)).step == 1
    (folder.with_name("000000000001-1") / "rank0.00000").unlink()
    plan = plan_restore([], steps(url))
    assert plan.step is None
    assert "1-1 lacks rank0" in plan.reason


def test_data_that_was_forged_with_its_quick_checksum_is_refused(tmp_path: Path) -> None:
    """The manifest, which a log may know, has a strong one beside it."""
    url, folder = saved(tmp_path)
    resealed(folder / "complete", lambda body: body["value"]["shards"][0].update(sha256="0" * 64))
    with pytest.raises(ObjectError, match="is damaged"):
        read_shard(url, listed(url, 2))


def test_prune(url: str, small_parts: None) -> None:
    for step in range(5):
        whole(url, step, bytes([step]) * 100)
    put(url, 1, "rank0", b"never finished", generation=2)
    late = put(url, 9, "rank0", b"being written")
    assert [(checkpoint.step, checkpoint.generation) for checkpoint in prune(url, 2)] == [
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 1),
    ]
    assert [checkpoint.step for checkpoint in steps(url) if not checkpoint.bad] == [3, 4]
    assert get(url, 3) == bytes([3]) * 100
    finish(url, late)
    assert get(url, 9) == b"being written"
    assert prune(url, 3) == []
    with pytest.raises(UserError, match="keep is 0"):
        prune(url, 0)


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nosuch://x cannot be used"):
        steps("nosuch://x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectError, match=r"shard rank0 of step 1: .*Not a directory: .*file/"):
        put(str(tmp_path / "file"), 1, "rank0", b"x")
    assert steps(str(tmp_path / "nothing here")) == []
    with pytest.raises(ObjectError, match="cannot name a file"):
        put(str(tmp_path), 1, "../rank0", b"x")
