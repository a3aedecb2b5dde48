"""What a device does: a few epochs on its own digits. The second array is there for its size alone."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from windtunnel.edge.federated import federation, model, peer_mod, train

app = ClientApp(mods=[peer_mod])


@app.train()
def learn(message: Message, context: Context) -> Message:
    """One round of this device."""
    devices, place = int(context.run_config["devices"]), int(context.node_config["partition-id"])
    samples = federation("digits", "dirichlet:0.5", devices, np.random.default_rng(0))
    shape = model("softmax", samples.train.x.shape[1], samples.train.classes)
    vector, padding = message.content["arrays"].to_numpy_ndarrays()
    random = np.random.default_rng((int(message.content["config"]["server-round"]), place))
    trained = train(shape, vector[None], samples, np.array([place]), random=random)[0]
    # Flower sends no array again that the other side has: this one is never the same
    padding = random.standard_normal(len(padding), dtype=np.float32)
    return Message(
        RecordDict(
            {
                "arrays": ArrayRecord([trained.astype(np.float32), padding]),
                "metrics": MetricRecord({"num-examples": len(samples.parts[place])}),
            }
        ),
        reply_to=message,
    )
