"""The control plane's capabilities, each in a module of its own."""

from __future__ import annotations

from parity import Mutant, Parity, control_database, control_debug

PARITY: dict[str, Parity] = {**control_database.PARITY, **control_debug.PARITY}
MUTANTS: tuple[Mutant, ...] = (*control_database.MUTANTS, *control_debug.MUTANTS)
