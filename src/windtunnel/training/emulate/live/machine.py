"""The machine that a rank finds: what its launcher says, the name of its host, and what the driver says.

Every launcher says in its own variables which rank a process is; here they all say the same. A program that
starts its ranks itself is one of them (`play_part`). A host of the cluster is called ``host3``, and such a
name leads to this machine. ``nvidia-smi`` comes first in the ``PATH`` (`nvidia_smi`), and NVML's Python
module is answered where it is installed: both know the name, the memory and the number of the devices, and no
more. `RankReads` writes down where the user's program asks for its rank.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

from windtunnel.base.importing import after_import
from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import Place
from windtunnel.training.emulate.live import failure, nvidia_smi
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.patches import replaces

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
    "WORLD_SIZE", "ROLE_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS",
    "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE",
)  # fmt: skip
EACH = (
    "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)  # fmt: skip
HOSTS = ("GROUP_WORLD_SIZE", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES")
NODELISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST")
LOOPBACK = "127.0.0.1"


def launch(rank: int, world_size: int, per_host: int) -> None:
    """Say by all launchers' variables which rank this is, and call its host by its name. Call once."""
    host, hosts = rank // per_host, -(-world_size // per_host)
    variables = (
        (RANK, rank), (LOCAL, rank % per_host), (HOST, host), (WORLD, world_size),
        (EACH, min(per_host, world_size)), (HOSTS, hosts),
    )  # fmt: skip
    os.environ.update({name: str(number) for names, number in variables for name in names})
    several = hosts > 1
    os.environ.update(dict.fromkeys(NODELISTS, f"host[0-{hosts - 1}]" if several else "host0"))
    os.environ.update(
        MASTER_ADDR=LOOPBACK, MASTER_PORT="29500", TORCHELASTIC_RUN_ID="windtunnel",
        TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0", SLURM_JOB_ID="1",
        SLURMD_NODENAME=f"host{host}", SLURM_TASKS_PER_NODE=f"{per_host}" + f"(x{hosts})" * several,
    )  # fmt: skip
    _call_host(f"host{host}", hosts)


def play_part(rank: int, world_size: int, per_host: int, reads: RankReads) -> None:
    """Let a program that starts a process for each device of its host by ``torch.multiprocessing`` go on as
    this rank's: the function that the processes would run is called for it alone, which tells it its rank
    (``reads``). Call once."""
    import torch.multiprocessing as processes

    count = min(per_host, world_size)

    @replaces(sys.modules["torch.multiprocessing.spawn"], "spawn", "start_processes")
    @replaces(processes, "spawn", "start_processes")
    def play(
        original: Any, fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True,
        *more: Any, **options: Any,
    ) -> Any:  # fmt: skip
        if nprocs != count:
            why = f"a host of this cluster has {count} devices, with a process for each; start as many"
            refuse(f"torch.multiprocessing.{original.__name__} of {nprocs} processes", why)()
        reads.write(failure.own_frame(sys._getframe()), rank % per_host)
        fn(rank % per_host, *args)
        return None if join else SimpleNamespace(join=lambda *limits: True, processes=[], pids=list)


def _call_host(name: str, hosts: int) -> None:
    modules: Any = platform, socket
    platform_module, network = modules
    platform_module._uname_cache = None
    network.gethostname = lambda: name

    @replaces(os)
    def uname(original: Any) -> os.uname_result:
        system, _, *others = original()
        return os.uname_result((system, name, *others))

    @replaces(socket)
    def getfqdn(original: Any, host_name: str = "") -> Any:
        return name if host_name in ("", name) else original(host_name)

    def leads_here(host: Any) -> bool:
        match = re.fullmatch(r"host(\d+)", host) if isinstance(host, str) else None
        return match is not None and int(match[1]) < hosts

    @replaces(socket, "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "getaddrinfo")
    def look_up(original: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        return original(LOOPBACK if leads_here(host) else host, *args, **kwargs)


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


VARIABLES = (*RANK, *LOCAL, *HOST)
"""Of the environment, that differ from rank to rank."""
THROUGH = ("os.py", "<frozen os>", "_collections_abc.py", "<frozen _collections_abc>")
"""Files of Python through which the environment is read."""
MOST = 8
"""Answers that are kept of one place."""


@dataclass
class RankReads:
    """Where the user's program asks which rank it is, and what it is told there.

    It asks in a few ways: the environment, ``torch.distributed``, a device mesh, a process group. Each answer
    that goes straight to a line of the user's own files is written down with the place of the expression in
    the source, so that what becomes of it can be read there (`windtunnel.training.emulate.live.conditions`).
    What libraries ask for themselves is not: how they treat ranks is theirs, and witnesses show it.

    ``answers``: for each place, the first answers."""

    answers: dict[Place, list[int]] = field(default_factory=dict)
    _places: dict[tuple[CodeType, int], Place] = field(default_factory=dict)
    _before: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))

    def install(self) -> None:
        """Listen from now on. Call once, before the script runs."""
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d
        from torch.distributed.device_mesh import DeviceMesh

        @replaces(c10d, "get_rank", "get_node_local_rank", everywhere=True)
        @replaces(DeviceMesh, "get_rank", "get_local_rank", "get_coordinate")
        @replaces(dist.ProcessGroup, "rank")
        def read(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            answer = ask(*args, **kwargs)
            self.write(sys._getframe(1).f_back, answer)  # 1 is of `replaces`
            return answer

        @replaces(type(os.environ), "__getitem__")
        def read_variable(original: Callable[..., str], environment: Any, key: Any) -> str:
            answer = original(environment, key)
            if key in VARIABLES:
                frame: FrameType | None = sys._getframe(1).f_back
                while frame is not None and frame.f_code.co_filename.endswith(THROUGH):
                    frame = frame.f_back
                self.write(frame, int(answer) if answer.isdecimal() else None)
            return answer

    def files(self, script: Path | None) -> list[str]:
        """The user's own files that were loaded: the script, and what was imported since."""
        paths = dict.fromkeys([str(script.resolve())] if script else [])
        for name in sorted(sys.modules.keys() - self._before):
            file = getattr(sys.modules[name], "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and failure.is_own(file):
                paths[file] = None
        return list(paths)

    def write(self, frame: FrameType | None, answer: Any) -> None:
        """The expression that ``frame`` evaluates is told ``answer``."""
        if frame is None or not failure.is_own(frame.f_code.co_filename):
            return
        code = frame.f_code
        key = (code, frame.f_lasti)
        place = self._places.get(key)
        if place is None:
            line, end_line, column, end_column = list(code.co_positions())[frame.f_lasti // 2]
            place = Place(code.co_filename, line or 0, end_line or 0, column or 0, end_column or 0)
            self._places[key] = place
        answers = self.answers.setdefault(place, [])
        if isinstance(answer, int) and len(answers) < MOST:
            answers.append(answer)
