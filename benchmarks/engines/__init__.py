"""The engines against their peers: ``python -m benchmarks engines.flows`` and its like."""
