"""The SWE-ReX adapter, as its package's own runtime and deployment."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox.client import Client
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

rex = pytest.importorskip("swerex.runtime.abstract", reason="needs the package swe-rex")
faults = pytest.importorskip("swerex.exceptions")

from windtunnel.agents.sandbox.adapters.swerex import SandboxDeployment, SandboxRuntime  # noqa: E402


@pytest.fixture
def runtime(client: Client) -> SandboxRuntime:
    return SandboxRuntime(client.create(SandboxSpec("a")))


def do(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def session(runtime: SandboxRuntime, *actions: Any) -> list[Any]:
    await runtime.create_session(rex.CreateBashSessionRequest())
    return [await runtime.run_in_session(action) for action in actions]


def test_actions_and_their_turns(runtime: SandboxRuntime) -> None:
    first, second = do(
        session(
            runtime,
            rex.BashAction(command="echo out; echo err >&2; echo out2"),
            rex.BashAction(command="echo x; (exit 3)  # why", check="silent"),
        )
    )
    assert (first.output, first.exit_code) == ("out\nerr\nout2\n", 0)
    assert (second.output, second.exit_code) == ("x\n", 3)
    assert len(runtime.box.log().turns) == 3  # the start of the session, and each action


def test_here_documents_and_several_lines(runtime: SandboxRuntime) -> None:
    (observation,) = do(session(runtime, rex.BashAction(command="cat <<'END'\na $b\nEND\necho last")))
    assert observation.output == "a $b\nlast\n"


def test_failures_are_those_of_swerex(runtime: SandboxRuntime) -> None:
    async def life() -> None:
        await session(runtime)
        run = runtime.run_in_session
        with pytest.raises(faults.NonZeroExitCodeError, match=r"(?s)hint: .*exit code 4.*why"):
            await run(rex.BashAction(command="echo why; (exit 4)", error_msg="hint"))
        assert (await run(rex.BashAction(command="(exit 4)", check="ignore"))).exit_code is None
        with pytest.raises(faults.BashIncorrectSyntaxError) as wrong:
            await run(rex.BashAction(command="echo begun > ran; if then"))
        assert "syntax error" in wrong.value.extra_info["bash_stderr"]
        assert "ran" not in [entry.name for entry in runtime.box.listdir("/")]
        with pytest.raises(faults.CommandTimeoutError, match=r"0\.3 seconds"):
            await run(rex.BashAction(command="sleep 600", timeout=0.3))
        with pytest.raises(faults.SessionDoesNotExistError):
            await run(rex.BashAction(command="true", session="other"))
        with pytest.raises(faults.SessionExistsError):
            await runtime.create_session(rex.CreateBashSessionRequest())
        with pytest.raises(UserError, match="no terminal"):
            await run(rex.BashAction(command="gdb", is_interactive_command=True))
        with pytest.raises(faults.SessionDoesNotExistError):
            await runtime.close_session(rex.CloseBashSessionRequest(session="other"))

    do(life())


def test_an_interrupt_ends_what_runs(runtime: SandboxRuntime) -> None:
    async def life() -> None:
        await session(runtime)
        action = rex.BashAction(command="touch begun; sleep 600", check="silent")
        running = asyncio.create_task(runtime.run_in_session(action))
        async with asyncio.timeout(20):
            while "begun" not in [entry.name for entry in await asyncio.to_thread(runtime.box.listdir, "/")]:
                await asyncio.sleep(0.01)
            await runtime.run_in_session(rex.BashInterruptAction())
            assert (await running).exit_code is None
        assert (await runtime.run_in_session(rex.BashInterruptAction())).exit_code == 0

    do(life())


def test_commands_beside_the_sessions(runtime: SandboxRuntime) -> None:
    async def life() -> None:
        done = await runtime.execute(
            rex.Command(command=["sh", "-c", "echo $A; pwd; echo e >&2"], env={"A": "1"}, cwd="/")
        )
        assert (done.stdout, done.stderr, done.exit_code) == ("1\n/\n", "e\n", 0)
        done = await runtime.execute(
            rex.Command(command="echo a; echo b >&2", shell=True, merge_output_streams=True)
        )
        assert (done.stdout, done.stderr) == ("a\nb\n", "")
        with pytest.raises(faults.NonZeroExitCodeError, match="hint"):
            await runtime.execute(rex.Command(command="exit 2", shell=True, check=True, error_msg="hint"))
        with pytest.raises(faults.CommandTimeoutError):
            await runtime.execute(rex.Command(command=["sleep", "600"], timeout=0.3))

    do(life())


def test_files(client: Client, runtime: SandboxRuntime, tmp_path: Path) -> None:
    assert client.place.home is not None
    root = (
        client.place.home / "fake" / "a" / "files"
    )  # the fake host has no root of its own, so paths here are absolute

    async def life() -> None:
        await runtime.write_file(rex.WriteFileRequest(path="/f", content="ü\r\n"))
        assert runtime.box.get("/f") == "ü\r\n".encode()
        assert (await runtime.read_file(rex.ReadFileRequest(path="/f"))).content == "ü\n"
        (tmp_path / "d" / "sub").mkdir(parents=True)
        (tmp_path / "d" / "sub" / "file").write_bytes(b"\0x")
        (tmp_path / "d" / "run.sh").write_text("echo hi")
        (tmp_path / "d" / "run.sh").chmod(0o755)
        target = f"/{root.name}-up"
        await runtime.upload(rex.UploadRequest(source_path=str(tmp_path / "d"), target_path=target))
        assert runtime.box.get(f"{target}/sub/file") == b"\0x"
        assert {entry.name: entry.kind for entry in runtime.box.listdir(target)} == {
            "sub": "folder",
            "run.sh": "file",
        }
        with pytest.raises(FileNotFoundError):
            await runtime.upload(rex.UploadRequest(source_path="/no/such", target_path="/x"))

    do(life())


def test_a_deployment_makes_and_removes_its_sandbox(client: Client) -> None:
    async def life() -> None:
        deployment = SandboxDeployment(client, SandboxSpec("mine"))
        assert not await deployment.is_alive()
        with pytest.raises(faults.DeploymentNotStartedError):
            _ = deployment.runtime
        await deployment.start()
        assert await deployment.is_alive()
        await deployment.runtime.create_session(rex.CreateBashSessionRequest())
        client.get("mine").checkpoint()
        client.get("mine").stop()
        assert "stopped" in (await deployment.is_alive()).message
        await deployment.start()  # what died is brought back
        assert await deployment.is_alive()
        await deployment.stop()
        assert client.boxes() == []
        with pytest.raises(faults.DeploymentStartupError, match="image"):
            await SandboxDeployment(client, SandboxSpec("b", image="missing")).start()

    do(life())


def test_nothing_of_its_interface_is_missing() -> None:
    assert not inspect.isabstract(SandboxRuntime) and not inspect.isabstract(SandboxDeployment)
