"""What the tests of agents and launchers share: scripts without torch, and waiting on conditions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# A trainer that speaks to its agent by hand: it answers memberships, and writes down what it is told.
SPEAKER = """
import json, os, sys, threading, time
from windtunnel.base import wire
sock = wire.connect(os.environ["WINDTUNNEL_AGENT"], 20)
lock = threading.Lock()
def say(**message):
    with lock: wire.send(sock, message)
say(op="hello", rank=int(os.environ["RANK"]), pid=os.getpid())
welcome, _ = wire.receive(sock)
sock.settimeout(60)
def beat():
    while True:
        time.sleep(0.05); say(op="beat", step=1)
threading.Thread(target=beat, daemon=True).start()
generation = welcome["membership"]["generation"]
print(json.dumps(welcome), flush=True)
"""
# It stays, and tells its generation, until the file "stop" is in the run's folder; then it ends well.
STAYS = (
    SPEAKER
    + """
def listen():
    global generation
    while True:
        message, _ = wire.receive(sock)
        print(json.dumps(message), flush=True)
        if message["op"] == "membership":
            generation = message["membership"]["generation"]
            say(op="event", kind="here", generation=generation, pid=os.getpid())
threading.Thread(target=listen, daemon=True).start()
say(op="event", kind="here", generation=generation, pid=os.getpid())
while not os.path.exists(os.path.join(os.environ["WINDTUNNEL_RUN"], "stop")):
    time.sleep(0.02)
say(op="done", result=generation)
os._exit(0)
"""
)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def kinds(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["kind"] == kind]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
