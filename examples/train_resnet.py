"""Train a ResNet on made-up images with DistributedDataParallel. Plain PyTorch, nothing else.

    torchrun --nproc-per-node 2 examples/train_resnet.py --size debug --steps 20

Source: He et al., "Deep Residual Learning for Image Recognition" (arXiv:1512.03385), table 1; the stride of a
bottleneck is in its 3 x 3 convolution, and the learning rate grows with the batch, as in Goyal et al.
(arXiv:1706.02677).
"""

import argparse
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, ...]
    bottleneck: bool
    width: int = 64
    classes: int = 1000
    image: int = 224


SIZES = {
    "debug": Config(blocks=(1, 1, 1, 1), bottleneck=False, width=16, classes=10, image=32),
    "18": Config(blocks=(2, 2, 2, 2), bottleneck=False),
    "50": Config(blocks=(3, 4, 6, 3), bottleneck=True),
}


class Images(Dataset[tuple[Tensor, int]]):
    """Made-up images: noise around a pattern that belongs to the class."""

    def __init__(self, config: Config, count: int, seed: int) -> None:
        self.config, self.count, self.seed = config, count, seed
        generator = torch.Generator().manual_seed(seed)
        self.patterns = torch.randn(config.classes, 3, 8, 8, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index * 7919 % self.config.classes
        pattern = F.interpolate(self.patterns[label, None], self.config.image)[0]
        return pattern + torch.randn(pattern.shape, generator=generator), label


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Block(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of 1 x 1, 3 x 3 and 1 x 1, around which the input is added."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            parts = [
                *convolution(inputs, width, 1), nn.ReLU(inplace=True),
                *convolution(width, width, 3, stride), nn.ReLU(inplace=True),
                *convolution(width, outputs, 1),
            ]  # fmt: skip
        else:
            parts = [
                *convolution(inputs, width, 3, stride), nn.ReLU(inplace=True),
                *convolution(width, width, 3),
            ]  # fmt: skip
        self.body = nn.Sequential(*parts)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))
        nn.init.zeros_(parts[-1].weight)  # a block begins as the identity

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """Images (batch, 3, height, width) to logits (batch, classes)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *convolution(3, config.width, 7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)
        )
        channels, blocks = config.width, []
        for stage, count in enumerate(config.blocks):
            width = config.width << stage
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                blocks.append(Block(channels, width, stride, config.bottleneck))
                channels = 4 * width if config.bottleneck else width
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(channels, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.blocks(self.stem(x)).mean((2, 3)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="debug", help="layers of the network (default: debug)")
    add("--batch", type=int, help="images a rank (default: 32 for debug, else 128)")
    add("--dtype", choices=["bf16", "fp32"], default="bf16", help="of computation; parameters are fp32")
    add("--channels-last", action="store_true", help="keep the channels of a pixel together in memory")
    add("--sync-bn", action="store_true", help="batch statistics over all ranks (CUDA only)")
    add("--lr", type=float, default=0.1, help="learning rate at 256 images a step (default: 0.1)")
    add("--steps", type=int, default=3, help="(default: 3)")
    add("--seed", type=int, default=0, help="of the initial weights and the data")
    args = parser.parse_args()
    args.batch = args.batch or (32 if args.size == "debug" else 128)
    if args.batch < 1 or args.steps < 1:
        parser.error("--batch and --steps must be at least 1")
    if args.sync_bn and not torch.cuda.is_available():
        parser.error("--sync-bn needs CUDA devices")
    return args


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size, config = dist.get_rank(), dist.get_world_size(), SIZES[args.size]
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    torch.manual_seed(args.seed)
    net = ResNet(config).to(device, memory_format=layout)
    if args.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DistributedDataParallel(net, device_ids=[device.index] if device.type == "cuda" else None)
    lr = args.lr * args.batch * world_size / 256
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    if rank == 0:
        print(f"{args.size}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    images = Images(config, args.steps * args.batch * world_size, args.seed)
    sampler = DistributedSampler(images, world_size, rank, shuffle=False)
    start = time.perf_counter()
    for step, batch in enumerate(DataLoader(images, args.batch, sampler=sampler), 1):
        pictures, labels = (tensor.to(device) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = model(pictures.to(memory_format=layout))
        loss = F.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach()
        dist.all_reduce(mean)
        loss_value = mean.item() / world_size
        now = time.perf_counter()
        if rank == 0:
            rate = world_size * args.batch / (now - start)
            memory = f"  {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB" if device.type == "cuda" else ""
            print(f"step {step}  loss {loss_value:.4f}  {rate:,.0f} images/s{memory}", flush=True)
        start = now


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():  # what torchrun would set
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    args = parse_arguments()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(args, device)
    # Else a thread of gloo may still hold a tensor when the interpreter goes, which aborts the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
