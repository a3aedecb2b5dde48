"""A script that fails on each rank in another way."""

import os
import sys
import time

import torch
import torch.distributed as dist
from cases import run

RANK, LOCAL = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def case_raises():
    raise ValueError("no such luck\nwith a second line")


def case_exit_3():
    sys.exit(3)


def case_exit_0():
    sys.exit(0)


def case_os_exit_0():
    os._exit(0)


def case_endless():
    if "PID_FILE" in os.environ:
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(0.01)


def case_wrong_device_of_a_tensor():
    torch.zeros(1, device="cuda:9")


def case_wrong_world_size():
    dist.init_process_group("nccl", world_size=3, rank=0)


def case_killed():
    os.kill(os.getpid(), 9)


def case_crash():
    import ctypes

    ctypes.string_at(0)


def case_syntax():
    exec(compile("x = = 1", "broken.py", "exec"))


if __name__ == "__main__":
    if sys.argv[1:]:
        globals()[sys.argv[1]]()
    run(globals(), ["by-rank"])
