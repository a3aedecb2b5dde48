"""The gate's windows under any order of what can happen to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fake_turns import FakeBox
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.agents.sandbox.proxy.gate import Gate, Window

STEPS = st.lists(
    st.tuples(st.sampled_from(["open", "finish", "fail", "abandon"]), st.integers(0, 5)), max_size=14
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_releasing_an_older_generation_never_releases_a_newer_one(steps: Sequence[tuple[str, int]]) -> None:
    asyncio.run(played(steps))


async def played(steps: Sequence[tuple[str, int]]) -> None:
    box = FakeBox(instant=False)
    gate = Gate(box, seconds=20.0)
    windows: list[Window] = []
    ended: dict[int, str] = {}
    abandoned = -1
    for what, number in steps:
        if what == "open":
            windows.append(gate.open(f"request {len(windows)}"))
            await asyncio.to_thread(box.pending, len(windows))
        elif what == "abandon":
            gate.abandon("restored")
            abandoned = len(windows) - 1
        elif number < len(windows) and number not in ended:
            ended[number] = what
            box.pendings[number].finish(OSError("full") if what == "fail" else None)
            if not windows[number].settled.is_set():
                await asyncio.wait_for(windows[number].settled.wait(), 20)
        for place, window in enumerate(windows):
            safe_later = any(ended.get(later) == "finish" for later in range(place, len(windows)))
            if window.settled.is_set():
                assert place in ended or safe_later or place <= abandoned
            else:
                assert not safe_later
            if window.safe:
                assert safe_later
            if window.turn:
                assert window.turn == place + 1, "turns end in the order of their requests"
    for pending in box.pendings:
        pending.finish()
    for window in windows:
        await asyncio.wait_for(window.settled.wait(), 20)
    await gate.close()
