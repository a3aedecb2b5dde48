"""The agent process of one host: ``python -m windtunnel.training.host CONFIG``.

It puts together the agent, its memory service and, where nobody else keeps one, its fork server. CONFIG is
the JSON of `AgentConfig`. No torch in here: an agent is there in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import threading
from pathlib import Path

from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training.checkpoint.live.memory import Limits, MemoryService
from windtunnel.training.elastic.live import forked
from windtunnel.training.elastic.live.agent.agent import Agent
from windtunnel.training.elastic.live.agent.config import AgentConfig


def main(arguments: list[str] | None = None) -> None:
    """Entry point; ends with the status that the supervisor gave, 1 as an orphan."""
    parser = argparse.ArgumentParser(prog="host")
    parser.add_argument("config", type=Path)
    parser.add_argument("--lifeline", type=int, default=None)
    options = parser.parse_args(arguments)
    status = serve(AgentConfig.read(options.config), options.lifeline)
    sys.stdout.flush()
    os._exit(status)  # threads that wait for a peer need not be waited for


def serve(config: AgentConfig, lifeline: int | None = None) -> int:
    """Be the agent of this host until its end: the exit status.

    ``lifeline``: an fd of a pipe; when its other end closes the owner is gone and the agent ends.
    """
    keeper = None
    if config.forkserver is None:
        Path(config.memory_root).mkdir(parents=True, exist_ok=True)
        path = Path(config.memory_root) / f"forkserver-{os.getpid()}.sock"
        keeper = ForkServerKeeper(path, (forked.MODULE, *config.preload), dict(os.environ))
    agent = Agent(config, keeper.path if keeper else Path(config.forkserver or ""), keeper)
    with_memory(agent)
    signal.signal(signal.SIGTERM, lambda *_: agent.stop(1))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    if lifeline is not None:
        threading.Thread(target=_watch, args=(agent, lifeline), name="lifeline", daemon=True).start()
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
    limits = Limits(**agent.config.limits)
    agent.services.append(
        MemoryService(folder, agent.config.address, keys=agent.keys, context=agent, limits=limits)
    )


def _watch(agent: Agent, lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.poll()
    agent.stop(1)


if __name__ == "__main__":
    main()
