"""No turn's class is weaker than what it left: the referee, and who wrote the sessions, judge every turn.

The referee compares two full looks at the sandbox, before and after the turn, taken from the host: every
file, descriptor, process, port and shell. The generator (and whoever wrote the shipped sessions) knows the
true class of each turn, also where only memory changed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agents.sandbox.harness import PROGRAMS, Seat, missing, new_name, opened, own_home, sessions
from support import small_image
from windtunnel.agents.sandbox.checkpoint import quiesce
from windtunnel.agents.sandbox.files import host_image
from windtunnel.agents.sandbox.traces.observe import Observation, digest, listening, observe, tree
from windtunnel.agents.sandbox.traces.replay import Output, replay
from windtunnel.agents.sandbox.traces.schema import TraceTurn
from windtunnel.agents.sandbox.traces.score import weaker
from windtunnel.linux.processes import command_line, state

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(missing()), reason=missing() or "real sandboxes run here"),
]


def look(seat: Seat) -> Observation:
    """All that can be seen from the host without running anything inside."""
    machine = seat.box.machine()
    quiesce(machine.shells())
    pids = {pid: command_line(pid) for pid in machine.cgroup.pids() if state(pid) != "Z"}
    seen = observe(
        seat, seat.root, processes=machine.commands, ports=False, only=seat.written(),
        pids={pid: command for pid, command in pids.items() if command},
        shells={state.name: state.fingerprint for state in machine.shell_states()},
    )  # fmt: skip
    tables = [Path(f"/proc/{machine.pid}/net/{name}") for name in ("tcp", "tcp6")]
    text = "\n".join(table.read_text() for table in tables if table.exists())
    return replace(seen, ports=listening(text))


def test_no_turn_is_judged_weaker_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_image, "WANTED", small_image.WHOLE)  # agents use git
    wrong: list[str] = []
    judged = 0
    with own_home() as home, opened(home) as host:
        for trace in sessions(False, generated=8):
            seat, looks = Seat.new(host, new_name("judged")), list[Observation]()

            def begin(seat: Seat = seat, looks: list[Observation] = looks) -> None:
                seat.save()
                looks.append(look(seat))

            def end(turn: TraceTurn, _: Output, seat: Seat = seat, looks: list[Observation] = looks) -> None:
                nonlocal judged
                decided = seat.end_turn().wanted
                looks.append(look(seat))
                judged += 1
                objection = weaker(decided, *looks[-2:])
                if objection or (turn.true_class is not None and decided < turn.true_class):
                    wrong.append(f"{turn.turn}, {turn.command[:60]!r}: {decided.word}; {objection}")

            programs = digest(tree(seat.root, (PROGRAMS,)))
            replay(trace, seat, on_open=begin, on_turn=end)
            assert digest(tree(seat.root, (PROGRAMS,))) == programs, "it wrote where nobody looks"
            host.remove(seat.box.name)
    assert judged > 150 and not wrong
