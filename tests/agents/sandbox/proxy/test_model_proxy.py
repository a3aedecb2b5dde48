"""Unmodified agents in sandboxes whose only way out is the model proxy."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.proxy.fake_model import FakeModel
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import Shortfall

pytestmark = pytest.mark.root
EXAMPLE = Path(__file__).parents[4] / "examples" / "agents" / "killed_and_goes_on.py"
ASK = """python3 -B - <<'END'
import json, os, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "%s"}], "tools": [{}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
print(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read().decode())
END"""


def ask(box: Any, what: str) -> str:
    """What the model said to a program inside the sandbox."""
    result = box.run(ASK % what, timeout=60)
    assert result.exit_code == 0, result.stderr.decode()
    return str(json.loads(result.stdout)["choices"][0]["message"]["content"]).removeprefix("answer ")


@pytest.mark.slow
def test_a_killed_agent_goes_on_and_the_model_is_asked_no_more(home: Path) -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert "processes with memory and open files" in ran.stdout
    assert "fixed in test" in ran.stdout
    assert "the model was asked 6 times; the session has 6 turns" in ran.stdout


def test_a_request_ends_a_turn_while_its_command_still_runs(
    make: Callable[..., Any], model: FakeModel
) -> None:
    box = make(network="proxy", proxy_upstream=model.url)
    assert ask(box, "first") == "1"
    box.wait()
    assert box.turns == 1
    box.restore()
    assert ask(box, "first") == "1", "the recorded answer"
    box.rollback(box.log().checkpoints[0].id)
    assert ask(box, "first") == "2", "a rollback asks anew"


REFUSED = (
    "head -c 65M /dev/zero > /workspace/big; sleep 4321 < /workspace/big >/dev/null 2>&1 & "
    "until grep -q sleep /proc/$!/comm; do :; done; rm /workspace/big"
)
"""A process that CRIU refuses: it holds a deleted file of more than an image takes."""


def test_a_reply_is_held_while_its_turn_cannot_be_kept(make: Callable[..., Any], model: FakeModel) -> None:
    box = make(network="proxy", proxy_upstream=model.url)
    refused = box.run(f"{REFUSED}; {ASK % 'first'}", timeout=60)
    assert refused.exit_code != 0 and b"503" in refused.stderr
    line = box.log().turns[-1]
    assert (line.number, line.turn_class, line.required) == (1, TurnClass.FILES, TurnClass.FULL)
    lost, asking = line.lacks
    assert "sleep 4321" in lost.what and "python3" in asking.what
    # the policy was asked, and its answers are on record
    settled = [answer.answer for observation, answer in box.decisions() if isinstance(observation, Shortfall)]
    assert settled == ["retry", "hold", "hold"]
    assert b"503" in box.run(ASK % "first", timeout=60).stderr, "asked again, it is tried again"
    with pytest.raises(IncompleteError, match="sleep 4321"):
        box.checkpoint()
    assert box.checkpoint(allow_less=True).lacks == (lost,)
    assert ask(box, "first") == "1", "the recorded answer"
    # the next turn is held as well, until the process has gone
    assert b"503" in box.run(ASK % "second", timeout=60).stderr
    box.run("pkill sleep; wait", timeout=60)
    assert ask(box, "second") == "2"
    assert (len(model.calls), box.turns) == (2, 2)
    assert box.log().checkpoints[-1].image is not None and box.info().lacks == ()


def test_a_key_of_the_host_is_nowhere_but_at_the_model(
    host: Any, make: Callable[..., Any], model: FakeModel, tmp_path: Path
) -> None:
    key = f"sk-{secrets.token_hex(16)}"
    file = tmp_path / "key"
    file.write_text(key)
    file.chmod(0o600)
    box = make(network="proxy", proxy_upstream=model.url, proxy_key_file=str(file))
    assert ask(box, "first") == "1"
    box.wait()
    (fork,) = host.fork(box.name, 1)
    assert ask(fork, "second") == "2"
    assert ask(box, "second") == "3", "a fork has a proxy of its own"
    assert [call.headers["authorization"] for call in model.calls] == [f"Bearer {key}"] * 3
    box.restore()
    host.export(box.name, str(tmp_path / "out"))
    taken = host.import_(str(tmp_path / "out"), "taken")
    keyed = host.import_(str(tmp_path / "out"), "keyed", key_file=str(file))
    assert keyed.spec.proxy_key_file == host.fork("keyed", 1)[0].spec.proxy_key_file == str(file)
    assert taken.spec.proxy_key_file == "", "another host's word for what is read of this one's files"
    inside = (
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env; cat -- $(find /workspace /tmp /run /etc -type f)"
    )
    assert key.encode() not in box.run(f"{{ {inside}; }} 2>/dev/null", timeout=60).stdout
    folders = (host.home.boxes, host.home.pages, tmp_path / "out")
    own = ["grep", "-rlaF", "--exclude=netns", key, *folders, *host.home.path.glob("*.sqlite*")]
    search = subprocess.run(own, capture_output=True, text=True, timeout=60)
    assert (search.returncode, search.stdout) == (1, ""), search
