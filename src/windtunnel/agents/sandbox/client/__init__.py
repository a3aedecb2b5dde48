"""Sandboxes from another process or host: a client of the daemon, blocking and asynchronous.

``connect()`` gives a ``Client`` whose methods are those of ``Host``, and its boxes have those of ``Box``.
"""

from windtunnel.agents.sandbox.client.asynchronous import AsyncBox, AsyncClient, connect_async
from windtunnel.agents.sandbox.client.blocking import Client, RemoteBox, RemotePending, Sandbox, connect

__all__ = [
    "AsyncBox",
    "AsyncClient",
    "Client",
    "RemoteBox",
    "RemotePending",
    "Sandbox",
    "connect",
    "connect_async",
]
