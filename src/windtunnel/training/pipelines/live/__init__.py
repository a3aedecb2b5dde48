"""Pipelines of different lengths that train one model and survive the loss of hosts, for real."""
