"""Plans as files: written and read again, and refused where they are for other tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from windtunnel.base.errors import HostError, UserError
from windtunnel.data.embeddings.files import read_plan, write_plan
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier
from windtunnel.data.embeddings.policy import PlacementRequest, decide

TABLES = (
    EmbeddingTable("a", 100, 8, ranks=(0, 10, 100), shares=(0.0, 0.8, 1.0)),
    EmbeddingTable("b", 50, 16),
)
PLAN = decide(PlacementRequest(TABLES, 2, MemoryTier(1e3, 1e9), MemoryTier(1e5, 1e7), 64))


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.json", TABLES, PLAN)
    assert read_plan(tmp_path / "plan.json", TABLES[::-1]) == PLAN


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ((TABLES[0],), "it has b as 50 x 16 float32, here it is no table"),
        ((TABLES[0], replace(TABLES[1], rows=51)), "it has b as 50 x 16 float32, here it is 51 x 16 float32"),
        ((*TABLES, EmbeddingTable("c", 5, 8)), "it has c as no table, here it is 5 x 8 float32"),
    ],
)
def test_a_plan_of_other_tables_is_refused(
    tmp_path: Path, others: tuple[EmbeddingTable, ...], words: str
) -> None:
    write_plan(tmp_path / "plan.json", TABLES, PLAN)
    with pytest.raises(UserError, match="is for other tables: " + words):
        read_plan(tmp_path / "plan.json", others)


def test_what_is_no_plan_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, TABLES, PLAN)
    good = path.read_bytes()
    for text, words in (
        (good[:-9], "is truncated or damaged; accepted is what 'windtunnel embeddings plan' wrote"),
        (b"[" * 10**5, "is truncated or damaged"),
        (good.replace(b'"device":0', b'"device":7'), "does not match its checksum"),
        (good.replace(b'"version":1', b'"version":2'), "has version 2; version 1 is read"),
    ):
        path.write_bytes(text)
        with pytest.raises(UserError, match=words):
            read_plan(path, TABLES)
    with pytest.raises(UserError, match="none: cannot be read"):
        read_plan(tmp_path / "none", TABLES)


def test_a_plan_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "none" / "plan.json", tmp_path / "taken"):
        with pytest.raises(HostError, match=f"{path} cannot be written: "):
            write_plan(path, TABLES, PLAN)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
