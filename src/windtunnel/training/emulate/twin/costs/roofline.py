"""Modelled times of operators, from peaks and efficiency curves, and every constant of the cost models.

An operator takes as long as its arithmetic at the rate that its kind and shape allow, or as its memory
traffic at the bandwidth that its kind reaches, whichever is longer, and no less than the shortest kernel. For
matrix products the rate follows from how tiles fill the multiprocessors in waves; for attention from the
kernel's published throughput and the length of the sequence. Williams, Waterman and Patterson, "Roofline",
CACM 2009.

Every constant stands with its source; ``windtunnel calibrate show DEVICE`` prints them. A figure marked
"inference" was reasoned from neighbours, not read or measured. What belongs to a part (peaks, bandwidths, the
clock held under the power limit, link efficiencies) stands in the cluster catalogue instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from windtunnel.cluster.model import Device
from windtunnel.training.emulate.graph import Operator
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
    units_of,
)

FA2 = "FlashAttention-2, arXiv:2307.08691, figures 4 to 7"
FA3 = "FlashAttention-3, arXiv:2407.08608, figures 5 and 6"
FITTED = "fitted to llm-foundry's published rows of A100 and H100 (benchmarks/training/emulate), one for all"
TRITON = FITTED + ": by how much a step grows with the sequence, {} TFLOP/s in the job"
TUNER = "NCCL 2.18+, src/graph/tuning.cc"


def figure(value: Any, source: str) -> Any:
    """A field of a parameter table with its source beside it."""
    return field(default=value, metadata={"source": source})


@dataclass(frozen=True)
class GpuParameters:
    """Device-side time of operators on a GPU. Efficiencies are fractions of the device's peak."""

    # What an operator takes by itself over what it takes inside a job, where clocks are lower under hours of
    # load and caches colder. Measured profiles tell the former.
    in_job: float = figure(0.80, FITTED)
    in_job_matmul: float = figure(0.90, FITTED + "; instead of in_job for matrix products and convolutions")
    beside_collectives: float = figure(
        0.40,
        "arXiv:2507.03114: computation beside collectives on A100 and H100 slows by up to 40 %; " + FITTED,
    )
    matmul_issue: float = figure(0.97, "inference: what a full wave reaches of the sustained tensor rate")
    matmul_k_fill: float = figure(160.0, "inference: prologue and epilogue of a tile, in elements of K")
    float32_issue: float = figure(0.85, "inference: SIMT SGEMM against the float32 peak")
    conv_issue: float = figure(
        0.70, "inference: cuDNN implicit GEMM on ResNet shapes, channels last or first"
    )
    attention_forward_ampere: float = figure(0.72, FA2 + ": 225 of 312 TFLOP/s on A100, head dimension 128")
    attention_backward_ampere: float = figure(0.62, FA2 + ": 196 of 312 TFLOP/s on A100")
    attention_forward_hopper: float = figure(0.375, FA2 + ": 370 of 989 TFLOP/s on H100")
    attention_backward_hopper: float = figure(0.33, FA2 + ": up to 335 of 989 TFLOP/s on H100")
    cudnn_forward_hopper: float = figure(0.60, FA3 + ": cuDNN 9 at 500 to 640 TFLOP/s, head dimension 128")
    cudnn_backward_hopper: float = figure(0.50, FA3 + ": cuDNN 9 backward at 450 to 550 TFLOP/s")
    triton_forward_ampere: float = figure(0.48, TRITON.format(120))
    triton_backward_ampere: float = figure(0.35, TRITON.format(87))
    triton_forward_hopper: float = figure(0.285, TRITON.format(226))
    triton_backward_hopper: float = figure(0.20, TRITON.format(158))
    memory_efficient_attention: float = figure(0.36, FA2 + ": xformers (CUTLASS) 110 to 120 TFLOP/s on A100")
    flex_attention: float = figure(0.85, "PyTorch blog 'FlexAttention', 2024: 85 to 90 % of FlashAttention-2")
    attention_small_head: float = figure(0.85, FA2 + ": head dimension 64 against 128")
    attention_sequence_fill: float = figure(300.0, "inference from " + FA2 + ": sequence 512 against 16k")
    # Fractions of the memory bandwidth that large operators of a kind reach, reads and writes together.
    memory_elementwise: float = figure(0.89, "device copy of 4.3 of 4.8 TB/s measured on an H200")
    memory_copy: float = figure(0.89, "device copy of 4.3 of 4.8 TB/s measured on an H200")
    memory_strided_copy: float = figure(0.60, "inference: transposing copy through shared memory")
    memory_norm: float = figure(0.82, "inference: two passes over rows in registers")
    memory_norm_backward: float = figure(0.60, "inference: second kernel for the weight's gradient")
    memory_softmax: float = figure(0.75, "inference: rows longer than shared memory are read again")
    memory_reduction: float = figure(0.85, "inference")
    memory_embedding: float = figure(0.70, "inference: whole rows gathered")
    memory_embedding_backward: float = figure(0.35, "inference: sort of indices and atomic rows")
    memory_optimizer: float = figure(0.85, "inference: multi-tensor apply, seven streams")
    memory_matmul: float = figure(0.80, "inference: matrix-vector shapes")
    memory_other: float = figure(0.60, "inference")
    l2_speedup: float = figure(
        1.8, "inference: L2 against HBM bandwidth on A100 and H100, Chips and Cheese 2023"
    )
    kernel_seconds: float = figure(
        2.0e-6, "inference: the shortest kernels in public profiles take 1.5 to 2.5 us"
    )
    kernel_gap: float = figure(0.8e-6, "inference: start to start of empty kernels back to back in a stream")
    pcie_pinned: float = figure(0.82, "inference: pinned host memory, fraction of the PCIe rate")
    pcie_bandwidth: float = figure(31.5e9, "PCIe 4.0 x16; the host's own link replaces it where it is known")
    host_copy_seconds: float = figure(8e-6, "inference: cudaMemcpyAsync of a few bytes")
    foreach_tensors_per_kernel: int = figure(
        48, "PyTorch, multi_tensor_apply.cuh: 110 to 24 tensors a launch"
    )


