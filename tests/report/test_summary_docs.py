"""The records behind the page of summary.json have the fields of the summary that reports read."""

from dataclasses import fields

from report_examples import summary

from windtunnel.base import ranges
from windtunnel.training.emulate import summary as records
from windtunnel.training.emulate.twin.findings import RankWait
from windtunnel.training.emulate.twin.memory.profile import OutOfMemory

ONLY_THEN = {"confidential", "live"}


def names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_the_example_has_every_field_and_no_other() -> None:
    example = summary()
    assert set(example) == names(records.Summary) - ONLY_THEN
    for name, record in (
        ("command", records.Command),
        ("cluster", records.ClusterFacts),
        ("replay", records.ReplayFacts),
    ):
        assert set(example[name]) == names(record)
    for name, record in (
        ("waits", RankWait),
        ("ranks", records.RankFacts),
        ("collectives", records.CollectiveFacts),
        ("operators", records.OperatorFacts),
    ):
        assert set(example[name][0]) == names(record)
    assert next(set(row["oom"]) for row in example["ranks"] if row["oom"]) == names(OutOfMemory)


def test_the_example_is_consistent() -> None:
    example = summary()
    assert abs(sum(example["critical_path"].values()) - example["iteration_time_s"]) < 1e-12
    members = [rank for row in example["ranks"] for rank in ranges.read(row["members"])]
    assert sorted(members) == list(range(example["world_size"]))
