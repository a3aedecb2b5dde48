"""Training where host and storage are not trusted: who computes there, and what they hand back."""
