"""Kernels written in Triton, as in its tutorials: plain, autotuned, with heuristics, as an operator."""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton
from triton.runtime import driver

HALF: tl.constexpr = tl.constexpr(0.5)
N, WIDTH = 4096, 1024


@triton.jit
def add_kernel(x_ptr, y_ptr, output_ptr, n_elements, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(axis=0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offsets < n_elements
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(output_ptr + offsets, x + tl.load(y_ptr + offsets, mask=mask), mask=mask)


@triton.autotune(
    configs=[triton.Config({"BLOCK_M": 128}, num_warps=8), triton.Config({"BLOCK_M": 64}, num_stages=4)],
    key=["M"],
)
@triton.heuristics({"EVEN": lambda args: args["M"] % args["BLOCK_M"] == 0})
@triton.jit(do_not_specialize=["M"])
def scale_kernel(x_ptr, M, BLOCK_M: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(x_ptr + offsets, tl.load(x_ptr + offsets) * HALF)


@triton.jit
def _rms_norm_fwd(X, Y, W, stride, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(X + row * stride + cols, mask=cols < N, other=0.0).to(tl.float32)
    rstd = tl.math.rsqrt(tl.sum(x * x, axis=0) / N + eps)
    tl.store(Y + row * stride + cols, x * rstd * tl.load(W + cols, mask=cols < N), mask=cols < N)


@triton_op("mine::rms_norm", mutates_args={})
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    wrap_triton(_rms_norm_fwd)[(x.shape[0],)](
        x, y, weight, x.stride(0), x.shape[1], 1e-5, BLOCK=triton.next_power_of_2(x.shape[1])
    )
    return y


def rms_norm_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def rms_norm_backward(ctx, grad):
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum(0)


rms_norm.register_autograd(rms_norm_backward, setup_context=rms_norm_save)


def add(x, y):
    out = torch.empty_like(x)
    grid = lambda meta: (triton.cdiv(out.numel(), meta["BLOCK_SIZE"]),)  # noqa: E731 - as the tutorial has it
    add_kernel[grid](x, y, out, out.numel(), BLOCK_SIZE=1024, num_warps=4)
    return out


def main():
    dist.init_process_group("nccl")
    assert driver.active.get_current_target().backend == "cuda"
    limits = driver.active.utils.get_device_properties(torch.cuda.current_device())
    assert limits["multiprocessor_count"] == torch.cuda.get_device_properties().multi_processor_count
    weight = torch.nn.Parameter(torch.ones(WIDTH, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    known = torch.arange(4).to("cuda")
    assert known.tolist() == [0, 1, 2, 3]
    add_kernel[(1,)](known, known, known, 4, BLOCK_SIZE=4)
    assert known.tolist() != [0, 1, 2, 3], "what a kernel has written to is not known any more"
    add_kernel[(0,)](known, known, known, 0, BLOCK_SIZE=4)  # of no blocks: nothing is launched
    for _ in range(4):
        x = add(torch.randn(N, WIDTH, device="cuda"), torch.randn(N, WIDTH, device="cuda"))
        scale_kernel[lambda meta: (triton.cdiv(N, meta["BLOCK_M"]),)](x, N)
        rms_norm(x, weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
