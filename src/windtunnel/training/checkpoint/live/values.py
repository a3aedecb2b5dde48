"""What is neither module nor optimizer: generators, schedulers, cursors, plain values; in and out."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
import xxhash


def get(value: Any) -> Any:
    """What is saved of ``value``."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    return value


def put(state: dict[str, Any], item: str, value: Any, new: Any) -> None:
    """Give ``value``, which stands at ``state[item]``, what was saved of it; a plain value is replaced."""
    if isinstance(value, torch.Generator):
        value.set_state(new)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = new
    elif isinstance(value, random.Random):
        value.setstate(new)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(new)
    elif isinstance(value, dict) and isinstance(new, dict):
        value.clear()
        value.update(new)
    elif isinstance(value, list) and isinstance(new, list):
        value[:] = new
    else:
        state[item] = new


def generators() -> dict[str, Any]:
    """The states of the global generators of torch, Python and NumPy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def put_generators(states: dict[str, Any], reseed: int | None) -> None:
    """The inverse of `generators`; with ``reseed`` other states, that follow from these and this number."""
    if reseed is not None:
        seed = xxhash.xxh3_64_intdigest(states["torch"].numpy().tobytes(), seed=reseed)
        torch.manual_seed(seed >> 1)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
