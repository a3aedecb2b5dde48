"""Times over splitters are what the formula says, in both engines; baselines are what they are on paper."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.cli.main import main
from windtunnel.network.multicast.planning import OpticalParts, fabric_of, plan, totals
from windtunnel.network.multicast.policy import decide
from windtunnel.network.multicast.policy.repair import (
    GIVE_UP,
    MOST,
    TRIES,
    WAIT,
    MissingPackets,
    RepairDecision,
    repair,
)
from windtunnel.network.multicast.policy.shuffle import Shuffle
from windtunnel.network.multicast.twin import (
    MulticastWorld,
    cost,
    electrical,
    packets,
    pipelined,
    split_loss,
    splitters,
)

WORLD, SIZE = MulticastWorld(1e9, 2e-6, 1000), 1e6
PARTS = """
transmitter: {watts: 2, price: 30}
receiver: {watts: 1, price: 10}
splitter: {price: 5, excess_db: 1}
port: {watts: 4, price: 50}
budget_db: 7.1
"""


@pytest.mark.parametrize(("p", "k"), [(2, 2), (2, 3), (4, 2)])
def test_a_broadcast_takes_its_size_over_the_rate_and_2k_less_1_hops(p: int, k: int) -> None:
    shuffle = Shuffle(p, k)
    fabric = fabric_of(shuffle, [1], SIZE)
    decision = decide(fabric)
    flow_level = splitters(fabric, decision, WORLD)
    hops = 2 * k - 1
    assert flow_level.seconds == pytest.approx(SIZE / WORLD.rate + hops * WORLD.hop + (hops - 1) * 1e-6)
    assert flow_level.sent == pytest.approx(shuffle.racks / p * SIZE)
    packet_level = packets(fabric, decision.rounds[0][0], WORLD)
    assert packet_level.seconds == pytest.approx(flow_level.seconds, rel=1e-3)
    assert (packet_level.sent, packet_level.repairs) == (flow_level.sent, 0)
    assert cost(fabric, decision) == {"rounds": 1, "transmissions": shuffle.racks / p, "hops": hops}


def test_baselines_take_what_they_take_on_paper() -> None:
    fabric = fabric_of(Shuffle(2, 2), [3], SIZE)
    baselines = {
        arm: electrical(fabric.requests, 8, WORLD, arm) for arm in ("unicast", "binomial", "chain", "ip")
    }
    once = SIZE / WORLD.rate
    assert baselines["unicast"].seconds == pytest.approx(7 * once + WORLD.hop)
    assert baselines["binomial"].seconds == pytest.approx(3 * (once + WORLD.hop))
    assert baselines["chain"].seconds == pytest.approx(once + pipelined(7, WORLD))
    assert baselines["ip"].seconds == pytest.approx(once + WORLD.hop)
    assert [round(baseline.sent / SIZE) for baseline in baselines.values()] == [7, 7, 7, 1]
    with pytest.raises(ValueError, match="accepted are unicast, binomial"):
        electrical(fabric.requests, 8, WORLD, "gossip")


def test_unicasts_of_several_sources_do_not_meet_at_a_rack() -> None:
    """Each source needs its own port alone, so that several take as long as one."""
    for sources in ([4], [0, 5], [1, 2, 3, 23]):
        unicast = electrical(fabric_of(Shuffle(2, 3), sources, SIZE).requests, 24, WORLD, "unicast")
        assert unicast.seconds == pytest.approx(23 * SIZE / WORLD.rate + WORLD.hop)


def test_packed_sources_go_at_once_and_others_share_time() -> None:
    shuffle, once = Shuffle(2, 2), SIZE / WORLD.rate
    for sources, rounds in (([0, 1], None), ([0, 3, 5], 2)):
        fabric = fabric_of(shuffle, sources, SIZE)
        decision = decide(fabric)
        assert rounds is None or len(decision.rounds) >= rounds
        timing = splitters(fabric, decision, WORLD)
        assert timing.seconds == pytest.approx(len(decision.rounds) * once, rel=0.02)


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([(2, 2), (3, 2)]), st.floats(0, 0.2), st.integers(0, 99))
def test_losses_are_repaired_and_only_told_once(size: tuple[int, int], loss: float, seed: int) -> None:
    fabric = fabric_of(Shuffle(*size), [0], 1e5)
    (tree,) = decide(fabric).rounds[0]
    world = MulticastWorld(1e9, 2e-6, 1000, loss)
    lossy, clean = packets(fabric, tree, world, seed), packets(fabric, tree, WORLD)
    assert lossy.seconds >= clean.seconds and lossy.sent >= clean.sent * (1 - loss) ** 4 * 0.5
    assert packets(fabric, tree, world, seed) == lossy  # the same seed, the same run
    assert (lossy.repairs == 0) == (lossy.seconds == clean.seconds)


LACKED = st.sets(st.integers(0, 999), min_size=1, max_size=400).map(lambda of: tuple(sorted(of)))
GONE = st.sets(st.integers(0, 7)).map(tuple)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        MissingPackets, st.just(0), st.integers(1, 7), st.integers(1, 5),
        LACKED, st.booleans(), st.floats(0, 100), st.integers(0, TRIES + 1), st.floats(1e-3, 1), GONE,
    )
)  # fmt: skip
def test_a_rack_asks_who_can_answer_when_it_is_time_and_gives_up_in_the_end(gap: MissingPackets) -> None:
    decision = repair(gap)
    assert decide(gap) == decision
    assert decision.ask not in gap.gone and decision.ask in (gap.feeder, gap.source, WAIT, GIVE_UP)
    if decision.ask >= 0:
        assert decision.packets == gap.missing[:MOST] and gap.asked < TRIES
        assert gap.quiet >= gap.patience * (1 if gap.asked else gap.hop)  # far racks wait for near ones
        assert cost(gap, decision) == {"packets asked for": len(decision.packets)}
    else:
        assert decision.packets == ()
    if gap.quiet >= 50 * gap.patience:
        alone = {gap.feeder, gap.source} <= set(gap.gone) or gap.asked >= TRIES
        assert (decision == RepairDecision(GIVE_UP)) == alone and decision.ask != WAIT


def test_plans_name_what_parts_draw_and_what_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "parts.yaml"
    file.write_text(PARTS)
    from windtunnel.network.multicast.planning import read_parts

    parts = read_parts(file)
    bill = totals(Shuffle(2, 2), parts)
    assert bill["splitters"] == {
        "watts": 8 * 2 + 16 * 1, "price": 8 * 30 + 16 * 10 + 8 * 5, "split_loss_db": split_loss(2, 1)
    }  # fmt: skip
    assert bill["electrical"] == {"watts": 64, "price": 800}
    report = plan(8, 2, [0], SIZE, WORLD, ["2", "1-6"], OpticalParts.model_validate(parts.model_dump()))
    assert report["hops"] == 3 and 2 not in report["trees"][0]["transmitters"]
    assert len(report["rules"]) == 8 and report["parts"] == bill


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--racks", "9"], "the nearest accepted are 8 and 24"),
        (["--racks", "8", "--fail", "0-7"], "--fail: '0-7' is not of this fabric"),
        (["--racks", "8", "--from", "a"], "--from 'a' is not accepted"),
        (["--racks", "8", "--loss", "1.5"], "--loss 1.5 is not accepted"),
        (["--racks", "8", "--rate", "fast"], "--rate 'fast' is not accepted"),
        (["--racks", "8", "--fail", "0"], "rack 0 cannot send"),
        (["--racks", "128", "--split", "8", "--parts"], "8 outputs lose 10.0 dB and budget_db is 7.1"),
        (["--racks", "8", "--parts", "wrong"], "field port.watts is 'x', accepted is a number from 0 up"),
    ],
)
def test_bad_plans_end_in_a_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if "--parts" in words:
        wrong = words[-1] == "wrong"
        (tmp_path / "parts.yaml").write_text(PARTS.replace("watts: 4", "watts: x") if wrong else PARTS)
        words = [*words[: words.index("--parts") + 1], str(tmp_path / "parts.yaml")]
    monkeypatch.setattr(sys, "argv", ["windtunnel", "network", "multicast", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_verb_prints_what_was_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["windtunnel", "network", "multicast", "plan", "--racks", "8", "--from", "0,1", "--size", "1MB"]
    for more in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
        out = capsys.readouterr().out
    assert json.loads(out)["transmissions"] == [4, 4]
