"""Train on the batches of a session that `windtunnel ingest master` serves.

    windtunnel ingest master session.yaml --folder ingest --port 7070
    python examples/data/train_ingest.py 127.0.0.1:7070 ingest/secret

Columns that are lists are looked up in an embedding table each, the others are numbers; one is "label".
"""

import argparse

import torch

from windtunnel.data.ingest import IngestDataset, Ragged

ROWS, DIM = 100_000, 16


class Clicks(torch.nn.Module):
    def __init__(self, batch):
        super().__init__()
        self.lists = [name for name, one in batch.items() if isinstance(one, Ragged)]
        self.numbers = [name for name in batch if name not in self.lists and name != "label"]
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(ROWS, DIM, mode="sum") for _ in self.lists)
        self.over = torch.nn.Linear(len(self.numbers) + DIM * len(self.lists), 1)

    def forward(self, batch):
        parts = [torch.nan_to_num(batch[name].float())[:, None] for name in self.numbers]
        for name, table in zip(self.lists, self.tables, strict=True):
            values, offsets = batch[name]
            parts.append(table(values % ROWS, offsets[:-1].long()))
        return self.over(torch.cat(parts, 1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("secret")
    parser.add_argument("--epochs", type=int, default=1)
    given = parser.parse_args()
    dataset = IngestDataset(given.address, secret=given.secret)
    model = None
    for epoch in range(given.epochs):
        rows = losses = steps = 0
        for batch in dataset:
            if model is None:
                model = Clicks(batch)
                optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"].float())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rows, losses, steps = rows + len(batch["label"]), losses + loss.item(), steps + 1
        waited = dataset.counts.stalled
        print(f"epoch {epoch}: {rows} rows, loss {losses / max(steps, 1):.4f}, waited {waited:.2f} s")


if __name__ == "__main__":
    main()
