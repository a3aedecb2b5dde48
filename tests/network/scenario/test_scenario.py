"""``windtunnel network run``: jobs alone and together, where they come from, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from support import quick
from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.cluster.fabric import Fabric, placements
from windtunnel.cluster.load import load_cluster
from windtunnel.network.aggregation.policy.fixed import VALUES
from windtunnel.network.aggregation.twin.fabric import PACKET
from windtunnel.network.dag.sources import TrainingStep, data_parallel, lower, mapreduce, of_chakra
from windtunnel.network.scenario import Prices, run
from windtunnel.network.scenario.together import ScenarioTenant, together
from windtunnel.report.chakra import COMM_COLL, COMM_RECV, COMM_SEND, COMP, GraphNodes, write_graph
from windtunnel.store.runs import Store

GROUPED = True
ROOT = Path(__file__).parents[3]
CLUSTER = load_cluster("v100:2x2,nic=ethernet-25,nics=1")
FABRIC = Fabric(CLUSTER)
RATES = {FABRIC.name(link): rate for link, rate in enumerate(FABRIC.rates)}
NIC = CLUSTER.host.nic_bandwidth * CLUSTER.host.nic.efficiency


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        yield folder


def tenants(
    *steps: TrainingStep, weights: tuple[float, ...] = (1, 1), flows: tuple[float, ...] = (1, 1)
) -> list[ScenarioTenant]:
    """Jobs of two ranks, one a host, that share the hosts' NICs."""
    places = placements(CLUSTER, [2] * len(steps), "shared")
    names = "abc"
    return [
        ScenarioTenant(lower(names[k], step, FABRIC, ranks), weights[k], flows[k])
        for k, (step, ranks) in enumerate(zip(steps, places, strict=True))
    ]


def medians(jobs: list[ScenarioTenant], iterations: int = 12, **options: Any) -> list[float]:
    return [float(np.median(outcome.seconds)) for outcome in together(jobs, RATES, iterations, **options)[0]]


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_jobs_that_collide_on_one_link_send_for_exactly_twice_as_long(sharing: str) -> None:
    """No computing overlaps: an iteration alone is c + s, and beside a twin c + 2 s."""
    step = data_parallel(2, 1, NIC * 0.2, 0.1)
    (alone,) = medians(tenants(step))
    assert alone == pytest.approx(0.1 + 0.2, rel=1e-9)
    assert medians(tenants(step, step), sharing=sharing) == pytest.approx([0.1 + 0.4] * 2, rel=1e-9)


def test_what_is_lost_is_told_by_where_it_went() -> None:
    step = data_parallel(2, 1, NIC * 0.2, 0.1)
    (outcome, _), uses = together(tenants(step, step), RATES, 8)
    assert outcome.path == pytest.approx({"computing": 0.1, "latency": 0, "sending": 0.2, "neighbours": 0.2})
    assert outcome.lost["NIC out"] == pytest.approx(0.2, rel=1e-6)
    (nic,) = [use for use in uses if use.name.startswith("NIC out")]
    assert nic.count == 2 and sum(nic.by.values()) == pytest.approx(9 * 0.4 / (9 * 0.5 + 0.1), rel=1e-6)
    assert nic.by["a"] == pytest.approx(nic.by["b"])


def test_a_fifo_gives_by_messages_and_rates_of_ones_own_by_weight() -> None:
    """Both always want to send: three times the messages, or the weight, are three quarters of the link."""
    step = mapreduce(2, NIC * 0.1, 1e-6)
    jobs = tenants(step, step, flows=(3, 1))
    assert medians(jobs, sharing="fair") == pytest.approx([0.1, 0.1], rel=1e-3)
    few, many = medians(jobs, 8, sharing="fifo")
    assert few == pytest.approx(0.05 * 4 / 3, rel=1e-3) and many == pytest.approx(0.05 * 4, rel=1e-3)
    few, many = medians(tenants(step, step, weights=(3, 1)), 8, sharing="aq")
    assert few == pytest.approx(0.05 * 4 / 3 / 0.985, rel=0.02) and many == pytest.approx(
        0.2 / 0.985, rel=0.02
    )


