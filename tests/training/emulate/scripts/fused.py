"""Fused kernels of packages that are not installed, forward and backward, told apart by their sizes."""

import pathlib
import sys
import tempfile

import torch

HALF = torch.bfloat16


def given(*shape, dtype=HALF):
    return torch.empty(*shape, device="cuda", dtype=dtype, requires_grad=True)


def flash():
    from flash_attn import flash_attn_func, flash_attn_qkvpacked_func, flash_attn_varlen_func

    q, kv = given(2, 256, 8, 64), given(2, 256, 2, 64)
    flash_attn_func(q, kv, kv, causal=True).sum().backward()
    qkv = given(2, 128, 3, 8, 64)
    before = torch.cuda.memory_allocated()
    out = flash_attn_qkvpacked_func(qkv)
    # the output, and for each row of scores a float32
    assert torch.cuda.memory_allocated() - before == 2 * 128 * 8 * (64 * 2 + 4)
    out.sum().backward()
    assert qkv.grad.shape == qkv.shape
    q = given(100, 8, 64)
    offsets = torch.tensor([0, 10, 40, 100], dtype=torch.int32).cuda()
    flash_attn_varlen_func(q, q, q, offsets, offsets, 60, 60, causal=True).sum().backward()
    flash_attn_func(given(1, 512, 4, 64), given(1, 512, 4, 64), given(1, 512, 4, 64), causal=True,
                    window_size=(127, 0))  # fmt: skip
    offsets = (torch.rand(5, device="cuda") * 100).int()
    flash_attn_varlen_func(q, q, q, offsets, offsets, 60, 60)


def hopper():
    from flash_attn_interface import flash_attn_func, flash_attn_varlen_func

    q, kv = given(2, 256, 8, 128), given(2, 256, 2, 128)
    flash_attn_func(q, kv, kv, causal=True).sum().backward()
    q = given(100, 8, 64)
    offsets = torch.tensor([0, 10, 40, 100], dtype=torch.int32).cuda()
    out, lse = flash_attn_varlen_func(q, q, q, offsets, offsets, 60, 60, return_attn_probs=True)
    assert out.shape == (100, 8, 64) and lse.shape == (8, 100)


def hub():
    """The package ``kernels``, on a machine that does not reach its Hub."""
    with tempfile.TemporaryDirectory() as folder:
        answer = "def {}(repo_id, **options):\n    raise OSError('no network')\n"
        pathlib.Path(folder, "kernels.py").write_text(
            answer.format("get_kernel") + answer.format("has_kernel")
        )
        sys.path.insert(0, folder)
        import kernels
    q = given(1, 64, 4, 64)
    for name in ("varunneal/flash-attention-3", "kernels-community/flash-attn3"):
        assert kernels.has_kernel(name)
        kernels.get_kernel(name, version=1).flash_attn_interface.flash_attn_func(q, q, q, window_size=(31, 0))
    plain = kernels.get_kernel("kernels-community/flash-attn2")
    assert plain.flash_attn_func(q, q, q).shape == q.shape
    try:
        kernels.get_kernel("kernels-community/activation")
    except OSError:
        return
    raise AssertionError("nobody knows what it computes")


def apex():
    from apex.normalization import FusedLayerNorm, FusedRMSNorm
    from apex.optimizers import FusedAdam

    model = torch.nn.Sequential(FusedLayerNorm(64), FusedRMSNorm(64)).cuda()
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    for _ in range(3):
        model(given(7, 64, dtype=torch.float32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def float8():
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling, Format

    layer = te.Linear(64, 96, bias=False, params_dtype=HALF)
    with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID)):
        for first in (True, False):
            layer(given(32, 64), is_first_microbatch=first).sum().backward()


def core():
    import transformer_engine.pytorch as te

    attention = te.DotProductAttention(8, 64, num_gqa_groups=2)
    q, k = given(128, 2, 8, 64), given(128, 2, 2, 64)
    out = attention(q, k, k)
    assert out.shape == (128, 2, 512) and out.is_contiguous()
    out.sum().backward()


def refused():
    import transformer_engine.pytorch as te
    from flash_attn import flash_attn_with_kvcache
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.fp8 import fp8_model_init

    q, full = given(8, 2, 4, 64), given(8, 2, 4, 64, dtype=torch.float32)
    attention = te.DotProductAttention(4, 64)

    def in_float8():
        with te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_dpa=True)):
            attention(q, q, q)

    for call in (
        lambda: flash_attn_with_kvcache(q, q, q),
        lambda: attention(full, full, full),
        lambda: attention(q, q, q, attn_mask_type="arbitrary"),
        in_float8,
        lambda: te.Linear(8, 8, delay_wgrad_compute=True),
        lambda: te.TransformerLayer(8, 8, 8),
        fp8_model_init,
    ):
        try:
            call()
        except NotImplementedError as error:
            assert "cannot be emulated because" in str(error)
        else:
            raise AssertionError("nothing was refused")


def parallel():
    import torch.distributed as dist
    import transformer_engine.pytorch as te

    dist.init_process_group("nccl")
    options = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "params_dtype": HALF}
    up = te.LayerNormLinear(64, 256, parallel_mode="column", fuse_wgrad_accumulation=True, **options)
    down = te.Linear(256, 64, parallel_mode="row", **options)
    up.weight.main_grad, up.weight.grad_added_to_main_grad = torch.zeros(up.weight.shape).cuda(), False
    x = given(4, 2, 64)
    out = down(up(x))
    assert out.shape == x.shape
    out.sum().backward()
    assert up.weight.grad_added_to_main_grad
    te.Linear(256, 48, parallel_mode="row", ub_overlap_rs=True, **options)(given(64, 32))


def without():
    sys.modules["apex"] = None
    try:
        import apex  # noqa: F401
    except ImportError:
        torch.nn.LayerNorm(8).cuda()(given(3, 8, dtype=torch.float32))


for name in sys.argv[1:]:
    globals()[name]()
