"""A job of a few operators, for sweeps: one layer, its gradient summed over all ranks."""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--note", default="", help="a file to which every start of this script adds a line")
args = parser.parse_args()
if args.note:
    with open(args.note, "a") as file:
        file.write(f"{args.width}\n")
if args.width % 2:
    raise SystemExit(f"--width {args.width} is odd")

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
layer = torch.nn.Linear(args.width, args.width, device="cuda")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.randn(64, args.width, device="cuda")).sum().backward()
    for parameter in layer.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
