"""What each kind of trusted execution adds, in seconds, to what leaves a GPU's package.

A message of n bytes is encrypted and authenticated by its sender, decrypted and checked by its receiver:

    added = 2 (γ + n / C)        γ: seconds of a call, whatever its size; C: bytes/s of a call

A collective is that for each message of its ring (`messages`); a copy between host and GPU is one message,
with figures of its own, since the host's CPU is at one end of it. Only the package is trusted: NVLink counts
as outside (NVIDIA's PPCIe mode trusts it), and a switch cannot add up what it cannot read. The host's share
of a copy does not block the program's thread, and launches of kernels cost nothing more.

Source: Lee et al., GPU TEE Overheads in Distributed Data Parallel ML Training (arXiv:2501.11771): each step
of the ring does cryptographic work at both ends. Figures: `SCHEMES`, each with where it is from.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.base.errors import UserError


@dataclass(frozen=True)
class ProtectionScheme:
    """``call`` and ``rate``: γ and C between GPUs; ``host_call`` and ``host_rate``: of a copy, both ends
    together being twice that. Seconds and bytes/s."""

    name: str
    call: float
    rate: float
    host_call: float
    host_rate: float
    source: str

    def copy(self, nbytes: float) -> float:
        """Seconds that are added to a copy between host and GPU."""
        return 2 * (self.host_call + nbytes / self.host_rate)

    def collective(self, kind: str, nbytes: float, ranks: int) -> float:
        """Seconds that are added to a collective, or a message between two ranks; see `messages`."""
        count, each = messages(kind, nbytes, ranks)
        return count * 2 * (self.call + each / self.rate)


CORE = 2.3e9
"""Bytes/s of AES-256-GCM on one core of a 2.5 GHz Xeon with AES-NI, 1 MiB at once: measured."""
KERNEL = "inference: a kernel of AES on the GPU at 10 GB/s after 10 us; host: one core, measured"
FITTED = (
    "call fitted by `benchmarks trust.gpu` to 41.6x of GPT-2-XL (arXiv:2501.11771); rate: inference, PCIe 5; "
    "host: 4 GB/s for both ends (NVIDIA's blog on H100 confidential computing, recalled and not read again)"
)
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ProtectionScheme(
            "hix", 10e-6, 10e9, 20e-6, 2 / (1 / CORE + 1 / 10e9), KERNEL + ", and the broker's queue"
        ),
        ProtectionScheme("graviton", 10e-6, 10e9, 6e-6, 2 / (1 / CORE + 1 / 10e9), KERNEL),
        ProtectionScheme("h100-cc", 7.8e-3, 55e9, 10e-6, 8e9, FITTED),
    )
}


def scheme_of(name: str, device: str, others: bool) -> ProtectionScheme | None:
    """The scheme of that name, None for none. ``device``: the kind that the cluster has; ``others``: whether
    something besides NCCL's ways carries collectives.

    Raises:
        UserError: it is unknown, or not for such a cluster.
    """
    accepted = ", ".join(["none", *SCHEMES])
    if name == "none":
        return None
    if name not in SCHEMES:
        raise UserError(f"`confidential`: {name!r} is unknown; accepted are {accepted}")
    if device != "gpu" or others:
        lack = "switches or fabrics that read what they carry" if others else "no GPUs"
        raise UserError(f"`confidential`: {name!r} with {lack} is not priced; accepted there is none")
    return SCHEMES[name]


def messages(kind: str, nbytes: float, ranks: int) -> tuple[int, float]:
    """How many messages follow each other in a collective, and bytes of each. ``nbytes``: as nccl-tests
    counts (the whole buffer; of one rank in an all-to-all)."""
    if ranks < 2:
        return 0, 0.0
    if kind in ("send", "recv"):
        return 1, nbytes
    if kind in ("all_reduce", "barrier"):
        return 2 * (ranks - 1), nbytes / ranks if kind == "all_reduce" else 0.0
    if kind in ("broadcast", "reduce"):  # passed on in pieces: each link carries all of it once
        return ranks - 1, nbytes / (ranks - 1)
    return ranks - 1, nbytes / ranks
