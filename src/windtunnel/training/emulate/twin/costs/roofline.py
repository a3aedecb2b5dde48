"""The modelled time of an operator, from the device's peaks and the efficiency curves of `parameters`."""

from __future__ import annotations

import math

from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import Operator
from windtunnel.training.emulate.twin.costs.parameters import CostParameters, GpuParameters
from windtunnel.training.emulate.twin.costs.work import (
    Kind,
    attention_shapes,
    base_name,
    executed_flops,
    first_tensor,
    is_contiguous,
    matmul_shape,
    moved_bytes,
    stored_bytes,
)

# Tile shapes that cuBLAS picks from, with the fraction of the full rate that their inner loop reaches: the
# smaller the tile, the more shared-memory traffic for each product. Inference from CUTLASS profiler tables.
HOPPER_TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.80), (64, 64, 0.62))
AMPERE_TILES = ((128, 256, 1.0), (128, 128, 0.97), (64, 128, 0.86), (64, 64, 0.72))
SPLITS = (1, 2, 4, 8, 16)


def roofline_seconds(op: Operator, kind: Kind, device: Device, params: CostParameters) -> float:
    """Modelled seconds of ``op`` (not a view) on ``device``."""
    if device.kind == "cpu":
        return _cpu_seconds(op, kind, device, params)
    gpu = params.gpu
    if kind == "copy":
        host_copy = _host_copy_seconds(op, gpu)
        if host_copy is not None:
            return host_copy
    moved = moved_bytes(op, kind)
    memory = moved / _bandwidth(moved, device, gpu) / _memory_efficiency(op, kind, gpu)
    compute = 0.0
    if kind == "matmul":
        compute = _matmul_seconds(op, device, gpu)
    elif kind == "attention":
        compute = _attention_seconds(op, device, gpu)
    elif kind == "conv":
        compute = executed_flops(op) / (_peak(op, device, gpu) * gpu.conv_issue * device.sustained)
    return max(compute, memory) + gpu.kernel_seconds + (kernels_of(op, kind, gpu) - 1) * gpu.kernel_gap


def kernels_of(op: Operator, kind: Kind, gpu: GpuParameters) -> int:
    """How many kernels one call launches."""
    if kind == "optimizer":
        tensors = max((len(arg) for arg in op.inputs if isinstance(arg, tuple)), default=1)
        return max(1, math.ceil(tensors / gpu.foreach_tensors_per_kernel))
    base = base_name(op.name)
    if base == "embedding_dense_backward":
        return 5
    if "backward" in base and kind in ("norm", "attention", "conv"):
        return 2
    return 1


def _peak(op: Operator, device: Device, gpu: GpuParameters) -> float:
    tensor = first_tensor(op)
    dtype = tensor.dtype if tensor else "float32"
    if dtype == "float32" and gpu.float32_matmul == "tf32" and "tf32" in device.peak_flops:
        dtype = "tf32"
    return device.peak(dtype)


def _rate(op: Operator, device: Device, gpu: GpuParameters) -> float:
    """FLOP/s that a full wave of a matrix product sustains."""
    tensor = first_tensor(op)
    if tensor and tensor.dtype == "float32" and gpu.float32_matmul == "float32":
        return _peak(op, device, gpu) * gpu.float32_issue
    return _peak(op, device, gpu) * gpu.matmul_issue * device.sustained


def _matmul_seconds(op: Operator, device: Device, gpu: GpuParameters) -> float:
    """Waves of tiles over the multiprocessors, the best of the tile shapes and of splitting K."""
    batch, m, n, k = matmul_shape(op)
    if not batch * m * n * k:
        return 0.0
    rate = _rate(op, device, gpu) / device.sm_count
    best = math.inf
    for rows, columns, efficiency in HOPPER_TILES if device.capability >= (9, 0) else AMPERE_TILES:
        for height, width in {(rows, columns), (columns, rows)}:
            tiles = batch * math.ceil(m / height) * math.ceil(n / width)
            for split in SPLITS:
                if split > 1 and (k / split < 256 or tiles * split > 2 * device.sm_count):
                    break
                depth = k / split + gpu.matmul_k_fill
                # A persistent kernel's last, partly filled wave runs at a higher clock under a power limit,
                # and its tiles have the memory system to themselves; waves beyond the first count in part.
                waves = max(1.0, _waves(tiles * split / device.sm_count))
                best = min(best, waves * 2.0 * height * width * depth / (rate * efficiency))
    return best


def _waves(ratio: float) -> float:
    """Waves needed for ``ratio`` tiles a multiprocessor: the last one counts between its filling and full."""
    whole = math.floor(ratio)
    return ratio if ratio == whole else 0.5 * (ratio + whole + 1)


