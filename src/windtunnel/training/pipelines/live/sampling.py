"""Which samples a step takes, whatever machines work on it.

Every epoch is one permutation of all samples, drawn from the seed and the epoch's number alone. The steps
take consecutive blocks of this endless row, so a block may hold the end of one epoch and the start of the
next, and each sample is used exactly once in an epoch. Microbatch ``m`` is the ``m``-th part of a step's
block; a pipeline works on consecutive microbatches. So a step's samples, and which of them come together,
are the same in every layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class SampleOrder:
    """``samples`` in the data set, ``microbatches`` of ``size`` samples in a step."""

    samples: int
    microbatches: int
    size: int
    seed: int
    _epochs: dict[int, np.ndarray] = field(default_factory=dict, repr=False)

    def microbatch(self, step: int, microbatch: int) -> list[int]:
        """The indices of the samples of one microbatch (0-based) of ``step`` (0-based)."""
        begin = (step * self.microbatches + microbatch) * self.size
        found: list[int] = []
        while len(found) < self.size:
            epoch, at = divmod(begin + len(found), self.samples)
            found += self._epoch(epoch)[at : at + self.size - len(found)].tolist()
        return found

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a step needs two at most, unless an epoch is shorter than it
                del self._epochs[min(self._epochs)]
            generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            self._epochs[epoch] = generator.permutation(self.samples)
        return self._epochs[epoch]


def noise_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Seed of the random numbers that a layer draws for one microbatch: the same on every machine."""
    words = np.random.SeedSequence([seed, step, microbatch, layer]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))  # torch takes 63 bits


def build_seed(seed: int, layer: int) -> int:
    """Seed of a layer's first parameters: whoever builds it gets the same."""
    words = np.random.SeedSequence([seed, layer]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
