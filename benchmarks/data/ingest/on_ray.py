"""A session's batches by Ray Data, in a Python that has Ray: ``python -m`` this, with session and processes.

The trainer's process gets Arrow tables, no tensors: that Python may have no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.data.ingest.paces import Pace, paced
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.data.ingest import reader, transforms
from windtunnel.data.ingest.model import Session


def pace(session: Session, processes: int) -> Pace:
    """Of the whole session on a Ray of this host with so many processors."""
    import ray

    ray.init(num_cpus=processes, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    steps = [(one, transforms.settings(one, "bench")) for one in session.transforms]

    def made(table: pa.Table) -> pa.Table:
        columns: dict[str, Any] = {name: table[name].combine_chunks() for name in table.column_names}
        rows = transforms.Rows(session.seed, 0, np.arange(table.num_rows))
        found = transforms.apply(steps, columns, rows, session.table)
        return pa.table({name: found[name] for name in session.columns})

    data = ray.data.read_parquet(session.table, columns=list(reader.needed(session)))
    data = data.map_batches(made, batch_format="pyarrow", batch_size=session.batch)

    def batches() -> Iterator[int]:
        for _ in range(session.epochs):
            for table in data.iter_batches(batch_size=session.batch, batch_format="pyarrow"):
                yield table.num_rows

    return paced(batches(), sum(one.rows for one in reader.splits(session)), session.epochs)


if __name__ == "__main__":
    print(json.dumps(to_plain(pace(from_plain(Session, json.loads(sys.argv[1])), int(sys.argv[2])))))
