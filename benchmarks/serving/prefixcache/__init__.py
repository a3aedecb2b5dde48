"""Hit rates and times to the first token are emulated: requests of synthetic sessions, or of a ``--trace``
in Mooncake's form, go through the very cache that a server uses. Published figures are Marconi's, of its
traces."""

from benchmarks.harness.rows import runner

SECTIONS = {
    "agents": "rows.agent_rows", "chats": "rows.chat_rows", "mooncake": "rows.mooncake_rows",
    "ties": "rows.tie_rows", "tiers": "rows.tier_rows",
}  # fmt: skip
run = runner(__name__, SECTIONS, traced=("mooncake",))
