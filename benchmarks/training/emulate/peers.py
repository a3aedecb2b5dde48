"""PyTorch's own tools on the same model: what `MemTracker` tells of memory, and how long it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.rows import Row, left_out
from benchmarks.training.emulate.jobs import (
    PACKAGE,
    BenchJob,
    capture_one,
    example,
    peak_bytes,
    run_for_real,
)
from windtunnel.base.errors import ScriptError

SECTION = "peers"
JOB = BenchJob("none", 1)
PEER = "torch.distributed._tools.MemTracker under FakeTensorMode"


def peers_rows(quick: bool) -> Iterator[Row]:
    """Peak bytes as the peer and as windtunnel tell it, each against the real run; and their seconds."""
    measured = run_for_real(JOB, "memory", steps=3)[0][-1]
    theirs = _in_process()
    began = time.perf_counter()
    ours = peak_bytes(capture_one(JOB))
    seconds = time.perf_counter() - began
    yield Row(SECTION, f"peak tensor bytes, {JOB.name}: windtunnel", "bytes", measured, ours)
    name = f"peak tensor bytes, {JOB.name}: MemTracker"
    yield Row(SECTION, name, "bytes", measured, theirs["peak"], source=PEER)
    yield Row(
        SECTION, "process start to answer: windtunnel over MemTracker", "times",
        measured=seconds / theirs["seconds"],
        note=f"{seconds:.1f} s, with all of the script run for real, against {theirs['seconds']:.1f} s",
    )  # fmt: skip
    yield left_out(SECTION, "RuntimeEstimator", "it reads a CUDA device's peak rates, and knows no CPU")


def _in_process() -> dict[str, Any]:
    """What `main` prints, and the seconds from its start to its end."""
    began = time.perf_counter()
    command = [sys.executable, "-m", f"{PACKAGE}.peers"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode:
        raise ScriptError(f"{PEER} failed", done.stderr[-3000:])
    return {**json.loads(done.stdout.splitlines()[-1]), "seconds": time.perf_counter() - began}


def main() -> None:
    """Two training steps of the example's model under the peer: prints the peak bytes of the second."""
    import torch
    import torch.nn.functional as F
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    sys.path.insert(0, str(example().parent))
    from llama_model import SIZES, Llama  # type: ignore[import-not-found]

    config = SIZES["debug"]
    with FakeTensorMode():
        model = Llama(config, JOB.seq, range(config.layers))
        model.init_weights()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for step in range(2):
                tokens = torch.zeros(JOB.batch, JOB.seq, dtype=torch.int64)
                loss = F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten(0, 1))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")
    print(json.dumps({"peak": sum(kinds["Total"] for kinds in peak.values())}))


if __name__ == "__main__":
    main()
