"""A script that stands still, or only seems to, in each case in another way."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

FOLDER = Path(os.environ.get("STUCK_FOLDER", "."))


def train():
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        model(torch.ones(1, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def records(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.ones(1, device="cuda")
        time.sleep(0.1)


def case_sleeps():
    time.sleep(1000)


def case_spins():
    while True:
        pass


def case_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)


def case_child():
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (FOLDER / "child").write_text(f"{child.pid}\n")
    child.wait()


def case_reads():
    x, turns = torch.rand(8, device="cuda"), 0
    while x.sum().item() < 100:
        x, turns = x + 1, turns + 1
        print(turns, flush=True)
        with open("/dev/zero", "rb") as file:
            file.read(1 << 20)
        for _ in range(3):
            x.max().item()


def case_grows():
    x, until = torch.rand(8, device="cuda"), time.monotonic() + 2.5
    while time.monotonic() < until:
        x = torch.cat([x, x[:1]])
        x.sum().item()
        time.sleep(0.02)
    train()


def case_records():
    records(2)
    train()


if __name__ == "__main__":
    names = [name for name in globals() if name.startswith("case_")]
    globals()[sys.argv[1] if sys.argv[1:] else names[int(os.environ["RANK"])]]()
