"""Packets: flows with real congestion control over links with real queues, packet by packet.

For what fluid flows leave out: queues, drops, marks, timeouts, incast, and programs in the network.

    >>> fast, back = PacketLink(1.25e9, 10e-6, Queue(packets=200)), PacketLink(1.25e9, 10e-6)
    >>> world = Simulation([fast, back], [Flow([0], [1], "cubic"), Flow([0], [1], "dctcp", ecn=True)])
    >>> print(world.foretell(0.1)); world.run(0.1); world.flows["received"] * 1500 / world.now

`kernel` says how time passes, `queues` and `senders` what they model and what they leave out, `hooks` how a
capability puts a compiled function before a link or into the network.
"""

from windtunnel.engines.packets.hooks import gate, node
from windtunnel.engines.packets.network import At, Flow, Fork, PacketLink, Queue
from windtunnel.engines.packets.simulation import PacketForecast, Simulation

__all__ = ["At", "Flow", "Fork", "PacketForecast", "PacketLink", "Queue", "Simulation", "gate", "node"]
