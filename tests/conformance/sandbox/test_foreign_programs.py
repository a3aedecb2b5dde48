"""The matrix's own verdicts, held against sandboxes that lie; and a few real rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from conformance.sandbox.matrix import judge
from conformance.sandbox.matrix.arena import Answer, Told
from conformance.sandbox.matrix.judge import judged
from conformance.sandbox.matrix.row import MatrixRow, Outcome, Verdict, folders
from conformance.sandbox.matrix.run import ROWS, counted, image_of, missing
from conformance.sandbox.matrix.table import BEGIN, END, table, write
from windtunnel.base.errors import UserError

ROW = MatrixRow("a counter", "program", "it counts", start="count", check="check", go_on="more", end="end")


@dataclass
class Fake:
    """Sandboxes that answer what a test says: ``says`` is given the sandbox's role (the sandbox, a fork of
    it, the undisturbed control), the command, and how often that sandbox was restored."""

    says: Callable[[str, str, int], bool] = lambda role, command, restored: True
    kept: Told = field(default_factory=lambda: Told("c1"))
    back: Told = field(default_factory=lambda: Told("c1"))
    forked: Told = field(default_factory=lambda: Told("c1"))
    did: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=set)
    restored: int = 0

    def create(self, name: str, image: str, network: str, environment: Mapping[str, str]) -> None:
        self.alive.add(name)

    def put(self, name: str, path: str, data: bytes) -> None: ...

    def run(self, name: str, command: str, timeout: float) -> Answer:
        role = "control" if "control" in name else "fork" if "fork" in name else "box"
        self.did.append(f"{role} {command}")
        return Answer(0 if self.says(role, command, self.restored) else 1, "said so")

    def checkpoint(self, name: str) -> Told:
        self.did.append("checkpoint")
        return self.kept

    def kill(self, name: str) -> None:
        self.did.append("kill")

    def restore(self, name: str) -> Told:
        self.did.append("restore")
        self.restored += 1
        return self.back

    def fork(self, checkpoint: str, name: str, count: int) -> Told:
        assert checkpoint == "c1" and count == 2
        self.did.append("fork")
        self.alive.update((f"{name}-1", f"{name}-2"))
        return self.forked

    def remove(self, name: str) -> None:
        self.alive.discard(name)


def outcome(fake: Fake, row: MatrixRow = ROW) -> tuple[Verdict, str]:
    judgement = judged(fake, row, "host", {})
    assert not fake.alive
    return judgement.verdict, judgement.words


def test_a_row_that_comes_back_is_right_and_every_step_was_taken() -> None:
    fake = Fake()
    assert outcome(fake) == (Verdict.RIGHT, "")
    steps = [did for did in fake.did if did.split()[-1] in ("check", "more", "end") or " " not in did]
    assert steps == [
        "checkpoint", "kill", "restore", "box check",
        "fork", "fork check", "fork check", "box more", "box end",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("role", "command", "where"),
    [
        ("box", "check", "after the restore"),
        ("fork", "check", "in fork 1"),
        ("box", "more", "going on"),
        ("box", "end", "at the end"),
    ],
)
def test_a_check_that_fails_after_everybody_said_well_is_wrong_in_silence(
    role: str, command: str, where: str
) -> None:
    fake = Fake(lambda who, asked, restored: (who, asked) != (role, command) or restored == 0)
    verdict, words = outcome(fake)
    assert verdict is Verdict.SILENT
    assert words == f"{where}: exit status 1: said so"


@pytest.mark.parametrize("what", ["back", "forked"])
@pytest.mark.parametrize("reply", [Told("c1", ("timerfd 5: does not tick",)), Told(fault="CRIU failed")])
def test_what_a_restore_or_a_fork_tells_is_wrong_but_told(what: str, reply: Told) -> None:
    verdict, words = outcome(replace(Fake(), **{what: reply}))
    assert verdict is Verdict.TOLD
    assert reply.words in words


def test_a_refusal_beforehand_is_kept_where_the_sandbox_goes_on() -> None:
    refused = Told("c1", ("python3 app.py: io_uring: cannot be kept",))
    fake = Fake(kept=refused)
    assert outcome(fake) == (Verdict.REFUSED, refused.words)
    assert "restore" not in fake.did and fake.did[-1] == "box end"
    assert outcome(Fake(kept=refused), replace(ROW, refused="io_uring"))[0] is Verdict.REFUSED
    assert outcome(Fake(kept=refused), replace(ROW, refused="huge pages"))[0] is Verdict.TOLD


def test_a_refusal_that_harms_or_says_nothing_is_none() -> None:
    refused = Told("c1", ("python3 app.py: io_uring: cannot be kept",))
    harmed = Fake(lambda role, command, _: command != "end", kept=refused)
    assert outcome(harmed)[0] is Verdict.TOLD
    assert outcome(Fake(kept=Told(fault="the disk is full"))) == (Verdict.TOLD, "the disk is full")


def test_a_row_that_fails_undisturbed_too_says_nothing_about_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    verdict, words = outcome(Fake(lambda role, command, _: command != "check"))
    assert (verdict, words) == (Verdict.BROKEN, "undisturbed: exit status 1: said so")
    monkeypatch.setattr(judge, "EVERY", 0.0)
    late = replace(ROW, ready="ready", seconds=0.0)
    verdict, words = outcome(Fake(lambda role, command, _: command != "ready"), late)
    assert verdict is Verdict.BROKEN and "not ready after 0 s: said so" in words


# --- rows, their image, and the table


def test_rows_are_sound() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.asks and row.check and row.seconds <= 120, row.name
        assert all((row.inside / file).is_file() for file in row.files), row.name


def test_what_a_row_needs_and_is_not_here_is_named() -> None:
    assert "no-such-package" in missing(replace(ROW, packages=("no-such-package",)))
    assert missing(replace(ROW, distributions=("no-such-distribution",))) == (
        "the Python distribution no-such-distribution is not installed"
    )
    assert any(path.name == "simpy" for path in folders(("simpy",)))
    assert image_of([replace(ROW, packages=("b", "a")), replace(ROW, packages=("a",))]) == "host+a,b"
    assert image_of([ROW]) == "host"


def test_what_is_absent_does_not_count_and_what_is_wrong_is_named() -> None:
    right, wrong, absent = (
        Outcome(replace(ROW, name=verdict.name), verdict, "why")
        for verdict in (Verdict.RIGHT, Verdict.SILENT, Verdict.ABSENT)
    )
    row = counted("programs", [right, wrong, absent])
    assert (row.measured, row.passed) == (0.5, False)
    assert "SILENT: wrong in silence (why)" in row.note
    assert counted("programs", [right, absent]).passed is True


def test_the_table_goes_between_its_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}the old\n{END}\nafter\n")
    outcomes = [Outcome(ROW, Verdict.RIGHT), Outcome(replace(ROW, name="b|c"), Verdict.TOLD, "line\nby line")]
    write(page, outcomes)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{END}\nafter\n") and "old\n" not in text
    assert "| a counter | it counts | ✓ right |" in text
    assert "| b/c | it counts | ✗ wrong, told: line by line |" in text
    assert "2 rows: 1 right, 1 wrong, told." in table(outcomes)
    write(page, outcomes)
    assert page.read_text() == text
    page.write_text("nothing")
    with pytest.raises(UserError, match="no line '<!-- matrix -->'"):
        write(page, outcomes)
