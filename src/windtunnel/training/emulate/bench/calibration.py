"""One process of a calibration for a captured job: the job's own operators, while its peers do the same.

    torchrun ... -m windtunnel.training.emulate.bench.calibration SLICE FOLDER SECONDS

Ranks that compute side by side share memory bandwidth, the last cache and the clock budget of the processor,
so an operator is measured with as many cores equally busy as the job has ranks. Each rank writes
``FOLDER/RANK.json``, a profile. Nothing here has seen the time of a real step of the job.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch.distributed as dist

from windtunnel.training.emulate.bench.jobs import step_calls, step_order
from windtunnel.training.emulate.calibrate import measure_operators, measure_overhead, measure_sharding
from windtunnel.training.emulate.calibrate.gloo import measure_calls
from windtunnel.training.emulate.twin.costs.profile import save_profile


def main() -> None:
    """The program: see the module."""
    path, folder, seconds = sys.argv[1:]
    slice_ = pickle.loads(Path(path).read_bytes())
    dist.init_process_group("gloo")
    dist.barrier()
    overhead = measure_overhead(1)
    dist.barrier()
    overhead["fsdp_tensor"] = measure_sharding(1)
    dist.barrier()
    profile = measure_operators(slice_.operators, "cpu", 1, order=step_order(slice_), seconds=float(seconds))
    profile.host_overhead = overhead
    if dist.get_world_size() > 1:
        dist.barrier()
        profile.collectives = measure_calls(step_calls(slice_))
    save_profile(profile, Path(folder, f"{os.environ['RANK']}.json"))
    dist.barrier()
    os._exit(0)  # without gloo's destructors, which can deadlock: see `tracked`


if __name__ == "__main__":
    main()
