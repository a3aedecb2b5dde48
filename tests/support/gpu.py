"""A host with a device and its broker, and a user in a process of his own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

from windtunnel.store.eventlog import read
from windtunnel.trust.gpu import Denied, Gpu, GpuHost

PROGRAMS = Path(__file__).parent.parent / "trust" / "gpu" / "programs.py"
USER = """
import pickle, sys
import numpy as np
from windtunnel.trust.gpu import claim
broker, allow, me = pickle.load(sys.stdin.buffer)
with claim(broker, allow, me(), "pipelined") as gpu:
    buffer = gpu.empty((1 << 21,), "float32")
    while True:
        gpu.write(buffer, np.ones(1 << 21, "float32"))
"""


def host(folder: Path, pages: int = 256) -> GpuHost:
    return GpuHost(folder, PROGRAMS, pages=pages)


def writing_user(gpu: GpuHost) -> subprocess.Popen[bytes]:
    """A process that claims the device and writes to it until it is killed."""
    user = subprocess.Popen([sys.executable, "-c", USER], stdin=subprocess.PIPE)
    assert user.stdin is not None
    pickle.dump((gpu.spec["broker"]["address"], gpu.allow, gpu.me), user.stdin)
    user.stdin.close()
    return user


def log(gpu: GpuHost) -> list[dict[str, Any]]:
    return read(gpu.spec["device"]["log"])


def decided(gpu: GpuHost, kind: str) -> list[dict[str, Any]]:
    """Decisions about requests of that kind."""
    return [e for e in log(gpu) if e["kind"] == "decision" and e["observation"]["request"]["kind"] == kind]


def free(gpu: GpuHost) -> bool:
    """Whether the device can be claimed: it is, and is released."""
    try:
        with gpu.claim("single"):
            return True
    except Denied:
        return False


def all_paths(gpu: Gpu) -> None:
    import numpy as np

    content = np.random.default_rng(gpu.epoch).random((1100, 1000), np.float32)  # over 4 chunks, and a rest
    x, y = gpu.array(content), gpu.empty(content.shape, content.dtype)
    gpu.run("double", [x], [y])
    assert np.array_equal(gpu.read(y), 2 * content) and np.array_equal(gpu.read(x), content)
