"""What last words are evidence of."""

from __future__ import annotations

import subprocess
import sys

import pytest

from windtunnel.training.elastic.policy.evidence import blames_peers, cause_in

NOISE = "import sys\nprint('Warning: something harmless', file=sys.stderr)\n"


def words_of(text: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def test_a_cause_is_an_uncaught_exception_alone() -> None:
    """Of a real interpreter: the last of a chain; never what was merely printed, before or after."""
    text = NOISE + "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise ValueError('boom\\nmore') from e"
    status, lines = words_of(text)
    found = cause_in([*lines, "Exception ignored in: <x>"], status).splitlines()
    assert (found[0], found[-1]) == ("Traceback (most recent call last):", "ValueError: boom")
    for text in (NOISE + "sys.exit(1)", NOISE + "sys.exit('done')", NOISE + "sys.exit(3)"):
        assert cause_in(words_of(text)[1], words_of(text)[0]) == ""
    logged = "import traceback, sys\ntry:\n  1/0\nexcept Exception:\n  traceback.print_exc()\nsys.exit(4)"
    assert cause_in(words_of(logged)[1], words_of(logged)[0]) == ""


def test_wrong_use_is_told_as_argparse_tells_it() -> None:
    status, lines = words_of("import argparse\nargparse.ArgumentParser('me').parse_args(['--x'])")
    assert cause_in(lines, status) == "me: error: unrecognized arguments: --x"
    assert cause_in(["anything"], 2) == ""


PAIR = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:457] "


@pytest.mark.parametrize(
    ("error", "peers"),
    [
        (f"RuntimeError: {PAIR}Application timeout caused pair closure", True),
        (f"RuntimeError: {PAIR}Connection closed by peer [127.0.0.1]:4", True),
        ("Traceback (most recent call last):\n  File\ntorch.distributed.DistNetworkError: gone", True),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted", True),
        (f"RuntimeError: {PAIR}op.preamble.length <= op.nbytes. 8 vs 4", False),
        ("ValueError: gloo timed out", False),
        ("TimeoutError: no data within 5 s", False),
        ("", False),
    ],
)
def test_whom_an_error_blames(error: str, peers: bool) -> None:
    assert blames_peers(error) == peers
