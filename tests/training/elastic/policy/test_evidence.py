"""What there is evidence of: who has to go where hosts do not reach each other (all graphs of a few hosts,
and hosts dead to all), what last words tell, who is silent, and when silence says nothing."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.elastic.live.agent import link
from windtunnel.training.elastic.policy.evidence import Leases, blames_peers, cause_in, to_fence
from windtunnel.training.elastic.policy.rules import Doubt, Fail, Fence, Keep, Look, Reached, Regroup, decide

Pairs = tuple[tuple[int, int], ...]


def both(pairs: Pairs) -> Pairs:
    return tuple(chain(pairs, ((other, host) for host, other in pairs)))


def left(hosts: int, pairs: Pairs, gone: tuple[int, ...]) -> Pairs:
    return tuple(pair for pair in pairs if not set(pair) & set(gone))


@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
def test_all_that_are_left_reach_each_other(hosts: int) -> None:
    """Every set of cut pairs. Up to four hosts no smaller choice would do; nobody goes who is in no pair."""
    links = list(combinations(range(hosts), 2))
    for count in range(len(links) + 1):
        for pairs in combinations(links, count):
            gone = to_fence(range(hosts), both(pairs), range(hosts))
            covers = [
                some
                for size in range(hosts)
                for some in combinations(range(hosts), size)
                if not left(hosts, pairs, some)
            ]
            least = min(map(len, covers))
            assert set(gone) <= set(chain(*pairs))
            if gone or not pairs:
                assert not left(hosts, pairs, gone) and 2 * len(gone) <= hosts
            else:
                assert 2 * least > hosts or hosts > 4
            assert not gone or len(gone) == least or hosts > 4


def test_one_of_a_pair_goes() -> None:
    assert to_fence((7, 3, 5, 4), both(((3, 4),)), (3, 4, 5, 7)) == (4,)  # the higher place, not the id
    assert to_fence((7, 3, 5, 4), both(((3, 4), (7, 3))), (3, 4, 5, 7)) == (3,)  # two others suspect it
    assert to_fence((7, 3, 5, 4), ((3, 4),), (3, 4, 5, 7)) == (4,)  # one way is none
    assert to_fence((7, None, 5, 4), both(((3, 4),)), (4, 5, 7)) == ()  # it is gone already
    assert to_fence((0, 1, 2, 3), both(((0, 2), (0, 3), (1, 2), (1, 3))), range(4)) == (2, 3)  # in two halves


@given(st.integers(2, 9), st.data())
def test_healthy_hosts_stay_when_others_are_dead_to_all(hosts: int, data: st.DataObject) -> None:
    """Dead hosts answer nobody, nor the question. Without a dead one nobody goes, whoever waits for whom."""
    dead = data.draw(st.sets(st.integers(0, hosts - 1), max_size=hosts // 2))
    alive = [host for host in range(hosts) if host not in dead]
    silent = tuple((host, other) for host in alive for other in sorted(dead))
    assert to_fence(range(hosts), silent, alive) == tuple(sorted(dead))


@given(st.integers(3, 9), st.data())
def test_who_is_deaf_goes_and_not_who_does_not_hear_of_it(hosts: int, data: st.DataObject) -> None:
    """One that reaches nobody but answers the question; or all others do not reach it. It alone goes."""
    bad = data.draw(st.integers(0, hosts - 1))
    pairs = tuple((bad, other) for other in range(hosts) if other != bad)
    for silent in (pairs, tuple((other, host) for host, other in pairs), both(pairs)):
        assert to_fence(range(hosts), silent, range(hosts)) == (bad,)


def test_the_decisions() -> None:
    doubt = Doubt(ranks=(1,), waited=0.6, allowed=0.5, times=1, probed=False)
    assert decide(doubt) == Look()
    assert decide(Doubt(ranks=(1,), waited=0.4, allowed=0.5, times=1, probed=False)) == Keep()
    assert decide(Doubt(ranks=(1,), waited=0.6, allowed=0.5, times=1)) == Regroup()
    assert isinstance(decide(Doubt(ranks=(1,), waited=0.6, allowed=0.5, times=4)), Fail)
    late = Doubt(ranks=(1,), waited=30.0, allowed=0.5, times=4, unstarted=(0,), lived=40.0, start=60.0)
    assert decide(late) == Keep()
    assert isinstance(decide(replace(late, lived=60.0)), Fail)
    assert decide(Reached((0, 1, 2), (0, 1, 2), both(((0, 1),)))) == Fence(hosts=(1,))
    assert decide(Reached((0, 1, 2), (0, 1, 2), ())) == Keep()  # the program hangs by itself
    assert decide(Reached((0, 1, 2), (0, 1, 2), both(((0, 1), (0, 2), (1, 2))))) == Keep()


def test_a_refusal_and_a_process_that_stands_still_are_answers() -> None:
    with contextlib.ExitStack() as stack:
        still, full, gone = (stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3))
        addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in (still, full, gone)]
        gone.close()
        full.listen(0)  # what comes beyond the queue is dropped without a word
        for _ in range(8):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        assert link.silent({**dict(enumerate(addresses)), 3: ""}, 0.2) == [1]
    assert link.silent({}, 0.2) == []


NOISE = "import sys\nprint('Warning: something harmless', file=sys.stderr)\n"


def words_of(text: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    return done.returncode, done.stderr.splitlines()


def test_a_cause_is_an_uncaught_exception_alone() -> None:
    """Of a real interpreter: the last of a chain; never what was merely printed, before or after."""
    text = NOISE + "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise ValueError('boom\\nmore') from e"
    status, lines = words_of(text)
    cause = cause_in([*lines, "Exception ignored in: <x>"], status).splitlines()
    assert (cause[0], cause[-1]) == ("Traceback (most recent call last):", "ValueError: boom")
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


@given(gaps=st.lists(st.floats(0.0, 0.49), max_size=20), late=st.floats(0.01, 5.0))
def test_who_gives_no_sign_for_a_lease_is_silent_and_nobody_else(gaps: list[float], late: float) -> None:
    """The looker looks often enough: at each sign of the one that lives."""
    leases: Leases[str] = Leases(1.0)
    now = 0.0
    for key in ("lives", "dead"):
        leases.renew(key, now)
    for gap in gaps:
        now += gap
        assert not leases.forgive(now)
        assert leases.silent(now).keys() == ({"dead"} if now > 1.0 else set())
        leases.renew("lives", now)
    leases.end("lives")
    assert "lives" not in leases.silent(now + late)


def test_a_looker_that_was_stopped_forgives_all_once() -> None:
    leases: Leases[str] = Leases(1.0)
    leases.renew("a", 0.0)
    leases.forgive(0.0)
    assert leases.forgive(0.6) and leases.silent(1.5) == {}
    assert not leases.forgive(1.0)
    assert not leases.forgive(1.5) and leases.silent(1.7).keys() == {"a"}


def test_a_sign_of_earlier_shortens_no_lease() -> None:
    """A host of which only the log tells has longer to come back."""
    leases: Leases[str] = Leases(1.0)
    leases.renew("a", 3.0)
    leases.renew("a", 0.0)
    assert leases.silent(3.9) == {} and leases.silent(4.1).keys() == {"a"}
