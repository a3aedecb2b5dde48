"""A supervisor that is killed over and over, while workers are lost and ranks agree."""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from support.waiting import PATIENCE, until
from training.elastic.supervisor import supervised_process
from training.elastic.supervisor.fake_agents import Agent
from windtunnel.store import eventlog


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_time_and_started_again(tmp_path: Path, seed: int) -> None:
    """SIGKILL to the supervisor at random times, while workers are lost and ranks agree: the run goes on to
    its end, generations only grow, and nothing is decided twice."""
    random_ = random.Random(seed)
    process, address = supervised_process.start(tmp_path, places=3)
    agents = [Agent(address) for _ in range(3)]
    over = threading.Event()

    def hurt() -> None:
        """Keep recoveries under way."""
        while not over.wait(random_.uniform(0.01, 0.15)):
            agent = random_.choice(agents)
            for rank in list(agent.workers):
                agent.exit(rank, signal=9)
            agent.event("step", generation=agent.generation, step=1, rank=0)

    hurting = threading.Thread(target=hurt)
    try:
        for agent in agents:
            until(lambda a=agent: a.generation >= 1, "generation 1")  # type: ignore[misc]
        hurting.start()
        for _ in range(5):
            over.wait(random_.uniform(0.0, 0.3))
            process.kill()
            process.wait(PATIENCE)
            process, again = supervised_process.start(tmp_path, places=3)
            assert again == address
        over.set()
        hurting.join(30)

        def together() -> bool:
            """All in one generation, with all workers."""
            return len({a.generation for a in agents}) == 1 and all(len(a.workers) == 1 for a in agents)

        for number in itertools.count():
            until(together, "a generation of all")
            generation, key = agents[0].generation, f"commit/{number}"
            posted = 0.0

            def settled(number: int = number, key: str = key, generation: int = generation) -> bool:
                """What is said to the supervisor before is lost, and said again, as by real agents."""
                nonlocal posted
                if time.monotonic() > posted + 1.0:
                    posted = time.monotonic()
                    for agent in agents:
                        for rank in list(agent.workers):
                            agent.post(key, rank, number, generation=generation)
                return bool(agents[0].of("decided", key=key)) or agents[0].generation > generation

            until(settled, "an agreement, or a newer generation")
            if agents[0].of("decided", key=key):
                break
        for agent in agents:
            agent.done(result=1)
        assert process.wait(PATIENCE) == 0
        assert all(agent.ended.wait(PATIENCE) for agent in agents)
        events = eventlog.read(tmp_path / "events.jsonl")
        decided = [e["membership"]["generation"] for e in events if e["kind"] == "decided"]
        assert decided == list(range(1, len(decided) + 1))
        epochs = [e["epoch"] for e in events]
        assert epochs == sorted(epochs) and epochs[-1] == 6
        assert not [e for e in events if e["kind"] == "lost" and e["what"] == "host"]
    finally:
        over.set()
        for agent in agents:
            agent.kill()
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(PATIENCE)
