"""The verb ``sandbox``: real processes of the command line, in front of the fake host."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agents.sandbox.daemon.daemons import ended
from support.preloaded import SANDBOX, Process, run
from support.waiting import gone
from windtunnel.agents.sandbox import daemon as launch
from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.main import app

CLI = (sys.executable, str(Path(__file__).parent / "fakecli.py"), "sandbox")
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture
def cli(client: Client) -> Run:
    """Run the command line as a process of its own, for the daemon of ``client``."""
    return lambda *arguments, **options: run(
        [*CLI[1:], "--home", client.place.home, *arguments], modules=SANDBOX, **options
    )


@pytest.fixture
def verb(client: Client, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the command line in this process: faster, for what needs no streams of its own."""
    monkeypatch.setenv("WINDTUNNEL_SANDBOX_HOME", str(client.place.home))
    monkeypatch.delenv("WINDTUNNEL_SANDBOX_URL", raising=False)

    def run(*arguments: str, status: int = 0) -> str:
        result = CliRunner().invoke(app, ["sandbox", *arguments])
        if isinstance(result.exception, UserError | ScriptError):
            raise result.exception
        assert result.exit_code == status, result.output
        return re.sub(r"\x1b\[[0-9;]*m", "", result.output)

    return run


Verb = Callable[..., str]


