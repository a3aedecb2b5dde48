"""Error feedback: what a codec leaves out waits in a residual and is sent with the next gradient.

    corrected = gradient + residual;  code = encode(corrected);  residual = corrected - decoded(code)

so that what was sent and what waits are together what backward made, at any step (Seide et al. '14;
Karimireddy et al. '19), with no share of it decaying. A gradient with NaN or infinity in it is sent as it
is, so that all ranks see it, and leaves the residual as it was: a step that a loss scaler skips loses
nothing.

The state is kept by parameter, so that other groups, buckets or plans find it again, and every rank has its
own. Under gradient accumulation a step is one synchronisation: no backward in between asks for a code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.codecs import Codec

Residuals = dict[str, Tensor]
"""Of one rank: what waits, by parameter."""


class Feedback:
    """Residuals of one rank.

    ``groups``: of each group its parameters and their elements, in the order in which they lie in the group's
    row.

    A ``gradient`` is a group's row, or the part of it that begins at element ``at``; it may go beyond the
    row's end, by zeros that make parts equal.
    """

    def __init__(self, groups: Sequence[Mapping[str, int]]) -> None:
        self._groups = [dict(group) for group in groups]
        # rows of groups; a group has none until something waits in it
        self._residuals: dict[int, Tensor] = {}

    def encode(self, group: int, gradient: Tensor, codec: Codec, seed: int = 0, at: int = 0) -> Tensor:
        """The code of the gradient and of what waits; what it leaves out waits from now on."""
        corrected = self.corrected(group, gradient, codec, at)
        code = codec.encode(corrected, seed)
        if codec.feedback and corrected is not gradient:
            codec.add(code, corrected, -1.0)
        return code

    def corrected(self, group: int, gradient: Tensor, codec: Codec, at: int = 0) -> Tensor:
        """The gradient and what waits. For a codec with feedback it is the residual itself, a 1-D tensor of
        float32, from which the caller subtracts what is sent; else, and where the gradient has NaN or
        infinity, another, and nothing is to be subtracted."""
        if not (codec.feedback or group in self._residuals) or not _finite(gradient):
            return gradient
        flat, waits = gradient.detach().reshape(-1), self._part(group, gradient, at)
        if not codec.feedback:
            tensor = flat + waits
            waits.zero_()
            if waits.numel() == self._residuals[group].numel():
                del self._residuals[group]
            return tensor.to(gradient.dtype)
        return waits.add_(flat)

    def left_out(
        self, group: int, total: Tensor, code: Tensor, codec: Codec, at: int, times: float = 1.0
    ) -> None:
        """What the code of a sum over ranks leaves out of it, ``times`` that, waits as if it were this rank's
        own: it is part of the next sum."""
        if codec.feedback and _finite(total):
            rest = total.detach().float().clone()
            codec.add(code, rest, -1.0)
            self._part(group, total, at).add_(rest, alpha=times)

    def _part(self, group: int, gradient: Tensor, at: int) -> Tensor:
        """What waits in a group's row where ``gradient`` lies; beyond the row's end nothing does."""
        rows = self._residuals
        numel, end = sum(self._groups[group].values()), at + gradient.numel()
        if group not in rows or len(rows[group]) < end:
            grown = torch.zeros(max(numel, end), device=gradient.device)
            if group in rows:
                grown[: len(rows[group])] = rows[group]
            rows[group] = grown
        rows[group][numel:] = 0.0
        return rows[group][at:end]

    def state_dict(self) -> Residuals:
        """A copy, by parameter, on the processor."""
        tensors = {}
        for group, row in self._residuals.items():
            begin = 0
            for name, numel in self._groups[group].items():
                tensors[name] = row[begin : begin + numel].cpu().clone()
                begin += numel
        return tensors

    def load_state_dict(self, residuals: Residuals, device: torch.device | str = "cpu") -> None:
        """The inverse of `state_dict`, whatever the groups were there; parameters that it lacks have nothing
        that waits.

        Raises:
            UserError: it has parameters, or sizes of them, that are not in the groups.
        """
        sizes = {name: numel for group in self._groups for name, numel in group.items()}
        for name, tensor in residuals.items():
            if sizes.get(name) != tensor.numel():
                raise UserError(
                    f"feedback: the state has {tensor.numel()} elements of {name!r}, "
                    f"{sizes.get(name, 'none')} are in the groups; load it into the model that it is of"
                )
        tensors = {}
        for place, group in enumerate(self._groups):
            if group.keys() & residuals.keys():
                rows = [residuals.get(name, torch.zeros(numel)) for name, numel in group.items()]
                tensors[place] = torch.cat([row.reshape(-1).float() for row in rows]).to(device)
        self._residuals = tensors


def redistributed(former: Sequence[Residuals], rank: int, world: int) -> Residuals:
    """What ``rank`` of ``world`` goes on with, from what waited on all ranks that were before: its own, and
    that of ranks that are no more, dealt out evenly. The sum over ranks stays what it was; ranks beyond the
    former ones begin with nothing."""
    total: Residuals = {}
    for residuals in former[rank::world]:
        for name, tensor in residuals.items():
            total[name] = total[name] + tensor if name in total else tensor.clone()
    return total


def _finite(gradient: Tensor) -> bool:
    """One pass that only reads; a sum of float32 that overflows counts as infinite."""
    return math.isfinite(float(gradient.detach().sum(dtype=torch.float32)))
