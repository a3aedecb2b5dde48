"""Multicast between racks over passive splitters, relayed hop by hop (Shufflecast)."""
