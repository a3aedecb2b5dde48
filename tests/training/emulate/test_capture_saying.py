"""What one rank says to another arrives, also where the one that says it is captured later."""

from __future__ import annotations

from pathlib import Path

import pytest
from capturing import capture, cases, session

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.graph import NoteKind, sentences
from windtunnel.training.emulate.live.mailbox import MailboxWait, hanging

CLUSTER = "h100-sxm:1x4"
SAY = "ranks that have not run are taken to say what the one that asks says itself"
HOLD = "ranks that have not run are taken to hold the values that the one that asks holds itself"
OTHERS = ("gathered_of_earlier_ranks", "wait_for_each_other")
CASES = [f"case_{name}" for name in cases("saying.py") if name not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_first_rank_hears_the_others(jobs: int) -> None:
    with session("saying.py", *CASES, cluster=CLUSTER, jobs=jobs) as capture_session:
        (first,) = capture_session.capture([0])
        assert capture_session.run_for_others == {1, 2, 3}
        (third, last) = capture_session.capture([2, 3])
        assert [first.rank, third.rank, last.rank] == [0, 2, 3] and capture_session.run_for_others == {1}
    assert sentences(first.notes, NoteKind.APPROXIMATION) == [
        f"all_gather_object: {SAY} (rank 0 of ranks 1-3)"
    ]


@pytest.mark.slow
def test_of_a_gather_the_earlier_ranks_are_heard_and_the_others_assumed() -> None:
    slices = capture("saying.py", "case_gathered_of_earlier_ranks", cluster=CLUSTER, ranks=(0, 1, 2, 3))
    approximations = [set(sentences(slice_.notes, NoteKind.APPROXIMATION)) for slice_ in slices]
    assert approximations[3] == set()
    assert approximations[1] == {
        f"all_gather_object: {SAY} (rank 1 of ranks 2-3)",
        f"all_gather: {HOLD} (rank 1 of ranks 2-3)",
    }


def test_ranks_that_wait_for_each_other_would_hang() -> None:
    with pytest.raises(ScriptError, match="the job would hang: ranks wait for each other") as caught:
        capture("saying.py", "case_wait_for_each_other", cluster=CLUSTER)
    assert "rank 0 for what rank 1 says (broadcast_object_list)" in str(caught.value)
    assert "rank 1 for what rank 0 says (broadcast_object_list)" in str(caught.value)


def test_nothing_hangs_while_a_message_lies_there(tmp_path: Path) -> None:
    here = tmp_path / "message"
    waiting = {4: MailboxWait(7, "recv", str(here)), 7: MailboxWait(4, "scatter", str(tmp_path / "other"))}
    assert hanging(waiting) == (
        "the job would hang: ranks wait for each other, rank 4 for what rank 7 says (recv), "
        "rank 7 for what rank 4 says (scatter)"
    )
    here.touch()
    assert hanging(waiting) is None
