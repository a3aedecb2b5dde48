"""Activations and gradients between neighbouring stages.

A message is all tensors of one microbatch in one block of bytes, so one send and one receive, told apart by
its tag (microbatch and direction). Sends return at once and are waited for at the end of the step; a receive
is posted one action ahead, so that gloo moves the data while the stage computes. The first message of a
layout says beforehand which shapes and dtypes follow, and which tensors want a gradient; later ones must be
alike.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError

_HEADER = 4096  # bytes of the first message
_ALIGN = 16
_HEADER_TAG = 1

Spec = list[tuple[str, list[int], bool]]  # dtype, shape, whether it wants a gradient


class StageExchange:
    """The two neighbours of this stage in its pipeline: their ranks, None at the ends."""

    def __init__(self, before: int | None, after: int | None, device: torch.device) -> None:
        self.before = before
        self.after = after
        self.device = device
        self._incoming: Spec | None = None
        self._outgoing: Spec | None = None
        self._expected: dict[int, tuple[Any, Tensor]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def expect(self, kind: Literal["forward", "backward"], microbatch: int) -> None:
        """Post the receive that a forward or backward will need, if its shapes are known yet."""
        if kind == "forward" and self.before is not None and self._incoming is not None:
            self._expect(self.before, _forward_tag(microbatch), self._incoming)
        if kind == "backward" and self.after is not None and self._outgoing is not None:
            self._expect(self.after, _backward_tag(microbatch), _wanting(self._outgoing))

    def activations(self, microbatch: int) -> tuple[Tensor, ...]:
        """The input of this stage for a microbatch, marked where the neighbour wants a gradient."""
        assert self.before is not None
        if self._incoming is None:
            header = torch.empty(_HEADER, dtype=torch.uint8)
            _wait(dist.irecv(header, self.before, tag=_HEADER_TAG))
            self._incoming = json.loads(header.numpy().tobytes().rstrip(b"\0"))
        spec = self._incoming
        received = self._receive(self.before, _forward_tag(microbatch), spec)
        return tuple(t.requires_grad_(wants) for t, (_, _, wants) in zip(received, spec, strict=True))

    def send_activations(self, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Give this stage's output on.

        Raises:
            UserError: its shapes differ from those of the microbatch before.
        """
        assert self.after is not None
        spec: Spec = [(_name(t), list(t.shape), t.requires_grad) for t in tensors]
        if self._outgoing is None:
            self._outgoing = spec
            text = json.dumps(spec).encode()
            if len(text) > _HEADER:
                raise UserError(f"a stage gives {len(tensors)} tensors to the next, too many to describe")
            header = torch.frombuffer(bytearray(text.ljust(_HEADER, b"\0")), dtype=torch.uint8)
            self._send(header, self.after, _HEADER_TAG)
        if spec != self._outgoing:
            raise UserError(f"a stage's output is {spec}, before it was {self._outgoing}; all must be alike")
        self._send(_block(tensors), self.after, _forward_tag(microbatch))

    def gradients(self, microbatch: int) -> list[Tensor]:
        """Gradients of those outputs that want one, in their order."""
        assert self.after is not None and self._outgoing is not None
        return self._receive(self.after, _backward_tag(microbatch), _wanting(self._outgoing))

    def send_gradients(self, microbatch: int, gradients: list[Tensor]) -> None:
        assert self.before is not None
        self._send(_block(gradients), self.before, _backward_tag(microbatch))

    def finish(self) -> None:
        """Return when all that was sent has arrived."""
        for work, _ in self._sent:
            _wait(work)
        self._sent.clear()

    def _expect(self, peer: int, tag: int, spec: Spec) -> None:
        if tag not in self._expected and spec:
            buffer = torch.empty(sum(_sizes(spec)), dtype=torch.uint8)
            self._expected[tag] = (dist.irecv(buffer, peer, tag=tag), buffer)

    def _receive(self, peer: int, tag: int, spec: Spec) -> list[Tensor]:
        if not spec:
            return []
        self._expect(peer, tag, spec)
        work, buffer = self._expected.pop(tag)
        _wait(work)
        tensors, at = [], 0
        for (name, shape, _), size in zip(spec, _sizes(spec), strict=True):
            dtype: torch.dtype = getattr(torch, name)
            nbytes = dtype.itemsize * _count(shape)
            tensors.append(buffer[at : at + nbytes].view(dtype).view(shape).to(self.device))
            at += size
        return tensors

    def _send(self, block: Tensor, peer: int, tag: int) -> None:
        if block.numel():
            # The tensor must live until the peer has it
            self._sent.append((dist.isend(block, peer, tag=tag), block))


def _wait(work: Any) -> None:
    assert work is not None
    work.wait()


def _forward_tag(microbatch: int) -> int:
    return 2 + 2 * microbatch


def _backward_tag(microbatch: int) -> int:
    return 3 + 2 * microbatch


def _wanting(spec: Spec) -> Spec:
    return [entry for entry in spec if entry[2]]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _sizes(spec: Spec) -> list[int]:
    """Bytes of each tensor in a block, each beginning where any dtype may."""
    return [_padded(getattr(torch, name).itemsize * _count(shape)) for name, shape, _ in spec]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _block(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    parts = []
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        pad = _padded(raw.numel()) - raw.numel()
        parts += [raw, torch.zeros(pad, dtype=torch.uint8)] if pad else [raw]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
