"""A process that is forked from a preloaded server is as one that was started, where tests rely on it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from support.preloaded import Process
from support.waiting import until

LIGHT = ("json",)


def test_arguments_environment_streams_and_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['GIVEN'], os.getcwd(), __name__, input())\n"
        "shown = open('/proc/self/environ').read().rstrip('\\0').split('\\0')\n"
        "assert shown == [f'{name}={value}' for name, value in os.environ.items()]\n"
        "os.write(int(sys.argv[1]), b'through')\n"
        "sys.exit('last words')\n"
    )
    read, write = os.pipe()
    process = Process(
        [script, str(write)], modules=LIGHT, env={"GIVEN": "this"}, cwd=tmp_path, text=True, pass_fds=[write],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    assert process.stdin and process.stdout and process.stderr
    process.stdin.write("typed\n")
    process.stdin.close()
    assert process.stdout.read() == f"['{write}'] this {tmp_path} __main__ typed\n"
    assert process.stderr.read() == "last words\n"
    assert process.wait() == 1 and process.poll() == 1
    assert os.read(read, 100) == b"through"
    os.close(read)
    process.stdout.close()
    process.stderr.close()


def test_a_signal_ends_it_and_it_is_found_by_its_environment(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import signal\nsignal.pause()\n")
    process = Process([script], modules=LIGHT, env={"MARK": "found"}, start_new_session=True)
    assert process.poll() is None
    until(lambda: _marked(process))
    assert os.getsid(process.pid) == process.pid
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait() == -signal.SIGTERM


def _marked(process: Process) -> bool:
    return b"MARK=found" in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
