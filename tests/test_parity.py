"""What every capability decided live is decided anew from its log: by its policy the same, by a mutant not.

One line of `LIVE` says how a live run of a capability is recorded, one of `MUTANTS` which rule is changed to
see that it is found out. That the twin, where time passes, comes to the same decisions in the same world is
held by the capabilities' own tests (``test_*parity.py``).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.error import HTTPError

import pytest

import windtunnel as wt
from support import quick
from support.ranks import run_ranks
from windtunnel.capabilities import CAPABILITIES, Capability
from windtunnel.replay import replay
from windtunnel.store import eventlog
from windtunnel.training.gradsync.run import plan_run

ROOT = Path(__file__).parent.parent
SANDBOX = ROOT / "tests" / "agents" / "sandbox"
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parity")]
DECIDING = [one for one in CAPABILITIES if "policy" in one.rooms and ("live" in one.rooms or one.worlds_of)]
EMULATED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
layer = torch.nn.Linear(64, 64, device=torch.device("cuda", dist.get_rank() % torch.cuda.device_count()))
for _ in range(3):
    layer(torch.ones(4, 64, device=layer.weight.device)).sum().backward()
    dist.all_reduce(layer.weight.grad)
    layer.weight.grad = None
"""
KEPT = """
import torch
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

def train(job):
    state = {"x": torch.zeros(8)}
    checkpointer = PeerCheckpointer(job, copies=2, mode="blocking")
    for step in range(checkpointer.restore(state), 8):
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""


def emulated(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    (folder / "train.py").write_text(EMULATED)
    with pytest.MonkeyPatch.context() as patch, quick.captures():
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        run = wt.emulate(folder / "train.py", cluster="h100-sxm:2x2", report=False)
    return [run.directory / eventlog.NAME]


def trained(folder: Path, *words: str | Path) -> list[Path]:
    """The log of ``windtunnel train``, whose hosts and faults ``words`` give."""
    done = quick.windtunnel("train", "--out", folder / "run", *words, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return [folder / "run" / eventlog.NAME]


def kept(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    (folder / "train.py").write_text(KEPT)
    killed = ("--inject", "kill:host=1,step=2", "--inject", "kill:host=0,step=5")
    return trained(folder, "--hosts", "2", "--spares", "1", "--lease", "5", *killed, folder / "train.py")


def shrunk(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    killed = ("--on-loss", "shrink", "--inject", "kill:host=1,step=2")
    return trained(folder, "--hosts", "5", *killed, "examples/train_pipeline.py", "--steps", "4")


def synchronised(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """A script is measured by its ranks, and planned for."""
    profile, script = folder / "profile.json", ROOT / "examples" / "train_resnet.py"
    words = ["-m", "windtunnel.training.gradsync.live.script", "profile", profile, "1", "fp16,sign", script]
    done = run_ranks([*words, "--size", "debug", "--steps", "12"], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDTUNNEL_HOME", str(folder))
        return [plan_run(None, profile=profile).directory / eventlog.NAME]


def served(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Requests that share a prompt and have branches, one of which comes too late."""
    from support.serving import served

    with served(folder, "--policy", "eager", "--log", "1", "--max-rows", "6", "--chunk", "32") as server:
        for end in ("one", "two", "three"):
            branches = {"prompts": ["a", "b", "c"], "max_tokens": 6}
            prompt = "Of the wings there are " + end
            server.post("completions", prompt=prompt, max_tokens=4, ignore_eos=True)
            server.post("completions", prompt=prompt, branches=branches, ignore_eos=True)
        with pytest.raises(HTTPError, match="429"):
            server.post("completions", prompt="late", objective={"ttft": 1e-9})
        assert server.stop() == 0
    return [server.log]


def sandboxed(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    home = request.getfixturevalue("sandbox_home")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SANDBOX))
        session = import_module("recorded").recorded(home, folder)
    return [session.log, session.host_log]


