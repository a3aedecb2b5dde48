"""Manifests: exact, checked, and clear about what cannot be read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sandbox.store.image_making import manifest
from windtunnel.agents.sandbox.model import CheckpointManifest
from windtunnel.agents.sandbox.store import KIND, VERSION, CheckpointStore, new_id
from windtunnel.base.errors import UserError
from windtunnel.store.objects import ObjectError
from windtunnel.store.objects.chunks import compress
from windtunnel.store.objects.manifest import seal, unseal


@settings(max_examples=50, deadline=None)
@given(st.builds(CheckpointManifest))
def test_every_field_comes_back(checkpoint: CheckpointManifest) -> None:
    if float("inf") > checkpoint.created > float("-inf"):
        try:
            data = seal(KIND, VERSION, checkpoint)
        except ValueError:  # not a number has no JSON
            return
        assert unseal(CheckpointManifest, KIND, VERSION, data, "here") == checkpoint


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path)


def put(store: CheckpointStore, id: str, data: bytes) -> None:
    with store.transaction() as db:
        db.execute("UPDATE manifest SET data=? WHERE id=?", (compress(data, 1), id))


def test_a_manifest_is_written_once(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = manifest()
    store.add(checkpoint)
    assert store.load(checkpoint.id) == CheckpointStore(tmp_path).load(checkpoint.id) == checkpoint
    with pytest.raises(ObjectError, match="already"):
        store.add(replace(checkpoint, turn=9))
    assert store.load(checkpoint.id) == checkpoint
    store.drop([checkpoint.id])
    store.drop([checkpoint.id])
    assert store.all() == ([], [])
    with pytest.raises(ObjectError, match="is not there"):
        store.load(checkpoint.id)


def test_what_is_not_what_was_written_is_refused_by_name(store: CheckpointStore) -> None:
    for id in "ab":
        store.add(manifest(id))
    data = seal(KIND, VERSION, manifest("a"))
    for at in range(0, len(data) - 1, 7):
        put(store, "a", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        good, problems = store.all()
        assert [checkpoint.id for checkpoint in good] == ["b"]
        assert len(problems) == 1 and problems[0].startswith("manifest a in ")
    for wrong, words in (
        (data[:-5], "damaged"),
        (json.dumps({**json.loads(data), "version": VERSION + 1}).encode(), f"version {VERSION} is read"),
        (seal(KIND, VERSION, manifest("c")), "another checkpoint, c"),
    ):
        put(store, "a", wrong)
        with pytest.raises(ObjectError, match=words):
            store.load("a")


def test_find_by_prefix(store: CheckpointStore) -> None:
    with pytest.raises(UserError, match="there is none yet"):
        store.load(store.named("x"))
    for id in ("2026-aa", "2026-ab", "2026-a"):
        store.add(manifest(id))
    assert store.load(store.named("2026-ab")).id == "2026-ab"
    assert store.load(store.named("2026-a")).id == "2026-a"
    with pytest.raises(UserError, match="ambiguous: 2026-a, 2026-aa, 2026-ab"):
        store.load(store.named("2026"))
    for wrong in ("", "9", "../2026-a"):
        with pytest.raises(UserError, match="is not known; the newest are 2026-a, 2026-aa, 2026-ab"):
            store.load(store.named(wrong))


def test_ids_are_unique_and_sort_by_time() -> None:
    ids = [new_id() for _ in range(200)]
    assert len(set(ids)) == 200
    assert all(re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{6}", id) for id in ids)
    assert [id[:15] for id in ids] == sorted(id[:15] for id in ids)
