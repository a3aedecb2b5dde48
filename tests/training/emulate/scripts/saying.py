"""What ranks tell each other arrives as it was said: a case holds on each rank, whoever runs first."""

import os
import sys
import threading

import torch
import torch.distributed as dist
from cases import run

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
LAST = WORLD - 1
DEVICES = ("cuda", "cpu")


def case_broadcast():
    for device in DEVICES:
        mine = torch.tensor([RANK, 5, -RANK], device=device)
        dist.broadcast(mine, src=LAST)
        assert mine.tolist() == [LAST, 5, -LAST]
        into = torch.tensor(RANK + 0.5, device=device) if RANK == LAST else torch.empty((), device=device)
        dist.broadcast(into, src=LAST)
        assert into.item() == LAST + 0.5
        again = into.clone() if device == "cpu" else torch.empty_like(into).copy_(into)
        assert again.item() == LAST + 0.5


def case_weights_are_not_waited_for():
    for size in (8, 1 << 20):
        dist.broadcast(torch.randn(size, device="cuda"), src=LAST)
    loss = torch.randn(4, device="cuda").mean()
    dist.broadcast(loss, src=LAST)


def case_scatter():
    for device in DEVICES:
        into = torch.empty(2, dtype=torch.int64, device=device)
        parts = [torch.tensor([r, r * r], device=device) for r in range(WORLD)] if RANK == 2 else None
        dist.scatter(into, parts, src=2)
        assert into.tolist() == [RANK, RANK * RANK]


def case_messages():
    for device in DEVICES:
        said = torch.tensor([RANK, 7], device=device)
        into = torch.empty(2, dtype=torch.int64, device=device)
        ops = [
            dist.P2POp(dist.isend, said, (RANK + 1) % WORLD),
            dist.P2POp(dist.irecv, into, (RANK - 1) % WORLD),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert into.tolist() == [(RANK - 1) % WORLD, 7]


def case_objects():
    said = [{"from": RANK}, None, list(range(100_000)) if RANK == LAST else []]
    dist.broadcast_object_list(said, src=LAST)
    assert said == [{"from": LAST}, None, list(range(100_000))]
    scattered = [None]
    dist.scatter_object_list(scattered, [f"to {r}" for r in range(WORLD)] if RANK == 1 else None, src=1)
    assert scattered == [f"to {RANK}"]
    pair = dist.new_group([0, 3])
    said = [RANK]
    if RANK in (0, 3):
        dist.broadcast_object_list(said, group_src=1, group=pair)
        assert said == [3]
        with_tensor = [{"x": torch.ones(3, 5, device="cuda", dtype=torch.bfloat16), "y": torch.ones(2)}]
        dist.broadcast_object_list(with_tensor if RANK == 3 else (got := [None]), src=3, group=pair)
        if RANK == 0:
            x, y = got[0]["x"], got[0]["y"]
            assert x.is_cuda and x.shape == (3, 5) and x.dtype == torch.bfloat16 and y.tolist() == [1, 1]


def case_objects_by_message():
    # Down the ring from the last rank: each waits for the one after it.
    said = [f"from {RANK}"]
    if RANK < LAST:
        got = [None]
        assert dist.recv_object_list(got, src=RANK + 1) == RANK + 1
        assert got == [f"from {RANK + 1}"]
    if RANK > 0:
        dist.send_object_list(said, dst=RANK - 1)


def case_wrong_arguments():
    pair = dist.new_group([0, 1])
    for call, error in (
        (lambda: dist.broadcast_object_list([1], src=3, group=pair), ValueError),
        (lambda: dist.gather_object(1, [None], dst=3, group=pair), ValueError),
        (lambda: dist.broadcast_object_list([1], src=0, group_src=0), ValueError),
        (lambda: dist.send_object_list([1], dst=RANK), ValueError),
        (lambda: dist.scatter_object_list([], [1] * WORLD, src=0), ValueError),
        (lambda: dist.gather_object(1, None if RANK == 0 else [None], dst=0), (ValueError, TypeError)),
        (lambda: dist.all_gather_object([None] * WORLD, threading.Lock()), TypeError),
        (lambda: dist.all_gather_object([None] * (WORLD - 1), 1), IndexError),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError(f"no {error}: {call.__code__.co_firstlineno}")
    if RANK > 1:
        assert dist.broadcast_object_list([1], src=0, group=pair) is None  # warns
    said = ["good"]
    if RANK == LAST:
        try:
            dist.broadcast_object_list([threading.Lock()], src=LAST)
        except TypeError:
            pass
        else:
            raise AssertionError("a lock was pickled")
    dist.broadcast_object_list(said, src=LAST)
    assert said == ["good"]


def case_gathered_of_earlier_ranks():
    # Ranks that run before this one are heard; of the others nothing is known but what this one holds.
    known = [RANK if r > RANK else r for r in range(WORLD)]
    said = [None] * WORLD
    dist.all_gather_object(said, RANK)
    assert said == known
    for to in (0, LAST):
        said = [None] * WORLD if to == RANK else None
        dist.gather_object((RANK, to), said, dst=to)
        assert said is None or said == [(r, to) for r in known]
    for device in DEVICES:
        mine = torch.tensor([RANK], device=device)
        into = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(WORLD)]
        dist.all_gather(into, mine)
        assert [received.item() for received in into] == known
        dist.all_gather(into, torch.tensor([RANK + 1], device=device))
        assert [received.item() for received in into] == [r + 1 for r in known]
        flat = torch.empty(WORLD, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(flat, mine)
        assert flat.tolist() == known
        dist.gather(mine, into if RANK == LAST else None, dst=LAST)
        if RANK == LAST:
            assert [received.item() for received in into] == known


def case_wait_for_each_other():
    said = [RANK]
    for source in (1, 0) if RANK == 0 else (0, 1):
        dist.broadcast_object_list(said, src=source)


if __name__ == "__main__":
    torch.empty(1, device="cuda")
    run(globals(), sys.argv[1:])
