"""A model that follows a script: an OpenAI-compatible chat service without a model behind it.

    python scripted_model.py --port 8080 --think 2

Its answer depends only on how many commands the conversation already holds, so that a repeated request gets
the same answer and any number of agents can ask. ``--think``: seconds before each answer.
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STEPS = [
    "mkdir -p /workspace/shop && cd /workspace/shop && export STAGE=test",
    "printf 'def total(prices):\\n    return sum(prices) + 1\\n' > shop.py",
    "printf 'from shop import total\\nassert total([2, 3]) == 5\\n' > check.py && python3 check.py",
    "python3 -m http.server 8000 --bind 127.0.0.1 > server.log 2>&1 & echo started",
    "sed -i 's/ + 1//' shop.py && python3 check.py && echo fixed in $STAGE",
]
"""What the scripted model has the agent run: a project is made, is broken, is served and is mended."""


def answer(request: dict[str, Any], steps: list[str]) -> dict[str, Any]:
    """The next command of the script, as a call of the tool ``bash``; words when there is none."""
    done = sum(message["role"] == "tool" for message in request["messages"])
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if done < len(steps):
        call = {"name": "bash", "arguments": json.dumps({"command": steps[done]})}
        message["tool_calls"] = [{"id": f"call_{done}", "type": "function", "function": call}]
    else:
        message["content"] = "Done."
    reason = "tool_calls" if done < len(steps) else "stop"
    return {
        "id": f"chat-{done}",
        "object": "chat.completion",
        "model": request.get("model", ""),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
    }


class Server(ThreadingHTTPServer):
    """Counts the requests it answered."""

    def __init__(self, port: int, steps: list[str], think: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.steps, self.think, self.asked = steps, think, 0
        self.counting = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.counting:
            self.server.asked += 1
        time.sleep(self.server.think)
        body = json.dumps(answer(request, self.server.steps)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Silent: the agent tells what happens."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--think", type=float, default=1.0, help="seconds before each answer (default: 1)")
    parser.add_argument(
        "--steps", type=Path, help="a file with one command a line (default: a small session)"
    )
    args = parser.parse_args()
    steps = args.steps.read_text().splitlines() if args.steps else STEPS
    Server(args.port, steps, args.think).serve_forever()
