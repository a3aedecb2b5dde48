"""windtunnel: emulate a real training job on a cluster that is not there, then run it on one that is."""

__version__ = "0.1.0"
