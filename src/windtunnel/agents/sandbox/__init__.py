"""Agent sandboxes that survive: checkpoint, restore, fork and roll back files, processes and shells.

    from windtunnel.agents.sandbox import SandboxHost, SandboxSpec

    with SandboxHost() as host:
        box = host.create(SandboxSpec("demo"))
        with box.turn():
            box.run("echo hello > /workspace/a")
        forks = host.fork("demo", 4)

``SandboxHost`` works in this process; ``Sandbox(name)`` and ``connect`` speak to a daemon, of this host or
another. Both are what `protocol` says, and raise the same errors. Source: Crab (arXiv 2604.28138); what
differs from it is said where it does.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
