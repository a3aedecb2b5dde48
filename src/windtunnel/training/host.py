"""The agent process of one host: ``python -m windtunnel.training.host CONFIG``.

It puts together the agent, its memory service and, where nobody else keeps one, its fork server. CONFIG is
the JSON of `AgentConfig`. No torch in here: an agent is there in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from pathlib import Path

from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training.checkpoint.live.memory import MemoryLimits, MemoryService
from windtunnel.training.elastic.live import forked
from windtunnel.training.elastic.live.agent.agent import Agent
from windtunnel.training.elastic.live.agent.config import AgentConfig


def main(arguments: list[str] | None = None) -> None:
    """Entry point; ends with the status that the supervisor gave, 1 as an orphan."""
    parser = argparse.ArgumentParser(prog="host")
    parser.add_argument("config", type=Path)
    options = parser.parse_args(arguments)
    status = serve(AgentConfig.read(options.config))
    sys.stdout.flush()
    os._exit(status)  # threads that wait for a peer need not be waited for


def serve(config: AgentConfig) -> int:
    """Be the agent of this host until its end: the exit status."""
    keeper = None
    if config.forkserver is None:
        Path(config.memory_root).mkdir(parents=True, exist_ok=True)
        path = Path(config.memory_root) / f"forkserver-{os.getpid()}.sock"
        keeper = ForkServerKeeper(path, (forked.MODULE, *config.job.preload), dict(os.environ))
    agent = Agent(config, keeper.path if keeper else Path(config.forkserver or ""), keeper)
    with_memory(agent)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    try:
        return agent.run()
    finally:
        if keeper is not None:
            keeper.close()
            with contextlib.suppress(OSError):
                Path(config.memory_root).rmdir()


def with_memory(agent: Agent) -> None:
    """Add the memory service, in a folder of its own within the agent's."""
    folder = agent.memory / "shards"
    folder.mkdir(exist_ok=True)
    agent.service = MemoryService(
        folder,
        agent.config.address,
        keys=agent.keys,
        context=agent,
        limits=MemoryLimits(**agent.config.job.waits("memory")),
    )


if __name__ == "__main__":
    main()
