"""The words of a fault, and when it strikes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.training.elastic.faults import POINTS, RECOVERY, WITHOUT_STEP, Fault, matches, parse


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:host=2,step=7", Fault("", "kill", host=2, step=7)),
        ("kill:rank=3,step=5", Fault("", "kill", rank=3, step=5)),
        ("stop:rank=1,step=4", Fault("", "stop", rank=1, step=4)),
        ("raise:rank=0,step=2,times=2", Fault("", "raise", rank=0, step=2, times=2)),
        (
            "kill:rank=2,point=after_local_write,step=5",
            Fault("", "kill", rank=2, point="after_local_write", step=5),
        ),
        ("kill:rank=1,during=recovery", Fault("", "kill", rank=1, during="recovery")),
        (
            "kill:rank=1,generation=2,point=regrouped",
            Fault("", "kill", rank=1, generation=2, point="regrouped"),
        ),
        ("down:host=1,step=4", Fault("", "down", host=1, step=4)),
        ("slow:host=1,step=4,rate=10Mbit", Fault("", "slow", host=1, step=4, rate=1.25e6)),
        ("slow:host=1,step=4,rate=2.5GB", Fault("", "slow", host=1, step=4, rate=2.5e9)),
        ("kill-launcher:step=7", Fault("", "kill-launcher", rank=0, step=7)),
    ],
)
def test_parse(text: str, fault: Fault) -> None:
    assert parse(f" {text} ") == Fault(**{**vars(fault), "text": text})


@pytest.mark.parametrize(
    ("text", "named", "accepted"),
    [
        ("", "''", "kill, stop"),
        ("burn:host=1,step=2", "'burn'", "kill, stop"),
        ("kill", "whom", "host=PLACE or rank=RANK"),
        ("kill:host=1,rank=2,step=1", "whom", "either host=PLACE or rank=RANK"),
        ("kill:host=1", "when", "step="),
        ("kill:host=x,step=1", "host=x", "whole number"),
        ("kill:host=-1,step=1", "host=-1", "whole number"),
        ("kill:host=1,step=1,step=2", "twice", "one value"),
        ("kill:host=1,step", "'step'", "name=value"),
        ("kill-launcher:rank=1,step=1", "'rank=1'", "step, point"),
        ("kill-launcher", "when", "step="),
        ("kill:host=1,step=1,status=2", "'status=2'", "generation"),
        ("kill:host=1,step=1,times=0", "times=0", "from 1"),
        ("kill:host=1,point=lunch", "point=lunch", "after_local_write"),
        ("kill:host=1,during=lunch", "during=lunch", "recovery"),
        ("kill:host=1,during=recovery,step=3", "no step", "during= alone"),
        ("kill:host=1,point=regrouped,step=3", "step=3", "no step"),
        ("down:rank=1,step=3", "rank=1", "host=PLACE"),
        ("slow:host=1,step=3", "how slow", "rate="),
        ("slow:host=1,step=3,rate=fast", "rate=fast", "10Mbit"),
        ("slow:host=1,step=3,rate=0bit", "rate=0bit", "10Mbit"),
    ],
)
def test_refused_by_name(text: str, named: str, accepted: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    words = str(caught.value)
    assert repr(text) in words and named in words and accepted in words.partition("accepted:")[2]


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
    except UserError as error:
        assert "accepted:" in str(error)


small = st.integers(0, 3)
maybe = st.none() | small
points = st.sampled_from(sorted(POINTS))


@st.composite
def texts(draw: st.DrawFn) -> str:
    whom = draw(st.sampled_from(["rank", "host"]))
    fields = [f"{whom}={draw(small)}"]
    when = draw(st.sampled_from(["during", "point", "step", "generation"]))
    if when == "during":
        fields.append("during=recovery")
    elif when == "point":
        point = draw(points)
        fields.append(f"point={point}")
        if point not in WITHOUT_STEP and draw(st.booleans()):
            fields.append(f"step={draw(small)}")
    else:
        fields.append(f"{when}={draw(small)}")
    if draw(st.booleans()):
        fields.append(f"times={draw(st.integers(1, 3))}")
    return "kill:" + ",".join(draw(st.permutations(fields)))


@given(texts(), points, maybe, small, small, small, small)
def test_matches_means_every_field(
    text: str, point: str, step: int | None, rank: int, place: int, generation: int, fired: int
) -> None:
    fields = dict(part.split("=") for part in text.partition(":")[2].split(","))
    here = {"rank": rank, "host": place, "generation": generation, "step": step}
    wanted = all(str(here[name]) == value for name, value in fields.items() if name in here)
    wanted &= fired < int(fields.get("times", 1))
    if "during" in fields:
        wanted &= generation > 1 and point in RECOVERY
    else:
        wanted &= point == fields.get("point", "step")
    assert matches(parse(text), point, step, rank, place, generation, fired) == wanted


def test_every_point_is_explained() -> None:
    assert {"step", "before_local_write", "after_local_write", "after_replicated"} <= set(POINTS)
    assert {"before_commit", "restoring", "regrouped", "before_apply", "after_ack"} <= set(POINTS)
    assert all(POINTS.values())


def test_the_package_needs_no_torch() -> None:
    """The supervisor, the agents and the command line read it, and must start at once."""
    code = (
        "import sys, windtunnel.training.elastic as s, windtunnel.training.elastic.faults;"
        "assert 'torch' not in sys.modules; assert s.MembershipChanged.__module__"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
