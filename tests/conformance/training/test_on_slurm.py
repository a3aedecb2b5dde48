"""A job on a real Slurm: one controller and four slurmd in this computer, on ports and files of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.waiting import until
from training.host_helpers import STAYS, script
from windtunnel.store import eventlog
from windtunnel.training import hosts
from windtunnel.training.elastic.policy.state import Outcome
from windtunnel.training.elastic.spec import JobSpec

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]

pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (Debian: slurm-wlm, munge)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as slurmd does"),
]
NODES = 4
CONFIG = """
ClusterName=windtunnel
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/linear
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Path]:
    """Its folder, with what it logs. Paths of sockets are short, so it is in /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)  # munged demands it
    (folder / "state").mkdir()
    name = socket.gethostname().partition(".")[0]
    controller = free_port(NODES + 1)
    nodes = "\n".join(
        f"NodeName=n{number} NodeHostname={name} NodeAddr=127.0.0.1 Port={controller + 1 + number} CPUs=1"
        for number in range(NODES)
    )
    (folder / "slurm.conf").write_text(
        CONFIG.format(name=name, controller=controller, folder=folder, nodes=nodes)
    )
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={folder}/key",
        f"--socket={folder}/munge.socket",
    ]
    munged += [f"--{file}-file={folder}/munge.{file}" for file in ("log", "pid", "seed")]
    daemons = [munged, ["slurmctld", "-D", "-c"], *(["slurmd", "-D", "-N", f"n{n}"] for n in range(NODES))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        patch.setenv("PATH", PATH)
        running = []
        with (folder / "output").open("wb") as output:
            for words in daemons:
                running.append(subprocess.Popen(words, stdout=output, stderr=output))
                if words is munged:
                    until((folder / "munge.socket").exists)
        try:
            until(
                lambda: said("sinfo", "-h", "-t", "idle", "-o", "%D") == str(NODES),
                (folder / "output").read_text(),
            )
            yield folder
        finally:
            said("scancel", "--full", "--signal=KILL", "--user=root")
            for process in reversed(running):
                process.terminate()
                process.wait(30)
            shutil.rmtree(folder)


def said(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def test_hosts_and_the_whole_job_are_run_again(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = JobSpec(
        script(tmp_path, STAYS), on="slurm", hosts=3, spares=1, preload=("json",), deadlines={"back": 0.5},
    )  # fmt: skip
    number = hosts.queue(job, folder, str(folder))["slurm_job"]

    def of(kind: str) -> list[dict[str, Any]]:
        path = folder / eventlog.NAME
        return [event for event in eventlog.read(path) if event["kind"] == kind] if path.exists() else []

    def stand(generation: int) -> bool:
        return len({e["rank"] for e in of("here") if e["generation"] == generation}) == 3

    def output() -> str:
        return (folder / "slurm.log").read_text() if (folder / "slurm.log").exists() else ""

    until(lambda: stand(1), output())
    first = {event["pid"] for event in of("host.joined")}
    os.kill(of("host.joined")[0]["pid"], signal.SIGKILL)
    until(lambda: stand(2))
    until(lambda: len({event["pid"] for event in of("host.joined")} - first) == 1)  # in the place of that one
    said("scontrol", "requeue", number)
    until(lambda: said("squeue", "-h", "-o", "%T") == "PENDING")
    said("scontrol", "update", f"JobId={number}", "StartTime=now")  # else in two minutes
    until(lambda: len(of("started")) == 2)
    until(lambda: of("here")[-1]["generation"] > 2 and stand(of("here")[-1]["generation"]))
    (folder / "stop").touch()
    outcome = until(lambda: Outcome.of(eventlog.read(folder / eventlog.NAME)))
    assert outcome is not None and outcome.status == 0, output()
    until(lambda: not said("squeue", "-h"))
