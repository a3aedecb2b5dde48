"""``-m``: a program as a module, as ``python -m`` runs it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from windtunnel.cli.main import main

TRAIN = """
    import os, sys
    import torch
    {extra}
    def main():
        print(sys.argv, file=open("said", "w"))
        assert sys.path[0] == os.getcwd() and sys.modules["__main__"].__file__ == __file__
        model = torch.nn.Linear(int(sys.argv[2]), 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(4, int(sys.argv[2]), device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Modules that cannot be imported but by the ranks: importing them here fails."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    files = {
        "plain.py": TRAIN.format(extra=""),
        "beside.py": "raise_nothing = True",
        "pkg/__init__.py": "import os\nassert os.environ['RANK']",
        "pkg/train.py": TRAIN.format(extra="from .other import NUMBER; from beside import raise_nothing"),
        "pkg/other.py": "NUMBER = 3",
        "runs/__init__.py": "",
        "runs/__main__.py": TRAIN.format(extra="from . import __name__ as name; assert name == 'runs'"),
        "spaces/train.py": TRAIN.format(extra=""),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    given = ["windtunnel", "emulate", "-c", "h100-sxm:1x1", "--no-report", "--json", *words]
    monkeypatch.setattr("sys.argv", given)
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("plain", "plain.py"),
        ("pkg.train", "pkg/train.py"),
        ("runs", "runs/__main__.py"),
        ("spaces.train", "spaces/train.py"),
    ],
)
def test_a_module_runs_as_python_runs_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    module: str,
    file: str,
) -> None:
    assert run(monkeypatch, "-m", module, "--size", "16") == 0, capfd.readouterr().err
    summary = json.loads(capfd.readouterr().out)
    assert summary["command"]["script"] == f"-m {module}"
    assert summary["command"]["args"] == ["--size", "16"]
    assert (folder / "said").read_text() == f"{[str(folder / file), '--size', '16']}\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("nowhere", "there is no module 'nowhere' to be imported from"),
        ("pkg.nowhere", "there is no module 'pkg.nowhere'"),
        ("plain.train", "'plain' is not a package, so it has no 'plain.train'"),
        ("pkg", "'pkg' is a package without a __main__.py, which cannot be run"),
        ("spaces", "'spaces' is a package without a __main__.py, which cannot be run"),
        ("plain.py", "'plain.py' is not the name of a module (give its name, not its file)"),
        ("../plain", "'../plain' is not the name of a module"),
        ("", "'' is not the name of a module"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_no_module_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], module: str, said: str
) -> None:
    assert run(monkeypatch, "-m", module) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("windtunnel: -m: ") and said in err
