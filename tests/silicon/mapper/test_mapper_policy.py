"""Counts against loops that are run, optima against all mappings, and what must hold of any of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.silicon.mapper.brute import exhaustive, random_case, random_tiny, simulate
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.silicon.mapper.model import DIMS, IRRELEVANT, OPERANDS, Accelerator, Layer, Level
from windtunnel.silicon.mapper.policy import POLICIES, Decision, Observation, decide
from windtunnel.silicon.mapper.policy.allocation import allocate, sizes
from windtunnel.silicon.mapper.policy.counts import count, cycles, joules, tile_words
from windtunnel.silicon.mapper.policy.schedule import lines
from windtunnel.silicon.mapper.policy.search import divisors, least_energy, padded
from windtunnel.silicon.mapper.policy.unroll import unrollings

SMALL = Layer("small", (3, 3, 6, 6, 8, 8, 2))


def chip(own: float = 24, shared: float = 400, *, energy: float = 1.0, double: bool = False) -> Accelerator:
    """Three levels, a word of one byte."""
    levels = (
        Level("registers", own, energy, None, True),
        Level("buffer", shared, 6 * energy, 8.0),
        Level("DRAM", None, 200 * energy, 4.0),
    )
    return Accelerator("chip", (4, 4), levels, 1, 1.0, 0.5 * energy, 0.25 * energy, double)


def test_the_sets_of_loops_that_operands_do_not_touch_share_none_and_are_all() -> None:
    assert sorted(dim for each in IRRELEVANT for dim in each) == list(range(len(DIMS)))


def test_counts_are_those_of_loops_that_run_one_by_one() -> None:
    rng = np.random.default_rng(11)
    crossing = strided = 0
    for _ in range(150):
        layer, accelerator, mapping = random_case(rng)
        counted = count(layer, accelerator, mapping)
        assert list(counted) == list(simulate(layer, accelerator, mapping))
        crossing += accelerator.inner > 1
        strided += layer.stride > 1
    assert crossing > 20 and strided > 20


def test_a_strided_tile_counts_words_that_are_used() -> None:
    for fx, ox, stride in ((1, 4, 2), (3, 4, 2), (2, 5, 3), (3, 3, 1)):
        used = {stride * x + f for x in range(ox) for f in range(fx)}
        assert tile_words("I", (fx, 1, ox, 1, 1, 1, 1), stride) == len(used)


def test_the_optimum_is_that_of_all_tilings_and_orders() -> None:
    rng = np.random.default_rng(5)
    none = 0
    for _ in range(25):
        layer, accelerator, unroll = random_tiny(rng)
        mapping, energy, exact = least_energy(layer, accelerator, "", unroll)
        assert exact
        assert energy == pytest.approx(exhaustive(layer, accelerator, unroll))
        none += mapping is None
        if mapping is not None:
            moved = count(layer, accelerator, mapping)
            assert energy == pytest.approx(joules(layer, accelerator, mapping, moved))
    assert none < 5


def test_each_boundary_moves_at_least_every_word_once() -> None:
    decision = decide(Observation(SMALL, chip()))
    reach = [
        math.prod(bound for level in decision.mapping.loops for d, bound in level if d == dim) * along
        for dim, along in enumerate(decision.mapping.unroll)
    ]
    for boundary in decision.traffic:
        least = tile_words(boundary.operand, reach, SMALL.stride)
        assert (boundary.written if boundary.operand == "O" else boundary.read) >= least
        assert boundary.moved >= boundary.read + boundary.written


def test_more_room_never_costs_more_and_energies_scale() -> None:
    energies = [decide(Observation(SMALL, chip(24 * factor, 400))).energy for factor in (1, 2, 4)]
    assert energies == sorted(energies, reverse=True)
    energies = [decide(Observation(SMALL, chip(24, 400 * factor))).energy for factor in (1, 2, 4)]
    assert energies == sorted(energies, reverse=True)
    double = decide(Observation(SMALL, chip(energy=2.0)))
    assert double.energy == pytest.approx(2 * decide(Observation(SMALL, chip())).energy)


def test_rows_and_columns_may_change_places() -> None:
    wide = Layer("wide", (3, 1, 6, 2, 8, 4, 1))
    tall = Layer("tall", (1, 3, 2, 6, 8, 4, 1))
    assert decide(Observation(wide, chip())).energy == pytest.approx(decide(Observation(tall, chip())).energy)


@pytest.mark.parametrize("double", [False, True])
def test_tiles_fit_and_the_array_is_not_exceeded(double: bool) -> None:
    accelerator = chip(double=double)
    decision = decide(Observation(SMALL, accelerator))
    extents = [1] * len(DIMS)
    for place, level in enumerate(accelerator.levels[:-1]):
        for dim, bound in decision.mapping.loops[place]:
            extents[dim] *= bound
        along = [1] * len(DIMS) if level.per_pe else decision.mapping.unroll
        tile = [a * b for a, b in zip(extents, along, strict=True)]
        held = sum(tile_words(operand, tile, SMALL.stride) for operand in OPERANDS)
        assert held <= level.capacity / (2 if double else 1)
    assert decision.mapping.pes <= 16
    assert decision.utilisation <= 1


def test_time_is_that_of_the_slowest_or_the_sum() -> None:
    layer = replace(SMALL, groups=3)
    for double in (True, False):
        accelerator = chip(48, 800, double=double)
        decision = decide(Observation(layer, accelerator))
        mapping = decision.mapping
        words = dict.fromkeys(range(3), 0)
        for boundary in decision.traffic:
            words[boundary.above] += boundary.read + boundary.written
            words[boundary.below] += boundary.moved
        times = [3.0 * mapping.steps, words[1] / 8.0, words[2] / 4.0]
        assert decision.cycles == pytest.approx(max(times) if double else sum(times))
        assert decision.cycles == cycles(layer, accelerator, mapping, decision.traffic)


def test_groups_cost_so_many_times_one() -> None:
    single, three = (decide(Observation(replace(SMALL, groups=groups), chip())) for groups in (1, 3))
    assert three.energy == pytest.approx(3 * single.energy)
    assert three.mapping == single.mapping


def test_a_beam_over_four_levels_is_told_and_finds_what_three_levels_have() -> None:
    three = chip()
    through = replace(three.levels[1], name="L2", capacity=4000.0, energy=12.0)
    four = replace(three, levels=(*three.levels[:2], through, three.levels[2]))
    decision, plain = decide(Observation(SMALL, four)), decide(Observation(SMALL, three))
    assert plain.exact and not decision.exact
    assert decision.energy < plain.energy  # a level between them saves DRAM
    moved = count(SMALL, four, decision.mapping)
    assert decision.energy == pytest.approx(joules(SMALL, four, decision.mapping, moved))
    layer, unroll = Layer("tiny", (1, 1, 4, 1, 4, 3, 1)), (1, 1, 1, 1, 2, 1, 1)
    small = replace(
        four,
        levels=(chip(8).levels[0], chip(8, 24).levels[1], replace(through, capacity=40.0), three.levels[2]),
    )
    assert least_energy(layer, small, "", unroll)[1] == pytest.approx(exhaustive(layer, small, unroll))


def test_the_fastest_takes_no_more_cycles_and_the_frugal_no_more_energy() -> None:
    observation = Observation(Layer("odd", (3, 3, 13, 13, 6, 10, 1)), chip(64, 2000, double=True))
    frugal, fast = POLICIES["energy"](observation), POLICIES["fastest"](observation)
    assert frugal.energy <= fast.energy
    assert fast.cycles <= frugal.cycles


def test_dataflows_have_names_and_replication() -> None:
    names = {
        unrolling.dataflow for unrolling in unrollings(Layer("c", (3, 3, 13, 13, 256, 384, 16)), (16, 16))
    }
    assert {"C|K", "OX|K"} <= names
    assert any("+" in name for name in names)
    row = unrollings(Layer("c", (3, 3, 13, 13, 256, 384, 16)), (16, 16), "FY|OY")
    assert row and all(
        {part.split("+")[0] for part in unrolling.dataflow.split("|")} == {"FY", "OY"} for unrolling in row
    )
    assert all(math.prod(unrolling.unroll) <= 256 and 0 < unrolling.utilisation <= 1 for unrolling in row)


def test_what_is_wrong_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"`dataflow`: 'C\|C' is not understood, accepted are two of FX"):
        decide(Observation(SMALL, chip(), "C|C"))
    with pytest.raises(UserError, match="layer small has no mapping that fits chip"):
        decide(Observation(SMALL, chip(own=2)))
    with pytest.raises(UserError, match="no level has a table of energies"):
        next(sizes(chip()))


def test_bounds_are_padded_to_numbers_with_divisors() -> None:
    assert [padded(n) for n in (1, 13, 17, 50257)] == [1, 13, 18, 50336]
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]


def test_an_energy_table_is_a_power_law_between_its_entries() -> None:
    table = ((8.0, 1.0), (32.0, 4.0), (64.0, 6.0))
    level = Level("buffer", 8.0, 1.0, scale=table)
    assert [level.sized(size).energy for size in (8, 16, 32, 64, 128)] == pytest.approx([1, 2, 4, 6, 9])
    assert level.sized(16).capacity == 16


def test_memories_are_sized_at_the_same_throughput() -> None:
    base = chip(64, 1024)
    scales = (((8.0, 0.1), (64.0, 1.0)), ((256.0, 3.0), (2048.0, 9.0)), ())
    levels = tuple(replace(level, scale=scale) for level, scale in zip(base.levels, scales, strict=True))
    base = replace(base, levels=levels, double_buffered=True)
    layers = [Layer("gemm", (1, 1, 1, 1, 32, 32, 16))]
    allocation = allocate(layers, base, "C|K", decide)
    assert len(allocation.points) == 4 * 4
    assert allocation.best.cycles <= 1.001 * allocation.base.cycles
    assert allocation.gain >= 1
    assert allocation.best.energy == min(
        point.energy for point in allocation.points if point.cycles <= 1.001 * allocation.base.cycles
    )


def test_a_schedule_names_every_loop_once() -> None:
    decision = decide(Observation(SMALL, chip()))
    text = [*lines(SMALL, chip(), decision.mapping)]
    (order,) = [line for line in text if line.startswith("O.reorder")]
    assert len(order.split(", ")) == sum(map(len, decision.mapping.loops))
    assert sum("compute_at" in line for line in text) == 6
    assert f"# {decision.mapping.dataflow} on the array" in "\n".join(text)


def test_an_observation_and_a_decision_survive_the_log() -> None:
    observation = Observation(SMALL, chip())
    decision = decide(observation)
    again = from_plain(Observation, to_plain(observation))
    assert again == observation
    assert from_plain(Decision, to_plain(decision)) == decision == decide(again)
