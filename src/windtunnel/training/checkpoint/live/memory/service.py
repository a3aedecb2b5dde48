"""The memory service of a host: checkpoints in this host's memory, and copies of those of others.

It lives in the agent, so it outlives the trainers. Local ranks call it on a Unix socket (`owner`),
other hosts' services and restoring trainers ask on a TCP port (`holder`). The agent tells it of each new
membership and of each agreement; it tells the agent of copies that have arrived, and of events.

On a new membership all slots stay, and what was being sent or received is given up. The ranks agree on a step
that they all go back to (`restored`) and save it again as it is: what copies it lacks are made, and it is
committed once more, before anything older may be overwritten. Slots of a job of another size are deleted
when a step of the new one is committed, not before.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any

from windtunnel.base import rpc
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.holder import Holder
from windtunnel.training.checkpoint.live.memory.messages import ERRORS, FROM_PEER, Ranks, StaleGeneration
from windtunnel.training.checkpoint.live.memory.owner import Owner
from windtunnel.training.checkpoint.live.memory.state import Context, State
from windtunnel.training.checkpoint.live.memory.storing import Persister
from windtunnel.training.checkpoint.live.memory.transfer import PeerRequests, Refused
from windtunnel.training.checkpoint.settings import MemoryLimits
from windtunnel.training.elastic.model import Membership

_LONGEST_SOCKET_NAME = 100


class MemoryService:
    """``folder``: in tmpfs, of this host alone. ``host``: the address under which peers reach it; it listens
    there alone. ``keys``: of the job; whoever does not know them learns nothing here and leaves nothing.

    ``address``: "host:port" for peers. ``path``: "unix:/..." for local ranks.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        *,
        keys: Keys,
        context: Context,
        limits: MemoryLimits | None = None,
    ) -> None:
        limits = limits or MemoryLimits()
        self._folder = folder
        self._state = State(folder, keys, context, limits)
        self._holder = Holder(self._state)
        self._persister = Persister(self._state)
        self._owner = Owner(self._state, self._persister)
        outer = socket.create_server((host, 0), family=_family(host), backlog=256)
        self.address = f"{host}:{outer.getsockname()[1]}"
        requests = PeerRequests(self._holder.handlers, FROM_PEER, limits.silence)
        self._peers = Listener(
            outer, requests.serve, keys=keys, services=self._services, name="memory-listener"
        )
        self._spare: str | None = None
        path = folder / "memory.sock"
        if len(str(path)) > _LONGEST_SOCKET_NAME:
            self._spare = tempfile.mkdtemp(prefix="windtunnel-")
            path = Path(self._spare) / "memory.sock"
        path.unlink(missing_ok=True)
        served = rpc.RpcService.of(Ranks, self._owner, ERRORS)
        served.explain = _explained
        self._ranks = rpc.RpcServer(served, f"unix:{path}")
        self.path = self._ranks.address

    def _services(self) -> tuple[str, ...]:
        """What peers take this service for: its address, and where they reach it by another, that."""
        state, own = self._state, transfer.service(self.address)
        membership, place = state.membership, state.place
        if membership is None or place is None:
            return (own,)
        return own, transfer.service(membership.hosts[place].memory)

    def membership(self, membership: Membership, place: int | None) -> None:
        """A new generation; ``place``: this host's in it, None for none. Does not wait."""
        self._state.change(membership, place)
        self._owner.change(membership.hosts)
        self._holder.cut()

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All ranks have posted ``key``; keys of others, and of generations that are over, are no matter of
        ours. Does not wait."""
        kind, _, rest = key.partition("/")
        step, _, term = rest.partition("/")
        if kind not in ("checkpoint", "persist") or term != self._state.term:
            return
        if kind == "persist":
            self._persister.decided(key, values)
        else:
            self._state.commit(int(step))

    def close(self, wipe: bool) -> None:
        """Stop; ``wipe``: and delete all that is kept, or else let a step that is being written to storage
        end."""
        if not wipe:
            self._persister.join(self._state.limits.silence)
        with self._state.changed:
            self._state.closed = True
            self._state.changed.notify_all()
        self._ranks.close()
        self._peers.close()
        self._owner.close()
        self._state.folder.close()
        self._state.board.close()
        if self._spare:
            shutil.rmtree(self._spare, ignore_errors=True)
        if wipe:
            shutil.rmtree(self._folder, ignore_errors=True)


def _explained(error: Exception) -> Exception:
    """What a rank gets for it."""
    if isinstance(error, Refused):
        return UserError(str(error)) if error.kind == "user" else StaleGeneration(str(error))
    return UserError(str(error)) if isinstance(error, ValueError) else error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
