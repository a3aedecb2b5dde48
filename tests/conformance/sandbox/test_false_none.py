"""No turn's class is weaker than what it left: the referee, and who wrote the sessions, judge every turn.

The referee compares two full looks at the sandbox, before and after the turn, taken from the host: every
file, descriptor, process, port and shell. The generator (and whoever wrote the shipped sessions) knows the
true class of each turn, also where only memory changed.
"""

from __future__ import annotations

import pytest
from referee import Look, look, weaker

from benchmarks.agents.sandbox.harness import PROGRAMS, Seat, missing, new_name, open_host, own_home
from benchmarks.agents.sandbox.sessions import Output, replay, shipped, tree
from support import small_image
from support.sessions.generate import generate
from windtunnel.agents.sandbox.files import host_image
from windtunnel.agents.sandbox.traces import TraceTurn

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing() or "real sandboxes run here"),
]


def test_no_turn_is_judged_weaker_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_image, "WANTED", small_image.WHOLE)  # agents use git
    wrong: list[str] = []
    judged = 0
    with own_home() as home, open_host(home) as host:
        for trace in [*shipped(), *(generate(16, seed) for seed in range(8))]:
            seat, looks = Seat.new(host, new_name("judged")), list[Look]()

            def begin(seat: Seat = seat, looks: list[Look] = looks) -> None:
                seat.save()
                looks.append(look(seat))

            def end(turn: TraceTurn, _: Output, seat: Seat = seat, looks: list[Look] = looks) -> None:
                nonlocal judged
                decided = seat.end_turn().required
                looks.append(look(seat))
                judged += 1
                objection = weaker(decided, *looks[-2:])
                if objection or (turn.true_class is not None and decided < turn.true_class):
                    wrong.append(f"{turn.turn}, {turn.command[:60]!r}: {decided.word}; {objection}")

            programs = tree(seat.root, (PROGRAMS,))
            replay(trace, seat, on_open=begin, on_turn=end)
            assert tree(seat.root, (PROGRAMS,)) == programs, "it wrote where nobody looks"
            host.remove(seat.box.name)
    assert judged > 150 and not wrong
