"""Jobs that are described for a launcher which an engine starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from host_helpers import STAYS, script
from typer.testing import CliRunner

from support.waiting import until
from windtunnel.cli.main import app
from windtunnel.training import hosts
from windtunnel.training.elastic.spec import JobSpec
from windtunnel.training.launch import Preempted, resume


def test_a_manifest_has_the_job_that_its_launcher_begins(tmp_path: Path) -> None:
    words = [
        "train",
        "--on",
        "kubernetes",
        "--image",
        "registry/job:1",
        "--hosts",
        "3",
        "--spares",
        "1",
        "--json",
    ]
    done = CliRunner().invoke(app, [*words, str(script(tmp_path, "")), "--steps", "5"])
    assert done.exit_code == 0, done.output
    config, jobs = json.loads(done.stdout)["items"]
    ((name, text),) = config["data"].items()
    (tmp_path / name).write_text(text)
    job = hosts.described(tmp_path)
    assert job is not None and (job.hosts, job.arguments, job.on) == (3, ("--steps", "5"), "")
    assert job.external_hosts and job.listen == "windtunnel-leader-0-0.windtunnel:29400"
    leader, host = (role["template"]["spec"] for role in jobs["spec"]["replicatedJobs"])
    assert (leader["parallelism"], host["parallelism"]) == (1, 4)
    (container,) = host["template"]["spec"]["containers"]
    assert container["command"] == ["windtunnel", "host", job.listen]
    assert container["image"] == "registry/job:1"


@pytest.mark.slow
def test_a_described_job_is_begun_and_after_preemption_begun_again(tmp_path: Path) -> None:
    job = JobSpec(script(tmp_path, STAYS), preload=(), deadlines={"back": 0.2})
    folder = tmp_path / "run"
    hosts.describe(job, folder)

    def stands(generation: int) -> bool:
        return any(e["kind"] == "here" and e["generation"] >= generation for e in launched.events())

    with pytest.raises(Preempted), resume(folder) as launched:
        until(lambda: stands(1))
        raise Preempted
    with resume(folder) as launched:
        assert launched.outcome is None
        until(lambda: stands(2))
        (folder / "stop").touch()
        outcome = launched.wait(60)
    assert outcome is not None and outcome.status == 0
