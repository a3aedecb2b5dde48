"""The prefix cache over real tensors, in memory and on a disk: what is found is what would be computed."""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from cached_chats import chats  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from windtunnel.base import atomic  # noqa: E402
from windtunnel.base.errors import UserError  # noqa: E402
from windtunnel.cli.main import app  # noqa: E402
from windtunnel.serving.engine.live import disk, families  # noqa: E402
from windtunnel.serving.engine.live.disk import PREFIX, Disk  # noqa: E402
from windtunnel.serving.engine.live.executor import Executor, Snapshot  # noqa: E402
from windtunnel.serving.engine.live.prefixes import Prefixes  # noqa: E402
from windtunnel.store import alive  # noqa: E402

CLOSE = 1e-5  # of the largest logit
SLOW = 1.0  # FLOP/s: so slow that all is worth bringing back
PROMPT = 40


@pytest.fixture(scope="module", params=["qwen3", "falcon_h1", "qwen3_next", "lfm2"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Attention alone; a state and keys in one layer; a gated delta net; convolutions alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Executor(families.build(families.tiny(request.param)))
    torch.set_num_threads(threads)


_adopt = Executor.adopt
TWO = pytest.mark.parametrize("executor", ["qwen3", "falcon_h1"], indirect=True)


def size(executor: Executor, prompts: float) -> int:
    """Bytes of so many prompts of `PROMPT` tokens with a state each."""
    return int(prompts * (PROMPT * executor.token_bytes + executor.state_bytes))


def ask(prefixes: Prefixes, tokens: list[int], now: float) -> int:
    """Serves a prompt: its last logits are those of a model that knew nothing of it. Tokens that were
    found."""
    executor = prefixes.executor
    found = prefixes.look(tokens, now)
    stream = prefixes.take(found, tokens)
    keep = sorted({*found.keep, *([len(tokens)] if found.end == 1 else [])} - {found.depth})
    logits, kept = executor.prefill(stream, tokens[found.depth :], keep)
    wanted, _ = executor.prefill(alone := executor.new(), tokens)
    assert (logits - wanted).abs().max() <= CLOSE * wanted.abs().max()
    assert int(logits.argmax()) == int(wanted.argmax())
    prefixes.put(tokens, kept, stream, now)
    for one in (alone, stream):
        executor.free(one)
    prefixes.leave(found)
    return found.depth


def check(prefixes: Prefixes) -> None:
    """What is held, in memory and in files, is what the tree says."""
    nodes = {one.id: one for one in prefixes.tree._nodes.values() if one.id}
    assert set(prefixes._held) == {name for name, one in nodes.items() if one.tier == 0}
    for name, held in prefixes._held.items():
        assert held.depth == nodes[name].end
        assert bool(held.states) == (nodes[name].state == 0)
    files = {(name, "kv") for name, one in nodes.items() if one.tier}
    files |= {(name, "state") for name, one in nodes.items() if one.state}
    assert prefixes.disk is None or set(prefixes.disk._files) == files
    executor = prefixes.executor
    assert executor.snapshots == set(prefixes._held.values())
    pieces = {piece for one in executor.snapshots for piece, _ in one.path}
    states = sum(each.nbytes for one in executor.snapshots for each in one.states.values())
    assert executor._states_kept == states
    assert executor.lasting == states + sum(piece.bytes for piece in pieces) <= prefixes.tree.capacity[0]


def written(kept: Disk) -> list[Path]:
    """Its files, all of them written."""
    kept._writer.submit(int).result()
    return sorted(one for one in kept._own.iterdir() if one.name.isdigit())


def forget(prefixes: Prefixes) -> None:
    """The executor is another test's next."""
    prefixes.disk.close()
    for held in prefixes._held.values():
        prefixes.executor.free(held)


@pytest.mark.parametrize("rules", ["density", "block16"])
def test_what_comes_back_from_anywhere_is_what_would_be_computed(
    executor: Executor, rules: str, tmp_path: Path
) -> None:
    """Prompts that part anywhere, in so little room that they go down, come back and go for good."""
    chance = random.Random(rules)
    prefixes = Prefixes(executor, rules, size(executor, 2.5), None, Disk(tmp_path), size(executor, 6), SLOW)
    taken, hits = [0], 0
    take = prefixes.disk.take
    prefixes.disk.take = lambda key: taken.append(key) or take(key)
    trunks = [[3 + trunk] * 16 for trunk in range(2)]
    for now in range(24):
        tokens = list(chance.choice(trunks))
        while len(tokens) < PROMPT + 9 and chance.random() < 0.9:
            tokens += [chance.randint(3, 5)] * 12
        hits += ask(prefixes, [*tokens, 7], float(now)) > 0
        check(prefixes)
    assert hits > 8 and prefixes.unwritten == prefixes.unread == 0
    assert len(taken) > 5
    assert 0 < prefixes.facts()["prefix_disk_bytes"] <= size(executor, 6)
    forget(prefixes)


def prompts(count: int) -> list[list[int]]:
    return [[3 + 11 * each + at % 7 for at in range(PROMPT)] for each in range(count)]


@TWO
def test_a_file_that_is_not_as_it_was_written_is_not_served(
    executor: Executor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Torn, with a bit turned over, exchanged, forged (of the right form, with other numbers) or gone."""
    prefixes = Prefixes(executor, "density", size(executor, 1.2), None, Disk(tmp_path), 1 << 40, SLOW)
    for now, prompt in enumerate(prompts(6)):
        ask(prefixes, [*prompt, 7], float(now))
    files = written(prefixes.disk)
    assert len(files) >= 5
    whole = [one.read_bytes() for one in files]
    for place, (file, data) in enumerate(zip(files, whole, strict=True)):
        match place % 5:
            case 0:
                file.write_bytes(data[:-1])
            case 1:
                file.write_bytes(data[:-9] + bytes([data[-9] ^ 4]) + data[-8:])
            case 2:
                file.write_bytes(whole[place - 1])
            case 3:
                other = {name: each + 1 for name, each in safetensors.load(data).items() if name != "digest"}
                file.write_bytes(safetensors.save(safetensors.load(data) | other))
            case 4:
                file.unlink()
    for now, prompt in enumerate(prompts(5), 10):
        assert ask(prefixes, [*prompt, 7], float(now)) == 0
        check(prefixes)
    facts = prefixes.facts()
    assert facts["prefix_disk_unread"] >= 5
    told = capsys.readouterr().err
    assert told.count("--prefix-disk") == 1 and f"--prefix-disk {tmp_path}: " in told
    for now, prompt in enumerate(prompts(5), 20):  # it goes on
        assert ask(prefixes, [*prompt, 7], float(now)) > 0
    assert prefixes.facts()["prefix_disk_unread"] == facts["prefix_disk_unread"]
    forget(prefixes)


@TWO
def test_a_disk_that_is_full_is_used_as_far_as_it_goes(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = size(executor, 20)
    prefixes = Prefixes(executor, "density", size(executor, 1.2), None, Disk(tmp_path), room, SLOW)
    real = atomic.replace

    def full(path: Path, data: bytes) -> None:
        """As the kernel answers: no file may be larger than this."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        try:
            real(path, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    for now, prompt in enumerate(prompts(4)):
        ask(prefixes, [*prompt, 7], float(now))
    there = len(written(prefixes.disk))
    with monkeypatch.context() as patch:
        patch.setattr(disk.atomic, "replace", full)
        for now, prompt in enumerate(prompts(8), 10):
            ask(prefixes, [*prompt, 7], float(now))
            written(prefixes.disk)
    ask(prefixes, [1, 2], 30.0)
    check(prefixes)
    facts = prefixes.facts()
    assert facts["prefix_disk_unwritten"] >= 1 and facts["prefix_disk_unread"] == 0
    assert facts["prefix_disk_room"] < room
    assert len(written(prefixes.disk)) <= there and not list(tmp_path.rglob("*.part"))
    told = capsys.readouterr().err
    assert told.count("--prefix-disk") == 1 and f"{tmp_path}: File too large" in told
    forget(prefixes)


def test_what_a_dead_worker_left_goes_and_what_a_live_one_has_stays(tmp_path: Path) -> None:
    for name in ("dead", "live"):
        (own := tmp_path / f"{PREFIX}{name}").mkdir()
        (own / alive.NAME).touch()
    alive.hold(own)
    (tmp_path / "notes").write_text("of the user")
    made = Disk(tmp_path)
    left = {one.name for one in tmp_path.iterdir()}
    assert left == {f"{PREFIX}live", "notes", made._own.name}
    alive.release(own)
    assert os.stat(made._own).st_mode & 0o077 == 0, "what prompts hold is for nobody else"
    assert made.put((1, "kv"), {"a": torch.arange(4.0)})
    made.close()
    assert not made._own.exists()


def test_a_disk_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = ["serve", "--config", "tiny-hybrid", "--prefix-disk"]
    for wrong, said in (
        ([str(tmp_path / "file")], f"--prefix-disk {tmp_path}/file cannot be used (File exists)"),
        ([str(tmp_path), "--prefix-cache", "none"], "--prefix-disk is for a model that is served with"),
        ([str(tmp_path), "--prefix-disk-kv", "much"], "--prefix-disk-kv 'much'"),
    ):
        done = CliRunner().invoke(app, [*words, *wrong])
        assert isinstance(done.exception, UserError) and said in str(done.exception)


def test_what_comes_back_from_a_disk_is_what_was_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = chats("lfm2", 3)
    assert (
        seen.differ == 0 and seen.off <= CLOSE and seen.found / seen.tokens == pytest.approx(0.6, abs=0.005)
    )
    monkeypatch.setattr(Executor, "adopt", lambda self, tensors, parent=None: _shifted(self, tensors, parent))
    seen = chats("lfm2", 3)
    assert seen.differ or seen.off > CLOSE, "what comes back from the disk is another state"


def test_what_was_decoded_is_not_kept_where_reading_it_gives_another_state() -> None:
    """Nemotron-H's own code bounds the time steps of its scan and not those of a decoded token."""
    seen = chats("nemotron_h", 3)
    assert seen.differ == 0 and seen.off <= CLOSE
    assert seen.found / seen.tokens == pytest.approx(0.53, abs=0.005)


@pytest.mark.conformance
@pytest.mark.parametrize("family", sorted(families.TINY))
def test_every_family_says_the_same_from_its_cache(family: str) -> None:
    seen = chats(family)
    assert seen.differ == 0 and seen.off <= CLOSE and seen.found > 0


def _shifted(executor: Executor, tensors: dict[str, torch.Tensor], parent: Snapshot | None) -> Snapshot:
    other = {name: each + 1 if each.is_floating_point() else each for name, each in tensors.items()}
    return _adopt(executor, other, parent)


def test_a_disk_that_is_too_slow_is_given_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "BEHIND", 8)
    made = Disk(tmp_path)
    whole = {"a": torch.arange(4.0)}
    gate = threading.Event()
    made._writer.submit(gate.wait)
    assert made.put((1, "kv"), whole) and not made.put((2, "kv"), whole)
    assert made.take((1, "kv")) is whole, "what is not written yet is there"
    gate.set()
    assert written(made) == [] and (1, "kv") not in made and made.failed() == []
