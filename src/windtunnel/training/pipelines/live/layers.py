"""A layer with all that training keeps of it, as an object, as a shard and as a digest.

A layer is the unit that stages are made of, that gradients are summed over and that is copied to another
host. Its state is parameters and buffers, the optimizer's state, the scheduler's, and its *version*: the
number of steps that were applied to it. To other hosts and to storage it goes as a shard of a checkpoint.

*Copies* to other hosts follow from what each host holds in fact, not from the layout before: a recovery may
have been broken off by the next failure. Sources are chosen by the policy that the twin asks
(`policy.reconfigure`). A layer's whole state is sent: without the optimizer's the trajectory would change.
Sends do not block, and all hosts walk through the same list, so no order can deadlock. *In storage* is what
the job falls back to when the last copy of a layer is lost: a checkpoint as any job's, in which each layer is
a shard.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint import Whole, steps
from windtunnel.training.checkpoint.model import StoredStep
from windtunnel.training.elastic.determinism import seed_for
from windtunnel.training.pipelines.model import LayerProfile, TemplateSet, Transfer
from windtunnel.training.pipelines.policy.planner import plan
from windtunnel.training.pipelines.policy.reconfigure import spread


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model: its name, and how to make it.

    ``build``: called on the hosts that hold the layer, with torch's random numbers seeded by the job's
    seed and the layer's position. The module takes what the layer before gives (a tensor, or a tuple as
    several arguments) and gives a tensor or a tuple of tensors.
    """

    name: str
    build: Callable[[], nn.Module]


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class HostLayer:
    """Layer ``index`` on this host. ``optimizer`` and ``scheduler`` are None where nothing is trained.

    Raises:
        UserError: it keeps statistics of its batches, which would depend on the layout.
    """

    def __init__(
        self,
        index: int,
        spec: LayerSpec,
        seed: int,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        device: torch.device,
    ) -> None:
        self.index = index
        self.name = spec.name
        self.version = 0
        torch.manual_seed(seed_for(seed, index))
        self.module = spec.build().to(device)
        for name, part in self.module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
                raise UserError(
                    f"layer {spec.name}: {type(part).__name__} {name!r} tracks statistics of its batches;"
                    " accepted: normalisation without them (LayerNorm, RMSNorm, GroupNorm)"
                )
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters) if self.parameters else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def apply(self, gradient: Tensor | None) -> None:
        """One step: ``gradient`` is flat, in the order of ``parameters``; None leaves the parameters as they
        are, as for a step whose gradient is no number."""
        if self.optimizer is not None and gradient is not None:
            parts = gradient.split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            if gradient is None and self.optimizer is not None:
                self.optimizer._opt_called = True  # type: ignore[attr-defined] # else it warns of the order
            self.scheduler.step()
        self.version += 1

    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        states = self.optimizer.state.values() if self.optimizer else ()
        tensors = [
            *self.module.state_dict().values(),
            *(value for entry in states for value in entry.values()),
        ]
        return sum(value.nbytes for value in tensors if isinstance(value, Tensor))

    def digest(self) -> str:
        """xxh3_128 of the state, the same on all hosts that hold the same state."""
        return self.pack().content()

    def pack(self) -> Whole:
        """The state as one shard."""
        return Whole.of(shard_of(self.index), self._state())

    def unpack(self, whole: Whole) -> None:
        """Take over the state in ``whole``, whose checksum the caller has verified.

        Raises:
            UserError: it is a state of another layer.
        """
        require_name(whole, self.name)
        state = self._state()
        whole.put(state)
        self.version = state["version"]

    def _state(self) -> dict[str, Any]:
        parts = {"module": self.module, "optimizer": self.optimizer, "scheduler": self.scheduler}
        there = {name: part for name, part in parts.items() if part is not None}
        return {"name": self.name, "version": self.version, **there}


def shard_of(index: int) -> str:
    """The shard that layer ``index`` is saved as: as if it were all that a rank of this number has."""
    return f"rank{index}"


def require_name(whole: Whole, name: str) -> None:
    """Raises:
    UserError: it is not of the layer ``name``."""
    if (name_there := whole.objects().get("name")) != name:
        raise UserError(f"the state is of layer {name_there!r}; {name!r} is needed")


