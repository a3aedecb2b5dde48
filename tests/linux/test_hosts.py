"""What is asked of engines that have hosts: commands, scripts and manifests; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.linux import hosts
from windtunnel.linux.hosts import RayCluster, batch_script, is_engine, is_ray, job_set, srun, submit


def test_engines_are_known_by_their_names() -> None:
    assert [on for on in ("ray", "ray://head:10001", "rays", "slurm", "sqlite://") if is_ray(on)] == [
        "ray", "ray://head:10001",
    ]  # fmt: skip
    assert is_engine("slurm") and is_engine("kubernetes") and not is_engine("ssh")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'windtunnel\[ray\]'"):
        RayCluster("ray")


def test_no_cluster_at_the_address() -> None:
    pytest.importorskip("ray", reason="needs ray (extra ray)")
    with pytest.raises(UserError, match="no Ray cluster answers there"):
        RayCluster("ray://127.0.0.1:1")


def test_srun_runs_again_what_a_signal_ended(tmp_path: Path) -> None:
    """The command of each host, by a shell as Slurm has it."""
    note = tmp_path / "runs"
    words = ["sh", "-c", f'echo >> {note}; [ "$(wc -l < {note})" -gt 2 ] && exit 1; kill -9 $$']
    command = srun(4, words)
    assert command[:3] == ["srun", "--nodes=4", "--ntasks=4"]
    shell = command[command.index("sh") :]
    subprocess.run(shell, check=False, capture_output=True)
    assert note.read_text().count("\n") == 3


def test_a_batch_script_goes_back_into_the_queue(tmp_path: Path) -> None:
    text = batch_script("job", 5, tmp_path, ["echo", "a b"])
    assert "#SBATCH --nodes=5\n" in text and "#SBATCH --requeue\n" in text
    done = subprocess.run(["sh", "-c", text], check=True, capture_output=True, text=True)
    assert done.stdout == "a b\n"


def test_where_slurm_is_not_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no sbatch on this host"):
        submit(tmp_path / "job.sh")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'no such partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(UserError, match="no such partition"):
        submit(tmp_path / "job.sh")


def test_a_job_set_is_as_its_schema_says() -> None:
    """The models are made from the schema of JobSet v1alpha2 and of Kubernetes' own kinds."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    manifest = job_set(
        "job", "image:1", ["lead", "a"], 3, ["lend", "b"], files={"job.json": "{}"}, folder="/run/job",
        secret="WINDTUNNEL_SECRET",
    )  # fmt: skip
    config, jobs = manifest["items"]
    assert models.IoK8sApiCoreV1ConfigMap.from_dict(config).to_dict() == config
    assert models.JobsetV1alpha2JobSet.from_dict(jobs).to_dict() == jobs  # a field that it has not is lost
    leader, host = jobs["spec"]["replicatedJobs"]
    assert host["template"]["spec"]["parallelism"] == 3
    (container,) = leader["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["lead", "a"]
    assert hosts.leader_address("job") == "job-leader-0-0.job"


def test_this_host_has_an_address() -> None:
    assert hosts.own_address().count(".") == 3
    assert hosts.in_allocation() == ("SLURM_JOB_ID" in os.environ)
