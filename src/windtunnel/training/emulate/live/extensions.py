"""Kernels that a package compiles for the device when it first needs them: DeepSpeed's.

Its op builders call nvcc, and what comes out is called as a module. There is neither compiler nor device
here: a stand-in takes the module's place where it is known what its functions read and write, and the others
are refused. Ops for the host are built as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from windtunnel.base.importing import after_import
from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.kernels import Launches
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.observe import Observer

BUILDERS = "deepspeed.ops.op_builder.builder"
TOLD = "DeepSpeed's FusedAdam is not compiled: its kernel is costed by the bytes that it reads and writes"
WHY = "DeepSpeed compiles it for the device when it is needed, and what it does to tensors is not known"


def install(observer: Observer, launches: Launches) -> None:
    """Let DeepSpeed's builders load stand-ins. Call once, before the script runs."""

    def multi_tensor_adam(chunk_size: int, flag: Any, lists: Sequence[Sequence[Any]], *numbers: Any) -> None:
        """Apex's signature: gradients, parameters, first and second moments; all but the first are updated.
        (csrc/adam/multi_tensor_adam.cu)"""
        written = [tensor for updated in lists[1:] for tensor in updated]
        launches.record("deepspeed.multi_tensor_adam", [list(one) for one in lists], written)
        launches.forget(written)

    def replace(module: ModuleType) -> None:
        builders: Any = module
        load = builders.OpBuilder.load

        def stand_in(self: Any, verbose: bool = False) -> Any:
            if not isinstance(self, builders.CUDAOpBuilder):
                return load(self, verbose)
            if self.name != "fused_adam":
                refuse(f"DeepSpeed's op {self.name}", WHY)()
            observer.note(TOLD, NoteKind.APPROXIMATION)
            return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)

        builders.OpBuilder.load = stand_in

    after_import(BUILDERS, replace)
