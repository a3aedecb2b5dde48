"""A session of which all connections are encrypted: who has no certificate of its CA is told so at once."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.certificates import Authority
from support.ingest import KEYS, QUICK, table, whole
from windtunnel.base.errors import UserError
from windtunnel.base.keys import VARIABLE, Keys
from windtunnel.cli.main import app
from windtunnel.data.ingest import IngestDataset
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.client import IngestClient
from windtunnel.data.ingest.live.master import Master
from windtunnel.data.ingest.live.pool import ProcessLauncher
from windtunnel.data.ingest.live.protocol import FlightLink


def test_with_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Master, worker (a process), client and status, each with its files; and those without."""
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    monkeypatch.setenv(VARIABLE, KEYS.secret.decode())
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(KEYS.secret)
    keys = Keys(KEYS.secret, ours.issue("master").load())
    settings = MasterSettings(workers=1, **QUICK)  # type: ignore[arg-type]
    master = Master(table(tmp_path), tmp_path / "m", keys, settings, ProcessLauncher(secret, keys))
    thread = threading.Thread(target=master.run)
    thread.start()
    plain = f"127.0.0.1:{master.port}"
    try:
        for address in (plain, master.address):
            with pytest.raises(UserError, match="asks for TLS, accepted are --tls-cert, --tls-key, --tls-ca"):
                IngestClient(address, KEYS)
        stranger = others.issue("stranger")
        with pytest.raises(UserError, match="no TLS with it: certificate verify failed"):
            IngestClient(plain, Keys(KEYS.secret, stranger.load()))
        mine = ours.issue("client")
        dataset = IngestDataset(plain, tls=mine.paths)
        assert whole([row for batch in dataset for row in batch["row"].tolist()])
        words = ["ingest", "status", "--master", plain, "--json"]
        reply = CliRunner().invoke(app, [*words, *mine.options])
        assert json.loads(reply.stdout)["served_by"]
        dataset.close()
    finally:
        master.stop()
        thread.join(30)
    bare = Master(table(tmp_path), tmp_path / "bare", KEYS, MasterSettings(workers=0))
    with pytest.raises(UserError, match="no TLS with it: wrong version number"):
        FlightLink(f"127.0.0.1:{bare.port}", Keys(KEYS.secret, mine.load())).call("snapshot")
    bare.shutdown()
