"""Seeded sessions whose every turn has a known true class and known output.

A model of the sandbox (files, shell, services, descriptors) is kept while turns are drawn, so what a turn
prints is known before it ever ran; nothing printed depends on clocks, pids or chance. The *true class* is the
weakest class that loses nothing of the turn. It is finer than what an inspector can be expected to see: a
request that only reads a counter is *none* (tag ``peek``), though the service received input and dirtied
pages.

The default probability of *none*, 0.75, is the share that Crab (arXiv 2604.28138) publishes as a lower bound;
how the rest is divided is our choice.

How long the model thinks is drawn from a log-normal. Its default parameters come from the six gaps between a
tool's answer and the next reply at the start of one public mini-SWE-agent trajectory (deepseek-chat on
django-10914, which records both times): 3.2, 2.6, 2.8, 3.3, 5.7 and 41.2 s, median 3.3 s, standard deviation
of the logarithms 1.05. That is little data, and one model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces import recipes
from windtunnel.agents.sandbox.traces.recipes import SessionState
from windtunnel.agents.sandbox.traces.schema import FIXED_ENVIRONMENT, Trace, TraceTurn
from windtunnel.base.errors import UserError

TOOLS = ("ask.py", "check.py", "svc.py")
THINK_MEDIAN, THINK_SIGMA, THINK_LONGEST = 3.3, 1.05, 600.0
"""Of the log-normal, seconds; a draw beyond the longest is cut to it."""


@dataclass(frozen=True)
class Mix:
    """Weights of the four classes; they need not sum to one."""

    none: float = 0.75
    shell: float = 0.05
    files: float = 0.12
    full: float = 0.08

    def __post_init__(self) -> None:
        weights = self.weights
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise UserError(
                f"session: weights none, shell, files, full {weights} are not accepted; use numbers from 0 "
                "of which one is not 0"
            )

    @property
    def weights(self) -> tuple[float, float, float, float]:
        return self.none, self.shell, self.files, self.full


def generate(
    turns: int = 40,
    seed: int = 0,
    mix: Mix | None = None,
    *,
    workdir: str = "/workspace",
    first_port: int = 8100,
) -> Trace:
    """A session of so many turns. Each service gets a port of its own, from ``first_port`` on."""
    if not 1 <= turns <= 100_000:
        raise UserError(f"session: turns {turns} is not accepted; use 1 to 100000")
    if not 1024 <= first_port <= 60_000:
        raise UserError(f"session: first port {first_port} is not accepted; use 1024 to 60000")
    mix = mix or Mix()
    random = Random(seed)
    world = SessionState(random, workdir, first_port)
    trace_turns = []
    for number in range(1, turns + 1):
        turn_class = random.choices(list(TurnClass), mix.weights)[0]
        step = recipes.draw(world, turn_class)
        trace_turns.append(
            TraceTurn(
                turn=number,
                command=step.command,
                think=_think(random) if number < turns else 0.0,
                expect_exit=step.exit_code,
                expect_stdout=step.stdout,
                tags=step.tags,
                true_class=turn_class,
            )
        )
    return Trace(
        name=f"generated-{seed}",
        source=f"generated: seed {seed}, {turns} turns",
        licence="Apache-2.0",
        turns=tuple(trace_turns),
        environment=FIXED_ENVIRONMENT,
        workdir=workdir,
        prelude=prelude(workdir),
        probes={f"port {port}": f"{world.ask} {port} /peek" for port in sorted(world.services)},
    )


def _think(random: Random) -> float:
    """One think time, to the millisecond."""
    return round(min(THINK_LONGEST, THINK_MEDIAN * math.exp(THINK_SIGMA * random.gauss(0, 1))), 3)


def prelude(workdir: str) -> str:
    """Shell text that writes the helpers and a small repository."""
    parts = [f"mkdir -p {' '.join(f'{workdir}/{name}' for name in recipes.FOLDERS)} {workdir}/tools"]
    for name in TOOLS:
        text = (Path(__file__).parent / "tools" / name).read_text()
        parts.append(f"cat > {workdir}/tools/{name} <<'END_OF_TOOL'\n{text}END_OF_TOOL")
    for path, lines in recipes.FIRST_FILES.items():
        quoted = " ".join(f"'{line}'" for line in lines)
        parts.append(f"printf '%s\\n' {quoted} > {workdir}/{path}")
    parts.append(f"git -C {workdir} init -q -b main && git -C {workdir} config gc.auto 0")
    parts.append(f"git -C {workdir} add -A && git -C {workdir} commit -q -m first")
    return "\n".join(parts)
