"""``windtunnel trust``: attestation and shields, against a host that attacks them."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, choice, emit

group = new_group("Train where host and storage are not trusted (ShEF, HIX).")
Demo = Annotated[bool, typer.Option("--demo", help="A simulated device and a hostile host, as processes.")]
Tier = Annotated[str, typer.Option(help="Tier: simulator, or tpm (Debian's swtpm).")]
Mode = Annotated[str, typer.Option(help="Protection mode: mac, versions, tree, or all.")]


@group.command("attest")
def attest(demo: Demo = False, tier: Tier = "simulator", as_json: Json = False) -> None:
    """Attest a device through a hostile host. Exit status 3: an attack succeeded.

    Example: windtunnel trust attest --demo --tier tpm
    """
    from windtunnel.trust.attest import demonstrate

    if not demo:
        raise UserError("trust attest: no device is named; give --demo, a simulated device")
    with TemporaryDirectory() as folder:
        rows = demonstrate(Path(folder), tier=tier)
    lines = ("  ".join(f"{name}: {value}" for name, value in row.items()) for row in rows)
    emit(as_json, rows, lines)
    if wrong := [row["attack"] for row in rows if row["refused"] == (row["attack"] == "none")]:
        raise LessError(f"trust attest: not refused, or refused without an attack: {', '.join(wrong)}")


@group.command("attack")
def attack(mode: Mode = "all", as_json: Json = False) -> None:
    """Attack shielded memory. Exit status 3: a mode detects less than it must.

    Example: windtunnel trust attack --mode all
    """
    from windtunnel.trust import shield

    with TemporaryDirectory() as folder:
        modes = shield.MODES if choice("mode", mode, (*shield.MODES, "all")) == "all" else [mode]
        results = {each: shield.attack(each, Path(folder)) for each in modes}
    missed = {each: [name for name in row if not row[name]] for each, row in results.items()}
    lines = []
    for each, row in results.items():
        detected = [name for name in row if row[name] and name != "honest"]
        lines.append(
            f"{each}: undetected {', '.join(missed[each]) or 'none'}; detected {', '.join(detected)}"
        )
    emit(as_json, results, lines)
    for each, names in missed.items():
        if names != (["replay", "rollback"] if each == "mac" else []):  # the control must miss them
            raise LessError(f"trust attack: {each} does not find out: {', '.join(names) or 'nothing'}")
