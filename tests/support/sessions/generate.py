"""Seeded sessions whose every turn has a known true class and known output.

A model of the sandbox (files, shell, services, descriptors) is kept while turns are drawn, so what a turn
prints is known before it ever ran; nothing printed depends on clocks, pids or chance. The *true class* is the
weakest class that loses nothing of the turn. It is finer than what an inspector can be expected to see: a
request that only reads a counter is *none* (tag ``peek``), though the service received input and dirtied
pages.

Shares of the classes and think times are those of the twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from random import Random

from support.sessions import recipes
from support.sessions.recipes import SessionState
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces import Trace, TraceTurn
from windtunnel.agents.sandbox.twin import SHARES, think_time
from windtunnel.base.errors import UserError

TOOLS = ("ask.py", "check.py", "svc.py")
FIXED_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "GIT_AUTHOR_NAME": "Agent",
    "GIT_AUTHOR_EMAIL": "agent@example.org",
    "GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "Agent",
    "GIT_COMMITTER_EMAIL": "agent@example.org",
    "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_OPTIONAL_LOCKS": "0",
}
"""What makes two runs of one session equal: no clock, locale, identity or cache of this machine shows."""


@dataclass(frozen=True)
class Mix:
    """Weights of the four classes; they need not sum to one."""

    none: float = SHARES[0]
    shell: float = SHARES[1]
    files: float = SHARES[2]
    full: float = SHARES[3]

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
                think=think_time(random.gauss(0, 1)) if number < turns else 0.0,
                expect_exit=step.exit_code,
                expect_stdout=step.stdout,
                tags=step.tags,
                true_class=turn_class,
            )
        )
    return Trace(
        name=f"generated-{seed}",
        turns=tuple(trace_turns),
        environment=FIXED_ENVIRONMENT,
        workdir=workdir,
        prelude=prelude(workdir),
        probes={f"port {port}": f"{world.ask} {port} /peek" for port in sorted(world.services)},
    )


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