def opened(client: Client, *words: str, **streams: Any) -> subprocess.Popen[bytes]:
    """The command line as a process of its own that is not waited for."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen([*CLI, "--home", str(client.place.home), *words], **streams)


def test_exec_passes_bytes_and_status_on(client: Client) -> None:
    client.create(SandboxSpec("a"))
    command = r"head -c 5000000 /dev/urandom | tee copy; printf '\xff\n' >&2; exit 41"
    with opened(client, "exec", "a", "--", command) as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (41, b"\xff\n")
    assert out == client.get("a").get("/copy")
    assert client.get("a").info().turns == 1


def test_exec_quotes_several_arguments(client: Client, cli: Run) -> None:
    client.create(SandboxSpec("a"))
    done = cli("exec", "a", "--", "printf", "%s|", "$HOME", "it's", "--timeout", "")
    assert (done.stdout, done.returncode) == (b"$HOME|it's|--timeout||", 0)


def test_exec_tells_how_a_command_was_cut_off(client: Client, cli: Run) -> None:
    box = client.create(SandboxSpec("a"))
    late = cli("exec", "a", "--timeout", "0.2", "--", "sleep 600")
    assert (late.returncode, late.stderr) == (124, b"windtunnel: cut off after 0.2 s\n")
    box.run("touch broken")
    warned = cli("exec", "a", "--", "echo fine")
    assert (warned.returncode, warned.stdout) == (1, b"fine\n")
    assert b"the disk is full" in warned.stderr
    box.stop()
    dead = cli("exec", "a", "--", "true")
    assert (dead.returncode, dead.stdout) == (1, b"")
    assert dead.stderr.startswith(b"windtunnel: sandbox a is dead") and dead.stderr.count(b"\n") == 1


def test_what_lacks_has_an_exit_status_of_its_own_and_is_told_as_json(client: Client, cli: Run) -> None:
    box = client.create(SandboxSpec("a"))
    box.run("echo it is watched > odd")
    lacks = [{"kind": "processes", "what": "odd (process 7 inside)", "why": "it is watched\n"}]
    for words, status in (((), 3), (("--allow-less",), 0)):
        kept = cli("checkpoint", "a", "--json", *words)
        report = json.loads(kept.stdout)
        assert (kept.returncode, report["lacks"], report["restorable"]) == (status, lacks, ["files"])
        assert report["id"] == box.tip, "it is kept all the same"
        assert (b"odd is not kept" in kept.stderr) == (status == 3)
        back = cli("restore", "a", "--json", *words)
        report = json.loads(back.stdout)
        assert (back.returncode, report["lacks"], report["restored"]) == (status, lacks, ["files"])
        assert box.info().status == ("stopped" if status else "running")
        gone = cli("notice", "30", "--json", *words)
        assert (gone.returncode, json.loads(gone.stdout)["a"]["lacks"]) == (status, lacks)
    shown = cli("checkpoint", "a").stderr.decode(), cli("log", "a").stdout.decode()
    assert shown == ("windtunnel: odd is not kept\n", shown[1]) and "1 lacking" in shown[1]


def test_ctrl_c_cancels_the_command(client: Client) -> None:
    client.create(SandboxSpec("a"))
    with opened(client, "exec", "a", "--", "echo $$; exec sleep 600") as process:
        assert process.stdout is not None and process.stderr is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == b"windtunnel: cancelled\n"
    assert gone(pid)


def test_a_reader_that_leaves_ends_the_command(client: Client) -> None:
    client.create(SandboxSpec("a"))
    with opened(client, "exec", "a", "--", "yes") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(4) == b"y\ny\n"
        process.stdout.close()
        assert process.wait(60) == 141
        assert process.stderr.read() == b""
    assert client.get("a").run("echo free", timeout=60).stdout == b"free\n"


def test_files_in_and_out(client: Client, cli: Run, tmp_path: Path) -> None:
    client.create(SandboxSpec("a"))
    data = bytes(range(256)) * 99
    (tmp_path / "in").write_bytes(data)
    (tmp_path / "in").chmod(0o751)
    assert cli("put", "a", "in", "/d/", cwd=tmp_path).returncode == 0
    assert cli("put", "a", "-", "/piped", input=data).returncode == 0
    assert client.get("a").run("stat -c %a d/in piped").stdout == b"751\n644\n"
    assert cli("get", "a", "/d/in").stdout == data
    assert cli("get", "a", "/piped", ".", cwd=tmp_path).returncode == 0
    assert (tmp_path / "piped").read_bytes() == data
    missing = cli("get", "a", "/nope", "out", cwd=tmp_path)
    assert (missing.returncode, missing.stderr) == (2, b"windtunnel: sandbox: /nope is no file\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "piped"]
    assert cli("put", "a", "nothing", "/x", cwd=tmp_path).returncode == 2


def test_shell_takes_lines_from_a_pipe(client: Client, cli: Run) -> None:
    client.create(SandboxSpec("a"))
    done = cli("shell", "a", input=b"echo one\n\necho two \\\nthree\nexit\necho never\n")
    assert (done.stdout, done.returncode) == (b"one\ntwo three\n", 0)
    assert client.get("a").info().turns == 2


def test_exec_has_this_standard_input_where_asked(client: Client, cli: Run) -> None:
    client.create(SandboxSpec("a"))
    data = os.urandom(2_000_000)
    assert cli("exec", "-i", "a", "--", "cat", input=data).stdout == data
    assert cli("exec", "a", "--", "cat", input=data).stdout == b""
    left = cli("exec", "-i", "a", "--", "head -c 3; exit 5", input=data)
    assert (left.stdout, left.returncode) == (data[:3], 5)
    reads = "while read x; do echo $x-; done"
    with opened(client, "exec", "-i", "a", "--", reads, stdin=subprocess.PIPE, stderr=None) as process:
        assert process.stdin is not None and process.stdout is not None
        for word in (b"one", b"two"):  # what is typed arrives before there is more
            process.stdin.write(word + b"\n")
            process.stdin.flush()
            assert process.stdout.readline() == word + b"-\n"
        process.stdin.close()
        assert process.wait(60) == 0


def test_shell_is_a_terminal_with_the_size_of_this_one(client: Client) -> None:
    client.create(SandboxSpec("a"))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (33, 77))
    with opened(client, "shell", "a", stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""

        def until(words: bytes) -> None:
            nonlocal shown
            while words not in shown:
                assert select.select([ours], [], [], 90)[0], shown
                shown += os.read(ours, 4096)

        os.write(ours, b"PS1=; tty; stty size; echo 6x$((6 * 7))\n")
        until(b"/dev/pts/")
        until(b"33 77")
        until(b"6x42")
        termios.tcsetwinsize(ours, (44, 99))
        process.send_signal(signal.SIGWINCH)
        os.write(ours, b"until [ \"$(stty size)\" = '44 99' ]; do sleep 0.05; done; echo resiz''ed\n")
        until(b"resized")
        os.write(ours, b"exit 7\n")
        assert process.wait(60) == 7
    os.close(ours)
    assert client.get("a").info().turns == 1


def test_the_life_of_sandboxes(client: Client, verb: Verb, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    limits = ["--memory", "1.5G", "--cpus", "2", "--pids", "none", "--disk", "10M"]
    network = ["--network", "proxy", "--upstream", "http://model"]
    words = ["--image", str(tmp_path / "image"), "--env", "A=b=c", "--service", "web=run it"]
    assert verb("create", "a", *words, *limits, *network).startswith("a runs")
    spec = client.get("a").spec
    assert spec.limits == SandboxLimits(3 * 2**29, 2.0, None, 10 * 2**20)
    assert (spec.environment, spec.services) == ({"A": "b=c"}, {"web": "run it"})
    verb("create", "b")
    assert json.loads(verb("ls", "--json"))[1]["name"] == "b"
    assert "running" in verb("ls")
    assert json.loads(verb("ls", "--json"))[0]["processes"] == ["sh"]
    with pytest.raises(UserError, match="'nope' is unknown"):
        verb("stop", "a", "nope")
    assert client.get("a").info().status == "running"
    assert verb("stop", "a") == "stopped a\n"
    assert verb("rm", "a", "b", "--yes") == "removed a\nremoved b\n"
    assert verb("ls").startswith("No sandboxes yet")


def test_checkpoints(client: Client, verb: Verb) -> None:
    box = client.create(SandboxSpec("a"))
    first = json.loads(verb("checkpoint", "a", "--label", "start", "--full", "--json"))
    assert (first["turn_class"], first["label"]) == ("full", "start")
    assert "kept: files" in verb("checkpoint", "a")
    assert verb("fork", "a", "--count", "2", "--name", "x") == "x-1\nx-2\n"
    assert verb("fork", first["id"], "--name", "y") == "y\n"
    assert "back: files" in verb("restore", "a")
    assert first["id"] in verb("rollback", "a", first["id"])
    lines = verb("log", "a").splitlines()
    assert [line for line in lines if line.startswith(first["id"]) and "start" in line]
    assert "tip of a" in lines[-1] and first["id"] in lines[2]
    with box.turn("r"):
        box.run("true")
    assert "modified /a" in verb("log", "a", "--turns")
    assert json.loads(verb("log", "a", "--json"))["turns"][0]["turn_class"] == "files"
    assert "~ /a" in verb("diff", "a", first["id"])
    assert "would drop checkpoint old" in verb("gc", "--dry-run")
    assert "4.0 KiB freed" in verb("gc")
    assert verb("notice", "30").count(": c") == 4
    assert "exported" in verb("export", "a", "out")
    assert verb("import", "file:///x", "z") == "z runs\n"
    assert client.get("z").info().image == "file:///x"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "Bad Name"), "name 'Bad Name' is not accepted"),
        (("create", "x", "--memory", "lots"), "--memory 'lots'"),
        (("create", "x", "--memory=-1G"), "--memory '-1G'"),
        (("create", "x", "--cpus", "0"), "limit cpus 0.0"),
        (("create", "x", "--cpus", "one"), "--cpus 'one'"),
        (("create", "x", "--pids", "1.5"), "--pids '1.5'"),
        (("create", "x", "--network", "wifi"), "off, proxy, egress"),
        (("create", "x", "--network", "proxy"), "--upstream"),
        (("create", "x", "--env", "A"), "--env 'A' is not accepted; write KEY=VALUE"),
        (("create", "x", "--env", "A=1", "--env", "A=2"), "given twice"),
        (("serve", "--http", "x"), "PORT or ADDRESS:PORT"),
        (("serve", "--http", "8000"), "needs a token"),
        (("serve", "--tcp", "0.0.0.0:1", "--token", "/dev/null"), "needs a token"),
        (("--tls-cert", "x", "ls"), "--tls-key"),
        (("serve", "--http", "8000", "--token", "/no/such"), "token file /no/such cannot be read"),
        (("--url", "tcp://127.0.0.1:1", "serve"), "a home of this host"),
        (("--home", "/tmp/" + "x" * 300, "ls"), "is too long"),
        (("put", "a", "/tmp/" + "x" * 300, "/x"), "put: /tmp/xxx"),
        (("get", "a", "/x", "/proc/nothing/x"), "No such file"),
        (("export", "a", ""), "the URL is empty"),
        (("import", " ", "b"), "the URL is empty"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(
    verb: Verb, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], words: str
) -> None:
    monkeypatch.delenv("WINDTUNNEL_SANDBOX_TOKEN", raising=False)
    with pytest.raises(UserError) as error:
        verb(*arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_two_at_once_start_one_daemon_and_down_ends_it(daemon_home: Path) -> None:
    command = [*CLI[1:], "--home", daemon_home]
    with ended(daemon_home):
        both = [
            Process([*command, "create", name], modules=SANDBOX, stdout=subprocess.DEVNULL) for name in "ab"
        ]
        assert [process.wait(60) for process in both] == [0, 0]
        assert len((daemon_home / "starts").read_text().split()) == 1
        down = run([*command, "down"], modules=SANDBOX)
        assert (down.stdout, down.returncode) == (b"the daemon has ended; 2 running sandboxes run on\n", 0)
        assert not launch.answers(daemon_home)
        down = run([*command, "down"], modules=SANDBOX)
        assert (down.stdout, down.returncode) == (f"no daemon of {daemon_home} runs\n".encode(), 0)