def chosen(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Queries to variants of a model, some with bounds, one that none fulfils."""
    from support.variants import asked

    return [asked(folder)]


def lending(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Two entities on an interface, of which one sends."""
    from support.sharing import lent

    return [lent(folder)]


def added(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Three workers at a switch that loses packets and has few slots."""
    from support.aggregation import recorded

    return recorded(folder)


def held_back(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Flows on a thin link, held back by a controller."""
    from support.hostrate import held_back

    return [held_back(folder)]


def ordered(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Two jobs that compute and send, in the order of their slack."""
    from support.dag import recorded

    return [recorded(folder)]


def fed(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Two ranks that share the splits of a small table, and workers as they are wanted."""
    from support.ingest import recorded

    return [recorded(folder)]


def relayed(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """A file from one rack to seven, which lose a tenth of it."""
    from support.multicast import sent

    return [sent(folder)]


def spread(folder: Path, request: pytest.FixtureRequest) -> list[Path]:
    """Tables on two ranks, whose rows are asked for otherwise after a while."""
    from support.embeddings import spread

    return [spread(folder)]


LIVE: dict[str, Callable[[Path, pytest.FixtureRequest], list[Path]]] = {
    "training.emulate": emulated,
    "training.elastic": kept,
    "training.checkpoint": kept,
    "training.pipelines": shrunk,
    "training.gradsync": synchronised,
    "serving.engine": served,
    "serving.branching": served,
    "serving.prefixcache": served,
    "serving.variants": chosen,
    "network.sharing": lending,
    "network.aggregation": added,
    "network.dag": ordered,
    "network.hostrate": held_back,
    "network.multicast": relayed,
    "data.ingest": fed,
    "agents.sandbox": sandboxed,
    "data.embeddings": spread,
}
# A file of the policy, a rule in it, and what it is made into: a difference whatever was measured.
MUTANTS = {
    "training.emulate": ("policy/search.py", "return Capture((0,),", "return Capture((1,),"),
    "training.elastic": ("policy/rules.py", "if missing <= 0:", "if missing < 0:"),
    "training.checkpoint": ("policy/slots.py", "return min(range(slots),", "return max(range(slots),"),
    "training.pipelines": ("policy/commit.py", "if has == version:", "if has != version:"),
    "training.gradsync": ("policy/plan.py", "backward, self.profile.forward,", "backward, 0.0,"),
    "serving.engine": ("policy/__init__.py", "if seen.now > latest:", "if seen.now < latest:"),
    "serving.branching": ("policy/__init__.py", "chosen[: max(0, seen.room)]", "chosen[:1]"),
    "serving.prefixcache": ("policy/__init__.py", "found.add(seen.matched)", "found.add(seen.usable)"),
    "serving.variants": ("policy/select.py", "and variant.accuracy >=", "and variant.accuracy <"),
    "network.sharing": ("policy/__init__.py", "one.offered <= IDLE * own", "one.offered > IDLE * own"),
    "network.aggregation": (
        "policy/__init__.py",
        "merge(seen.bits, seen.have,",
        "merge(seen.bits, seen.bits,",
    ),
    "network.dag": (
        "policy/__init__.py",
        "enumerate(sorted(set(ranks)))",
        "enumerate(sorted(set(ranks))[::-1])",
    ),
    "network.hostrate": (
        "policy/__init__.py",
        "return least if seen.backlog >",
        "return least if seen.backlog <",
    ),
    "network.multicast": ("policy/repair.py", "seen.missing[:MOST])", "seen.missing[1:MOST])"),
    "data.ingest": ("policy/__init__.py", "one.splits < seen.slots]", "one.splits > seen.slots]"),
    "agents.sandbox": ("policy/__init__.py", "if not look.has_parent:", "if look.has_parent:"),
    "data.embeddings": ("policy/replicas.py", "if saved > 1e-9 *", "if saved < 1e-9 *"),
}


@pytest.fixture(scope="module")
def sandbox_home() -> Iterator[Path]:
    spec = spec_from_file_location("sandbox_conftest", SANDBOX / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.fresh_home() as home:
        yield home


@pytest.fixture(scope="module")
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Capability], list[Path]]:
    """The logs of a live run of a capability; each way is gone once."""

    @cache
    def logs(record: Callable[[Path, pytest.FixtureRequest], list[Path]]) -> list[Path]:
        return record(tmp_path_factory.mktemp("recorded"), request)

    return lambda one: logs(LIVE[one.name])


Recorded = Callable[[Capability], list[Path]]


@pytest.mark.parametrize("capability", DECIDING, ids=lambda one: one.name)
def test_live_decisions_are_made_anew(capability: Capability, recorded: Recorded) -> None:
    logs = recorded(capability)
    mine = [part for log in logs for part in replay(log).parts if part.capability == capability.name]
    assert mine and all(part.decisions for part in mine)
    assert [one for part in mine for one in part.differences] == []
    if capability.pricing:
        assert all(part.recorded_cost is not None for part in mine)
    known = set(capability.room("policy").POLICIES)
    assert {name for part in mine for name in part.recorded_by} <= known


@pytest.mark.parametrize("capability", DECIDING, ids=lambda one: one.name)
def test_a_mutated_policy_is_found_out(capability: Capability, recorded: Recorded) -> None:
    """One rule is changed in the source; then what holds above does not hold."""
    name, rule, other = MUTANTS[capability.name]
    path = ROOT / "src" / "windtunnel" / capability.name.replace(".", "/") / name
    assert path.read_text().count(rule) == 1, "the rule has changed: give another mutant"
    logs = [str(log) for log in recorded(capability)]
    code = MUTATED.format(path=str(path), rule=rule, other=other, logs=logs)
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    assert capability.name in json.loads(done.stdout)


MUTATED = """
import importlib.machinery, json
from pathlib import Path
real = importlib.machinery.SourceFileLoader.get_data
mutated = Path({path!r})

def get_data(self, path):
    if Path(path).parent.parent == mutated.parent and Path(path).name.startswith(mutated.stem + "."):
        raise OSError  # the compiled module is not mutated
    data = real(self, path)
    return data.replace({rule!r}.encode(), {other!r}.encode()) if Path(path) == mutated else data

importlib.machinery.SourceFileLoader.get_data = get_data
from windtunnel.replay import replay
parts = [part for log in {logs!r} for part in replay(Path(log)).parts]
print(json.dumps([part.capability for part in parts if part.differences]))
"""
