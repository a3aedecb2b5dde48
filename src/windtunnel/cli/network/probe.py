"""``windtunnel network probe``: what this host can do with networks."""

from dataclasses import asdict

from windtunnel.cli.common import Json, print_json, print_table


def probe(as_json: Json = False) -> None:
    """Show what this host's kernel and tools can do with networks, and what is missing.

    Queues and programs are tried in a temporary network namespace.

    Example: windtunnel network probe --json
    """
    from windtunnel.linux.probe import probed

    facilities = probed()
    if as_json:
        return print_json([asdict(facility) | {"present": facility.present} for facility in facilities])
    rows = [("✓" if row.present else "✗", row.name, row.gives, row.missing) for row in facilities]
    print_table(("", "what", "gives", "why it is missing"), rows)
