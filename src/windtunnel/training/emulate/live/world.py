"""Completes ``torch.distributed``: a world of the target's size, of which this process is one rank.

Process groups are PyTorch's own `ProcessGroup` over a backend that does nothing; every collective is caught
at c10d's operators by the native library, whoever issues it. What is left for Python: the rendezvous, the
list of all groups of the world, and messages whose data must be real (objects, shapes that pipeline stages
tell each other).

What one rank says to another goes through a `Mailbox`: Python objects and the values of
small tensors (`values`), and the shapes of pipeline stages.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from windtunnel.training.emulate.graph import Group
from windtunnel.training.emulate.live.mailbox import Mailbox
from windtunnel.training.emulate.live.patches import replaces


@dataclass
class WorldView:
    """All process groups that the script makes, in order. ``note`` takes one sentence for the report."""

    rank: int
    size: int
    mailbox: Mailbox
    note: Callable[..., None]
    groups: list[Group] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)  # c10d's group name -> row of groups

    def add(self, ranks: tuple[int, ...], label: str, name: str | None) -> None:
        if name is not None:
            self.names.setdefault(name, len(self.groups))
        self.groups.append(Group(name or f"group{len(self.groups)}", ranks, label))


def fake_group(rank: int, size: int) -> Any:
    """A process group whose calls do nothing."""
    return FakeProcessGroup._create_internal(rank, size, FakeProcessGroup.Options())  # type: ignore[call-arg]


def install(
    world: WorldView, native: ctypes.CDLL | SimpleNamespace, device_type: str,
    create: Callable[[int, int], Any] = fake_group, group_type: type = FakeProcessGroup,
) -> None:  # fmt: skip
    """Pretend the world. Call once, after the surface is there and before the script runs. ``create``: makes
    a process group, of the type ``group_type``, for a place in it and its size."""
    _pretend_backends(create, group_type)
    _start_without_peers(world, device_type)
    _list_groups(world)
    _batch_messages(native)
    _agree_on_shapes(world)
    _trust_replicas()


class _AnyFake(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.fake_type)  # type: ignore[attr-defined]


class _Options:
    """Stands for a backend's options: holds what the script sets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.is_high_priority_stream = False
        self._timeout = None
        self.config = type("Config", (), {})()


class _Backend(metaclass=_AnyFake):
    """Stands for ``ProcessGroupNCCL`` and ``ProcessGroupGloo``."""

    Options = _Options
    create: Callable[[int, int], Any]
    fake_type: type

    def __new__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        return cls.create(rank, size)


def _pretend_backends(create: Callable[[int, int], Any], group_type: type) -> None:
    own = {"create": staticmethod(create), "fake_type": group_type}
    for module in (dist, c10d):
        m: Any = module
        for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2", "ProcessGroupGloo"):
            setattr(m, name, type(name, (_Backend,), own))
        m.is_nccl_available = lambda: True
        m.is_gloo_available = lambda: True
    # DDP's logger asks a gloo group for its network devices, which a group without peers has not
    silent = {"set_construction_data_and_log": lambda self, *args, **kwargs: None}
    m = dist
    m.Logger = type("Logger", (m.Logger,), silent)
    flags: Any = c10d
    flags._NCCL_AVAILABLE = True
    flags._nccl2_device = lambda options: None  # binding the group to it would make every other group a split
    flags.default_pg_nccl_timeout = c10d.default_pg_timeout
    fake: Any = FakeProcessGroup
    fake._set_sequence_number_for_group = lambda self: None
    fake._get_sequence_number_for_group = lambda self: 0
    fake._set_default_timeout = lambda self, timeout: None


