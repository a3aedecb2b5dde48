"""Ways to spread a model that the examples do not use."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
dist.init_process_group("nccl")


def net(depth=3, width=32):
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]).cuda()


def train(model, steps=2, width=32, **options):
    opt = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        model(torch.randn(4, width, device="cuda")).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return opt


def sharded(mesh=None, **options):
    model = net()
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def case_hybrid_shard():
    mesh = init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=("replicate", "shard"))
    train(
        sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    )


def case_fully_shard_options():
    model = sharded(reshard_after_forward=False)
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].set_modules_to_backward_prefetch([model[1]])
    train(model, fused=True)
    model.set_requires_gradient_sync(False)
    model(torch.randn(4, 32, device="cuda")).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.randn(4, 32, device="cuda")).sum().backward()
    model.unshard()
    model.reshard()


def case_first_fsdp():
    train(FullyShardedDataParallel(net(), device_id=LOCAL, use_orig_params=True))


def case_ddp_options():
    train(
        DistributedDataParallel(
            net(), device_ids=[LOCAL], gradient_as_bucket_view=True, bucket_cap_mb=1, static_graph=True
        )
    )
    model = DistributedDataParallel(net(), device_ids=[LOCAL], find_unused_parameters=True)
    with model.no_sync():
        model(torch.randn(4, 32, device="cuda")).sum().backward()
    train(model)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    model = DistributedDataParallel(net(), device_ids=[LOCAL])
    model.register_comm_hook(None, bf16_compress_hook)
    train(model)


def case_zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net(), device_ids=[LOCAL])
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.1)
    model(torch.randn(4, 32, device="cuda")).sum().backward()
    opt.step()


def case_tensor_parallel():
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cuda", (WORLD,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).cuda()
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)),
                                     "3": RowwiseParallel(output_layouts=Shard(1))})  # fmt: skip
    x = distribute_tensor(torch.randn(2, WORLD * 2, 32, device="cuda"), mesh, [Shard(1)])
    out = model(x)
    (out.full_tensor() if isinstance(out, DTensor) else out).sum().backward()
    t = DTensor.from_local(torch.randn(4, 4, device="cuda"), mesh, [Shard(0)])
    assert t.shape == (4 * WORLD, 4) and t.redistribute(mesh, [Replicate()]).to_local().shape == (
        4 * WORLD,
        4,
    )
    assert t.full_tensor().shape == (4 * WORLD, 4)


def case_state_dicts():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

    model = sharded()
    opt = train(model)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert not whole or whole["0.0.weight"].shape == (32, 32)
    weights, moments = get_state_dict(model, opt)
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=directory)


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
