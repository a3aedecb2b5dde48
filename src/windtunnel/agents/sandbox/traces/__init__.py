"""Sessions of agents as data: read, generated, replayed on a sandbox, and scored after a kill.

A *trace* is what an agent asked of its sandbox, turn by turn, with the seconds its model thought in between.
``schema`` holds it as a JSON-lines file; ``generate`` makes sessions whose every turn has a known true class;
``replay`` runs one on anything that has ``run``; ``observe`` and ``score`` say whether a recovery lost
anything, and the least class that two full looks at a sandbox allow.
"""

from __future__ import annotations

from pathlib import Path

from windtunnel.agents.sandbox.traces.schema import Trace, load


def shipped() -> list[Trace]:
    """The traces that come with the package, by name. They were written by hand for it: real work on small
    stand-in projects, with every turn's true class judged by hand; they are no recordings of an agent."""
    return [load(path) for path in sorted((Path(__file__).parent / "data").glob("*.jsonl"))]