@dataclass(frozen=True)
class CpuParameters:
    """Time of operators on one core of a CPU, where no profile was measured."""

    matmul: float = figure(0.75, "inference: oneDNN or MKL on one core, large matrices")
    matmul_fill: float = figure(2e5, "inference: FLOP lost to packing and dispatch")
    attention: float = figure(0.40, "inference")
    conv: float = figure(0.55, "inference")
    memory: float = figure(0.70, "inference: streaming by one core")
    cache_speedup: float = figure(3.0, "inference: last-level cache against memory")
    operator_seconds: float = figure(3e-6, "inference: dispatch of one operator from Python")


@dataclass(frozen=True)
class HostParameters:
    """Seconds that the host thread spends on one event of a job on GPUs (eager PyTorch on a server CPU)."""

    forward_operator: float = figure(7.0e-6, "inference: eager PyTorch with autograd, 6 to 10 us")
    backward_operator: float = figure(5.0e-6, "inference: the autograd engine in C++")
    recompute_operator: float = figure(7.0e-6, "inference: forward again from the backward thread")
    optimizer_operator: float = figure(6.0e-6, "inference: foreach and fused calls without autograd")
    view: float = figure(2.0e-6, "inference: a view with autograd metadata")
    allocation: float = figure(0.3e-6, "inference: a hit in the caching allocator")
    event: float = figure(1.0e-6, "inference: cudaEventRecord or cudaStreamWaitEvent")
    sync: float = figure(5.0e-6, "inference: return from cudaStreamSynchronize")
    collective: float = figure(25e-6, "inference: c10d and ncclLaunchKernel, 20 to 30 us")


