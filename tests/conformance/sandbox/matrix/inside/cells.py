"""A client of a Jupyter kernel: cells.py CONNECTION [CODE].

With code it runs that and prints what it prints. Without, it stays: x = 41 first, and once /row/again is
there what is x + 2 then, over the connection that it has had all along.
"""

import os
import sys
import time

from jupyter_client.blocking.client import BlockingKernelClient

while not os.path.exists(sys.argv[1]) or not os.path.getsize(sys.argv[1]):
    time.sleep(0.05)
client = BlockingKernelClient()
client.load_connection_file(sys.argv[1])
client.start_channels()
client.wait_for_ready(timeout=60)


def output(code: str) -> str:
    said: list[str] = []

    def collect(message: dict) -> None:  # type: ignore[type-arg]
        if message["header"]["msg_type"] == "stream":
            said.append(message["content"]["text"])

    client.execute_interactive(code, output_hook=collect, timeout=30)
    return "".join(said).strip()


if len(sys.argv) > 2:
    print(output(sys.argv[2]))
else:
    print("first:", output("x = 41; print(x)"), flush=True)
    while not os.path.exists("/row/again"):
        time.sleep(0.05)
    print("again:", output("print(x + 2)"), flush=True)
client.stop_channels()
