"""Memory behind a shield, in the hands of an attacker."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.trust import nonces
from windtunnel.base.errors import UserError
from windtunnel.trust.shield import MODES, Region, Shield, Tampered, attack

GOOD = ("versions", "tree")


@pytest.mark.parametrize("mode", MODES)
def test_good_modes_find_out_all_attacks_and_the_control_all_but_what_is_old(
    mode: str, tmp_path: Path
) -> None:
    missed = {name for name, detected in attack(mode, tmp_path).items() if not detected}
    assert missed == ({"replay", "rollback"} if mode == "mac" else set())


def test_a_shield_that_checks_nothing_fails_the_attacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of attacks can fail: without the check of the tree, what is old comes through."""
    from windtunnel.trust.shield.live import memory

    monkeypatch.setattr(memory._Area, "_digest", lambda self, level, place, node: b"\0" * 32)
    missed = {name for name, detected in attack("tree", tmp_path).items() if not detected}
    assert missed == {"rollback"}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), chunk=st.sampled_from([1, 7, 64]), length=st.integers(1, 700))
def test_it_is_memory_over_restarts(
    mode: str, seed: int, chunk: int, length: int, tmp_path_factory: Any
) -> None:
    draw, state = random.Random(seed), tmp_path_factory.mktemp("shield") / "state"
    regions = [Region(10, length, chunk, mode), Region(5000, 33, 16, "versions")]
    memory, truth = bytearray(sum(region.room for region in regions)), bytearray(6000)
    shield = Shield(memory, regions, state)
    for _ in range(25):
        base, most = draw.choice([(10, length), (5000, 33)])
        at = base + draw.randrange(most)
        size = draw.randint(0, base + most - at)
        match draw.randrange(6):
            case 0:
                shield.save()
                shield = Shield(memory, regions, state)
            case 1 | 2:
                assert shield.read(at, size) == truth[at : at + size]
            case _:
                truth[at : at + size] = data = draw.randbytes(size)
                shield.write(at, data)
    assert shield.read(10, length) == truth[10 : 10 + length]


@pytest.mark.parametrize("mode", GOOD)
def test_what_was_written_after_the_last_save_before_a_crash_is_refused(mode: str, tmp_path: Path) -> None:
    region = Region(0, 6400, 64, mode)
    memory = bytearray(region.room)
    shield = Shield(memory, [region], tmp_path / "state")
    shield.write(0, b"a" * 6400)
    shield.save()
    shield.write(64, b"b" * 64)
    again = Shield(memory, [region], tmp_path / "state")
    with pytest.raises(Tampered):
        again.read(64, 64)


def test_any_node_of_the_tree_that_is_changed_is_found_out_before_it_is_built_on(tmp_path: Path) -> None:
    region = Region(0, 64 * 300, 64, "tree")
    assert [count for count, _ in region.levels] == [19, 2, 1]
    memory = bytearray(region.room)
    shield = Shield(memory, [region], tmp_path / "state")
    shield.write(0, b"x" * region.length)
    for at in range(region.chunks * region.stride, region.room, 97):
        memory[at] ^= 1
        detections = 0
        for chunk in (0, 20, 299):
            try:
                shield.read(chunk * 64, 64)
            except Tampered:
                detections += 1
                with pytest.raises(Tampered):
                    shield.write(chunk * 64, b"y" * 64)
        memory[at] ^= 1
        top = at >= region.room - 512
        assert detections == 3 or not top
    assert shield.read(0, region.length) == b"x" * region.length


def test_zeros_are_read_where_nothing_was_written_whatever_lies_there(tmp_path: Path) -> None:
    for mode in GOOD:
        region = Region(0, 1000, 64, mode)
        memory = bytearray(b"\7" * region.room)
        shield = Shield(memory, [region], tmp_path / mode)
        memory[:64] = b"\xff" * 64
        assert shield.read(0, 1000) == bytes(1000)


@pytest.mark.parametrize("mode", MODES)
def test_plain_text_is_nowhere_and_no_nonce_comes_twice(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over restarts, of which some are crashes: the state is then older than what was written."""
    used = nonces(monkeypatch)
    rewritten(mode, tmp_path, 10_000)
    assert len(used) >= 10_000
    assert len(set(used)) == len(used)


def rewritten(mode: str, folder: Path, writes: int) -> None:
    """So many chunks written, with ten restarts, of which every second one comes without a save: versions on
    chip, and those in the tree, are then older than what was written under them."""
    draw, regions = random.Random(7), [Region(0, 2048, 32, mode), Region(4096, 512, 32, mode)]
    memory, secret = bytearray(sum(region.room for region in regions)), b"a planted secret"
    shield, saved = Shield(memory, regions, folder / "state"), bytes(memory)
    for restart in range(10):
        for _ in range(writes // 10):
            chunk = draw.randrange(80)
            shield.write(chunk * 32 if chunk < 64 else 4096 + (chunk - 64) * 32, secret * 2)
        assert secret not in memory
        if restart % 2:
            shield.save()
            saved = bytes(memory)
        else:  # brought back, so that a tree's nodes are those of the root that was saved
            memory[:] = saved
        shield = Shield(memory, regions, folder / "state")


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="mode 'schedule' is unknown; accepted are mac, versions, tree"):
        Region(0, 1, 1, "schedule")
    for wrong in ((0, 0, 1), (-1, 1, 1), (0, 1, 0), (0, (1 << 32) + 1, 1)):
        with pytest.raises(UserError, match=r"is empty, or has more than 2\^32 chunks"):
            Region(*wrong)
    region = Region(10, 100, 10)
    with pytest.raises(UserError, match="259 bytes are for"):
        Shield(bytearray(region.room - 1), [region], tmp_path / "state")
    shield = Shield(bytearray(region.room), [region], tmp_path / "state")
    for at, length in ((9, 1), (10, 101), (110, 1)):
        with pytest.raises(UserError, match="in no region"):
            shield.read(at, length)
    with pytest.raises(UserError, match="is of"):
        Shield(bytearray(1000), [Region(10, 90, 10)], tmp_path / "state")


def test_the_state_is_its_owners_alone(tmp_path: Path) -> None:
    Shield(bytearray(100), [Region(0, 64, 64)], tmp_path / "state")
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600
