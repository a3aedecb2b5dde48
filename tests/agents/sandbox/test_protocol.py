"""What a sandbox and a host are: equal methods here, through a daemon, and in the tests' fake."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.client import Client, RemoteBox, RemotePending
from windtunnel.agents.sandbox.context import Pending
from windtunnel.agents.sandbox.host import Host
from windtunnel.agents.sandbox.model import Terms
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox, PendingTurn

_FAKE = Path(__file__).parent / "daemon" / "fakehost.py"


def fakes() -> Any:
    if "fakehost" not in sys.modules:
        spec = importlib.util.spec_from_file_location("fakehost", _FAKE)
        assert spec and spec.loader
        sys.modules["fakehost"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["fakehost"])
    return sys.modules["fakehost"]


def shape(method: Any) -> list[tuple[str, Any, Any]]:
    """Names, kinds and defaults of its parameters; terms are each a parameter of its own."""
    terms = [(name, inspect.Parameter.KEYWORD_ONLY, False) for name in Terms.__annotations__]
    shapes: list[tuple[str, Any, Any]] = []
    for one in inspect.signature(method).parameters.values():
        shapes += terms if "Unpack[Terms]" in str(one) else [(one.name, one.kind, one.default)]
    return shapes


def differences(kind: type, protocol: type, instance: tuple[str, ...] = ()) -> list[str]:
    found = []
    for name, wanted in vars(protocol).items():
        if name.startswith("_") or not (callable(wanted) or isinstance(wanted, property)) or name in instance:
            continue
        have = getattr(kind, name, None)
        if have is None:
            found.append(f"{kind.__name__} has no {name}")
        elif isinstance(wanted, property):
            if not isinstance(have, property):
                found.append(f"{kind.__name__}.{name} is no property")
        elif shape(wanted) != shape(have):
            found.append(
                f"{kind.__name__}.{name}{inspect.signature(have)} is not {inspect.signature(wanted)}"
            )
    return found


def test_a_sandbox_is_the_same_here_and_elsewhere() -> None:
    assert differences(Box, AnySandbox) == []
    assert differences(RemoteBox, AnySandbox) == []
    assert differences(fakes().FakeBox, AnySandbox, instance=("name", "spec")) == []


def test_a_host_is_the_same_here_and_elsewhere() -> None:
    for kind in (Host, Client, fakes().FakeHost):
        assert differences(kind, AnyHost) == []


def test_a_checkpoint_under_way_is_the_same_here_and_elsewhere() -> None:
    for kind in (Pending, RemotePending, fakes().FakePending):
        assert differences(kind, PendingTurn) == []
