"""Gradients summed inside the network, by a switch that several jobs share (SwitchML, ATP, ESA).

``policy`` says whose fragments get the switch's few slots, what a server does with the rest, and how floats
become integers that a switch can add. ``twin`` has jobs, switches and servers in the packet engine.
"""
