"""A payment service in a file that processes share, a line for each charge. It may honour keys."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any


class Payments:
    def __init__(self, path: Path, *, honours_keys: bool = False) -> None:
        self.path = path
        self.honours_keys = honours_keys

    def charge(self, amount: int, key: str = "") -> dict[str, Any]:
        with self.path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            charges = [json.loads(line) for line in file]
            for charge in charges:
                if self.honours_keys and charge["key"] == key:
                    return dict(charge)
            new = {"id": len(charges) + 1, "amount": amount, "key": key}
            file.write(json.dumps(new) + "\n")
            return new

    def charges(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []

    def lookup(self, key: str) -> dict[str, Any] | None:
        return next((charge for charge in self.charges() if charge["key"] == key), None)
