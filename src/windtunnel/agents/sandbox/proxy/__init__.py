"""The network of sandboxes: the model proxy with its turns, gate and replay; egress; ports.

``attach.HostProxy`` is what a host uses.
"""
