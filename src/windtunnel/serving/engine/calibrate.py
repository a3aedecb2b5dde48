"""``windtunnel calibrate serving.engine``: what the steps of a small model take here, for the twin.

The engine that serves takes waves of requests (`live.timing`); the step model that fits its steps best
relative to their times, without a negative coefficient, is kept with its error: of one thread.
"""

from __future__ import annotations

from windtunnel.calibration.profiles import Calibrated, Progress, own, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.serving.engine import profile

MODEL = "small-attention"
CHUNK = 512
QUICK = ((1, 16, 0), (6, 16, 0), (16, 16, 0), (1, 640, 0), (4, 256, 0), (1, 128, 8))
FULL = (
    *((rows, 16, 0) for rows in (1, 2, 4, 8, 16, 32, 64)), *((rows, 256, 0) for rows in (1, 4, 16, 32)),
    (1, 2048, 0), (4, 1024, 0), (1, 512, 16), (2, 256, 32),
)  # fmt: skip
"""As of `live.timing.measure`."""


def calibrate_here(*, quick: bool, progress: Progress) -> Calibrated:
    """Measure and keep the profile; ``quick``: fewer and smaller steps."""
    import torch
    from rich.table import Table

    from windtunnel.serving.engine.live import families, timing

    progress("model", 0.0)
    torch.set_num_threads(1)
    executor = families.load(MODEL)
    waves = QUICK if quick else FULL
    points, seconds = timing.measure(executor, waves, CHUNK, progress=lambda share: progress("steps", share))
    time, error = profile.fit(points, seconds)
    path = own(profile.NAME)
    profile.save(
        path, time, executor.token_bytes, model=f"{MODEL} on a core of {processor_name()}",
        error=error, date=today(),
        points=[[*point, spent] for point, spent in zip(points, seconds, strict=True)],
    )  # fmt: skip
    table = Table("a step takes", "seconds")
    for words, value in (
        ("before any work", time.base), ("where rows decode", time.decode), ("for each row", time.row),
        ("for each KV token read", time.kv), ("for each chunk of prefill", time.chunk),
        ("for each token of it", time.token), ("for each token that such a one attends to", time.pair),
    ):  # fmt: skip
        table.add_row(words, f"{value:.4g}")
    summary = f"{len(points)} steps of {MODEL}, {error:.1%} from the step model on average"
    return Calibrated(path, summary, table)
