"""An agent is killed in the middle of its work, with everything that it had in memory, and goes on.

    sudo .venv/bin/python examples/agents/killed_and_goes_on.py

The agent (coding_agent.py) runs inside a sandbox whose only way out is the model proxy. Each of its requests
ends a turn; the checkpoint is taken while the model (scripted_model.py) thinks. After turn 4 every process
of the sandbox is killed, and the newest checkpoint restored: agent, shell and web server are back, the agent
sends its request again and finishes.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scripted_model import STEPS, Server

import windtunnel as wt
from windtunnel.agents.sandbox import SandboxHost, SandboxSpec

KILL_AFTER = 4
LIMIT = 120.0
HERE = Path(__file__).parent
LOG = "/workspace/agent.log"


def main() -> None:
    model = Server(0, STEPS, think=0.5)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    upstream = f"http://127.0.0.1:{model.server_port}"
    with (
        tempfile.TemporaryDirectory(prefix="windtunnel-example-") as folder,
        SandboxHost(Path(folder)) as host,
    ):
        box = host.create(SandboxSpec("coder", network="proxy", proxy_upstream=upstream))
        try:
            box.put("/agent.py", (HERE / "coding_agent.py").read_bytes())
            box.run(f"python3 -B /agent.py > {LOG} 2>&1 &")
            until(lambda: box.turns >= KILL_AFTER)
            box.wait()
            box.machine().cgroup.kill()
            until(lambda: box.info().status == "dead")
            print(f"after turn {box.turns}: every process of the sandbox was killed")
            report = box.restore()
            print(f"restored in {report.seconds * 1e3:.0f} ms: {', '.join(report.restored)}")
            for lack in report.lacks:
                print(f"not restored: {lack.what}: {lack.why}")
            until(lambda: b"Done." in box.get(LOG))
            print(f"\nwhat the agent wrote:\n\n{box.get(LOG).decode()}")
            print(f"the model was asked {model.asked} times; the session has {len(STEPS) + 1} turns")
            for turn in box.log().turns:
                print(f"  turn {turn.number}: {turn.turn_class.word:5} {'; '.join(turn.reasons[:2])}")
        finally:
            host.remove("coder")
            model.shutdown()


def until(true: Callable[[], bool]) -> None:
    """Wait until ``true()``; SystemExit when that takes too long."""
    deadline = time.monotonic() + LIMIT
    while not true():
        if time.monotonic() > deadline:
            raise SystemExit("it takes too long")
        time.sleep(0.01)


if __name__ == "__main__":
    try:
        main()
    except wt.UserError as error:
        sys.exit(str(error))
