"""Storage: round trips, what is not written twice, and everything that is refused by name."""

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
from windtunnel.store.objects import ObjectError, chunks
from windtunnel.store.objects.files import open_files
from windtunnel.store.objects.manifest import seal
from windtunnel.training.checkpoint.live.storage import (
    ShardManifest,
    StepManifest,
    complete_step,
    layout,
    prune,
    read_shard,
    scrub,
    step_folder,
    steps,
    write_shard,
)
from windtunnel.training.checkpoint.policy.restore import plan_restore


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "PIECE", 64)


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    return f"file://{tmp_path}/run" if request.param == "file" else str(tmp_path / "run")


def put(
    url: str,
    step: int,
    shard: str,
    data: bytes,
    *,
    world: int = 1,
    shared: bool = False,
    generation: int = 1,
    level: int | None = None,
) -> ShardManifest:
    return write_shard(
        url,
        step,
        shard,
        memoryview(data),
        world=world,
        has_shared=shared,
        generation=generation,
        layout="abc",
        checksum=xxhash.xxh3_128(data).hexdigest(),
        level=level,
    )


def finish(url: str, step: int, *, world: int = 1, shared: bool = False, generation: int = 1) -> StepManifest:
    return complete_step(
        url, step, world=world, has_shared=shared, generation=generation, layouts={"abc": b"lies here"}
    )


def get(url: str, step: int, shard: str = "rank0") -> bytes:
    sizes = [s.nbytes for one in steps(url) if one.step == step for s in one.shards if s.shard == shard]
    into = bytearray(sizes[-1] if sizes else 0)
    assert read_shard(url, step, shard, memoryview(into)) == xxhash.xxh3_128(into).hexdigest()
    return bytes(into)


@pytest.mark.parametrize("level", [None, 3])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000])
def test_what_goes_in_comes_out(url: str, level: int | None, size: int, small_pieces: None) -> None:
    data = os.urandom(size)
    put(url, 4, "rank0", data, shared=True, level=level)
    put(url, 4, "shared", b"all alike", shared=True, level=level)
    assert [one.bad != "" for one in steps(url)] == [True]
    assert open_files(url).names(step_folder(4, 1)) == ["rank0.shard", "shared.shard"]
    finish(url, 4, shared=True)
    assert get(url, 4) == data
    assert get(url, 4, "shared") == b"all alike"
    assert layout(url, "abc") == b"lies here"
    (one,) = steps(url)
    assert (one.step, one.world, one.has_shared, one.generation, one.bad) == (4, 1, True, 1, "")
    assert [shard.shard for shard in one.shards] == ["rank0", "shared"]
    assert plan_restore([], [one]).step == 4


def test_large_pieces_at_once(url: str) -> None:
    data = os.urandom(3 * chunks.PIECE + 17)
    put(url, 1, "rank0", data)
    finish(url, 1)
    assert get(url, 1) == data


def test_equal_pieces_are_written_once(tmp_path: Path, small_pieces: None) -> None:
    url = str(tmp_path)
    data = bytearray(os.urandom(640))
    put(url, 1, "rank0", bytes(data))
    finish(url, 1)
    before = set((tmp_path / "chunks").rglob("*"))
    data[100] ^= 1
    put(url, 2, "rank0", bytes(data))
    finish(url, 2)
    new = [path for path in set((tmp_path / "chunks").rglob("*")) - before if path.is_file()]
    assert len(new) == 1
    # compressed or not, a piece that is there is not written again
    put(url, 3, "rank0", bytes(data), level=3)
    assert not list((tmp_path / "chunks").rglob("*.zst"))
    assert get(url, 2) == bytes(data)


def test_courses_of_a_step_do_not_meet(url: str) -> None:
    put(url, 5, "rank0", b"old", world=2)
    put(url, 5, "rank0", b"new", world=2, generation=2)
    put(url, 5, "rank1", b"new", world=2, generation=2)
    with pytest.raises(ObjectError, match=r"step 5 cannot be completed: .*rank1\.shard is missing"):
        finish(url, 5, world=2)
    finish(url, 5, world=2, generation=2)
    assert get(url, 5) == b"new"
    whole = [one for one in steps(url) if not one.bad]
    assert [(one.step, one.generation) for one in whole] == [(5, 2)]
    with pytest.raises(ObjectError, match=r"rank0\.shard is of another checkpoint"):
        finish(url, 5, world=1, generation=2)


def test_a_complete_step_is_not_changed(url: str) -> None:
    put(url, 5, "rank0", b"one")
    finish(url, 5)
    put(url, 5, "rank0", b"one")
    finish(url, 5)
    with pytest.raises(ObjectError, match="step 5 of generation 1 is complete with another rank0"):
        put(url, 5, "rank0", b"two")
    assert get(url, 5) == b"one"


def test_what_memory_damaged_is_not_stored(url: str) -> None:
    with pytest.raises(ObjectError, match="rank0 of step 5 is damaged in memory"):
        write_shard(
            url,
            5,
            "rank0",
            memoryview(b"flipped"),
            world=1,
            has_shared=False,
            generation=1,
            layout="abc",
            checksum=xxhash.xxh3_128(b"flopped").hexdigest(),
        )
    assert open_files(url).names(step_folder(5, 1)) == []