def test_what_a_neighbour_leaves_is_lent() -> None:
    """A job beside one that hardly sends has nearly the whole line, after 5 ms at half of it."""
    idle = mapreduce(2, NIC * 1e-3, 1.0)
    busy = mapreduce(2, NIC * 0.8, 0.1)
    (alone,) = medians(tenants(busy), 4)
    beside = medians(tenants(busy, idle), 4, sharing="aq")[0]
    assert alone == pytest.approx(0.5, rel=1e-6) and beside == pytest.approx(alone, rel=0.06)


@pytest.mark.parametrize("schedule", ["fifo", "sebf", "mxdag"])
def test_a_schedule_keeps_the_link_busy(schedule: str) -> None:
    """Who goes first changes, the bytes a second do not fall: both always have something to send."""
    step = data_parallel(2, 4, NIC * 0.4, 0.1)
    ran, uses = together(tenants(step, step), RATES, 6, schedule=schedule, begins=(0.0, 0.03))
    nic = max(sum(use.by.values()) for use in uses)
    assert nic > 0.9 and all(len(outcome.seconds) >= 6 for outcome in ran)


def test_switches_that_add_halve_what_nics_carry() -> None:
    """A ring over four hosts sends 1.5 times a tensor from each, a switch gets it once; alone atp is esa."""
    fabric = Fabric(load_cluster("v100:4x1,nic=ethernet-25"))
    step = data_parallel(4, 1, 1e8, 0.1)
    ring, *added = (
        lower("a", step, fabric, range(4), prices.seconds, prices.loads)
        for prices in (Prices(fabric, range(4), (policy, 0)) for policy in ("none", "atp", "esa"))
    )
    (task,) = (task for task in ring.job.tasks if task.kind == "network")
    (other,) = (task for task in added[0].job.tasks if task.kind == "network")
    assert task.loads[0][1] == pytest.approx(1.5) and other.loads[0][1] == pytest.approx(
        PACKET / (4 * VALUES)
    )
    assert added[0] == added[1]


def test_overlap_is_kept_when_alone() -> None:
    """Sums travel during backward; only the first layer's, which is the last, holds up the next forward."""
    (alone,) = medians(tenants(data_parallel(2, 10, NIC * 1.0, 0.3)))
    assert alone == pytest.approx(1.0 + 0.3 / 3 + 0.2 / 10, rel=1e-6)


# sources


def trace(
    folder: Path, ranks: list[list[tuple[int, list[int], dict[str, Any], float]]], **metadata: Any
) -> Path:
    """Files of (type, dependencies, attributes, seconds) of each rank's nodes."""
    for rank, rows in enumerate(ranks):
        flat = [need for _, needs, _, _ in rows for need in needs]
        nodes = GraphNodes(
            id=np.arange(len(rows)), name=np.zeros(len(rows), np.int32), names=["node"],
            type=np.array([kind for kind, *_ in rows], np.int32), duration=np.array([row[3] for row in rows]),
            data_ptr=np.cumsum([0, *(len(row[1]) for row in rows)]), data_deps=np.array(flat, np.int64),
            ctrl_ptr=np.zeros(len(rows) + 1, np.int64), ctrl_deps=np.zeros(0, np.int64),
            attribute=np.arange(len(rows), dtype=np.int32), attributes=[known for _, _, known, _ in rows],
            metadata=metadata,
        )  # fmt: skip
        write_graph(folder / f"theirs.{rank}.et", nodes)
    return folder


def reduce(size: float, group: str = "", kind: int = 0) -> dict[str, Any]:
    return {"comm_type": kind, "comm_size": int(size), "pg_name": group, "is_cpu_op": False}


