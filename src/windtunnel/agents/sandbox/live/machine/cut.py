"""Whether a shell whose command is cut off would go on with the rest of it."""

from __future__ import annotations

import re

from windtunnel.agents.sandbox.live.machine.state import State

FOLLOWS = re.compile(
    r"[;\n`]|\|\||(?<!&)&(?!&|>)|\$\(|<\(|>\(|\b(eval|source|while|until|for|if|case|time)\b|^\s*[.!]"
)
"""Anything by which a command may have more than one part to run."""


def goes_on(command: str, state: State | None) -> bool:
    """Whether a shell may have more of the command to run when what it waits for has ended: it is a list or a
    loop, or names a function or an alias, which may be one, or traps would run."""
    if state is None or state.text("traps").strip() or FOLLOWS.search(command.strip()):
        return True
    aliases = re.findall(r"^alias (?:-- )?([^=\s]+)=", state.text("aliases"), re.MULTILINE)
    return bool({*state.functions(), *aliases} & set(re.findall(r"[^\s'\"()|&<>]+", command)))
