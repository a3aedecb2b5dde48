"""Whole jobs that lose processes and hosts, and end as if they had not."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from runs_helpers import STEPS, at_gate, end_well, forge_slots, forge_stored, of, open_gate, running, same

from support.certificates import Authority
from support.strikes import kill_host
from support.waiting import until
from windtunnel.training.elastic import faults

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_launch")]


def test_each_kind_of_loss(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """All connections between hosts are encrypted here."""
    strikes = (
        "kill:rank=1,step=0",
        "kill:host=2,step=2",
        "stop:rank=0,step=4",
        "raise:rank=2,step=8",
    )
    certificates = Authority(tmp_path / "ours").issue("host").paths
    with running(tmp_path, faults=strikes, tls=certificates) as launched:
        recoveries = same(launched, sharded)
    assert len(recoveries) == len(strikes)
    lost = [recovery.lost[0] for recovery in recoveries]
    assert [loss["evidence"] for loss in lost] == ["exit", "connection", "frozen", "exit"]
    assert [loss["own"] for loss in lost] == [False] * 3 + [True]
    assert "InjectedError" in lost[3]["error"]


def test_a_job_that_shrinks_at_the_step_that_storage_waits_for(tmp_path: Path) -> None:
    """Its last one: all ranks have it, and most often not all are done with writing. The others hold other
    shards then, and store these; where the write had ended before its host, nothing is stored again."""
    strike = f"kill:host=2,point=after_replicated,step={STEPS - 1}"
    settings = {"mode": "blocking", "persist": str(tmp_path / "stored"), "persist_every": STEPS}
    with running(tmp_path, hosts=3, on_loss="shrink", min_hosts=2, faults=(strike,), **settings) as launched:
        assert len(end_well(launched)) == 2
        assert [event["step"] for event in of(launched, "restored")][-2:] == [STEPS - 1] * 2
        wanted = [event["generation"] for event in of(launched, "storage.wanted")]
        (persisted,) = of(launched, "persisted")
        assert persisted["step"] == STEPS - 1
        assert wanted == [1, 2][: persisted["generation"]]


POINTS = [point for point in faults.POINTS if point not in ("after_ack", "before_apply")]
"""The other two are passed by pipelines only, see the tests there."""
assert POINTS[:3] == ["step", "regrouped", "restoring"]


@pytest.mark.parametrize("whom", ["rank", "host"])
def test_killed_at_every_point(tmp_path: Path, sharded: dict[str, Any], whom: str) -> None:
    """Property 1. Each point once, of another rank or host each time."""
    # Hosts of one group must not go in one recovery: nothing but storage outlives that.
    strikes = [
        f"kill:{whom}=0,step=1",
        f"kill:{whom}=2,point=regrouped,generation=2",
        f"kill:{whom}=0,point=restoring",
        *(f"kill:{whom}={step % 4},point={point},step={step}" for step, point in enumerate(POINTS[3:], 4)),
    ]
    settings = {"mode": "blocking", "persist": str(tmp_path / "stored"), "persist_every": 1}
    with running(tmp_path, faults=strikes, **settings) as launched:
        same(launched, sharded)
        assert {event["fault"] for event in of(launched, "injected")} == set(strikes)
        assert "storage" not in {event["tier"] for event in of(launched, "restored")}


def test_the_next_host_goes_as_soon_as_the_next_step_is_saved(
    tmp_path: Path, sharded: dict[str, Any]
) -> None:
    """A host of the other group each time, when what the last recovery went back to may still lack
    copies."""
    strikes = [
        f"kill:host={place},point=after_local_write,step={step}"
        for step, place in zip(range(3, 9), (0, 2, 1, 3, 0, 2), strict=True)
    ]
    with running(tmp_path, faults=strikes) as launched:
        recoveries = same(launched, sharded)
        assert len(of(launched, "injected")) == len(strikes)
    assert {tier for recovery in recoveries for tier in recovery.tiers.values()} == {"memory", "peer"}


def test_a_host_goes_while_the_last_step_is_written_to_storage(
    tmp_path: Path, sharded: dict[str, Any]
) -> None:
    last = STEPS - 1
    settings = {"mode": "blocking", "persist": str(tmp_path / "stored"), "persist_every": STEPS}
    with running(
        tmp_path, faults=[f"kill:host=1,point=after_replicated,step={last}"], **settings
    ) as launched:
        results = end_well(launched)  # no step follows this recovery
        assert {str(rank): result["digest"] for rank, result in results.items()} == sharded["digests"]
        assert [event["step"] for event in of(launched, "persisted")][-1:] == [last]


def test_recoveries_that_are_hit(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """Also the replacement is killed, twice, and ranks that had come back."""
    strikes = (
        "kill:rank=1,step=3",
        "kill:rank=2,during=recovery",
        "kill:host=3,step=6",
        "kill:host=3,point=restoring,times=2",
        "stop:rank=0,point=restoring,generation=6",
    )
    with running(tmp_path, faults=strikes) as launched:
        same(launched, sharded)
        assert {event["fault"] for event in of(launched, "injected")} == set(strikes)


def test_many_at_once(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """All workers; hosts of two groups; both hosts of one group, which only storage outlives."""
    settings = {"persist": str(tmp_path / "stored"), "persist_every": 3}
    with running(tmp_path, "--gates", 2, 5, 9, **settings) as launched:
        at_gate(launched, 2)
        for place in launched.places().values():
            for pid in place["workers"].values():
                os.kill(pid, signal.SIGKILL)
        open_gate(launched, 2)
        at_gate(launched, 5)
        kill_host(launched, 0)
        kill_host(launched, 2)
        open_gate(launched, 5)
        at_gate(launched, 9)
        stored = until(lambda: [event["step"] for event in of(launched, "persisted") if event["step"] == 8])[
            0
        ]
        kill_host(launched, 2)
        kill_host(launched, 3)
        open_gate(launched, 9)
        recoveries = same(launched, sharded, lost=3)
    assert [recovery.steps_lost for recovery in recoveries] == [0, 0, 8 - stored]
    assert "storage" in set(recoveries[2].tiers.values())


def test_forged_newer_checkpoints_are_ignored_and_named(tmp_path: Path) -> None:
    """Whole steps of the future, with checksums that fit, put into memory and storage from outside."""
    url = str(tmp_path / "stored")
    settings = {"persist": url, "persist_every": 1}
    with running(tmp_path, "--gates", 4, 8, kind="plain", hosts=2, **settings) as launched:
        at_gate(launched, 4, 2)
        forged = [path for place in launched.places() for path in forge_slots(launched, place, 50)]
        assert len(forged) == 6  # of two ranks, and what they hold alike
        os.kill(launched.places()[1]["workers"][1], signal.SIGKILL)
        open_gate(launched, 4)
        at_gate(launched, 8, 2)
        until(lambda: any(event["step"] == 7 for event in of(launched, "persisted")))
        forge_stored(url, 7, 60)
        kill_host(launched, 0)
        kill_host(launched, 1)
        open_gate(launched, 8)
        end_well(launched)
        assert [event["step"] for event in of(launched, "step")] == [*range(12)]
        assert [event["step"] for event in of(launched, "restored")] == [3, 3, 7, 7]
        notes = " ".join(note["text"] for note in of(launched, "note"))
    assert "not restored: step 50 in memory (3 of 3 shards) is not in the run's log as committed" in notes
    assert "not restored: step 60 in storage is not in the run's log as written by it" in notes


def test_what_is_lost_ends_the_job_or_is_begun_anew_where_that_was_asked_for(tmp_path: Path) -> None:
    for word in ("fail", "restart"):
        folder, settings = tmp_path / word, {"on_no_checkpoint": word}
        folder.mkdir()
        with running(folder, "--gates", 4, kind="plain", hosts=2, **settings) as launched:
            at_gate(launched, 4, 2)
            kill_host(launched, 0)
            kill_host(launched, 1)
            open_gate(launched, 4)
            if word == "restart":
                end_well(launched)
                steps = [event["step"] for event in of(launched, "step")]
                assert steps == [*range(4), *range(12)]
                assert any("begin" in note["text"] for note in of(launched, "note"))
                continue
            outcome = launched.wait(150)
        assert outcome is not None and outcome.status == 3
        assert outcome.reason.strip() == (
            "step 3 was committed, and no whole checkpoint is left (no host and no storage has a copy); "
            "--on-no-checkpoint restart begins at step 0"
        )
        assert [event["step"] for event in of(launched, "step")] == [*range(4)]


def test_a_program_that_fails_again_and_again(tmp_path: Path) -> None:
    strike = "raise:rank=1,point=before_local_write,step=2,times=9"
    with running(tmp_path, kind="plain", hosts=2, faults=(strike,), max_restarts=2) as launched:
        outcome = launched.wait(150)
        assert outcome is not None and outcome.status == 1
        assert "by itself 3 times" in outcome.reason
        assert "Traceback" in of(launched, "lost")[-1]["error"]
        assert "InjectedError" in (tmp_path / "output").read_text()


def test_two_ranks_a_host_and_spares(tmp_path: Path, replicated: dict[str, Any]) -> None:
    """DDP, whose parameters are saved once; no host is ordered while there are spare ones."""
    strikes = ("kill:rank=3,step=2", "kill:host=1,step=5", "kill:host=0,step=8")
    options: dict[str, Any] = {"hosts": 2, "per_host": 2, "spares": 2}
    with running(tmp_path, kind="ddp", faults=strikes, **options) as launched:
        assert len(same(launched, replicated)) == 3
        assert of(launched, "ordered") == []
        assert any(event["step"] >= 0 for event in of(launched, "committed"))
