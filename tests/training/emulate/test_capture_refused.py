"""What cannot be emulated is refused in a sentence that names the call and its line in the user's script."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from capturing import SCRIPTS, session

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.live.session import Session

NAMES = re.findall(r"^def case_(\w+)", (SCRIPTS / "refused.py").read_text(), re.MULTILINE)
CALLS = {
    "nonzero": "aten.nonzero", "unique": "aten._unique2",
    "repeat_interleave": "repeat_interleave without output_size",
    "cuda_graph": "torch.cuda.CUDAGraph",
    "cpu_offload": "torch.distributed.fsdp.CPUOffloadPolicy",
    "first_fsdp_offload": "torch.distributed.fsdp.CPUOffload(offload_params=True)",
    "symmetric_memory": "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    "rpc": "torch.distributed.rpc.init_rpc", "sparse": "aten", "triton": "triton.testing.do_bench",
}  # fmt: skip


@pytest.fixture(scope="module")
def refusing() -> Iterator[Session]:
    with session("refused.py", cluster="h100-sxm:2x8") as one:
        yield one


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_names_the_call_and_its_line(refusing: Session, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    with pytest.raises(ScriptError) as caught:
        refusing.capture([NAMES.index(name)])
    sentence = str(caught.value)
    assert re.match(rf"refused\.py:\d+ in case_{name}: ", sentence), sentence
    assert CALLS[name] in sentence and "cannot be emulated" in sentence
    assert "\n" not in sentence
    assert f"in case_{name}" in caught.value.details, "the script's own traceback is kept"
    assert "windtunnel/training" not in caught.value.details