def even_templates(
    layers: Sequence[LayerSpec], *, n0: int = 1, failures: int = 1, largest: int | None = None
) -> TemplateSet:
    """Cuts of ``layers`` into stages of as equal length as can be, for ``n0`` .. ``largest`` hosts.

    ``n0``: fewest hosts whose memory holds the model, as the caller knows. ``failures``: hosts that
    may be lost at once. ``largest``: as many as there are layers unless given; at least ``2 n0 - 1`` is of
    use.

    Raises:
        UserError: there are fewer layers than hosts.
    """
    largest = len(layers) if largest is None else largest
    if not 1 <= n0 <= largest <= len(layers):
        raise UserError(f"templates for {n0} to {largest} hosts; accepted: 1 to {len(layers)}, the layers")
    profile = [LayerProfile(layer.name, forward=1.0, backward=2.0) for layer in layers]
    planned = [plan(profile, hosts, 1.0) for hosts in range(n0, largest + 1)]
    templates = tuple(template for template in planned if template is not None)
    return TemplateSet(n0, failures, templates)


_TAG = 1 << 20  # above those of microbatches
_HEAD = struct.Struct("<QQ32s")  # bytes of the layout and of the data, and their checksum
_PART = 64 << 20  # bytes of a message: each must arrive within the group's timeout


class TransferError(ConnectionError):
    """What arrived is not what was sent."""


def plan_transfers(
    assigned: Mapping[int, Sequence[int]],
    holders: Mapping[int, Sequence[int]],
    nbytes: Mapping[int, int],
) -> tuple[Transfer, ...]:
    """What has to be copied so that each rank holds its layers.

    ``assigned``: layers of each rank; ``holders``: ranks that hold each layer now; both by rank numbers, as
    the result. Layers without a holder are left out.
    """
    missing = [
        (layer, rank)
        for rank, layers in assigned.items()
        for layer in layers
        if holders[layer] and rank not in holders[layer]
    ]
    return tuple(spread(missing, holders.__getitem__, lambda layer: float(nbytes.get(layer, 0))))


def copy_layers(
    transfers: Sequence[Transfer], layers: Mapping[int, HostLayer], rank: int
) -> dict[int, Whole]:
    """Do this rank's part of ``transfers`` (ranks, not host ids); what it received, verified.

    Raises:
        TransferError: a checksum is not that of the sender.
        RuntimeError: the group broke.
    """
    last = {t.layer: number for number, t in enumerate(transfers) if t.source == rank}
    packed: dict[int, list[Tensor]] = {}
    works: list[tuple[Any, Tensor]] = []
    received: dict[int, Whole] = {}
    for number, transfer in enumerate(transfers):
        if transfer.source == rank:
            if transfer.layer not in packed:
                packed[transfer.layer] = _messages(layers[transfer.layer].pack())
            for part in packed[transfer.layer]:
                works.append((dist.isend(part, transfer.target, tag=_TAG + number), part))
            if last[transfer.layer] == number:
                del packed[transfer.layer]
        elif transfer.target == rank:
            received[transfer.layer] = _receive(transfer, _TAG + number)
    for work, _ in works:
        work.wait()
    return received


def _messages(whole: Whole) -> list[Tensor]:
    head = _HEAD.pack(len(whole.layout), len(whole.data), whole.checksum().encode())
    text, data = torch.frombuffer(bytearray(whole.layout), dtype=torch.uint8), _bytes(whole.data)
    return [torch.frombuffer(bytearray(head), dtype=torch.uint8), text, *data.split(_PART)]


def _receive(transfer: Transfer, tag: int) -> Whole:
    def received(count: int) -> memoryview:
        block = memoryview(bytearray(count))
        for part in _bytes(block).split(_PART):
            dist.recv(part, transfer.source, tag=tag)
        return block

    length, nbytes, expected = _HEAD.unpack(received(_HEAD.size))
    whole = Whole(bytes(received(length)), received(nbytes))
    if (checksum := whole.checksum()) != expected.decode():
        raise TransferError(
            f"layer {transfer.layer} from rank {transfer.source}: the copy's checksum is {checksum}, "
            f"not {expected.decode()}"
        )
    return whole


def _bytes(block: memoryview) -> Tensor:
    return torch.frombuffer(block, dtype=torch.uint8)


def saved_steps(url: str) -> list[StoredStep]:
    """The whole checkpoints, the newest first.

    Raises:
        UserError: the place cannot be read.
    """
    try:
        return sorted((step for step in steps(url) if not step.bad), key=lambda s: (-s.step, -s.generation))
    except ObjectError as error:
        raise UserError(str(error)) from None


def read_layer(url: str, saved: StoredStep, index: int, names: Sequence[str]) -> Whole:
    """A layer of a checkpoint, verified.

    Raises:
        UserError: it is missing, cut short, altered, or of another model.
    """
    if len(saved.shards) != len(names):
        raise UserError(
            f"step {saved.step} in {url} has {len(saved.shards)} layers; the model has {len(names)}"
        )
    try:
        whole = Whole.read(url, saved.shards[index])
    except ObjectError as error:
        raise UserError(f"{url}: layer {names[index]} cannot be read: {error}") from None
    require_name(whole, names[index])
    return whole
