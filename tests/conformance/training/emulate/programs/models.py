"""Parts of models and ways to train them, one step each, on one device."""

import os

import torch
import torch.nn.functional as F
from torch import nn

LOCAL = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(LOCAL)
HALF = torch.bfloat16


def rand(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, device="cuda", dtype=dtype).requires_grad_(grad)


def step(model, *inputs, optimizer=torch.optim.SGD, loss=lambda y: y.float().pow(2).mean(), **options):
    model = model.cuda()
    opt = optimizer(model.parameters(), lr=0.1, **options)
    out = loss(model(*inputs))
    out.backward()
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.shape == p.shape, name
    opt.step()
    opt.zero_grad(set_to_none=True)
    return out


def case_attention():
    for dtype in (HALF, torch.float16, torch.float32):
        q, k, v = (rand(2, 8, 128, 64, dtype=dtype) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).sum().backward()
        mask = torch.ones(128, 128, dtype=torch.bool, device="cuda").tril()
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
        F.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.zeros(2, 1, 128, 128, device="cuda", dtype=dtype)
        )
        assert q.grad.shape == q.shape
    q, kv = rand(2, 8, 128, 64, dtype=HALF), rand(2, 2, 128, 64, dtype=HALF)
    F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True).sum().backward()
    assert kv.grad.shape == kv.shape
    short = rand(2, 8, 64, 64, dtype=HALF)
    assert F.scaled_dot_product_attention(short, q, q).shape == short.shape


def case_recurrent():
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        step(kind(16, 32, num_layers=2, batch_first=True), rand(4, 10, 16), loss=lambda y: y[0].sum())


def case_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    step(model, rand(2, 3, 32, 32, grad=False))
    step(
        model.to(memory_format=torch.channels_last), rand(2, 3, 32, 32).to(memory_format=torch.channels_last)
    )
    step(nn.Conv1d(4, 4, 3), rand(2, 4, 9))
    step(nn.Conv3d(1, 2, 3), rand(1, 1, 5, 5, 5))
    F.interpolate(rand(1, 1, 4, 4), scale_factor=2, mode="bilinear").sum().backward()
    model.eval()(rand(2, 3, 32, 32))


def case_losses_and_indices():
    logits, target = rand(8, 10), torch.randint(0, 10, (8,), device="cuda")
    F.cross_entropy(logits, target, label_smoothing=0.1, ignore_index=-100).backward()
    F.nll_loss(logits.log_softmax(-1), target).backward()
    F.binary_cross_entropy_with_logits(logits, torch.rand_like(logits)).backward()
    F.mse_loss(logits, torch.zeros_like(logits)).backward()
    F.kl_div(logits.log_softmax(-1), torch.softmax(logits, -1).detach(), reduction="batchmean").backward()
    step(nn.EmbeddingBag(50, 8, mode="sum"), torch.randint(0, 50, (4, 3), device="cuda"))
    step(nn.Embedding(50, 8, padding_idx=0), torch.randint(0, 50, (4, 3), device="cuda"))
    x = rand(6, 5, grad=False)
    values, where = x.topk(2, dim=-1)
    x.scatter_(1, where, values)
    x.gather(1, where).cumsum(0)
    x.sort(dim=0), x.argmax(), x.max(dim=1), torch.where(x > 0, x, 0.0), x.index_select(0, where[:, 0])
    x[where[:, 0]].sum(), x[:, None, :2], torch.einsum("ij,kj->ik", x, x), torch.cat([x, x]), x.roll(1, 0)
    x.index_add_(0, where[:, 0], x), x.masked_fill_(x > 0, 0.0), torch.bucketize(x, x[0].sort()[0])
    x.flatten()[where.flatten()] = 1.0
    one_hot = F.one_hot(torch.arange(3, device="cuda"), num_classes=7)
    assert one_hot.shape == (3, 7) and torch.histc(x, 10).shape == (10,)
    (
        torch.bincount(where.flatten(), minlength=5),
        torch.linalg.vector_norm(x),
        x.norm(dim=1),
        torch.tril(x),
        x.var(),
    )


def case_optimizers():
    kinds = [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}), (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"foreach": False}), (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False, "amsgrad": True}), (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.Adam, {"capturable": True}), (torch.optim.Adafactor, {}), (torch.optim.NAdam, {}),
    ]  # fmt: skip
    for kind, options in kinds:
        step(nn.Linear(8, 8), rand(4, 8), optimizer=kind, **options)


def case_mixed_precision():
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4)).cuda()
    opt = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    stepped = []
    opt.register_step_post_hook(lambda *args: stepped.append(1))
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(rand(8, 16, grad=False))
            assert out.dtype == torch.float16
            loss = F.mse_loss(out.float(), torch.zeros(8, 4, device="cuda"))
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert len(stepped) == 3, "an overflow was pretended"
    assert scaler.get_scale() > 0
    with torch.autocast("cuda", dtype=HALF):
        assert model(rand(8, 16)).dtype == HALF
    with torch.amp.autocast(device_type="cuda", enabled=False):
        assert model(rand(8, 16)).dtype == torch.float32


def case_checkpointing():
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16)).cuda()
    x = rand(4, 16)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    checkpoint(block, x, use_reentrant=True).sum().backward()
    checkpoint_sequential(block, 2, x, use_reentrant=False).sum().backward()
    assert x.grad.shape == x.shape


def case_autograd():
    x = rand(4, 4)
    (g,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
    g.sum().backward()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            return grad * 2 + 0 * a

    Double.apply(x).sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x).sum()
    y.backward()
    with torch.no_grad():
        x.add_(1)
    with torch.inference_mode():
        assert (x * 2).shape == x.shape
    torch.func.vmap(lambda a: a.sum())(x)
    torch.func.grad(lambda a: a.sum())(x)


def case_low_precision():
    a = torch.randn(32, 64, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(16, 64, device="cuda").to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device="cuda")
    assert torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=HALF).shape == (32, 16)
    grouped = torch._grouped_mm(
        torch.randn(64, 32, device="cuda", dtype=HALF), torch.randn(4, 32, 16, device="cuda", dtype=HALF),
        offs=torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="cuda"),
    )  # fmt: skip
    assert grouped.shape == (64, 16)
    step(nn.RMSNorm(32, device="cuda", dtype=HALF), rand(4, 32, dtype=HALF))


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
