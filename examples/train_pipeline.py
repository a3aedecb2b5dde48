"""A small language model over pipelines of hosts that come and go: templates, no spares, no step lost.

    windtunnel train --hosts 5 --on-loss shrink --inject "kill:host=1,step=7" examples/train_pipeline.py

Each block of the Llama of `llama_model` is a layer. Five hosts with room for half of the model each run a
pipeline of two and one of three; when one is lost, the others regroup by the next template and copy the
layers that they now need from each other. Losses and hashes at the end are those of a run without a failure,
bit for bit.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_model import SIZES, Block, rotations
from text_data import TEXT, Bytes
from windtunnel.training import elastic
from windtunnel.training.pipelines import LayerSpec, PipelineTrainer, even_templates


class Embedding(nn.Module):
    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Middle(nn.Module):
    """A block with its own rotary embedding."""

    def __init__(self, size: str, seq: int) -> None:
        super().__init__()
        config = SIZES[size]
        self.block = Block(config)
        freqs = rotations(config.dim // config.heads, seq, config.rope_theta, torch.device("cpu"))
        self.register_buffer("freqs", freqs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.freqs)


class Output(nn.Module):
    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="debug")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--microbatch-size", type=int, default=2)
    parser.add_argument("--n0", type=int, default=2, help="fewest hosts that hold the model")
    parser.add_argument("--reduction", choices=("float", "fixed"), default="fixed")
    parser.add_argument("--data", type=Path, default=TEXT)
    parser.add_argument("--checkpoint", type=Path, help="a folder that all hosts see")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps")
    return parser.parse_args()


def trainer(options: argparse.Namespace) -> PipelineTrainer:
    config = SIZES[options.size]
    layers = [
        LayerSpec("embedding", lambda: Embedding(config.vocab, config.dim)),
        *(LayerSpec(f"block{i}", lambda: Middle(options.size, options.seq)) for i in range(config.layers)),
        LayerSpec("output", lambda: Output(config.vocab, config.dim)),
    ]
    text = Bytes(options.data, options.seq, count=len(options.data.read_bytes()) // options.seq)

    def batch(indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*(text[index] for index in indices), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    return PipelineTrainer(
        layers,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        batch=batch,
        samples=len(text),
        microbatches=options.microbatches,
        microbatch_size=options.microbatch_size,
        templates=even_templates(layers, n0=options.n0),
        reduction=options.reduction,
        max_norm=1.0,
        checkpoint=options.checkpoint,
        checkpoint_every=options.checkpoint_every,
    )


def main() -> None:
    options = arguments()

    def train(job: Any) -> dict[str, Any]:
        def tell(step: int, loss: float) -> None:
            if job.rank == 0:
                print(f"step {step}  loss {loss:.4f}", flush=True)

        return job.keep("trainer", lambda: trainer(options)).fit(job, options.steps, tell)

    result = elastic.run(train, backend="gloo")
    print(result["losses"], result["hashes"])


if __name__ == "__main__":
    main()