def _start_without_peers(world: WorldView, device_type: str) -> None:
    module: Any = c10d
    module._is_barrier_after_init = lambda: 0  # TORCH_DIST_INIT_BARRIER: nobody else comes to this store

    @replaces(c10d, everywhere=True)
    def init_process_group(original: Any, backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if backend is None:
            backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        for key, expected in (("world_size", world.size), ("rank", world.rank)):
            argument = kwargs.get(key, -1)
            if argument not in (-1, None, expected):
                raise ValueError(
                    f"init_process_group({key}={argument}): the emulated world gives {key} {expected}"
                )
        group_options = {key: kwargs[key] for key in ("timeout", "group_name") if key in kwargs}
        original(backend, store=HashStore(), rank=world.rank, world_size=world.size, **group_options)
        world.add(tuple(range(world.size)), "world", c10d._get_default_group().group_name)


def _list_groups(world: WorldView) -> None:
    of_others: list[Any] = [None]  # how the last group was made that this rank is not in
    # newer versions keep the order of the ranks of a split, older ones sort them
    parameters = inspect.signature(c10d._new_group_with_tag).parameters
    in_order = {"sort_ranks": False} if "sort_ranks" in parameters else {}

    @replaces(c10d)
    def _new_group_with_tag(original: Any, ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        members = tuple(range(world.size)) if ranks is None else tuple(map(int, ranks))
        description = str(kwargs.get("group_desc") or "")
        label = description.removeprefix("mesh_") if description.startswith("mesh_") else ""
        if of_others[0] == (args, kwargs) and _is_of_others(members):
            # A large mesh has thousands of them, and PyTorch would check much and then only count, and keep
            # the places in the last one.
            outside: Any = dist.GroupMember.NON_GROUP_MEMBER
            c10d._world.group_count += 1
            c10d._world.pg_group_ranks[outside] = {rank: place for place, rank in enumerate(members)}
            world.add(members, label, None)
            return outside
        group = original(ranks, *args, **kwargs)
        mine = group if isinstance(group, dist.ProcessGroup) else None
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            of_others[0] = args, kwargs
        world.add(members, label, mine.group_name if mine is not None else None)
        return group

    def _is_of_others(members: tuple[int, ...]) -> bool:
        different = set(members)
        return (
            world.rank not in different
            and len(different) == len(members)
            and min(members, default=-1) >= 0
            and max(members) < world.size
        )

    @replaces(c10d, everywhere=True)
    def split_group(
        _: Any, parent_pg: Any = None, split_ranks: Any = None, timeout: Any = None, pg_options: Any = None,
        group_desc: Any = None, backend: Any = None,
    ) -> Any:  # fmt: skip
        """As groups that are made one by one, so that those of other ranks are known too. Of a group that is
        one of several alike, the others are split in the same way by their ranks."""
        parent_pg = parent_pg or c10d._get_default_group()
        parent = world.groups[world.names[parent_pg.group_name]]
        same = [
            group.ranks
            for group in world.groups
            if (group.label, len(group.ranks)) == (parent.label, len(parent.ranks))
        ]
        mine = dist.GroupMember.NON_GROUP_MEMBER
        group_options = {"timeout": timeout, "backend": backend, "group_desc": group_desc} | in_order
        for members in dict.fromkeys(same):
            for part in split_ranks:
                ranks = [members[index] for index in (part if in_order else sorted(part))]
                group = c10d._new_group_with_tag(ranks, **group_options)
                mine = group if members == parent.ranks and world.rank in ranks else mine
        return mine


def _batch_messages(native: ctypes.CDLL | SimpleNamespace) -> None:
    @replaces(c10d, everywhere=True)
    def batch_isend_irecv(_: Any, p2p_op_list: list[Any]) -> list[Any]:
        c10d._check_p2p_op_list(p2p_op_list)
        native.wt_batch(1)
        try:
            works = []
            for message in p2p_op_list:
                key = "group_dst" if message.op is dist.isend else "group_src"
                peer = {key: message.group_peer}
                works.append(message.op(message.tensor, group=message.group, tag=message.tag, **peer))
            return works
        finally:
            native.wt_batch(-1)


def _agree_on_shapes(world: WorldView) -> None:
    """Pipeline stages vote on how to learn shapes and tell each other: answered without the messages.

    Forward shapes come from the previous stage's capture, which runs before, or from this rank's own stages;
    a stage's gradients have the shapes of its own outputs.
    """
    from torch.distributed.pipelining import schedules, stage

    modes: Any = stage

    @replaces(schedules._PipelineSchedule)
    def _warmup_p2p(_: Any, self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for own_stage in stages:
            meta = own_stage._stage_meta
            static = meta.inputs is not None and meta.outputs is not None
            own_stage._inference_mode = modes.InferenceMode.STATIC if static else modes.InferenceMode.DYNAMIC

    sent: list[tuple[int, Any]] = []  # by this rank's stages, the last one at the end

    @replaces(stage.PipelineStage)
    def _send_meta(_: Any, self: Any, meta: Any, dst_stage: int) -> None:
        sent.append((self.stage_index, meta))
        world.mailbox.post(f"shapes {self.stage_index} {dst_stage}", meta, for_all=True)

    @replaces(stage.PipelineStage)
    def _recv_meta(_: Any, self: Any, src_stage: int) -> Any:
        if src_stage > self.stage_index:
            return modes._StageBackwardMeta(backward_metas=modes._derive_grad_metas(self._stage_meta.outputs))
        sender = self._resolve_peer_global_rank(src_stage)
        topic = f"shapes {src_stage} {self.stage_index}"
        available, meta = world.mailbox.read_earlier(sender, topic, last=not sent)
        if available:
            return meta
        if sent:
            # Stages that loop over the ranks: the one before is captured later. What lies between stages has
            # one shape in a stack of layers; where it has not, the messages of the two ranks do not match and
            # are reported.
            stage_index, meta = sent[-1]
            world.note(
                f"pipeline stage {self.stage_index} takes what stage {stage_index} sends to have the shape "
                "of its input"
            )
            return meta
        raise NotImplementedError(
            f"windtunnel: pipeline stage {self.stage_index} learns its input shapes from stage {src_stage}, "
            f"which cannot be emulated because rank {sender} is not captured before rank {world.rank}; use "
            "`ranks` auto, or pass input_args and output_args to PipelineStage"
        )


def _trust_replicas() -> None:
    """DDP compares parameter shapes across ranks by reading device data, which have no values here."""
    import torch.nn.parallel.distributed as ddp

    below: Any = dist
    below._verify_params_across_processes = lambda *args: None

    # In a Join, the last rank that has inputs gives its buffers to the others: here all have some.
    @replaces(ddp.DistributedDataParallel)
    def _find_common_rank(find: Any, self: Any, rank: int, condition: bool) -> int:
        find(self, rank, condition)
        return dist.get_world_size(self.process_group) - 1

    # DTensor's random numbers: every rank is given the state of the first, and compares it with its own on
    # the device.
    import torch.distributed.tensor._random as random

    @replaces(random.OffsetBasedRNGTracker, "__init__")
    def start(original: Any, self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        original(self, device_mesh, False)
