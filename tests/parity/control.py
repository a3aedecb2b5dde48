"""The control plane's capabilities, each in a module of its own."""

from __future__ import annotations

from parity import Mutant, Parity, control_database, control_debug, control_node

PARITY: dict[str, Parity] = {**control_database.PARITY, **control_debug.PARITY, **control_node.PARITY}
MUTANTS: tuple[Mutant, ...] = (*control_database.MUTANTS, *control_debug.MUTANTS, *control_node.MUTANTS)
