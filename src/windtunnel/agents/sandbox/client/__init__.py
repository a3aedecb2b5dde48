"""Sandboxes from another process or host: a client of the daemon, blocking and asynchronous.

``connect()`` gives a ``Client`` whose methods are those of ``Host``, and its boxes have those of ``Box``.
"""

from windtunnel.agents.sandbox.client.clients import (
    AsyncBox,
    AsyncClient,
    AsyncPending,
    Client,
    RemoteBox,
    RemotePending,
    Sandbox,
    connect,
    connect_async,
)

__all__ = [
    "AsyncBox",
    "AsyncClient",
    "AsyncPending",
    "Client",
    "RemoteBox",
    "RemotePending",
    "Sandbox",
    "connect",
    "connect_async",
]
