"""What a compiler makes of a captured rank's ``torch.compile`` regions: `compiled`, from slice to slice."""

from windtunnel.training.emulate.twin.compiler.rewrite import compiled

__all__ = ["compiled"]
