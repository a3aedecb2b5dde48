"""TorchRec takes our plans and statistics: its planner, its plans' own constructors, a DLRM on two ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.ranks import run_ranks
from windtunnel.base.errors import UserError
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import MemoryTier
from windtunnel.data.embeddings.policy import PlacementRequest, decide
from windtunnel.data.embeddings.torchrec import read_sharding, shardings, write_sharding

pytestmark = pytest.mark.conformance


MODULES = ("torchrec.distributed.model_parallel", "torchrec.distributed.planner", "torchrec.models.dlrm")
TABLES = synthetic.tables("small")
TOTAL = sum(table.total_bytes for table in TABLES)
PLAN = decide(
    PlacementRequest(TABLES, 4, MemoryTier(0.2 * TOTAL / 4, 1e12), MemoryTier(TOTAL, 1e10), 4096, "search")
)


@pytest.mark.skipif(
    not (find_spec("torchrec") and find_spec("fbgemm_gpu")), reason="needs TorchRec and FBGEMM"
)
def test_torchrec_takes_our_plans_and_statistics() -> None:
    done = run_ranks([Path(__file__).parent / "torchrec_rank.py"], 2, modules=MODULES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("all held") == 2


def test_a_sharding_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "sharding.json"
    write_sharding(path, TABLES, PLAN)
    sharding = read_sharding(path)
    assert sharding == shardings(TABLES, PLAN)
    cached = {name: entry for name, entry in sharding.items() if entry.compute_kernel == "fused_uvm_caching"}
    assert cached and all(0 < entry.load_factor < 1 for entry in cached.values() if entry.load_factor)
    # the caches take the memory that the plan has given
    fast = sum(
        entry.rows * entry.dim * 4 * (entry.load_factor or entry.compute_kernel == "fused")
        for entry in sharding.values()
    )
    assert fast == pytest.approx(sum(PLAN.fast_bytes))
    path.write_text(json.dumps({"a": {"rows": 1}}))
    with pytest.raises(UserError, match=r"accepted is what 'windtunnel embeddings plan --torchrec' wrote"):
        read_sharding(path)
