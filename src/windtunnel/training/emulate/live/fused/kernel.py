"""What all stand-ins share: a launch that is written down, a word to the report, and one attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.kernels import Launches
from windtunnel.training.emulate.live.observe import Observer

Views = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""From the tensors of a call to query (B, Hq, L, E), key (B, Hkv, S, E) and value (B, Hkv, S, Ev), without a
copy; their gradients are laid out as the tensors are."""

TE = "transformer_engine"
_process: dict[str, Any] = {}


def install(observer: Observer, launches: Launches) -> None:
    """Where launches and notes go. Call once, before the script runs."""
    _process.update(observer=observer, launches=launches)


def launch(name: str, inputs: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
    """One kernel ``name`` (``"package.kernel"``) that reads ``inputs`` and writes ``outputs``, on the current
    stream. Where an output is among the inputs it is updated, and what the host knew of it is forgotten."""
    launches: Launches = _process["launches"]
    launches.record(f"{name}.default", inputs, outputs)
    launches.forget(outputs)


def note(text: str, of: str = "") -> None:
    """Tell in the report of an approximation."""
    _process["observer"].note(text, NoteKind.APPROXIMATION, of)


def stands_in(package: str, name: str) -> None:
    """Tell in the report that ``name`` of a package that is not installed was used."""
    note(
        f"{package} is not installed: stand-ins are costed as its kernels are by what they read and compute",
        name,
    )


def begin() -> None:
    """At the beginning of an autograd function's forward: its backward belongs to the module that runs."""
    _process["launches"].native.wt_note_node()


@contextmanager
def unrecorded() -> Iterator[None]:
    """What is done within is none of the script's."""
    native = _process["launches"].native
    native.wt_pause(1)
    try:
        with torch.no_grad():
            yield
    finally:
        native.wt_pause(-1)


def values_of(tensor: Any) -> list[int] | None:
    """The values of a tensor of offsets, None where they are not known."""
    with unrecorded():
        known = bool((tensor >= 0).all().item())
        return [int(value) for value in tensor.tolist()] if known else None


class Attention(torch.autograd.Function):
    """A fused attention kernel and its gradient; ``share``: of the scores, how many its mask leaves, the
    causal half apart. It keeps its inputs, its output, and a float32 for each row."""

    @staticmethod
    def forward(ctx: Any, kernel: str, causal: bool, share: float, views: Views, *tensors: Any) -> Any:
        with unrecorded():
            query, key, value = views(tensors)
        same = query.shape[-1] == value.shape[-1]
        out = torch.empty_like(query) if same else query.new_empty(*query.shape[:-1], value.shape[-1])
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        begin()
        launch(kernel, (query, key, value, causal, share), (out, lse))
        ctx.save_for_backward(*tensors, out, lse)
        ctx.given = kernel, causal, share, views
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernel, causal, share, views = ctx.given
        *tensors, out, lse = ctx.saved_tensors
        results = [torch.empty_like(tensor) for tensor in tensors]
        with unrecorded():
            query, key, value = views(tensors)
            written = views(results)
        delta = torch.empty_like(lse)  # the sums of the output and its gradient, which the kernel takes
        given = (query, key, value, out, lse, delta, gradients[0], causal, share)
        launch(f"{kernel}_backward", given, written)
        return None, None, None, None, *results