def test_room_must_fit(url: str) -> None:
    put(url, 5, "rank0", b"12345")
    finish(url, 5)
    with pytest.raises(ObjectError, match="has 5 bytes; there is room for 4"):
        read_shard(url, 5, "rank0", memoryview(bytearray(4)))
    with pytest.raises(ObjectError, match="step 6 is not in storage"):
        read_shard(url, 6, "rank0")
    with pytest.raises(ObjectError, match=r"rank7\.shard is missing"):
        read_shard(url, 5, "rank7")
    with pytest.raises(ObjectError, match="layout xyz is missing"):
        layout(url, "xyz")


def saved(tmp_path: Path) -> tuple[str, Path]:
    url = str(tmp_path / "run")
    for step in (1, 2):
        put(url, step, "rank0", bytes([step]) * 200)
        finish(url, step)
    return url, next((tmp_path / "run/steps").glob("*2-1"))


def usable(url: str) -> list[int]:
    """The steps that a restore would find, with what fails while reading left out."""
    found = [one.step for one in steps(url) if not one.bad]
    for step in list(found):
        try:
            get(url, step)
        except ObjectError:
            found.remove(step)
    return found


@pytest.mark.parametrize("name", ["complete", "rank0.shard"])
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
    try:
        assert layout(url, "abc") == b"lies here"
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
    resealed(folder / "complete", lambda body: body.update(version=2))
    told = steps(url)[-1].bad
    assert told.endswith("2-1/complete has version 2; version 1 is read")
    resealed(folder / "complete", lambda body: body.update(version=1))
    assert steps(url)[-1].bad == ""
    resealed(folder / "rank0.shard", lambda body: body.update(version=3))
    with pytest.raises(ObjectError, match=r"rank0\.shard has version 3"):
        read_shard(url, 2, "rank0")
    with pytest.raises(ObjectError, match=r"nothing can be removed: .* has version 3"):
        prune(url, 2)
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
    bad = {one.step: one.bad for one in steps(url) if one.bad}
    assert bad[-1] == "steps/notes is not a step of a checkpoint"
    assert "it is no step of a checkpoint" in bad[2]
    assert "9-4 was not completed: 0 shards" in bad[9]
    assert "is of another step" in bad[7]
    assert plan_restore([], steps(url)).step == 1
    (folder.with_name("000000000001-1") / "rank0.shard").unlink()
    plan = plan_restore([], steps(url))
    assert plan.step is None
    assert "1-1 lacks rank0" in plan.reason


def test_a_shard_of_another_save_is_refused(tmp_path: Path) -> None:
    url, folder = saved(tmp_path)
    resealed(folder / "rank0.shard", lambda body: body["value"].update(layout="other"))
    with pytest.raises(ObjectError, match="is not the one that"):
        read_shard(url, 2, "rank0")


def test_prune(url: str, small_pieces: None) -> None:
    for step in range(5):
        put(url, step, "rank0", bytes([step]) * 64 + b"alike" * 20)
        finish(url, step)
    put(url, 1, "rank0", b"never finished", generation=2)
    put(url, 9, "rank0", b"being written")
    told = prune(url, 2)
    assert (told.steps, told.kept) == (4, (3, 4))
    assert told.chunks == 4
    assert [one.step for one in steps(url) if not one.bad] == [3, 4]
    assert get(url, 3)[:64] == bytes([3]) * 64
    finish(url, 9)
    assert get(url, 9) == b"being written"
    assert prune(url, 3).chunks == 0
    with pytest.raises(UserError, match="keep is 0"):
        prune(url, 0)


def test_scrub_heals_at_the_next_save(tmp_path: Path, small_pieces: None) -> None:
    url = str(tmp_path)
    data = bytes(range(200))
    put(url, 1, "rank0", data)
    finish(url, 1)
    assert scrub(url) == []
    victim = next(path for path in sorted((tmp_path / "chunks").rglob("*")) if path.is_file())
    victim.write_bytes(bytes(len(victim.read_bytes())))
    with pytest.raises(ObjectError, match="bytes do not match its name"):
        read_shard(url, 1, "rank0")
    assert len(scrub(url)) == 1
    put(url, 2, "rank0", data)
    finish(url, 2)
    assert get(url, 1) == get(url, 2) == data


def test_unfinished_writes_are_tidied(tmp_path: Path) -> None:
    url, _ = saved(tmp_path)
    folder = next((tmp_path / "run/chunks").iterdir())
    (folder / ".part-abc-old").write_bytes(b"half")
    (folder / ".part-abc-new").write_bytes(b"half")
    os.utime(folder / ".part-abc-old", (1, 1))
    prune(url, 2)
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".part")) == [".part-abc-new"]


def test_places_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nosuch://x cannot be used"):
        steps("nosuch://x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ObjectError, match=r"shard rank0 of step 1: .*Not a directory: .*file/"):
        put(str(tmp_path / "file"), 1, "rank0", b"x")
    assert steps(str(tmp_path / "nothing here")) == []
    with pytest.raises(ObjectError, match="cannot name a file"):
        put(str(tmp_path), 1, "../rank0", b"x")
