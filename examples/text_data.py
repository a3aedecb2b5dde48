"""A text file as training data: bytes are tokens, so no tokeniser is needed."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

TEXT = Path(__file__).resolve().parent / "data" / "coriolanus.txt"


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """``count`` sequences of ``seq`` bytes of a text, each with the bytes that follow, over and over."""

    def __init__(self, path: Path, seq: int, count: int) -> None:
        self.data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        self.seq, self.count = seq, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        where = (index * self.seq + torch.arange(self.seq + 1)) % len(self.data)
        window = self.data[where].long()
        return window[:-1], window[1:]
