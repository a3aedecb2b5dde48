"""Which samples a step takes, whatever hosts work on it.

The steps take consecutive blocks of an endless row of epochs (`determinism.samples`). Microbatch ``m`` is the
``m``-th part of a step's block; a pipeline works on consecutive microbatches. So a step's samples, and which
of them come together, are the same in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.training.elastic import determinism


@dataclass(frozen=True)
class SampleOrder:
    """``samples`` in the data set, ``microbatches`` of ``size`` samples in a step."""

    samples: int
    microbatches: int
    size: int
    seed: int

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """The indices of the samples of one microbatch (0-based) of ``step`` (0-based)."""
        begin = (step * self.microbatches + microbatch) * self.size
        return determinism.samples(self.seed, self.samples, begin, self.size)
