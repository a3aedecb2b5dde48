"""The memory service of a host: checkpoints in this host's memory, and copies of those of others.

It lives in the agent, so it outlives the trainers. Local ranks speak to it on a Unix socket (`owner`),
other hosts' services and restoring trainers on a TCP port (`holder`). The agent tells it of each new
membership and of each agreement; it tells the agent of copies that have arrived, and of events. `Persister`
writes the shards of committed steps to storage: training does not wait for that, nor ends it by dying.

On a new membership all slots stay, and what was being sent or received is given up. The ranks agree on a step
that they all go back to (`restored`) and save it again as it is: what copies it lacks are made, and it is
committed once more, before anything older may be overwritten. Slots of a job of another size are deleted
when a step of the new one is committed, not before.
"""

from __future__ import annotations

import mmap
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from windtunnel.base import handshake
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.base.units import amount
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.folder import free
from windtunnel.training.checkpoint.live.memory.holder import Holder
from windtunnel.training.checkpoint.live.memory.messages import FROM_PEER, FROM_RANK
from windtunnel.training.checkpoint.live.memory.owner import Owner
from windtunnel.training.checkpoint.live.memory.state import Context, State
from windtunnel.training.checkpoint.live.memory.transfer import Handler, Message, Requests
from windtunnel.training.checkpoint.live.slot import CopyError
from windtunnel.training.checkpoint.model import SHARED, Shard
from windtunnel.training.checkpoint.settings import Limits
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.policy.checkpoints import FAILED

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
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        self._folder = folder
        self._state = State(folder, keys, context, limits)
        self._holder = Holder(self._state)
        self._owner = Owner(self._state)
        self._persister = Persister(self._state)
        outer = socket.create_server((host, 0), family=_family(host), backlog=256)
        self.address = f"{host}:{outer.getsockname()[1]}"
        requests = Requests(self._holder.handlers, FROM_PEER, limits.silence)
        self._peers = Listener(
            outer, requests.serve, keys=keys, services=self._services, name="memory-listener"
        )
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
            "persist": lambda _, message, raw: self._persister.asked(message),
            "places": lambda *_: {"addresses": self._state.addresses()},
        }
        self._ranks = Listener(
            inner, Requests(handlers, FROM_RANK, limits.silence).serve, name="memory-ranks"
        )

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
            self._state.commit(int(step), values)

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


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


COMMIT_PATIENCE = 600.0
KEPT = 8


