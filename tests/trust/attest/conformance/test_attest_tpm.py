"""The evidence of Debian's swtpm: the demonstration, its quotes as tpm2-tools read them, its end."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import gone, until
from windtunnel.base.errors import HostError
from windtunnel.linux import processes
from windtunnel.trust.attest import demonstrate, measure
from windtunnel.trust.attest.live.tpm import swtpm
from windtunnel.trust.attest.messages import unpack
from windtunnel.trust.attest.quote import parse, pcrs, signed

LACK = [name for name in ("swtpm", "tpm2_quote") if shutil.which(name) is None]
needs_swtpm = pytest.mark.skipif(bool(LACK), reason=f"Debian's swtpm and tpm2-tools: {LACK} is not installed")


@needs_swtpm
def test_the_demonstration_names_the_claim_of_each_attack(tmp_path: Path) -> None:
    rows = {row["attack"]: row for row in demonstrate(tmp_path, tier="tpm")}
    assert rows["none"]["sum"] == 6
    assert {name: row["failing"] for name, row in rows.items() if row["refused"]} == {
        "flip": ("signature",), "replay": ("signature", "tpm.nonce"), "reflect": ("M2.label",),
        "record": ("record.tag",), "tpm none": ("least.tier",), "tpm nonce": ("tpm.nonce",),
        "tpm replay": ("tpm.nonce",), "tpm key": ("tpm.key",), "tpm flip": ("tpm.signature",),
        "program": ("loaded",), "tpm pcr": ("tpm.pcrs",),
    }  # fmt: skip


@needs_swtpm
def test_a_quote_is_read_as_tpm2_tools_read_it(tmp_path: Path) -> None:
    with swtpm(tmp_path / "tpm") as tpm:
        for pcr, layer in ((8, b"a"), (8, b"b"), (9, b"c")):
            tpm.extend(pcr, measure(layer))
        key, attest, signature = unpack("quote", tpm.quote(b"n" * 32))
        shown = subprocess.run(
            ["tpm2_print", "-t", "TPMS_ATTEST", str(tmp_path / "tpm" / "quote")],
            capture_output=True,
            text=True,
        ).stdout
        nonce, digest = parse(attest)
        assert f"extraData: {nonce.hex()}" in shown
        assert f"pcrDigest: {digest.hex()}" in shown
        assert digest == pcrs([measure(b"a"), measure(b"b")], [measure(b"c")])
        assert signed(key, attest, signature)
        with pytest.raises(HostError, match="tpm2_pcrextend: ERROR"):
            tpm.extend(8, "no digest")


@needs_swtpm
def test_swtpm_ends_with_who_started_it_killed_or_not(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from windtunnel.trust.attest.live.tpm import swtpm\n"
        "with swtpm(Path(sys.argv[1])): print('here', flush=True); sys.stdin.read()"
    )
    for number, end in enumerate((signal.SIGKILL, signal.SIGINT)):
        owner = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / f"{number}")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ},
        )  # fmt: skip
        with owner:
            assert owner.stdout is not None
            assert owner.stdout.readline() == b"here\n"
            (tpm,) = processes.descendants(owner.pid)
            owner.send_signal(end)
        until(lambda tpm=tpm: gone(tpm), "the end of swtpm")


def test_without_the_programs_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="swtpm is not installed; on Debian it is in the packages"):
        demonstrate(tmp_path, tier="tpm")
