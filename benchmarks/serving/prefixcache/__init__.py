"""What prefix caches are judged by: ``python -m benchmarks serving.prefixcache``.

Hit rates and times to the first token are emulated: requests of synthetic sessions, or of a trace that is
given (``--trace``, in Mooncake's form), go through the very cache that a server uses, for the paper's 7B
hybrid with the bytes that Transformers would hold. Published figures are Marconi's, of its own traces.
"""

from __future__ import annotations

from benchmarks.harness.rows import runner

SECTIONS = {
    "agents": "rows.agent_rows", "chats": "rows.chat_rows", "mooncake": "rows.mooncake_rows",
    "ties": "rows.tie_rows", "tiers": "rows.tier_rows",
}  # fmt: skip

run = runner(__name__, SECTIONS, traced=("mooncake",))
