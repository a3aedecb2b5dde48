"""Sandboxes as processes: namespaces, control groups, network, persistent shells, files in and out.

A sandbox is started by a small static program that sets everything up and becomes pid 1; all commands run
in shells that live on between them. Everything is chosen such that CRIU can dump and restore the whole: no
controlling terminal, no descriptor of the host's, mounts that are either the sandbox's own or declared
external.

Source: Crab (arXiv 2604.28138), section 4; capabilities and refused system calls after Docker's defaults.
"""

from windtunnel.agents.sandbox.machine import launch, walls
from windtunnel.agents.sandbox.machine.channel import KEPT as CHANNEL_KEPT
from windtunnel.agents.sandbox.machine.group import Cgroup, Group
from windtunnel.agents.sandbox.machine.leftovers import Guard, collect, leftovers, wait_for_guard
from windtunnel.agents.sandbox.machine.machine import Machine
from windtunnel.agents.sandbox.machine.network import addresses, netns_file, socket_inside
from windtunnel.agents.sandbox.machine.state import shell_effect
from windtunnel.agents.sandbox.model import Entry

__all__ = [
    "CHANNEL_KEPT",
    "Cgroup",
    "Entry",
    "Group",
    "Guard",
    "Machine",
    "addresses",
    "collect",
    "launch",
    "leftovers",
    "netns_file",
    "shell_effect",
    "socket_inside",
    "wait_for_guard",
    "walls",
]  # fmt: skip
