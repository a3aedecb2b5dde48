"""Batches from the workers of a DataLoader, one by one; each is checked."""

import os
import time

import torch
from torch.utils.data import DataLoader, Dataset

SIZE = 50_000


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.full((SIZE,), at, dtype=torch.int64)


if __name__ == "__main__":
    wrong = []
    loader = DataLoader(Numbers(), batch_size=4, num_workers=2, prefetch_factor=4)
    for number, batch in enumerate(loader):
        if batch[:, 0].tolist() != list(range(4 * number, 4 * number + 4)) or int(batch.sum()) != SIZE * int(
            batch[:, 0].sum()
        ):
            wrong.append(number)
        print(f"batch {number}", flush=True)
        while number > 5 and not os.path.exists("/row/go"):
            time.sleep(0.05)
        time.sleep(0.05)
    print("ended well" if not wrong else f"ended: batches {wrong} are wrong", flush=True)
