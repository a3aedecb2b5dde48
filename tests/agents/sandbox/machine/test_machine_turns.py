"""Commands in persistent shells: exact output, and framing that nothing a user does can break."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from support.waiting import until
from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.machine.state import shell_effect
from windtunnel.agents.sandbox.model import ShellEffect
from windtunnel.base.errors import UserError

pytestmark = pytest.mark.root


def out(box: Machine, command: str) -> str:
    result = box.run(command, timeout=60)
    assert result.ended == "exit", result
    assert result.stderr == b"", result
    return result.text


def test_outputs_are_exact_and_separate(box: Machine) -> None:
    result = box.run("printf 'a\\n\\nb\\0\\377'; printf err >&2; (exit 7)")
    assert (result.stdout, result.stderr, result.exit_code) == (b"a\n\nb\0\xff", b"err", 7)
    assert box.run("echo $?").stdout == b"7\n"
    assert box.run("cat").stdout == b"", "input is /dev/null"
    assert box.run("").exit_code == 0


FORMS = {
    "cat <<'E'\nit's $HOME\n\nE\n": "it's $HOME\n\n",
    "echo one\necho two # '\n": "one\ntwo\n",
    "for i in 1 2\ndo echo $i\ndone": "1\n2\n",
    "echo 'unicode: \u00e4\u4e16'": "unicode: \u00e4\u4e16\n",
    "printf %s \"$(printf 'x\\n\\n')\"": "x",
    "echo " + "y" * 200_000: "y" * 200_000 + "\n",
}


def test_commands_of_any_form(box: Machine) -> None:
    assert {command: out(box, command) for command in FORMS} == FORMS


def test_a_shell_keeps_its_state(box: Machine) -> None:
    out(box, "cd /tmp; x=1; export y=2; f() { echo f$x; }; alias ll='echo alias'; set -f; umask 027")
    assert out(box, "pwd; f; echo $y; echo *; umask; ll") == "/tmp\nf1\n2\n*\n0027\nalias\n"
    assert box.run("pwd", shell="other").text == "/workspace\n", "another shell has its own"
    assert set(box.shells()) == {"main", "other"}


TROUBLES = (
    "set -u", "set -C", "set -f", "IFS=0123456789abcdef", "set -o pipefail", "trap 'echo e' ERR",
    "exec >/tmp/away", "exec 2>/tmp/away", "exec </dev/zero", "cd /tmp; mkdir d; cd d; rmdir ../d",
    "readonly R=1",
    "PS4='$(echo trace)'; set -x", "set -v", "alias eval=false printf=false", "printf() { :; }",
    "trap '' INT TERM",
    "unset PATH", "set -- a 'b c'", "LC_ALL=C; x=$'\\377'", "shopt -s extglob nullglob failglob",
    "return 0",
    "set -T; trap 'true' DEBUG", "ulimit -f 100000",
)  # fmt: skip


def test_nothing_breaks_the_framing(box: Machine) -> None:
    for number, trouble in enumerate(TROUBLES):
        shell = f"shell{number}"
        box.run(trouble, shell=shell, timeout=60)
        for _ in range(2):
            said = "builtin echo hello; builtin echo there >&2; (exit 9)"
            result = box.run(said, shell=shell, timeout=60)
            assert result.exit_code == 9, (trouble, result)
            assert b"hello\n" in result.stdout and b"there\n" in result.stderr, (trouble, result)
            assert "note" not in result.note, trouble


def test_a_debug_trap_lives_until_it_is_taken_back(box: Machine) -> None:
    out(box, "trap 'echo d' DEBUG")
    assert out(box, "echo a") == "d\na\n"
    out(box, "trap - DEBUG")
    assert out(box, "echo a") == "a\n"


def test_errors_leave_the_shell_alive(box: Machine) -> None:
    before = box.shells()
    wrong = {"if": 2, "echo 'open": 2, "nosuchprogram": 127, "return 5": 5, "/": 126, "-x": 127}
    for command, code in wrong.items():
        result = box.run(command)
        assert (result.exit_code, result.note) == (code, ""), command
        assert result.stderr or command.startswith("return")
        assert box.shells() == before


def test_a_command_that_ends_the_shell(box: Machine) -> None:
    out(box, "cd /tmp; kept='a b'; f() { echo $kept; }")
    ends = {"exit 3": 3, "set -e; false": 1, "exec bash -c 'exit 4'": 4, "trap 'exit 6' EXIT; exit 1": 6}
    for command, code in ends.items():
        result = box.run(command)
        assert (result.exit_code, result.ended) == (code, "exit"), command
        assert result.note == (
            "the command ended the shell; the shell was started anew with its state from before the command"
        )
        assert out(box, "f; pwd; echo $-") == "a b\n/tmp\nhB\n"


def test_commands_inherit_no_descriptor_of_the_framing(box: Machine) -> None:
    code = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
    assert out(box, f'python3 -c "{code}"') in ("[0, 1, 2, 3]\n",), "3 is the folder that is being listed"


def test_background_services_run_on_and_hold_their_output(box: Machine) -> None:
    begun = "until read -r name </proc/$!/comm && [ $name = sleep ]; do :; done"
    result = box.run(f"sleep 1000 & {begun}; echo started")
    assert result.stdout == b"started\n"
    assert len(list(box.externals.of("channel").glob("main/out.*"))) == 1
    assert any("sleep 1000" in line for line in box.commands())
    box.run("kill %1; wait")
    assert not list(box.externals.of("channel").glob("main/out.*"))


def test_large_output_is_streamed_in_bounded_pieces(box: Machine) -> None:
    sizes = {"stdout": 0, "stderr": 0}
    largest = 0

    def listen(stream: str, data: bytes) -> None:
        nonlocal largest
        sizes[stream] += len(data)
        largest = max(largest, len(data))

    result = box.run("head -c 100000000 /dev/zero; echo done >&2", on_output=listen)
    assert sizes == {"stdout": 100_000_000, "stderr": 5}
    assert largest <= 2**20
    assert len(result.stdout) == 2**16 and result.stderr == b"done\n"
    assert (result.tails, result.note) == (("stdout",), "")


def test_bad_requests_are_refused(box: Machine) -> None:
    with pytest.raises(UserError, match="NUL"):
        box.run("echo \0")
    with pytest.raises(UserError, match=r"shell '\.\./x' is not accepted"):
        box.run("true", shell="../x")


def test_states_are_equal_exactly_when_the_shell_is(box: Machine) -> None:
    out(box, "x=1")
    first = box.shell_states()[0].fingerprint
    out(box, "echo $RANDOM $SECONDS $BASHPID >/dev/null; (y=3); sleep 0")
    assert box.shell_states()[0].fingerprint == first
    fingerprints = {first}
    changes = (
        "x=2",
        "cd /",
        "f() { :; }",
        "alias q=w",
        "set -f",
        "trap 'true' USR1",
        "umask 077",
        "set -- z",
    )
    for change in changes:
        out(box, change)
        fingerprints.add(box.shell_states()[0].fingerprint)
    assert len(fingerprints) == len(changes) + 1


def test_replay_takes_over_exactly(start: Callable[..., Machine]) -> None:
    source, target = start("one"), start("two")
    out(source, "cd /tmp; pushd / >/dev/null; x=$'a\\nb\\'c\"d'\ndeclare -A m=(['k 1']='v;$x' [']']='\\')")
    out(
        source,
        "a=(1 '' '*'); declare -i n=5; declare -n ref=n; export E='é ü'; f() { cat <<'Z'\nMARK '$x'\nZ\n}",
    )
    out(
        source, "declare -fx f; alias z='echo \"q\"'; shopt -s extglob\ng() { echo @(a|b); }; set -o pipefail"
    )
    out(source, "trap 'echo \"t\"' USR1; umask 031; set -- 'p 1' '' \"p'2\"; unset HOME")
    out(
        target, "junk=1; h() { :; }; alias junk=ls; set -f; trap 'true' USR2; cd /var; export HOME=/elsewhere"
    )
    state = source.shell_states()[0]
    assert shell_effect(state) == ShellEffect(state.name)
    target.replay(state)
    assert target.shell_states()[0].fingerprint == state.fingerprint
    show = "echo \"$x|${m['k 1']}|${m[']']}|${#a[@]}|$ref|$E|${junk-}|${HOME-none}|$#|$3\"; f; pwd"
    show += "; dirs; z; trap -p"
    assert out(target, show) == out(source, show)
    assert "junk" not in out(target, "alias; declare -F; declare -p")


def test_what_cannot_be_replayed_is_said(start: Callable[..., Machine]) -> None:
    source, target = start("one"), start("two")
    out(target, "readonly R=mine")
    with pytest.raises(MachineError, match="R is read-only"):
        target.replay(source.shell_states()[0])
    out(source, "exec 7</etc")
    assert "open descriptors (7>/etc)" in shell_effect(source.shell_states()[0]).resources[0]
    out(source, "exec 7<&-; sleep 1000 &")
    assert "background jobs" in shell_effect(source.shell_states()[0]).resources[0]


def test_a_plain_sh_serves_where_there_is_no_bash(
    start: Callable[..., Machine], make_root: Callable[..., object]
) -> None:
    root = make_root("plain")
    (root / "usr/bin/bash").unlink()  # type: ignore[operator]
    box = start("plain", root)
    assert box.run("x='1 2'; cd /tmp; (exit 3)").exit_code == 3
    assert out(box, 'echo "$x$?"; pwd') == "0\n/workspace\n", "each command has a shell of its own"
    assert box.run("if").exit_code == 2
    assert box.run("sleep 1000 & cd /").exit_code == 0
    assert box.run("sleep 1000", timeout=0.2).ended == "timeout"
    assert box.run("cat", stdin=b"x\n").stdout == b"x\n"
    assert "sleep 1000" in " ".join(box.commands())
    assert box.shells() == {} and box.shell_states() == ()
    assert box.run("exit 4").exit_code == 4


def test_what_a_command_leaves_behind_with_its_input_holds_nothing_of_the_host(box: Machine) -> None:
    feeds = {thread for thread in threading.enumerate() if thread.name == "sandbox-feed"}
    assert box.run("sleep 1000 0<&0 &", stdin=bytes(1 << 20)).exit_code == 0
    # The shell may end before its child has become what it runs.
    until(lambda: "sleep 1000" in " ".join(box.commands()))
    until(lambda: {thread for thread in threading.enumerate() if thread.name == "sandbox-feed"} <= feeds)