@dataclass(frozen=True)
class NcclParameters:
    """Latencies in seconds and bandwidth factors of NCCL's own tuner, by algorithm and protocol.

    A triple is (LL, LL128, Simple).
    """

    ring_base: tuple[float, float, float] = figure((6.6e-6, 14.0e-6, 8.4e-6), TUNER)
    tree_base: tuple[float, float, float] = figure((6.8e-6, 14.0e-6, 8.4e-6), TUNER)
    ring_nvlink: tuple[float, float, float] = figure((0.6e-6, 1.9e-6, 3.4e-6), TUNER)
    ring_pcie: tuple[float, float, float] = figure((1.0e-6, 2.5e-6, 5.7e-6), TUNER)
    ring_network: tuple[float, float, float] = figure((2.7e-6, 4.0e-6, 14.0e-6), TUNER)
    tree_nvlink: tuple[float, float, float] = figure((0.6e-6, 1.25e-6, 28e-6), TUNER)
    tree_pcie: tuple[float, float, float] = figure((1.0e-6, 1.9e-6, 28e-6), TUNER)
    tree_network: tuple[float, float, float] = figure((5.0e-6, 8.5e-6, 28e-6), TUNER)
    nvls_latency: float = figure(23e-6, TUNER)
    nvls_network: float = figure(14e-6, TUNER + " (NVLSTree)")
    network_post: float = figure(1.5e-6, TUNER + ", 1 to 2 us a message, three times that under Simple")
    ring_ll: float = figure(0.25, TUNER + ": fraction of the bus bandwidth under LL")
    ring_ll128: float = figure(0.92, TUNER)
    ring_ll128_single_rank: float = figure(0.7, TUNER + ": one rank a host drives its NIC")
    tree_bandwidth: float = figure(0.92, TUNER)
    tree_ll: float = figure(1 / 3.8, TUNER)
    tree_ll128_host: float = figure(7 / 9, TUNER)
    tree_ll128: float = figure(120 / 128, TUNER)
    ll_limit_host: float = figure(87.7e9, TUNER + ", llMaxBws of one Ampere or Hopper host (Volta: 39)")
    ll_limit_network: float = figure(19e9, TUNER)
    nvls_bandwidth: float = figure(0.61, "nccl-tests, 8 x H100: 480 GB/s bus bandwidth, 1.75 x 0.61 x 450")
    pat_base: float = figure(8.0e-6, TUNER + " (2.23, PAT)")
    pat_network: float = figure(4.0e-6, TUNER + " (2.23, PAT), a step of the tree")
    pat_rank: float = figure(2.8e-6, TUNER + " (2.23, PAT), its linear part")
    pat_bandwidth: float = figure(0.75, TUNER + " (2.23, PAT)")
    all_to_all_peer: float = figure(0.6e-6, "inference: one send and receive inside a grouped launch")
    all_to_all_efficiency: float = figure(0.85, "inference: of the link's large-message rate")
    message_base: float = figure(8.4e-6, TUNER + ", base latency of Simple")
    single_rank: float = figure(3e-6, "inference: a group of one is one device copy")


@dataclass(frozen=True)
class GlooParameters:
    """Gloo on CPU tensors; ``windtunnel calibrate cpu`` measures the machine's own."""

    call_seconds: float = figure(60e-6, "inference: queueing to gloo's worker thread and back")
    step_seconds: float = figure(25e-6, "inference: one TCP message over loopback")
    loopback_bandwidth: float = figure(2.0e9, "inference: one TCP stream over loopback and the copy of it")
    reduce_bandwidth: float = figure(4.0e9, "inference: summing of one segment by one core")


GPU, CPU, HOST, NCCL, GLOO = (
    GpuParameters(), CpuParameters(), HostParameters(), NcclParameters(), GlooParameters(),
)  # fmt: skip


def parameter_rows(device: Device) -> list[tuple[str, str, str]]:
    """Rows of (name, value, source) of the tables that apply to ``device``, for printing."""
    tables: dict[str, Any] = {"gpu": GPU, "host": HOST, "nccl": NCCL}
    if device.kind == "cpu":
        tables = {"cpu": CPU, "gloo": GLOO}
    rows = []
    for name, table in tables.items():
        for item in fields(table):
            value = getattr(table, item.name)
            text = ", ".join(f"{v:.3g}" for v in value) if isinstance(value, tuple) else str(value)
            rows.append((f"{name}.{item.name}", text, item.metadata["source"]))
    return rows


