"""Every way in which a script of a job talks to other ranks, small, with what must hold on any rank."""

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
dist.init_process_group("nccl", timeout=datetime.timedelta(minutes=5), device_id=torch.device("cuda", LOCAL))


def full(*shape, value=1.0, dtype=torch.float32):
    return torch.full(shape, value, dtype=dtype, device="cuda")


def case_ring_in_a_batch():
    out, into = torch.empty(1000, device="cuda"), torch.empty(1000, device="cuda")
    ops = [
        dist.P2POp(dist.isend, out, (RANK + 1) % WORLD),
        dist.P2POp(dist.irecv, into, (RANK - 1) % WORLD),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def case_messages_without_a_batch():
    box = torch.empty(500, device="cuda")
    if RANK % 2 == 0:
        dist.isend(box, RANK + 1).wait()
        dist.recv(box, RANK + 1)
    else:
        dist.irecv(box, RANK - 1).wait()
        dist.send(box, RANK - 1)


def case_uneven_all_to_all():
    # Rank r sends r + 1 rows to each of the others.
    out = torch.empty(sum(r + 1 for r in range(WORLD)), 4, device="cuda")
    into = torch.empty((RANK + 1) * WORLD, 4, device="cuda")
    dist.all_to_all_single(out, into, [r + 1 for r in range(WORLD)], [RANK + 1] * WORLD)
    dist.all_to_all([torch.empty(3, device="cuda") for _ in range(WORLD)],
                    [torch.empty(3, device="cuda") for _ in range(WORLD)])  # fmt: skip


def case_groups_by_splitting():
    half = dist.split_group(split_ranks=[list(range(WORLD // 2)), list(range(WORLD // 2, WORLD))])
    assert dist.get_process_group_ranks(half) == [r for r in range(WORLD) if r // 4 == RANK // 4]
    dist.all_reduce(torch.empty(11, device="cuda"), group=half)
    pair = dist.split_group(half, [[0, 3]], group_desc="mesh_outer")  # of each half
    if RANK % 4 in (0, 3):
        assert dist.get_process_group_ranks(pair) == [RANK // 4 * 4, RANK // 4 * 4 + 3]
    else:
        assert pair == dist.GroupMember.NON_GROUP_MEMBER


def case_lists():
    mine = torch.empty(7, 3, device="cuda")
    everything = [torch.empty_like(mine) for _ in range(WORLD)]
    dist.all_gather(everything, mine)
    dist.reduce_scatter(mine, everything)
    dist.gather(mine, everything if RANK == 0 else None, dst=0)
    dist.scatter(mine, everything if RANK == 0 else None, src=0)
    dist.reduce(mine, dst=1)
    dist.broadcast(mine, src=1)
    flat = torch.empty(7 * WORLD, 3, device="cuda")
    dist.all_gather_into_tensor(flat, mine)
    dist.reduce_scatter_tensor(mine, flat, op=dist.ReduceOp.AVG)


def case_coalesced():
    xs = [torch.empty(10, device="cuda") for _ in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    dist.all_reduce_coalesced(xs)


def case_functional():
    import torch.distributed._functional_collectives as functional

    x = torch.empty(WORLD, 8, device="cuda")
    group = dist.group.WORLD
    y = functional.all_reduce(x, "sum", group)
    z = functional.all_gather_tensor(x, 0, group)
    w = functional.reduce_scatter_tensor(z, "sum", 0, group)
    v = functional.all_to_all_single(x, None, None, group)
    assert (y + w + v).shape == x.shape and z.shape == (WORLD * WORLD, 8)


def case_groups_and_meshes():
    mine = None
    for start in range(0, WORLD, 2):
        group = dist.new_group([start, start + 1])
        if RANK in (start, start + 1):
            mine = group
    assert mine is not None and dist.get_world_size(mine) == 2 and dist.get_rank(mine) == RANK % 2
    dist.all_reduce(torch.empty(8, device="cuda"), group=mine)
    host, _ = dist.new_subgroups(2)
    dist.barrier(host)
    mesh = init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["tp"].size() == 2 and mesh.get_local_rank("tp") == RANK % 2
    assert list(mesh.get_coordinate()) == [RANK // 2, RANK % 2]
    dist.all_reduce(torch.empty(8, device="cuda"), group=mesh.get_group("dp"))
    flat = mesh[("dp", "tp")]._flatten("all")
    assert flat.size() == WORLD


def case_numbers_that_travel():
    # Small tensors whose data are known keep them, through the device and through collectives.
    x = torch.tensor([RANK, 5], device="cuda")
    assert x.tolist() == [RANK, 5]
    total = torch.tensor(3.0, device="cuda")
    dist.all_reduce(total)
    assert total.item() == 3.0 * WORLD
    flags = torch.ones(1, dtype=torch.int64, device="cuda")
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    assert flags.item() == 1
    host = torch.tensor([2.0])
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(host, group=gloo)
    assert host.item() == 2.0 * WORLD


def case_groups_of_others():
    """They are counted without being made: names, results and errors stay as they are."""
    others = [rank for rank in range(WORLD) if rank != RANK]
    before = dist.distributed_c10d._world.group_count
    for _ in range(3):
        assert dist.new_group(others[:1]) == dist.GroupMember.NON_GROUP_MEMBER
    for wrong in (others[:1] * 2, [others[0], WORLD]):
        try:
            dist.new_group(wrong)
        except ValueError:
            continue
        raise AssertionError(f"a group of {wrong} was made")
    mine = dist.new_group([RANK])
    assert dist.distributed_c10d._world.group_count == before + 4
    assert mine.group_name == str(before + 3)


def case_work_future():
    x = torch.empty(64, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    (y,) = work.get_future().then(lambda future: [future.value()[0] * 2]).wait()
    assert y.shape == x.shape and work.is_completed()


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
