"""The engines against their peers: ``windtunnel bench engines.flows`` and its like."""
