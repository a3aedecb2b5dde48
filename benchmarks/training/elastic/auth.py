"""What it costs that the processes of a job know each other, on the services that carry its checkpoints."""

from benchmarks.training.checkpoint.auth import auth_rows

__all__ = ["auth_rows"]
