"""How a collective with a frozen peer ends: the last rank stops itself, the others are blocked in all-reduce.

Argument: JSON with ``ranks``, ``timeout`` (s, of the group), ``method`` ("timeout": wait for it; "abort":
torch's ``_abort_process_group``; "cut": `CuttableGroup.cut`; both `AFTER` seconds after the rank blocked) and
``bound`` (s). Prints, for each rank, the seconds from the call (timeout) or the method (abort, cut) to the
release, null where there was none within ``bound``.
"""

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from windtunnel.training.elastic import CuttableGroup
from windtunnel.training.elastic.model import MemberHost, Membership

AFTER = 0.2


def main() -> None:
    """The parent: serves the store, forks the ranks, collects."""
    plan = json.loads(sys.argv[1])
    listener = socket.create_server(("127.0.0.1", 0), backlog=plan["ranks"])
    port = listener.getsockname()[1]
    children, pipes = [], []
    for rank in range(plan["ranks"]):
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                found = block(plan, rank, port)
                os.write(writes, json.dumps(found).encode())
            finally:
                os._exit(0)
        os.close(writes)
        children.append(child)
        pipes.append(reads)
    # Only now: a child that is forked while the store's thread holds a lock of the C library has it held
    # for ever.
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    end = time.monotonic() + plan["bound"] + 30.0
    results = [receive(pipe, end) for pipe in pipes[:-1]]
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    del store
    print(json.dumps(results), flush=True)
    os._exit(0)


def receive(pipe: int, end: float) -> float | None:
    """What a rank says; this program fails if one says nothing."""
    ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
    text = os.read(pipe, 100) if ready else b""
    if not text:
        raise RuntimeError("a rank came to no end")
    return json.loads(text)


def block(plan: dict[str, Any], rank: int, port: int) -> float | None:
    """One rank: seconds to its release."""
    torch.set_num_threads(1)
    hosts = tuple(MemberHost(n, "127.0.0.1", "") for n in range(plan["ranks"]))
    membership = Membership(1, 1, hosts, 1, f"127.0.0.1:{port}", "bench")
    group = CuttableGroup("gloo", plan["timeout"])
    group.form(membership, rank)
    numbers = torch.ones(4096)
    dist.all_reduce(numbers)
    if rank == plan["ranks"] - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    struck = released = time.monotonic()
    done = threading.Event()

    def call() -> None:
        nonlocal released
        try:
            dist.all_reduce(numbers)
        except RuntimeError:
            released = time.monotonic()
            done.set()

    threading.Thread(target=call, daemon=True).start()
    if plan["method"] != "timeout":
        time.sleep(AFTER)
        struck = time.monotonic()
        strike = group.cut if plan["method"] == "cut" else c10d._abort_process_group
        threading.Thread(target=strike, daemon=True).start()
    return released - struck if done.wait(plan["bound"]) else None


if __name__ == "__main__":
    main()
