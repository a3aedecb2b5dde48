"""The network of a host's sandboxes: served while they run, told of restores and forks.

A sandbox whose network is ``proxy`` finds the model API at ``http://127.0.0.1:7080``, a socket that the host
made inside the sandbox's network namespace; nothing else is reachable from there. The proxy starts with the
first such sandbox. The journal of payments and the like is one for the host, outside every sandbox, so no
rollback takes it back.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from windtunnel.agents.sandbox.effects import Journal
from windtunnel.agents.sandbox.machine import listen_inside
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy.gate import Turning
from windtunnel.agents.sandbox.proxy.upstream import Upstream, read_key, split_base
from windtunnel.base.errors import UserError

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.proxy.server import ModelProxy

PORT = 7080
JOURNAL = "effects.sqlite"
ADDRESS = f"http://127.0.0.1:{PORT}"


def with_address(spec: SandboxSpec) -> SandboxSpec:
    """``spec`` with the variables by which the usual client libraries find the proxy.

    Raises UserError when the network is the proxy's alone and no upstream is named, or none that
    can be one; and when its key file cannot be used.
    """
    if spec.network != "proxy":
        if spec.proxy_key_file:
            raise UserError(f"sandbox {spec.name}: a key file is for network 'proxy'")
        return spec
    if not spec.proxy_upstream:
        raise UserError(f"sandbox {spec.name}: network 'proxy' needs `proxy_upstream`, the model API's URL")
    split_base(spec.proxy_upstream)
    if spec.proxy_key_file:
        usable_key(spec.name, spec.proxy_key_file)
    addresses = {"OPENAI_BASE_URL": f"{ADDRESS}/v1", "ANTHROPIC_BASE_URL": ADDRESS}
    return replace(spec, environment={**addresses, **spec.environment})


def usable_key(name: str, file: str) -> None:
    """Raises UserError unless ``file`` of this host holds a key that can be used for sandbox ``name``."""
    if not Path(file).is_absolute():
        raise UserError(f"sandbox {name}: key file {file!r} must be an absolute path")
    read_key(Path(file))


class HostProxy:
    """Starts the model proxy when a sandbox needs one; does nothing for sandboxes that need none."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._proxy: ModelProxy | None = None
        self._journal: Journal | None = None
        self._lock = threading.Lock()

    @property
    def journal(self) -> Journal:
        """The side effects of this host's sandboxes."""
        with self._lock:
            if self._journal is None:
                self._journal = Journal(self._home.path / JOURNAL)
            return self._journal

    def proxy(self) -> ModelProxy:
        """The model proxy, started now if it was not yet."""
        # a host without such a sandbox does without an HTTP server
        from windtunnel.agents.sandbox.proxy.server import ModelProxy

        with self._lock:
            if self._proxy is None:
                self._proxy = ModelProxy(self._home)
            return self._proxy

    def serve(self, box: Turning, spec: SandboxSpec, netns: Path) -> None:
        """Be the model API of a sandbox that has just begun to run, or to run again, in that namespace.

        Requests that were at the model when it died go on: their replies answer the agent when it asks again.
        """
        if spec.network == "proxy":
            key_file = Path(spec.proxy_key_file) if spec.proxy_key_file else None
            listener = listen_inside(netns, PORT)
            try:
                self.proxy().serve(box, Upstream(spec.proxy_upstream, key_file=key_file), listener)
            except BaseException:
                listener.close()
                raise

    def forget(self, name: str) -> None:
        """The sandbox is removed: another of its name is another one."""
        if self._proxy is not None:
            self._proxy.forget(name)
        if (self._home.path / JOURNAL).exists():
            self.journal.retire(name)

    def restored(self, spec: SandboxSpec, turn: int, *, on_purpose: bool) -> None:
        """Before the processes run again as they were after ``turn``. What they ask again is answered from
        the record, except where somebody rolled back ``on_purpose`` and wants another answer."""
        if spec.network == "proxy":
            self.proxy().restored(spec.name, turn, on_purpose=on_purpose)

    def forked(self, source: str, spec: SandboxSpec, turn: int) -> None:
        """Before a fork of ``source`` runs: it has the conversation, and the side effects, up to ``turn``."""
        if spec.network == "proxy":
            self.proxy().forked(source, spec.name, turn)
        if (self._home.path / JOURNAL).exists():
            self.journal.fork(source, spec.name, turn)

    def close(self) -> None:
        """Answer what is under way, then end."""
        with self._lock:
            if self._proxy is not None:
                with contextlib.suppress(TimeoutError):
                    self._proxy.close()
            if self._journal is not None:
                self._journal.close()
            self._proxy = self._journal = None
