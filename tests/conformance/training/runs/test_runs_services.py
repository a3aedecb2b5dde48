"""Whole jobs whose services fail (memory, store, fork server, network), and of changing size."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from runs_helpers import (
    STEPS,
    at_gate,
    end_well,
    flip,
    no_network,
    of,
    open_gate,
    running,
    same,
    slot_files,
)
from runs_trainer import Samples, build, data

from support.strikes import kill_forkserver, kill_host, kill_worker
from support.waiting import until
from windtunnel.base.plain import from_plain
from windtunnel.training.elastic import policy as elastic

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_launch")]


def test_memory_that_is_wiped_or_corrupt(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """Property 5: the next copy serves, then an older step; a host whose memory is gone fills it again."""
    with running(tmp_path, "--gates", 2, 5, 9) as launched:
        at_gate(launched, 2)
        for path in Path(launched.places()[1]["memory"]).rglob("*.slot"):
            path.unlink()
        open_gate(launched, 2)
        before = at_gate(launched, 5)
        (own,) = slot_files(launched, 1, "rank1", 4)
        flip(own)
        kill_worker(launched, 1)
        at_gate(launched, 5, after=before)
        assert any(
            "bad copies were passed over: rank1 of step 4 at place 1" in n["text"]
            for n in of(launched, "note")
        )
        assert slot_files(launched, 1, "rank1", 4)
        open_gate(launched, 5)
        at_gate(launched, 9)
        (replica,) = slot_files(launched, 2, "rank3", 8)
        flip(replica)
        kill_host(launched, 3)
        open_gate(launched, 9)
        recoveries = same(launched, sharded)
        assert not [event for event in of(launched, "lost") if event["own"]]
    assert [recovery.resumed for recovery in recoveries][-2:] == [4, 7]


def test_services_that_die(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """The fork server, before something else is lost."""
    with running(tmp_path, "--gates", 9) as launched:
        at_gate(launched, 9)
        kill_forkserver(launched)
        kill_host(launched, 1)
        open_gate(launched, 9)
        recoveries = same(launched, sharded)
    assert len(recoveries) == 1


@pytest.mark.root
@pytest.mark.skipif(no_network is not None, reason=no_network or "")
def test_a_partition_and_a_slow_link(tmp_path: Path, sharded: dict[str, Any]) -> None:
    """Property 8: who was cut off, from all or from one other host, is replaced, and is not heard when it is
    back."""
    strikes = ("slow:host=3,step=1,rate=2Mbit",)
    with running(tmp_path, "--gates", 4, 8, faults=strikes, network="netns") as launched:
        before = at_gate(launched, 4)
        away = launched.places()[2]
        host = launched.site.of(away["pid"])
        assert launched.network is not None
        launched.network.link_down(host.name)
        at_gate(launched, 4, after=before)
        (lost,) = of(launched, "lost")
        assert (lost["evidence"], lost["host"]) == ("lease", away["host"])
        assert of(launched, "decided")[-1]["membership"]["hosts"][2]["id"] != away["host"]
        held = {path.name: path.read_bytes() for path in slot_files(launched, 3, "rank2", 3)}
        launched.network.link_up(host.name)
        assert host.process.wait(60) == 1  # it was told that it is given up, and ends with its worker
        assert held == {path.name: path.read_bytes() for path in slot_files(launched, 3, "rank2", 3)}
        open_gate(launched, 4)
        before = at_gate(launched, 8)
        # two of which each reaches all others, and the supervisor: no group with both can form
        ids = {place: status["host"] for place, status in launched.places().items()}
        first, second = (launched.site.of(launched.places()[place]["pid"]).name for place in (0, 2))
        launched.network.part(first, second, apart=True)
        kill_worker(launched, 1)
        at_gate(launched, 8, after=before)
        cut = [event for event in of(launched, "lost") if event["evidence"] == "cut"]
        assert [(event["host"], event["place"]) for event in cut] == [(ids[2], 2)]
        after = of(launched, "decided")[-1]["membership"]["hosts"]
        assert [host["id"] == ids[place] for place, host in enumerate(after)] == [True, True, False, True]
        open_gate(launched, 8)
        assert len(same(launched, sharded)) == 2
        said = [
            decision for decision in of(launched, "decision") if decision["capability"] == "training.elastic"
        ]
    observations = [from_plain(elastic.Observation, decision["observation"]) for decision in said]
    assert [elastic.decide(observation) for observation in observations] == [
        from_plain(elastic.Decision, decision["decision"]) for decision in said
    ]


def test_a_job_that_shrinks_and_grows_again(tmp_path: Path) -> None:
    """Property 7: 4, 3 and again 4 hosts; the batch stays, so the model is that of one process, but for
    the order of sums."""
    model = build(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5)
    samples, (x, y) = Samples(), data()
    for _ in range(STEPS):
        batch = samples.next()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])

    with running(tmp_path, "--drop", 0, "--gates", 4, 8, on_loss="shrink", min_hosts=2) as launched:
        at_gate(launched, 4)
        kill_host(launched, 1)
        open_gate(launched, 4)
        at_gate(launched, 8, 3)
        launched._start_hosts(1)
        at_gate(launched, 8, 4)
        open_gate(launched, 8)
        results = end_well(launched)
        assert [event["step"] for event in of(launched, "step")] == list(range(STEPS))
    assert set(results) == {0, 1, 2, 3}
    for result in results.values():
        torch.testing.assert_close(torch.tensor(result["weights"]), expected, rtol=1e-4, atol=1e-5)


PLAIN = """
    import os, pathlib, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    folder = pathlib.Path(os.environ["WINDTUNNEL_RUN"])
    began = torch.ones(1)
    dist.all_reduce(began)
    (folder / f"began.{os.environ['RANK']}.{os.getpid()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    dist.all_reduce(began)
    dist.barrier()
    print("the sum is", began.item(), flush=True)
    os._exit(0)
"""


def test_a_script_without_run_is_started_anew_as_a_whole(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(textwrap.dedent(PLAIN))
    with running(tmp_path, script=script, hosts=2) as launched:
        until(lambda: len(list(launched.folder.glob("began.*"))) == 2)
        kill_worker(launched, 1)
        until(lambda: len(list(launched.folder.glob("began.*"))) == 4)
        (launched.folder / "go").touch()
        end_well(launched)
    assert (tmp_path / "output").read_text().count("the sum is 4.0") == 2