def test_a_trace_of_ranks_is_a_job(tmp_path: Path) -> None:
    """Rank 1 computes longer, so the all_reduce waits for it; then both go on."""
    ranks = [
        [(COMP, [], {}, seconds), (COMM_COLL, [0], reduce(NIC * 0.2), 0.0), (COMP, [1], {}, 0.05)]
        for seconds in (0.1, 0.3)
    ]
    step = of_chakra(trace(tmp_path, ranks), CLUSTER.host.device)
    assert medians(tenants(step), 3) == pytest.approx([0.3 + 0.2 + 0.05], rel=1e-6)


def test_messages_round_a_ring_do_not_wait_for_their_receives(tmp_path: Path) -> None:
    """Each sends to the next and then receives, as ASTRA-sim's own algorithms do."""
    size = int(NIC * 0.1)
    ranks = []
    for rank in range(2):
        to, back = {"comm_src": rank, "comm_dst": 1 - rank}, {"comm_src": 1 - rank, "comm_dst": rank}
        ranks.append(
            [
                (COMM_SEND, [], to | {"comm_size": size}, 0.0),
                (COMM_RECV, [0], back | {"comm_size": size}, 0.0),
            ]
        )
    step = of_chakra(trace(tmp_path, ranks), CLUSTER.host.device)
    assert medians(tenants(step), 3) == pytest.approx([0.1], rel=1e-6)


def test_groups_and_operations_without_a_duration(tmp_path: Path) -> None:
    work = {"num_ops": int(CLUSTER.host.device.peak("float32")), "tensor_size": 1}
    ranks = [[(COMP, [], work, 0.0), (COMM_COLL, [0], reduce(8, f"g{rank % 2}"), 0.0)] for rank in range(4)]
    trace(tmp_path, ranks)
    (tmp_path / "comm_group.json").write_text('{"g0": [0, 2], "g1": [1, 3]}')
    step = of_chakra(tmp_path, CLUSTER.host.device)
    assert sorted(call.groups for call in step.calls) == [((0, 2),), ((1, 3),)]
    assert step.skeleton.times({}, 1)[0][-1] == pytest.approx(1 / CLUSTER.host.device.sustained, rel=1e-6)


SEND = (COMM_SEND, [], {"comm_src": 3, "comm_dst": 1}, 0.0)
ONE = (COMM_COLL, [], reduce(8), 0.0)


