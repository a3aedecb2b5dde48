"""Runs a script as it is, and ends its process without destructors: ``ending.py SCRIPT [ARGS...]``.

PyTorch's gloo groups can abort or hang while a process ends: a thread of theirs may still release a tensor,
for which it needs the interpreter that is going, or the lock that is held. That is no matter of
what the tests hold the scripts to, so groups live as long as the process.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist


def main() -> None:
    dist.destroy_process_group = lambda group=None: None
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")  # what it raises, SystemExit too, ends it as usual
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