class Persister:
    """One thread for each step of each rank that is being written.

    The slots are copied first, verified on the way: storage may take longer than they are left alone. For
    each rank ``persist/{step}/{term}`` is posted when its shards are there; then the service of place 0
    completes the step.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._urls: dict[str, tuple[str, int]] = {}  # by key: what is to be completed
        self._keep = 0  # steps that stay in storage, as was asked last
        self._made: dict[str, dict[str, Any]] = {}  # by key: what was said of what is completed
        self._threads: list[threading.Thread] = []

    def asked(self, message: Message) -> Message:
        """The request of a local rank that has saved a step: write its shards, once the step is committed.

        They are copied before this answers: the rank does not overwrite the slots earlier, but may soon."""
        state, rank, step, url = self._state, message["rank"], message["step"], message["url"]
        state.require(message["generation"])
        self._keep = message["keep"]
        key = f"persist/{step}/{state.term}"
        try:
            copied = self._copied(rank, step)
        except (UserError, CopyError, OSError) as error:
            self._not_written(step, url, error)
            return {"answer": "not begun"}
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        arguments = (key, rank, step, url, copied)
        thread = threading.Thread(target=self._write, args=arguments, name=f"{key} {rank}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return {"answer": "begun"}

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All shards of a step are in storage: place 0 makes it a checkpoint. Does not wait."""
        if self._state.place != 0:
            return
        thread = threading.Thread(target=self._complete, args=(key, values), name=f"{key}-end", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float) -> None:
        """Wait for what is being written."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _copied(self, rank: int, step: int) -> list[tuple[Shard, memoryview]]:
        state = self._state
        with state.changed:
            spec, world = state.specs.get(rank), state.world
            shards = sorted(spec.nbytes) if spec else []
        wanted = [shard for shard in shards if shard != SHARED or state.place == 0]
        return [self._shard(shard, step, world) for shard in wanted]

    def _write(
        self, key: str, rank: int, step: int, url: str, copied: list[tuple[Shard, memoryview]]
    ) -> None:
        from windtunnel.training.checkpoint.live import storage  # only here: it is slow to import

        if not self._committed(step, key.rpartition("/")[2]):
            return
        try:
            written = [to_plain(storage.write_shard(url, shard, data)) for shard, data in copied]
        except Exception as error:  # storage has errors of many kinds; the run goes on without this one
            self._not_written(step, url, error)
            return
        self._urls[key] = (url, step)
        while len(self._urls) > KEPT:
            del self._urls[next(iter(self._urls))]
        self._state.context.post(key, rank, written)

    def _not_written(self, step: int, url: str, error: Exception) -> None:
        self._state.context.event(FAILED, step=step, error=f"it is not written to {url}: {error}")

    def _committed(self, step: int, term: str) -> bool:
        state = self._state
        end = time.monotonic() + COMMIT_PATIENCE
        with state.changed:
            while state.committed < step:
                left = end - time.monotonic()
                if left <= 0 or state.term != term or state.closed:
                    return False
                state.changed.wait(left)
        return True

    def _shard(self, shard: str, step: int, world: int) -> tuple[Shard, memoryview]:
        state = self._state
        with state.changed:
            match = state.folder.find(shard, step, world)
        if match is None:
            raise CopyError(f"{shard} of step {step} is not in memory")
        slot, it = match
        there, bound = free(state.folder.path)
        if it.nbytes > there:
            text = f"a copy of {shard} takes {amount(it.nbytes)}"
            raise UserError(f"{text}, {amount(there)} are {bound}")
        # Not the heap's: this goes back to the host at once.
        data = memoryview(mmap.mmap(-1, max(1, it.nbytes)))[: it.nbytes]
        return slots.load(slot.path, data, step=step), data

    def _complete(self, key: str, values: dict[Any, Any]) -> None:
        from windtunnel.training.checkpoint.live import storage

        state = self._state
        if key in self._made:  # the supervisor was started again, and may not have heard of it
            state.context.event("persisted", **self._made[key])
        if key not in self._urls:
            return
        url, step = self._urls.pop(key)
        try:
            written_by_rank = [
                (int(rank), from_plain(storage.Written, record)) for rank in values for record in values[rank]
            ]
            blobs = {
                written.shard.layout: self._layout(written.shard.layout, rank)
                for rank, written in written_by_rank
            }
            manifest = storage.complete_step(url, [written for _, written in written_by_rank], blobs)
        except Exception as error:
            self._not_written(step, url, error)
            return
        self._made[key] = {
            "key": key, "step": step, "url": url, "course": manifest.shards[0].shard.generation,
            "check": storage.check_of(manifest),
        }  # fmt: skip
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        state.context.event("persisted", **self._made[key])
        if self._keep:
            try:
                storage.prune(url, self._keep)
            except Exception as error:  # what is needed is there; the next step's tries again
                state.context.event("note", text=f"older checkpoints stay in {url}: {error}")

    def _layout(self, digest: str, rank: int) -> bytes:
        """A layout, from here or from the host of the rank that has it."""
        state = self._state
        blob = state.folder.layout(digest)
        if blob is not None:
            return blob
        membership = state.membership
        assert membership is not None
        address = membership.hosts[rank // membership.per_host].memory
        with handshake.connect(address, state.limits.connect, state.keys, transfer.service(address)) as sock:
            sock.settimeout(state.limits.silence)
            return transfer.layout(sock, digest)
