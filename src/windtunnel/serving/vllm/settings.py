"""What the scheduler in vLLM is asked for: the object ``windtunnel`` of vLLM's ``--additional-config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.model import Objective

KEY = "windtunnel"


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """A field without a value here leaves the choice to the default that its docstring names."""

    policy: str = "taper"
    """which branches take part in a step: a name of `branching.policy`, or FILE.py"""
    admission: str = "refuse"
    """late requests: `refuse`, or `wait` (first come, first served)"""
    ttft: float | None = None
    """seconds until the first token, for requests without an objective of their own"""
    tpot: float | None = None
    """seconds for each further token, likewise"""
    step_time: str = ""
    """as of `windtunnel serve --step-time`; "" learns it from the steps"""
    prefix_cache: str = ""
    """depths at which states are cached: a name of `prefixcache.policy`; "" leaves it to vLLM"""
    chunk: int = 0
    """prompt tokens of a step; 0 takes what vLLM's budget leaves beside the decode batch"""
    events: str = ""
    """the event log; "" is that of a run of its own"""
    every: int = 1
    """one step of so many is logged; 0 logs none"""

    @classmethod
    def read(cls, additional: object) -> VllmSettings:
        """From vLLM's ``additional_config``.

        Raises:
            UserError: a field is unknown, or its value is not of the field's kind.
        """
        values = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
        if not isinstance(values, Mapping):
            raise UserError(f"--additional-config: `{KEY}` is {values!r}, accepted is an object")
        kinds = {field.name: str(field.type) for field in fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise UserError(
                    f"--additional-config: `{KEY}.{name}` is unknown; accepted are {', '.join(kinds)}"
                )
            if not _fits(kinds[name], value):
                raise UserError(
                    f"--additional-config: `{KEY}.{name}` is {value!r}, accepted is {kinds[name]}"
                )
        return cls(**values)

    def objective(self, extra: Mapping[str, Any] | None) -> Objective:
        """What a request is promised: what it asks for itself (``vllm_xargs``), else the defaults."""
        seconds = {"ttft": self.ttft, "tpot": self.tpot}
        for name in seconds:
            value = (extra or {}).get(name)
            if isinstance(value, int | float) and value > 0:
                seconds[name] = float(value)
        return Objective.of(**seconds)

    def additional(self) -> dict[str, Any]:
        """The value for ``--additional-config``."""
        return {KEY: asdict(self)}


def _fits(kind: str, value: object) -> bool:
    if isinstance(value, bool):
        return False
    if kind == "str":
        return isinstance(value, str)
    if kind == "int":
        return isinstance(value, int) and value >= 0
    return value is None or (isinstance(value, int | float) and value > 0)
