"""A small coding agent: it asks a model what to run, runs it in one shell, and says what came of it.

    OPENAI_BASE_URL=http://127.0.0.1:8080/v1 python coding_agent.py "make a shop and test it"

It knows nothing of sandboxes or checkpoints and needs only Python. It keeps the conversation in memory and
its shell in a child process; so it lives on only where both are brought back. A request that is cut off is
sent again, as every client library of a model service does.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

BASE = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
KEY = os.environ.get("OPENAI_API_KEY", "none")
MODEL = os.environ.get("MODEL", "scripted")
TRIES = 30
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command in a shell that stays.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message. The request is repeated while the service cannot be reached or is busy."""
    body = json.dumps({"model": MODEL, "messages": messages, "tools": TOOLS}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    for attempt in range(TRIES):
        request = urllib.request.Request(f"{BASE}/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as reply:
                return dict(json.load(reply)["choices"][0]["message"])
        except urllib.error.HTTPError as error:
            if error.code not in (408, 409, 429) and error.code < 500:
                raise
            print(f"the model service said {error.code}; trying again", flush=True)
        except (OSError, ValueError) as error:
            print(f"no answer ({error}); trying again", flush=True)
        time.sleep(min(0.1 * 2**attempt, 5.0))
    raise SystemExit("the model service cannot be reached")


class Shell:
    """One bash for all commands, so that directory, variables and background jobs stay."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.number = 0

    def run(self, command: str) -> str:
        """Output and exit status of a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.number += 1
        end = f"--- end of {self.number}: "
        self.process.stdin.write(f"{command}\nprintf '\\n%s%d\\n' '{end}' $?\n".encode())
        self.process.stdin.flush()
        lines = []
        for line in self.process.stdout:
            text = line.decode(errors="replace")
            if text.startswith(end):
                return "".join(lines).strip() + f"\n[exit status {text.removeprefix(end).strip()}]"
            lines.append(text)
        raise SystemExit("the shell ended")


def main(task: str) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a coding agent. Use the tool bash until the task is done."},
        {"role": "user", "content": task},
    ]
    shell = Shell()
    while True:
        message = ask(messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"], flush=True)
            return
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            output = shell.run(command)
            print(f"$ {command}\n{output}", flush=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "make a shop and test it")
