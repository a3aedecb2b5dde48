"""What ``torch.compile`` is asked for, and what becomes of a module that it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
from capturing import capture

SCRIPT = """
import copy, os, sys
import torch

layer = torch.nn.Linear(8, 8).cuda()
COMPILE
plain = getattr(layer, "_orig_mod", layer)
assert not hasattr(plain, "_orig_mod") and plain.weight is layer.weight
other = copy.deepcopy(layer)
assert getattr(other, "_orig_mod", other).weight is other.weight is not layer.weight
assert other.forward.__self__ is other, "a copy runs by itself"
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(3):
    layer(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("compiled", "regions"),
    [
        ("layer = torch.compile(layer, fullgraph=True); assert layer._orig_mod is not layer", {0, 1}),
        ("layer.compile()", {0, 1}),
        ("layer = torch.compile(disable=True)(layer)", {0}),
        ("layer.compile(backend='eager')", {0}),
        ("os.environ['TORCH_COMPILE_DISABLE'] = '1'; layer.compile()", {0}),
    ],
)
def test_a_region_is_what_inductor_compiles(tmp_path: Path, compiled: str, regions: set[int]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("COMPILE", compiled))
    (slice_,) = capture(str(script))
    assert {operator.region for operator in slice_.operators} == regions
