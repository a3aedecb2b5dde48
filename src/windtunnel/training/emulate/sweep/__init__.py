"""The same script over a grid of clusters and arguments: which of them is fastest, smallest, cheapest?

`load_sweep` reads the file, `run_sweep` emulates its points and remembers each as it is done, `result` finds
the Pareto front of time, memory and cost.
"""

from windtunnel.training.emulate.sweep.execute import run_sweep
from windtunnel.training.emulate.sweep.result import result
from windtunnel.training.emulate.sweep.spec import Point, Sweep, load_sweep

__all__ = ["Point", "Sweep", "load_sweep", "result", "run_sweep"]
