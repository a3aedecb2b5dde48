"""What a trainer of ours imports beside torch; the fork server has it before it starts one."""

from windtunnel.training.checkpoint.live import checkpointer
from windtunnel.training.elastic.live import run

__all__ = ["checkpointer", "run"]
