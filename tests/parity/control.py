"""The control plane: claims of real workers on a real database, agents on this host."""

from __future__ import annotations

from parity import Mutant, Parity

PARITY: dict[str, Parity] = {}
MUTANTS: tuple[Mutant, ...] = ()
