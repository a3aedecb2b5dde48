"""``windtunnel calibrate serving.engine``: what the steps of a small model take here, for the twin.

The executor that serves decodes and prefills on a grid of rows, contexts and chunks; the step model that fits
best relative to the times, without a negative coefficient, is kept with its error: of one thread.
"""

from __future__ import annotations

from windtunnel.calibration.profiles import Calibrated, Progress, own, today
from windtunnel.cluster.catalogue import processor_name
from windtunnel.serving.engine import profile

MODEL = "small-attention"
QUICK = {"rows": (1, 4, 16), "contexts": (16, 256), "chunks": (16, 128), "apart": 4096}
FULL = {
    "rows": (1, 2, 4, 8, 16, 32, 64), "contexts": (16, 256, 1024), "chunks": (16, 64, 256, 512),
    "apart": 8192,
}  # fmt: skip


def calibrate_here(*, quick: bool, progress: Progress) -> Calibrated:
    """Measure and keep the profile; ``quick``: fewer and smaller steps."""
    import torch
    from rich.table import Table

    from windtunnel.serving.engine.live import named, timing

    progress("model", 0.0)
    torch.set_num_threads(1)
    executor = named.load(MODEL)
    grid = QUICK if quick else FULL
    points = timing.measure(executor, **grid, progress=lambda share: progress("steps", share))  # type: ignore[arg-type]
    time, error = timing.fit(points)
    path = own(profile.NAME)
    profile.save(
        path, time, executor.token_bytes, model=f"{MODEL} on a core of {processor_name()}",
        error=error, date=today(),
        points=[[*point, spent] for point, spent in points],
    )  # fmt: skip
    table = Table("a step takes", "seconds")
    for words, value in (
        ("before any work", time.base), ("for each row", time.row), ("for each KV token read", time.kv),
        ("for each token prefilled", time.token), ("for each token that such a one attends to", time.pair),
    ):  # fmt: skip
        table.add_row(words, f"{value:.4g}")
    said = f"{len(points)} steps of {MODEL}, {error:.1%} from the step model on average"
    return Calibrated(path, said, table)
