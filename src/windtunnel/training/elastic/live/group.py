"""A process group that can be cut while its ranks are blocked in it, and built anew in the same process.

gloo has no working abort: with a frozen peer, survivors sit in a collective until its timeout. So all sockets
are remembered that WORLD and every later subgroup (``new_group``, DeviceMesh, DDP, FSDP2) opens, and a cut
shuts them down (`linux.sockets`). Each blocked operation then returns with an error in milliseconds, here and
at the neighbours. For NCCL the same interface calls its ``abort``. (Who waits in the store comes out by
itself, see `live.store`.)

A collective that was cut leaves its tensors partly reduced: restore, or begin the step anew.

Meshes of a generation that is over are kept apart from those of the next (`part_meshes`): torch takes two
device meshes for equal that have the same ranks in the same order, whichever of them this process is, and
DTensor keeps what it worked out for a mesh in caches for the life of the process. A process that goes on
under another rank would get results on the old mesh, with the coordinates of the old rank: the pieces that it
holds would be taken for others. So meshes of two generations are never equal, and the caches are emptied in
between.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import traceback
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from windtunnel.linux.sockets import SocketRecorder, appeared
from windtunnel.linux.sockets import ports as _ports
from windtunnel.training.elastic.model import Membership

_generation = 0
_init, _eq = DeviceMesh.__init__, DeviceMesh.__eq__


def _mesh_init(self: Any, *arguments: Any, **named: Any) -> None:
    self._windtunnel = _generation
    _init(self, *arguments, **named)


def _equal(self: Any, other: object) -> Any:
    if getattr(self, "_windtunnel", 0) != getattr(other, "_windtunnel", 0):
        return False
    return _eq(self, other)


def part_meshes() -> None:
    """Meshes made from now on differ from those before."""
    global _generation
    if not _generation:
        DeviceMesh.__init__ = _mesh_init  # type: ignore[method-assign]
        DeviceMesh.__eq__ = _equal  # type: ignore[method-assign]
    _generation += 1
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, _redistribute

        with suppress(AttributeError):  # private; without it the caches are only not freed
            # as `torch.distributed.tensor.debug` does, whose import takes longer than a recovery
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
            torch._C._clear_DTensor_sharding_propagator_cache()
            _redistribute._gen_transform_infos.cache_clear()
            _redistribute._planner_cache.clear()


_Gloo = c10d.ProcessGroupGloo
_CONNECT, _CONNECT_A_RANK = 5.0, 0.05  # seconds that connecting may take once all are there, more a rank
_current: CuttableGroup | None = None  # whose subgroups are being recorded


class _Recording(type):
    """Stands in for the class `ProcessGroupGloo` where torch makes groups: the same objects come out."""

    def __call__(cls, store: Any, rank: int, size: int, *args: Any, **named: Any) -> Any:
        group = _current
        if group is None:
            return _Gloo(store, rank, size, *args, **named)
        if args or set(named) != {"timeout"}:  # not as torch itself calls it
            return group.make(lambda: _Gloo(store, rank, size, *args, **named), store, rank, size)
        limit = named["timeout"]
        group.gather(store, rank, size)
        within = min(limit, timedelta(seconds=_CONNECT + _CONNECT_A_RANK * size))
        backend = group.make(lambda: _Gloo(store, rank, size, timeout=within), store, rank, size)
        backend._set_default_timeout(limit)
        return backend

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_Gloo, name)


class _RecordedGloo(metaclass=_Recording):
    pass


class CuttableGroup:
    """WORLD of one generation. One at a time in a process.

    ``backend``: as for ``init_process_group``. ``timeout`` (s) bounds every operation, the store's too.
    """

    def __init__(self, backend: str, timeout: float) -> None:
        self.backend = backend
        self.timeout = timeout
        self._recorder = SocketRecorder()

    @property
    def is_cut(self) -> bool:
        return self._recorder.is_cut

    def form(self, membership: Membership, rank: int, store: Store) -> None:
        """Make WORLD out of the ranks of ``membership``, which meet in ``store``. When this returns, all of
        them are in it.

        Raises:
            RuntimeError: a rank did not come within the timeout, a newer generation came, or the connection
                to a rank broke.
            ConnectionAbortedError: the group was cut before.
        """
        global _current
        os.environ["TORCH_GLOO_LAZY_INIT"] = "0"  # what connects later would not be seen
        limit = timedelta(seconds=self.timeout)
        hook = sys.excepthook
        _current = self
        c10d.ProcessGroupGloo = _RecordedGloo  # type: ignore[assignment, misc]
        self._store = store  # C++ alone would not keep what of it is Python
        try:
            dist.init_process_group(
                self.backend, store=store, rank=rank, world_size=membership.world, timeout=limit
            )
        finally:
            sys.excepthook = hook  # torch wraps it at each call: after 200 generations, 200 deep
        dist.barrier()

    def gather(self, store: Any, rank: int, size: int) -> None:
        """Wait until all members have come. Whoever waits here comes out when a newer generation is known; in
        gloo's constructor a rank that waits for a connection from one that died has no socket of it to shut,
        and sits there until the timeout. So it is entered when all are there, and given less time.

        Raises:
            ConnectionAbortedError: the group was cut before.
            RuntimeError: a newer generation came, or not all came within the timeout.
        """
        if self.is_cut:
            raise ConnectionAbortedError("the process group was cut")
        store.set(f"windtunnel/here/{rank}", "")
        store.wait([f"windtunnel/here/{other}" for other in range(size)])

    def make(self, constructor: Any, store: Any, rank: int, size: int) -> Any:
        """What ``constructor`` makes, with the sockets that it opens recorded as this group's.

        Of the sockets that appeared meanwhile only those are kept that lead from or to a port on which a
        member of the new group listens (the members tell each other through ``store``): another thread of
        the program may open connections of its own at any moment.
        """
        with self._recorder.recording():
            before = dict(self._recorder.sockets)
            backend = constructor()
        ours = [_ports(fd) for fd in appeared(self._recorder.sockets, before)]
        store.set(f"windtunnel/{rank}", json.dumps([own for listens, own, _ in ours if listens]))
        keys = [f"windtunnel/{other}" for other in range(size)]
        self._choose(before, {port for text in store.multi_get(keys) for port in json.loads(text)})
        return backend

    def _choose(self, before: dict[int, int], listening: set[int]) -> None:
        """Of what was recorded since ``before``, keep what leads from or to a port of ``listening``."""
        chosen = dict(before)
        for fd, inode in self._recorder.sockets.items():
            _, own, peer = _ports(fd)
            if own in listening or peer in listening:
                chosen[fd] = inode
        self._recorder.keep(chosen)

    def cut(self) -> int:
        """Release every operation that is blocked in this group, here and at the neighbours, from any thread;
        how many sockets were shut down. Nothing works in the group afterwards but `leave`."""
        count = self._recorder.cut()
        for group in list(c10d._world.pg_map) if _current is self else []:
            with suppress(Exception):  # no such backend, or aborted already
                backend = group._get_backend(torch.device("cuda"))
                if not isinstance(backend, _Gloo):
                    backend.abort()
        return count

    def leave(self, error: BaseException | None = None) -> None:
        """Destroy the group and all subgroups, cut or not; afterwards another can be formed.

        ``error``: the exception that ended the program's work in the group. The local variables of the frames
        that it went through are dropped: they hold models and optimisers bound to the dead group.
        """
        global _current
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error.__traceback__, error = None, error.__cause__ or error.__context__
        self._recorder.cut()
        if _current is self:
            _current = None
            c10d.ProcessGroupGloo = _Gloo  # type: ignore[misc]
            if dist.is_initialized():
                # gloo's destructor joins its threads, and one that was cut in the middle of a ring may wait
                # in vain until the group's timeout: that must not keep the next generation waiting.
                groups = list(c10d._world.pg_map)
                dist.destroy_process_group()
                threading.Thread(target=groups.clear, daemon=True, name="windtunnel-leave").start()
            # torch numbers groups, and the number is in the keys that the ranks meet under: one that was cut
            # while it formed must not leave this process a number ahead of those that are new.
            c10d._world.group_count = 0
            part_meshes()
        gc.collect()
        self._recorder = SocketRecorder()


def group_sockets() -> list[int]:
    """Descriptors of the sockets of this process's cuttable group; none where it has none."""
    return list(_current._recorder.sockets) if _current is not None else []