# Tile shapes that cuBLAS picks from, with the fraction of the full rate that their inner loop reaches: the
# smaller the tile, the more shared-memory traffic for each product. Inference from CUTLASS profiler tables.
HOPPER_TILES = ((128, 256, 1.0), (128, 128, 0.92), (64, 256, 0.88), (64, 128, 0.80), (64, 64, 0.62))
AMPERE_TILES = ((128, 256, 1.0), (128, 128, 0.97), (64, 128, 0.86), (64, 64, 0.72))
SPLITS = (1, 2, 4, 8, 16)


def roofline_seconds(op: Operator, kind: Kind, device: Device, pcie: float = GPU.pcie_bandwidth) -> float:
    """Modelled seconds of ``op`` (not a view) on ``device``, joined to its host at ``pcie`` bytes/s."""
    if device.kind == "cpu":
        return _cpu_seconds(op, kind, device)
    if kind == "copy":
        host_copy = _host_copy_seconds(op, pcie)
        if host_copy is not None:
            return host_copy
    moved = moved_bytes(op, kind)
    memory = moved / _bandwidth(moved, device) / _memory_efficiency(op, kind)
    compute = 0.0
    if kind == "matmul":
        compute = _matmul_seconds(op, device)
    elif kind == "attention":
        compute = _attention_seconds(op, device)
    elif kind == "conv":
        compute = executed_flops(op) / (device.peak(units_of(op)) * GPU.conv_issue * device.sustained)
    return max(compute, memory) + GPU.kernel_seconds + (kernels_of(op, kind) - 1) * GPU.kernel_gap


def kernels_of(op: Operator, kind: Kind) -> int:
    """How many kernels one call launches."""
    if kind == "optimizer":
        tensors = max((len(arg) for arg in op.inputs if isinstance(arg, tuple)), default=1)
        return max(1, math.ceil(tensors / GPU.foreach_tensors_per_kernel))
    base = base_name(op.name)
    if base == "embedding_dense_backward":
        return 5
    if "backward" in base and kind in ("norm", "attention", "conv"):
        return 2
    return 1


def _rate(op: Operator, device: Device) -> float:
    """FLOP/s that a full wave of a matrix product sustains."""
    dtype = units_of(op)
    if dtype == "float32" or (dtype == "tf32" and device.units(dtype) == "float32"):
        return device.peak(dtype) * GPU.float32_issue
    return device.peak(dtype) * GPU.matmul_issue * device.sustained


def _matmul_seconds(op: Operator, device: Device) -> float:
    """Waves of tiles over the multiprocessors, the best of the tile shapes and of splitting K."""
    batch, m, n, k = matmul_shape(op)
    if min(m, n) <= 1 or not batch * k:  # a vector's product is no tile's: it is read at the memory's rate
        return 0.0
    rate = _rate(op, device) / device.sm_count
    best = math.inf
    for rows, columns, efficiency in HOPPER_TILES if device.capability >= (9, 0) else AMPERE_TILES:
        for height, width in {(rows, columns), (columns, rows)}:
            tiles = batch * math.ceil(m / height) * math.ceil(n / width)
            for split in SPLITS:
                if split > 1 and (k / split < 256 or tiles * split > 2 * device.sm_count):
                    break
                depth = k / split + GPU.matmul_k_fill
                # A persistent kernel's last, partly filled wave runs at a higher clock under a power limit,
                # and its tiles have the memory system to themselves; waves beyond the first count in part.
                waves = max(1.0, _waves(tiles * split / device.sm_count))
                best = min(best, waves * 2.0 * height * width * depth / (rate * efficiency))
    return best


def _waves(ratio: float) -> float:
    """Waves needed for ``ratio`` tiles a multiprocessor: the last one counts between its filling and full."""
    whole = math.floor(ratio)
    return ratio if ratio == whole else 0.5 * (ratio + whole + 1)


