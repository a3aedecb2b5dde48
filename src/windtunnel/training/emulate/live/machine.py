"""The machine that a rank finds: what its launcher says, the name of its host, and what the driver says.

Every launcher says in its own variables which rank a process is; here they all say the same. A host of the
cluster is called ``host3``, and such a name leads to this machine. ``nvidia-smi`` comes first in the ``PATH``
(`nvidia_smi`), and NVML's Python module is answered where it is installed: both know the name, the memory and
the number of the devices, and no more.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shlex
import socket
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from windtunnel.base.importing import after_import
from windtunnel.cluster.model import Device
from windtunnel.training.emulate.live import nvidia_smi
from windtunnel.training.emulate.live.names import refuse

RANK = (
    "RANK", "ROLE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
)  # fmt: skip
LOCAL = (
    "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK",
    "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK",
)  # fmt: skip
HOST = ("GROUP_RANK", "SLURM_NODEID")
WORLD = (
    "WORLD_SIZE", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
EACH = (
    "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
HOSTS = ("GROUP_WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
LOOPBACK = "127.0.0.1"


def launch(rank: int, world_size: int, per_host: int) -> None:
    """Say by all launchers' variables which rank this is, and call its host by its name. Call once."""
    host, hosts = rank // per_host, -(-world_size // per_host)
    said = (
        (RANK, rank), (LOCAL, rank % per_host), (HOST, host), (WORLD, world_size),
        (EACH, min(per_host, world_size)), (HOSTS, hosts),
    )  # fmt: skip
    os.environ.update({name: str(number) for names, number in said for name in names})
    os.environ.update(
        MASTER_ADDR=LOOPBACK, MASTER_PORT="29500", TORCHELASTIC_RUN_ID="windtunnel",
        TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0", SLURM_JOB_ID="1",
        SLURMD_NODENAME=f"host{host}", SLURM_JOB_NODELIST=f"host[0-{hosts - 1}]" if hosts > 1 else "host0",
    )  # fmt: skip
    _call_host(f"host{host}", hosts)


def _call_host(name: str, hosts: int) -> None:
    modules: Any = os, socket, platform
    system, network, known = modules
    uname, qualify = system.uname, network.getfqdn
    system.uname = lambda: os.uname_result((uname()[0], name, *uname()[2:]))
    known._uname_cache = None
    network.gethostname = lambda: name
    network.getfqdn = lambda given="": name if given in ("", name) else qualify(given)

    def leads_here(host: Any) -> bool:
        found = re.fullmatch(r"host(\d+)", host) if isinstance(host, str) else None
        return found is not None and int(found[1]) < hosts

    for function in ("gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getaddrinfo"):

        def look_up(original: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
            return original(LOOPBACK if leads_here(host) else host, *args, **kwargs)

        setattr(network, function, functools.partial(look_up, getattr(network, function)))


def install(device: Device, count: int, directory: Path) -> None:
    """Answer for the driver: ``count`` devices. ``directory``: for the program, of this rank alone."""
    import torch

    directory.mkdir(exist_ok=True)
    program, memory = directory / "nvidia-smi", str(int(device.memory_bytes) >> 20)
    words = [sys.executable, "-S", nvidia_smi.__file__, device.torch_name, memory, str(count)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = f"{directory}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    def memory_info(handle: Any, version: Any = None) -> Any:
        free, total = torch.cuda.mem_get_info()
        return SimpleNamespace(total=total, free=free, used=total - free)

    def nothing(*args: Any) -> None:
        """There is nothing to begin or to end."""

    answers = {
        "nvmlInit": nothing, "nvmlInitWithFlags": nothing, "nvmlShutdown": nothing,
        "nvmlDeviceGetCount": lambda: count,
        "nvmlDeviceGetHandleByIndex": lambda index: range(count)[int(index)],
        "nvmlDeviceGetIndex": lambda handle: handle,
        "nvmlDeviceGetName": lambda handle: device.torch_name,
        "nvmlDeviceGetMemoryInfo": memory_info,
    }  # fmt: skip

    def answer(module: ModuleType) -> None:
        for name, value in list(vars(module).items()):
            if name.startswith("nvml") and callable(value):
                why = "no driver is there to ask; NVML knows the devices' number, name and memory here"
                setattr(module, name, answers.get(name) or refuse(f"{module.__name__}.{name}", why))

    after_import("pynvml", answer)
