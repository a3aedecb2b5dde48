"""Error feedback: what a codec leaves out waits in a residual and is sent with the next gradient.

    corrected = gradient + residual;  code = encode(corrected);  residual = corrected - decoded(code)

so that what was sent and what waits are together what backward made, at any step (Seide et al. '14;
Karimireddy et al. '19), with no share of it decaying. A gradient with NaN or infinity in it is sent as it
is, so that all ranks see it, and leaves the residual as it was: a step that a loss scaler skips loses
nothing.

For codecs ``dgc:R`` momentum is corrected as well (Deep Gradient Compression, section 3): u = m u +
gradient after clipping its norm, the residual gathers u, and elements that are sent lose their momentum
(*masking*). The optimizer must then be without momentum of its own.

The state is kept by parameter, so that other groups, buckets or plans find it again, and every rank has its
own. Under gradient accumulation a step is one synchronisation: no backward in between asks for a code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.codecs import Codec


class State(TypedDict):
    """By parameter: what waits, and for ``dgc`` the momentum. One rank's."""

    residuals: dict[str, Tensor]
    momenta: dict[str, Tensor]


class Feedback:
    """Residuals of one rank.

    ``groups``: of each group its parameters and their elements, in the order in which they lie in the group's
    row. ``momentum``, ``clip``: for ``dgc``; ``clip`` is the norm that a group's gradient of this rank may
    have (0: any), for a clipping of the mean at c about c / sqrt(world).
    """

    def __init__(self, groups: Sequence[Mapping[str, int]], momentum: float = 0.9, clip: float = 0.0) -> None:
        self._groups = [dict(one) for one in groups]
        self._momentum, self._clip = momentum, clip
        # rows of groups; a group has none until something waits in it
        self._residuals: dict[int, Tensor] = {}
        self._momenta: dict[int, Tensor] = {}

    def encode(self, group: int, gradient: Tensor, codec: Codec, seed: int = 0, at: int = 0) -> Tensor:
        """The code of the group's gradient and of what waits; what it leaves out waits from now on.
        ``gradient`` may be a part of the group's row, from element ``at`` on; of what is beyond the row's end
        (zeros that make parts equal) nothing waits."""
        if at or gradient.numel() != self._numel(group):
            return self._encode_part(group, gradient, codec, seed, at)
        corrected = self.corrected(group, gradient, codec)
        code = codec.encode(corrected, seed)
        if codec.feedback and corrected is self._residuals.get(group):
            codec.add(code, corrected, seed, -1.0)
            if codec.family == "dgc" and codec.indices is not None:
                sent = codec.indices(code)
                self._momenta[group][sent[sent >= 0].long()] = 0.0
        return code

    def _numel(self, group: int) -> int:
        return sum(self._groups[group].values())

    def _waits(self, group: int, device: torch.device) -> Tensor:
        if group not in self._residuals:
            self._residuals[group] = torch.zeros(self._numel(group), device=device)
        return self._residuals[group]

    def _encode_part(self, group: int, part: Tensor, codec: Codec, seed: int, at: int) -> Tensor:
        if not codec.feedback or not math.isfinite(float(part.sum(dtype=torch.float32))):
            return codec.encode(part, seed)
        waits = self._waits(group, part.device)[at : at + part.numel()]
        corrected = part.detach().float()
        if corrected is part or corrected.data_ptr() == part.data_ptr():
            corrected = corrected.clone()
        corrected[: waits.numel()] += waits
        code = codec.encode(corrected, seed)
        codec.add(code, corrected, seed, -1.0)
        waits.copy_(corrected[: waits.numel()])
        return code

    def left_out(
        self, group: int, total: Tensor, code: Tensor, codec: Codec, seed: int, at: int, times: float = 1.0
    ) -> None:
        """What the code of a sum over ranks leaves out of it, ``times`` that, waits as if it were this rank's
        own: it is part of the next sum. ``total`` begins at element ``at`` of the group."""
        if not codec.feedback or not math.isfinite(float(total.sum(dtype=torch.float32))):
            return
        waits = self._waits(group, total.device)[at : at + total.numel()]
        rest = total.detach().float().clone()
        codec.add(code, rest, seed, -1.0)
        waits.add_(rest[: waits.numel()], alpha=times)

    def corrected(self, group: int, gradient: Tensor, codec: Codec) -> Tensor:
        """The gradient and what waits. For a codec with feedback it is the residual itself, a 1-D tensor of
        float32, from which the caller subtracts what is sent; else, and where the gradient has NaN or
        infinity, another, and nothing is to be subtracted."""
        waits = self._residuals.get(group)
        if not codec.feedback and waits is None:
            return gradient
        flat = gradient.detach().reshape(-1)
        # one pass that only reads; a sum of float32 that overflows counts as infinite
        if not math.isfinite(float(flat.sum(dtype=torch.float32))):
            return gradient
        if not codec.feedback:
            self._momenta.pop(group, None)
            return self._residuals.pop(group).add_(flat).to(gradient.dtype)
        if waits is None:
            waits = self._residuals[group] = torch.zeros(
                sum(self._groups[group].values()), device=gradient.device
            )
        if codec.family == "dgc":
            flat = self._with_momentum(group, flat)
        return waits.add_(flat)

    def _with_momentum(self, group: int, flat: Tensor) -> Tensor:
        share = 1.0
        if self._clip:
            norm = float(torch.linalg.vector_norm(flat, dtype=torch.float32))
            share = min(1.0, self._clip / norm) if norm else 1.0
        if group not in self._momenta:
            self._momenta[group] = torch.zeros(flat.shape, device=flat.device)
        return self._momenta[group].mul_(self._momentum).add_(flat, alpha=share)

    def norm(self) -> float:
        """Of all that waits."""
        return math.sqrt(sum(float(one.square().sum()) for one in self._residuals.values()))

    def state_dict(self) -> State:
        """A copy, by parameter, on the processor."""
        return {"residuals": self._by_name(self._residuals), "momenta": self._by_name(self._momenta)}

    def load_state_dict(self, state: State, device: torch.device | str = "cpu") -> None:
        """The inverse of `state_dict`, whatever the groups were there; parameters that it lacks have nothing
        that waits.

        Raises:
            UserError: it has parameters, or sizes of them, that are not in the groups.
        """
        self._residuals = self._by_group(state["residuals"], device)
        self._momenta = self._by_group(state["momenta"], device)

    def _by_name(self, rows: Mapping[int, Tensor]) -> dict[str, Tensor]:
        found = {}
        for group, row in rows.items():
            sizes = self._groups[group]
            parts = zip(sizes, row.split(list(sizes.values())), strict=True)
            found.update({name: one.cpu().clone() for name, one in parts})
        return found

    def _by_group(self, named: Mapping[str, Tensor], device: torch.device | str) -> dict[int, Tensor]:
        sizes = {name: numel for group in self._groups for name, numel in group.items()}
        for name, one in named.items():
            if sizes.get(name) != one.numel():
                raise UserError(
                    f"feedback: the state has {one.numel()} elements of {name!r}, "
                    f"{sizes.get(name, 'none')} are in the groups; load it into the model that it is of"
                )
        found = {}
        for place, group in enumerate(self._groups):
            if group.keys() & named.keys():
                parts = [named.get(name, torch.zeros(numel)) for name, numel in group.items()]
                found[place] = torch.cat([one.reshape(-1).float() for one in parts]).to(device)
        return found


def redistributed(states: Sequence[State], rank: int, world: int) -> State:
    """What ``rank`` of ``world`` goes on with, from the states of all ranks that were before: its own, and
    those of ranks that are no more, dealt out evenly. The sum over ranks stays what it was; ranks beyond the
    former ones begin with nothing."""
    mine = states[rank::world]
    return {
        "residuals": _sum(state["residuals"] for state in mine),
        "momenta": _sum(state["momenta"] for state in mine),
    }


def _sum(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, one in part.items():
            total[name] = total[name] + one if name in total else one.clone()
    return total
