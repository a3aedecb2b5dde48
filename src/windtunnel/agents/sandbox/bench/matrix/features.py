"""Rows of what programs use of the kernel, each with a small program that would notice."""

from __future__ import annotations

from windtunnel.agents.sandbox.bench.matrix.row import MatrixRow

FEATURES: tuple[MatrixRow, ...] = ()
