"""examples/train_llama.py as torchtitan had it: Llama 2's sizes, and norms of several operators.

    windtunnel emulate --cluster h100-96:1x8 benchmarks/training/emulate/titan.py --norm rmsnorm --size 8b

``--norm rmsnorm`` is that of ``llama3_8b.toml`` in December 2024; before, it was one kernel, as PyTorch's is.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def norm(self: nn.RMSNorm, x: Tensor) -> Tensor:
    """torchtitan's RMSNorm."""
    y = x.float()
    return (y * torch.rsqrt((y * y).mean(-1, keepdim=True) + (self.eps or 1e-5))).type_as(x) * self.weight


def main() -> None:
    """Run the example."""
    sys.path.insert(0, str(EXAMPLES))
    from llama_model import SIZES, Config  # type: ignore[import-not-found]

    SIZES["llama2-13b"] = Config(5120, 40, 40, 40, 13824, 32000, 10_000.0)
    SIZES["llama2-70b"] = Config(8192, 80, 64, 8, 28672, 32000, 10_000.0)
    if "--norm" in sys.argv:
        at = sys.argv.index("--norm")
        if sys.argv[at + 1] == "rmsnorm":
            nn.RMSNorm.forward = norm  # type: ignore[method-assign]
        del sys.argv[at : at + 2]
    runpy.run_path(str(EXAMPLES / "train_llama.py"), run_name="__main__")


if __name__ == "__main__":
    main()
