"""Real ciphertext: a shield before a memory, and before storage."""
