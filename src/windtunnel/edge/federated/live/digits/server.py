"""What the server does: FedAvg, in groups or not, and the accuracy of each round's model."""

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from windtunnel.edge.federated import FedP2P, federation, model
from windtunnel.store.eventlog import NAME, EventLog

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """All rounds; the result goes to the file that the run's configuration names."""
    config = context.run_config
    devices, groups = int(config["devices"]), int(config["groups"])
    samples = federation("digits", "dirichlet:0.5", devices, np.random.default_rng(0))
    shape = model("softmax", samples.train.x.shape[1], samples.train.classes)
    fedavg = FedAvg(fraction_evaluate=0.0, min_train_nodes=devices, min_available_nodes=devices)
    log = EventLog(Path(str(config["result"])).with_name(NAME))
    strategy = FedP2P(fedavg, groups=groups, patience=120.0, log=log) if groups else fedavg
    rounds: list[dict[str, float]] = []

    def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord:
        vector = arrays.to_numpy_ndarrays()[0].astype(np.float64)
        accuracy = shape.accuracy(vector, samples.test.x, samples.test.y)
        rounds.append({"number": number, "accuracy": accuracy, "ended": time.time()})
        return MetricRecord({"accuracy": accuracy})

    first = shape.initial(np.random.default_rng(0)).astype(np.float32)
    arrays = ArrayRecord([first, np.zeros(int(config["padding"]) // 4, np.float32)])
    strategy.start(grid, arrays, num_rounds=int(config["rounds"]), timeout=300.0, evaluate_fn=evaluated)
    events = strategy.events if isinstance(strategy, FedP2P) else []
    Path(str(config["result"])).write_text(json.dumps({"rounds": rounds, "events": events}))
