"""The emulated world of a job that loses hosts: days of failures on thousands of them, six ways to go on."""

from windtunnel.training.goodput.twin.cost import cost

__all__ = ["cost"]
