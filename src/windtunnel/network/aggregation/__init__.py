"""Gradients summed inside the network, by a switch that several jobs share (SwitchML, ATP, ESA).

``policy`` says whose fragments get the switch's few slots, what a server does with the rest, and how floats
become integers that a switch can add. ``twin`` has jobs, switches and servers in the packet engine, ``live``
the same as processes that speak UDP:

    from windtunnel.network import aggregation

    group = aggregation.connect("10.0.0.9:7000")      # on every rank, after init_process_group
    group.all_reduce(tensor)                          # in place
    ddp.register_comm_hook(group, aggregation.hook)   # means of gradients
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
