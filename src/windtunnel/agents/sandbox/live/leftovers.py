"""What a crash has left of a home, seen without opening it: for a look that must change nothing."""

from __future__ import annotations

from windtunnel.agents.sandbox.live import machine, record
from windtunnel.agents.sandbox.live.place import Home


def remains(home: Home) -> list[str]:
    """In words: groups, namespaces and devices without a sandbox; sandboxes and dumps half made."""
    if not home.boxes.is_dir():
        return []
    records = {folder.name: record.read(folder) for folder in sorted(home.boxes.iterdir())}
    owned = {name for name, one in records.items() if one is not None and one.status != "making"}
    found = machine.leftovers(home, owned)
    found += [f"half-made sandbox {name}" for name in records if name not in owned]
    dumps = home.path / "dumps"
    if dumps.is_dir():
        found += [f"half-stored process image {one.name}" for one in sorted(dumps.iterdir())]
    return found
