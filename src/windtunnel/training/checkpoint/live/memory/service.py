"""The memory service of a host: checkpoints in this host's memory, and copies of those of others.

It lives in the agent, so it outlives the trainers. Local ranks speak to it on a Unix socket (`owner`),
other hosts' services and restoring trainers on a TCP port (`holder`). The agent tells it of each new
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

from windtunnel.base import wire
from windtunnel.training.checkpoint.live.memory.holder import Holder
from windtunnel.training.checkpoint.live.memory.owner import Owner
from windtunnel.training.checkpoint.live.memory.pacing import Pacer
from windtunnel.training.checkpoint.live.memory.persist import Persister
from windtunnel.training.checkpoint.live.memory.replicate import Limits
from windtunnel.training.checkpoint.live.memory.serve import Handler, Listener, Message
from windtunnel.training.checkpoint.live.memory.state import Context, State
from windtunnel.training.checkpoint.model import Health
from windtunnel.training.elastic.model import Membership

_LONGEST_SOCKET_NAME = 100


class MemoryService:
    """``folder``: in tmpfs, of this host alone. ``host``: the address under which peers reach it; it listens
    there alone. ``outgoing``: own address for connections to peers, which chooses the network card.

    ``address``: "host:port" for peers. ``path``: "unix:/..." for local ranks.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        *,
        context: Context,
        port: int = 0,
        outgoing: str = "",
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self._folder = folder
        self._state = State(folder, context, limits)
        self._holder = Holder(self._state)
        self._owner = Owner(self._state, Pacer(), outgoing)
        self._persister = Persister(self._state)
        outer = socket.create_server((host, port), family=_family(host), backlog=256)
        self.address = f"{host}:{outer.getsockname()[1]}"
        self._peers = Listener(outer, self._holder.handlers, limits.silence)
        self._spare: str | None = None
        path = folder / "memory.sock"
        if len(str(path)) > _LONGEST_SOCKET_NAME:
            self._spare = tempfile.mkdtemp(prefix="windtunnel-")
            path = Path(self._spare) / "memory.sock"
        path.unlink(missing_ok=True)
        inner = socket.socket(socket.AF_UNIX)
        inner.bind(str(path))
        path.chmod(0o600)
        inner.listen(64)
        self.path = f"unix:{path}"
        handlers: dict[str, Handler] = {
            **self._holder.handlers,
            **self._owner.handlers,
            "persist": self._persist,
            "places": self._places,
        }
        self._ranks = Listener(inner, handlers, limits.silence)

    def membership(self, membership: Membership, place: int | None) -> None:
        """A new generation; ``place``: this host's in it, None for none. Does not wait."""
        self._state.change(membership, place)
        self._owner.change(membership.hosts)
        self._holder.cut()

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All ranks have posted ``key``; keys of others, and of generations that are over, are no matter of
        ours. Does not wait."""
        kind, _, rest = key.partition("/")
        step, _, generation = rest.partition("/")
        if kind not in ("checkpoint", "persist") or generation != str(self._state.generation):
            return
        if kind == "persist":
            self._persister.decided(key, values)
        elif self._state.commit(int(step), values) and self._state.place == 0:
            self._state.context.event("committed", step=int(step))

    def health(self) -> Health:
        """How well the present state is kept, as far as it is known here."""
        return self._state.health()

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

    def _persist(self, sock: socket.socket, message: Message, following: int) -> Message:
        wire.skip(sock, following)
        return self._persister.asked(message)

    def _places(self, sock: socket.socket, message: Message, following: int) -> Message:
        wire.skip(sock, following)
        membership = self._state.membership
        return {"addresses": [host.memory for host in membership.hosts] if membership else []}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
