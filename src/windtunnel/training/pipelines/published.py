"""Oobleck's published evaluation as data, for the check of the twin against it.

Source: Jang et al., "Oobleck: Resilient Distributed Training of Large Models Using Pipeline Templates", SOSP
2023 (arXiv 2309.08125), and its artifact (github.com/SymbioticLab/Oobleck, branch ``sosp23-artifact``):
constants from its trace simulator, ratios from running that simulator on its own traces. All of them are
*published*: none was measured here, and times are seconds. Throughputs are not among them; a ratio of 1.0 at
rare failures says that those of Oobleck and Varuna are about equal there.

``THROUGHPUT`` gives Oobleck over Varuna and over Bamboo. The 13.9 of the abstract's first version is one
cell: GPT-3 6.7B, a failure every ten minutes, against Varuna, whose restart and checkpoints then take most
of the time. The 29.6 of the revised abstract is no cell of the artifact.
"""

from __future__ import annotations

from dataclasses import dataclass

HOSTS = 30
"""Hosts at the start; half of them are taken away one by one in the traces with a fixed interval."""

CHECKPOINT_EVERY = 10
"""Steps between Varuna's blocking checkpoints."""

BAMBOO_EXTRA = 30.0
"""Seconds that Bamboo takes beside its reconfiguration."""


@dataclass(frozen=True)
class PublishedModel:
    """What the artifact's simulator assumes of a model, in seconds.

    ``oobleck_reconfigure``: from a loss to the next step. ``varuna_restart``, ``varuna_checkpoint``: of a
    full restart and of a checkpoint that blocks. ``bamboo_reconfigure``; ``bamboo_fits``: Bamboo can hold it
    at all.
    """

    name: str
    oobleck_reconfigure: float
    varuna_restart: float
    varuna_checkpoint: float
    bamboo_reconfigure: float
    bamboo_fits: bool


MODELS: tuple[PublishedModel, ...] = (
    PublishedModel("BERT-large", 2.0, 76.0, 16.0, 76.0, True),
    PublishedModel("GPT-2", 2.0, 83.0, 12.0, 80.0, True),
    PublishedModel("GPT-3 medium", 3.0, 79.0, 11.0, 100.0, False),
    PublishedModel("GPT-3 2.7B", 6.0, 515.0, 50.0, 230.0, False),
    PublishedModel("GPT-3 6.7B", 10.0, 701.0, 120.0, 450.0, False),
)

INTERVALS: dict[str, float] = {"6h": 21_600.0, "1h": 3_600.0, "30m": 1_800.0, "10m": 600.0}
"""Seconds between losses in the traces with a fixed interval, by name."""

SPOT: dict[str, float] = {"p3": 234.0, "gcp": float("nan")}
"""Mean seconds between losses in the spot traces (EC2 P3, GCP), before they are rescaled to 15..30 hosts;
not a number where it is not told."""


@dataclass(frozen=True)
class Ratio:
    """Throughput of Oobleck over Varuna (None: Varuna makes no progress) and over Bamboo (None: it does not
    fit)."""

    over_varuna: float | None
    over_bamboo: float | None


def _row(*cells: tuple[float | None, float | None]) -> dict[str, Ratio]:
    return {model.name: Ratio(*cell) for model, cell in zip(MODELS, cells, strict=True)}


THROUGHPUT: dict[str, dict[str, Ratio]] = {
    "6h": _row((1.1, 3.7), (1.0, 4.9), (1.0, None), (1.0, None), (1.0, None)),
    "1h": _row((1.2, 3.8), (1.0, 5.0), (1.0, None), (1.1, None), (1.6, None)),
    "30m": _row((1.2, 3.8), (1.0, 5.0), (1.0, None), (1.2, None), (3.9, None)),
    "10m": _row((1.6, 4.0), (1.1, 5.3), (1.4, None), (3.9, None), (13.9, None)),
    "p3": _row((1.2, 3.5), (1.0, 4.7), (1.0, None), (9.1, None), (None, None)),
    "gcp": _row((1.1, 3.6), (1.0, 4.7), (1.0, None), (6.7, None), (None, None)),
}
"""The artifact's table, by trace and model. The trace of 3 h is within 0.1 of that of 6 h."""
