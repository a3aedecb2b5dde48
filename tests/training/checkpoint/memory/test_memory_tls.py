"""Checkpoints that travel with certificates: whole, and unreadable on the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from memory_cluster import Cluster, content

from support import secret
from support.between import between, relay
from support.certificates import Authority
from windtunnel.base.tls import Untrusted

N = 3_000_000


@pytest.mark.parametrize("sealed", [True, False])
def test_who_listens_between_hosts_reads_a_checkpoint_only_where_there_is_no_tls(
    tmp_path: Path, sealed: bool
) -> None:
    mark = content("rank0", 1, 100)
    keys = secret.KEYS
    if sealed:
        keys = replace(secret.KEYS, tls=Authority(tmp_path / "ours").issue("host").load())
    cluster, overheard = Cluster(tmp_path, 2, keys=keys), bytearray()
    target = cluster.services[1]
    real = target.address
    with between(real, lambda client, server: relay(client, server, overheard)) as through:
        target.address = through
        cluster.form([0, 1])
        target.address = real
        cluster.reserve(N)
        for step in range(2):
            cluster.save(step, step, N)
            cluster.wait(step)
        assert len(overheard) > 2 * N
        assert (mark in overheard) == (b"rank0" in overheard) == (not sealed)
        assert cluster.holders("rank0", 1) == [0, 1]  # and it is whole, read by a rank as well
        if sealed:
            with pytest.raises(Untrusted, match="asks for TLS"):
                secret.memory(real)
        cluster.close()
