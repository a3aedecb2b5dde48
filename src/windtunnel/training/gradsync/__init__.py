"""Gradient synchronisation that chooses for itself (Espresso, Cupcake, DRAGONN, ZEN)."""