@pytest.mark.parametrize(
    ("ranks", "metadata", "message"),
    [
        ([[(COMP, [1], {}, 1.0), (COMP, [0], {}, 1.0)]], {}, "the dependencies of node"),
        ([[ONE], []], {}, "all_reduce of 8 bytes is met by 1 of 2 ranks"),
        ([[ONE], [(COMM_COLL, [], reduce(9), 0.0)]], {}, "has all_reduce of 8: they would not meet"),
        ([[(COMM_COLL, [], reduce(8, kind=12), 0.0)]], {}, "has comm_type 12, accepted are 0 to 9"),
        ([[SEND]], {}, "a send from 3 to 1 in the file of rank 0"),
        ([[ONE]], {"rank_class": "all"}, "is of a class of ranks"),
        ([[ONE]], {"version": "0.0.1"}, "Chakra version 0.0.1"),
        ([], {}, "holds no .et file"),
    ],
)  # fmt: skip
def test_a_trace_that_is_none_is_refused(
    tmp_path: Path, ranks: list[Any], metadata: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        of_chakra(trace(tmp_path, ranks, **metadata), CLUSTER.host.device)
    assert message in str(caught.value)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    trace(tmp_path, [[ONE], [ONE]])
    shutil.copy(tmp_path / "theirs.1.et", tmp_path / "others.1.et")
    with pytest.raises(UserError, match=r"holds ranks 0, 1, 1, accepted are files NAME\.RANK\.et"):
        of_chakra(tmp_path, CLUSTER.host.device)


# the verb


def scenario(folder: Path, jobs: dict[str, Any], **more: Any) -> Path:
    file = folder / "scenario.yaml"
    file.write_text(json.dumps({"cluster": "v100:2x2,nic=ethernet-25,nics=1", "jobs": jobs} | more))
    return file


TINY = {"training": {"bytes": 1e3, "seconds": 1e-7}, "devices": 2}
SORT = {"mapreduce": {"bytes": "50 MB", "seconds": "10 ms"}, "devices": 2}


def test_the_verb_emulates_a_script_and_keeps_all_as_a_run(home: Path, tmp_path: Path) -> None:
    script = {"script": str(ROOT / "examples" / "train_resnet.py"), "devices": 2}
    file = scenario(tmp_path, {"vision": script, "sort": SORT}, placement="shared", iterations=4)
    words = ["network", "run", str(file), "--sharing", "aq", "--schedule", "mxdag", "--json"]
    with quick.captures():
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    vision, sort = report["jobs"]
    assert vision["emulated_s"] > 0 and abs(vision["lowering_error"]) < 0.05
    assert vision["slowdown"] >= 1 and sort["slowdown"] >= 0.999 and vision["iterations"] >= 4
    assert sum(vision["path_s"].values()) == pytest.approx(np.mean(vision["together_s"]), rel=0.5)
    kept = Store.open().get(report["run_id"])
    assert kept.status == "done" and kept.summary is not None
    page = (kept.directory / "report.html").read_text()
    assert "vision" in page and "NIC out" in page
    # the same from the run that was kept
    again = run(scenario(tmp_path, {"a": {"run": vision["run"]}, "b": {"run": "last"}}, placement="shared"))
    assert [job["alone_s"] for job in again["jobs"]] == pytest.approx([vision["alone_s"]] * 2, rel=1e-6)
    with pytest.raises(UserError, match=f"{report['run_id']} is of network.run; accepted is a run of"):
        run(scenario(tmp_path, {"a": {"run": report["run_id"]}}))
    shown = CliRunner().invoke(app, ["network", "run", str(scenario(tmp_path, {"sort": SORT}))])
    assert shown.exit_code == 0 and "sort (mapreduce)" in shown.output


@pytest.mark.parametrize(
    ("jobs", "more", "message"),
    [
        ({}, {}, "field jobs is {}, accepted is a mapping of names to jobs"),
        ({"a": {}}, {}, "jobs.a has no kind, accepted is one of script, run, chakra, training, mapreduce"),
        ({"a": {"spark": 1}}, {}, "field jobs.a.spark is unknown"),
        ({"a": SORT | {"run": "last"}}, {}, "jobs.a has run and mapreduce, accepted is one of"),
        ({"a": SORT | {"devices": 3}, "b": SORT}, {}, "jobs of 3, 2 ranks are placed packed"),
        ({"a": SORT | {"weight": -1}}, {}, "field jobs.a.weight is -1, accepted is a number greater than 0"),
        ({"a": {"mapreduce": {"bytes": 1e6, "seconds": 0}}}, {}, "jobs.a: field devices is missing"),
        ({"a": {"mapreduce": {"bytes": "x"}, "devices": 2}}, {}, "field jobs.a.mapreduce.bytes is 'x'"),
        ({"a": {"run": "nowhere"}}, {}, "'nowhere' is not a run"),
        ({"a": {"chakra": "nowhere"}}, {}, "holds no .et file"),
        ({"a": SORT}, {"placement": "wide"}, "field placement is 'wide', accepted is packed, spread or"),
        ({"a": SORT}, {"cluster": "v9:2x2"}, "v9"),
        ({"a": SORT, "b": TINY}, {"iterations": 9999}, "give fewer"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(
    home: Path, tmp_path: Path, jobs: dict[str, Any], more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(scenario(tmp_path, jobs, **more))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_unknown_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`sharing`: 'tcp' is unknown, accepted are fifo, fair, aq"):
        run(scenario(tmp_path, {"a": SORT}), "tcp")
    with pytest.raises(
        UserError, match="`aggregation`: 'sharp' is unknown, accepted are none, switchml, atp"
    ):
        run(scenario(tmp_path, {"a": SORT}), "fifo", "fair", "sharp")
    with pytest.raises(UserError, match="`schedule`: 'edf' is unknown, accepted are fair, fifo, sebf, mxdag"):
        run(scenario(tmp_path, {"a": SORT}), "fifo", "edf")
