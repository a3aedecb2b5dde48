"""Two tables spread over the ranks of a job, trained, spread anew as what is asked for changes, and saved.

torchrun --nproc-per-node 2 examples/data/sharded_embeddings.py
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from windtunnel.data.embeddings import EmbeddingTable, ShardedEmbedding, exchange, synthetic

SAMPLES = 64


def main() -> None:
    dist.init_process_group("gloo")
    ranks, shares = synthetic.zipf(50_000, 1.1)
    items = EmbeddingTable("items", 50_000, 16, pooling=40.0, sequence=True, ranks=ranks, shares=shares)
    tags = EmbeddingTable("tags", 1_000, 16, pooling=5.0)
    orders = {one.name: synthetic.order(one.rows, seed=1) for one in (items, tags)}  # ids, most wanted first

    seen = exchange((items, tags), SAMPLES, intra=10e9, inter=1e9, distinct=False)
    adagrad = partial(torch.optim.Adagrad, lr=0.05)
    embeddings = ShardedEmbedding(seen, orders=orders, optimizer=adagrad)
    top = torch.nn.Linear(16, 1)
    rng = np.random.default_rng(dist.get_rank())
    for step in range(6):
        if step == 3:  # tomorrow other items are wanted: the same rows, elsewhere
            orders["items"] = synthetic.order(items.rows, seed=1, day=1, drift=0.3)
            embeddings.reshard(replace(seen, samples=SAMPLES), orders)
        drawn = {one.name: synthetic.draw(one, SAMPLES, rng, orders[one.name]) for one in (items, tags)}
        ids = {name: torch.from_numpy(found) for name, (_, found) in drawn.items()}
        bags = torch.from_numpy(drawn["tags"][0][:-1])
        vectors = embeddings({"items": ids["items"], "tags": (ids["tags"], bags)})
        loss = top(vectors["items"]).square().mean() + top(vectors["tags"]).square().mean()
        loss.backward()
        embeddings.step()
    embeddings.save("embeddings")  # one file a table, for any number of ranks
    if dist.get_rank() == 0:
        cuts = embeddings.decision.tables[0]
        moved = sum(map(sum, embeddings.sent.values()))
        print(f"{cuts.hot} rows of items lie on both ranks; rank 0 has sent {moved / 2**20:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