def _attention_seconds(op: Operator, device: Device) -> float:
    query, key, _, causal, backward = attention_shapes(op)
    base = base_name(op.name)
    hopper = device.capability >= (9, 0)
    tensor = first_tensor(op)
    if tensor is None or not query[2]:
        return 0.0
    if "math" in base or (tensor.dtype == "float32" and "cudnn" not in base):
        # No fused kernel at tensor-core rate for float32: the memory-efficient one runs on its CUDA cores.
        rate = device.peak("float32") * GPU.memory_efficient_attention
        return executed_flops(op) / rate
    if "efficient" in base:
        fraction = GPU.memory_efficient_attention
    else:
        kernel = "triton" if "triton" in base else "cudnn" if "cudnn" in base and hopper else "attention"
        way = "backward" if backward else "forward"
        fraction = getattr(GPU, f"{kernel}_{way}_{'hopper' if hopper else 'ampere'}")
    if "flex" in base:
        fraction *= GPU.flex_attention
    if query[3] <= 64 and "triton" not in base:
        fraction *= GPU.attention_small_head
    # Under half of the peak these kernels do not reach the power limit of the full part.
    clock = min(1.0, device.sustained / 0.8)
    blocks = query[0] * query[1] * math.ceil((key[2] if backward else query[2]) / 128)
    filling = min(1.0, blocks / device.sm_count)
    # A causal kernel also computes the masked part of the tiles on the diagonal, and its rows differ in
    # length.
    fill = GPU.attention_sequence_fill * (2.0 if causal else 1.0)
    fraction *= clock * filling * key[2] / (key[2] + fill)
    return executed_flops(op) / (device.peak(tensor.dtype) * fraction)


def _bandwidth(moved: float, device: Device) -> float:
    """Memory bandwidth for a working set of ``moved`` bytes: what fits into half of L2 comes from there."""
    if not device.l2_bytes:
        return device.memory_bandwidth
    outside = min(1.0, max(0.0, (moved - 0.5 * device.l2_bytes) / (2.0 * device.l2_bytes)))
    return device.memory_bandwidth / (outside + (1.0 - outside) / GPU.l2_speedup)


def _memory_efficiency(op: Operator, kind: Kind) -> float:
    base = base_name(op.name)
    if kind == "copy":
        tensors = [*op.tensors(), *op.outputs]
        return GPU.memory_copy if all(map(is_contiguous, tensors)) else GPU.memory_strided_copy
    if kind == "norm" and "backward" in base:
        return GPU.memory_norm_backward
    if base == "embedding_dense_backward":
        return GPU.memory_embedding_backward
    like = {"compiled": "elementwise", "attention": "matmul", "conv": "matmul"}.get(kind, kind)
    return float(getattr(GPU, f"memory_{like}"))


def host_copy_bytes(op: Operator) -> int | None:
    """Bytes of a copy between host and device memory, 0 of a single number, None inside the device."""
    ends = {tensor.device for tensor in [*op.tensors(), *op.outputs]}
    if base_name(op.name) in ("_local_scalar_dense", "item"):
        return 0
    if len(ends) < 2:
        return None
    return max((stored_bytes(tensor) for tensor in [*op.tensors(), *op.outputs]), default=0)


def _host_copy_seconds(op: Operator, pcie: float) -> float | None:
    """Seconds of a copy between host and device memory over PCIe, None for one inside the device."""
    size = host_copy_bytes(op)
    return None if size is None else GPU.host_copy_seconds + size / (pcie * GPU.pcie_pinned)


def _cpu_seconds(op: Operator, kind: Kind, device: Device) -> float:
    moved = moved_bytes(op, kind)
    in_cache = device.l2_bytes and moved < 0.5 * device.l2_bytes
    bandwidth = device.memory_bandwidth * CPU.memory * (CPU.cache_speedup if in_cache else 1.0)
    compute = 0.0
    if kind in ("matmul", "attention", "conv"):
        fraction = {"matmul": CPU.matmul, "attention": CPU.attention, "conv": CPU.conv}[kind]
        tensor = first_tensor(op)
        peak = device.peak(tensor.dtype if tensor else "float32")
        compute = (executed_flops(op) + CPU.matmul_fill) / (peak * fraction)
    return max(compute, moved / bandwidth) + CPU.operator_seconds