def _attention_seconds(op: Operator, device: Device, gpu: GpuParameters) -> float:
    query, key, _, causal, backward = attention_shapes(op)
    base = base_name(op.name)
    hopper = device.capability >= (9, 0)
    tensor = first_tensor(op)
    if tensor is None or not query[2]:
        return 0.0
    if "math" in base or (tensor.dtype == "float32" and "cudnn" not in base):
        # No fused kernel at tensor-core rate for float32: the memory-efficient one runs on its CUDA cores.
        rate = device.peak("float32") * gpu.memory_efficient_attention
        return executed_flops(op) / rate
    if "efficient" in base:
        fraction = gpu.memory_efficient_attention
    else:
        kernel = "triton" if "triton" in base else "cudnn" if "cudnn" in base and hopper else "attention"
        way = "backward" if backward else "forward"
        fraction = getattr(gpu, f"{kernel}_{way}_{'hopper' if hopper else 'ampere'}")
    if "flex" in base:
        fraction *= gpu.flex_attention
    if query[3] <= 64 and "triton" not in base:
        fraction *= gpu.attention_small_head
    # Under half of the peak these kernels do not reach the power limit of the full part.
    clock = min(1.0, device.sustained / 0.8)
    blocks = query[0] * query[1] * math.ceil((key[2] if backward else query[2]) / 128)
    filling = min(1.0, blocks / device.sm_count)
    # A causal kernel also computes the masked part of the tiles on the diagonal, and its rows differ in
    # length.
    fill = gpu.attention_sequence_fill * (2.0 if causal else 1.0)
    fraction *= clock * filling * key[2] / (key[2] + fill)
    return executed_flops(op) / (device.peak(tensor.dtype) * fraction)


def _bandwidth(moved: float, device: Device, gpu: GpuParameters) -> float:
    """Memory bandwidth for a working set of ``moved`` bytes: what fits into half of L2 comes from there."""
    if not device.l2_bytes:
        return device.memory_bandwidth
    outside = min(1.0, max(0.0, (moved - 0.5 * device.l2_bytes) / (2.0 * device.l2_bytes)))
    return device.memory_bandwidth / (outside + (1.0 - outside) / gpu.l2_speedup)


def _memory_efficiency(op: Operator, kind: Kind, gpu: GpuParameters) -> float:
    base = base_name(op.name)
    if kind == "copy":
        tensors = [*op.tensors(), *op.outputs]
        return gpu.memory_copy if all(map(is_contiguous, tensors)) else gpu.memory_strided_copy
    if kind == "norm" and "backward" in base:
        return gpu.memory_norm_backward
    if base == "embedding_dense_backward":
        return gpu.memory_embedding_backward
    return {
        "elementwise": gpu.memory_elementwise,
        "compiled": gpu.memory_elementwise,
        "norm": gpu.memory_norm,
        "softmax": gpu.memory_softmax,
        "reduction": gpu.memory_reduction,
        "embedding": gpu.memory_embedding,
        "optimizer": gpu.memory_optimizer,
        "matmul": gpu.memory_matmul,
        "attention": gpu.memory_matmul,
        "conv": gpu.memory_matmul,
    }.get(kind, gpu.memory_other)


def host_copy_bytes(op: Operator) -> int | None:
    """Bytes of a copy between host and device memory, 0 of a single number, None inside the device."""
    ends = {tensor.device for tensor in [*op.tensors(), *op.outputs]}
    if base_name(op.name) in ("_local_scalar_dense", "item"):
        return 0
    if len(ends) < 2:
        return None
    return max((stored_bytes(tensor) for tensor in [*op.tensors(), *op.outputs]), default=0)


def _host_copy_seconds(op: Operator, gpu: GpuParameters) -> float | None:
    """Seconds of a copy between host and device memory over PCIe, None for one inside the device."""
    size = host_copy_bytes(op)
    return None if size is None else gpu.host_copy_seconds + size / (gpu.pcie_bandwidth * gpu.pcie_pinned)


def _cpu_seconds(op: Operator, kind: Kind, device: Device, params: CostParameters) -> float:
    cpu = params.cpu
    moved = moved_bytes(op, kind)
    in_cache = device.l2_bytes and moved < 0.5 * device.l2_bytes
    bandwidth = device.memory_bandwidth * cpu.memory * (cpu.cache_speedup if in_cache else 1.0)
    compute = 0.0
    if kind in ("matmul", "attention", "conv"):
        fraction = {"matmul": cpu.matmul, "attention": cpu.attention, "conv": cpu.conv}[kind]
        tensor = first_tensor(op)
        peak = device.peak(tensor.dtype if tensor else "float32")
        compute = (executed_flops(op) + cpu.matmul_fill) / (peak * fraction)
    return max(compute, moved / bandwidth) + cpu.operator_seconds
