"""Scripts that fail, or call what cannot be emulated, end with one sentence and their own traceback, and
leave nothing behind."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from capturing import SCRIPTS, cases, session

from support.waiting import until
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.main import main
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.failure import is_own
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.program import Script

NAMES = cases("faulty.py")
SAID = {
    "raises": (r"case_raises: ValueError: no such luck \(", "with a second line"),
    "exit_3": (r"case_exit_3: the script called exit\(3\)", ""),
    "exit_72": (r"case_exit_72: the script called exit\(72\)", ""),
    "exit_75": (r"case_exit_75: the script called exit\(75\)", ""),
    "exit_0": (r"the script ended without any work on a device", ""),
    "os_exit_0": (r"the script ended by itself as rank \d+ \(os._exit\?\)", ""),
    "endless": (r"the script hung as rank \d+: for \d+ s it stood at faulty.py:\d+ in case_endless$",
    "in case_endless"),
    "wrong_device_of_a_tensor": (r"invalid device ordinal 9: the emulated host has 8 devices", "cuda:9"),
    "wrong_world_size": (r"init_process_group\(world_size=3\): the emulated world gives world_size 24", ""),
    "killed": (r"rank \d+ was killed \(SIGKILL", ""),
    "crash": (r"the script died of signal 11", "in case_crash"),
    "syntax": (r"broken.py:1: SyntaxError: invalid syntax \(as", "x = = 1"),
}  # fmt: skip
REFUSED = {
    "nonzero": "aten.nonzero", "unique": "aten._unique2",
    "repeat_interleave": "repeat_interleave without output_size",
    "cuda_graph": "torch.cuda.CUDAGraph", "cpu_offload": "torch.distributed.fsdp.CPUOffloadPolicy",
    "first_fsdp_offload": "torch.distributed.fsdp.CPUOffload(offload_params=True)",
    "symmetric_memory": "torch.distributed._symmetric_memory.enable_symm_mem_for_group",
    "rpc": "torch.distributed.rpc.init_rpc", "sparse": "aten", "triton": "triton.testing.do_bench",
}  # fmt: skip
SAID |= {
    name: (rf"^faulty\.py:\d+ in case_{name}: (?=.*{re.escape(call)}).*cannot be emulated", f"in case_{name}")
    for name, call in REFUSED.items()
}


@pytest.fixture(scope="module")
def failing() -> Iterator[Session]:
    with session("faulty.py", cluster="h100-sxm:3x8", timeout=2.0) as capture_session:
        yield capture_session


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_told_in_one_sentence(failing: Session, name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    with pytest.raises(ScriptError) as caught:
        failing.capture([NAMES.index(name)])
    sentence, shown = SAID[name]
    assert re.search(sentence, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert shown in caught.value.details
    assert "windtunnel/training" not in caught.value.details, "frames of ours are no help to the user"


def test_an_operator_without_a_kernel_is_named() -> None:
    error = NotImplementedError("Could not run 'fbgemm::pack' with arguments from the 'CUDA' backend. This")
    assert (
        failure.sentence(error) == "fbgemm::pack cannot be emulated because it has no kernel for CUDA tensors"
    )


def test_of_a_rank_that_is_checked_only_what_cannot_be_emulated_is_no_failure(failing: Session) -> None:
    refused = NAMES.index("nonzero")
    assert failing.check([refused]) == [None]
    assert "aten.nonzero cannot be emulated" in failing.refused[refused]
    with pytest.raises(ScriptError, match=r"the script called exit\(72\)"):
        failing.check([NAMES.index("exit_72")])


def test_whoever_asked_may_go_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with session("faulty.py") as capture_session:
        assert capture_session._worker.stdin is not None and list(tmp_path.iterdir())
        capture_session._worker.stdin.close()
        until(lambda: not list(tmp_path.iterdir()))


@pytest.mark.parametrize("home", ["/usr/lib", "/usr/lib64", "/opt/venv/lib64"])
def test_libraries_are_no_files_of_the_user(home: str) -> None:
    assert not is_own(f"{home}/python3.12/site-packages/torch/nn/modules/module.py")
    assert is_own(f"{home.replace('lib', 'work')}/train.py")


def test_the_script_is_looked_at_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret.py").touch()
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may read what nobody else may
    for name, said in (("none.py", "does not exist"), ("", "is not a file"), ("secret.py", "cannot be read")):
        with pytest.raises(UserError, match=said):
            Session(Script(tmp_path / name, ()), load_cluster("h100-sxm:1x8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "said"),
    [
        (["faulty.py", "case_raises"], r"^windtunnel: faulty.py:\d+ in case_raises: ValueError: no"),
        (["lonely.py"], r"the job would hang: .* at lonely\.py:12 in <module>"),
    ],
)
def test_the_command_ends_with_a_status_and_a_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    script: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    words = ["windtunnel", "emulate", "-c", "h100-sxm:1x8", str(SCRIPTS / script[0]), *script[1:]]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capfd.readouterr()
    assert end.value.code == 1
    assert re.search(said, err, re.MULTILINE), err
    assert out == "" and "windtunnel/" not in err.replace(str(SCRIPTS), "")
    assert not list(tmp_path.glob("windtunnel-*"))
