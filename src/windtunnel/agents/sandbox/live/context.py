"""The parts that a host puts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from windtunnel.agents.sandbox.live.criu import Criu
from windtunnel.agents.sandbox.live.diff_inspector import DiffInspector
from windtunnel.agents.sandbox.live.engine import Engine
from windtunnel.agents.sandbox.live.files import Pool
from windtunnel.agents.sandbox.live.images import Manifests, PageStore
from windtunnel.agents.sandbox.live.inspect import Inspector
from windtunnel.agents.sandbox.live.model_proxy.attach import HostProxy
from windtunnel.agents.sandbox.live.place import Home
from windtunnel.agents.sandbox.live.record import SandboxLog
from windtunnel.agents.sandbox.policy import PolicyName, Retention, Rules
from windtunnel.agents.sandbox.views import Event


@dataclass(frozen=True)
class Context:
    """What every operation on a sandbox needs; ``criu`` and ``inspector``: None where there is none."""

    home: Home
    pool: Pool
    pages: PageStore
    manifests: Manifests
    criu: Criu | None
    inspector: Inspector | DiffInspector | None
    engine: Engine
    rules: Rules
    retention: Retention
    policy: PolicyName
    in_use: list[str]
    """Checkpoints that are being made or restored, once for each: nothing of them may be dropped."""
    proxy: HostProxy
    report: Callable[[Event], None]
    no_images: str
    """Why processes are not kept where ``criu`` is None."""

    def log(self, box: str) -> SandboxLog:
        """The log of that sandbox, and what decides of it; with the empty name, of the host."""
        return SandboxLog(box, self.policy, self.home.box(box) if box else self.home.path, self.report)
