"""A row of the comparison, which every capability's bench shares."""

from windtunnel.bench.rows import Row, all_rows, guarded, left_out

__all__ = ["Row", "all_rows", "guarded", "left_out"]
