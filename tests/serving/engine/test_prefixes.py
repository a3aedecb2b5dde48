"""The prefix cache over real tensors, what is found is what would be computed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from cached_chats import chats  # noqa: E402

from support.families import TINY, read, tiny  # noqa: E402
from windtunnel.serving.engine.live import families  # noqa: E402
from windtunnel.serving.engine.live.executor import Executor  # noqa: E402
from windtunnel.serving.engine.live.prefixes import Prefixes  # noqa: E402

CLOSE = 3e-5  # of the largest logit: processors differ in how they add (up to 1.1e-5 was seen)
PROMPT = 40


@pytest.fixture(scope="module", params=["qwen3", "falcon_h1", "qwen3_next", "lfm2"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    """Attention alone; a state and keys in one layer; a gated delta net; convolutions alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Executor(families.build(tiny(request.param)))
    torch.set_num_threads(threads)


def size(executor: Executor, prompts: float) -> int:
    """Bytes of so many prompts of `PROMPT` tokens with a state each."""
    return int(prompts * (PROMPT * executor.token_bytes + executor.state_bytes))


def ask(prefixes: Prefixes, tokens: list[int], now: float) -> int:
    """Serves a prompt: its last logits are those of a model that knew nothing of it. Tokens that were
    found."""
    executor = prefixes.executor
    match = prefixes.look(tokens, now)
    stream = prefixes.take(match)
    keep = sorted({*match.keep, *([len(tokens)] if match.end == 1 else [])} - {match.depth})
    logits, kept = read(executor, stream, tokens[match.depth :], keep)
    wanted = executor.prefill(alone := executor.new(), tokens)
    assert (logits - wanted).abs().max() <= CLOSE * wanted.abs().max()
    assert int(logits.argmax()) == int(wanted.argmax())
    prefixes.put(tokens, kept, stream, now)
    for sequence in (alone, stream):
        executor.free(sequence)
    prefixes.leave(match)
    return match.depth


def check(prefixes: Prefixes) -> None:
    """What is held, is what the tree says."""
    nodes = {node.id: node for node in prefixes.tree._nodes.values() if node.id}
    assert set(prefixes._snapshots) == set(nodes)
    for name, held in prefixes._snapshots.items():
        assert held.depth == nodes[name].end
        assert bool(held.states) == nodes[name].state
    executor = prefixes.executor
    assert executor.snapshots == set(prefixes._snapshots.values())
    pieces = {piece for snapshot in executor.snapshots for piece, _ in snapshot.path}
    states = sum(each.nbytes for snapshot in executor.snapshots for each in snapshot.states.values())
    held = executor.held(executor.snapshots)
    assert held == states + sum(piece.bytes for piece in pieces) <= prefixes.tree.capacity


def forget(prefixes: Prefixes) -> None:
    """The executor is another test's next."""
    for held in prefixes._snapshots.values():
        prefixes.executor.free(held)


@pytest.mark.parametrize("rules", ["density", "block16"])
def test_what_is_found_is_what_would_be_computed(executor: Executor, rules: str) -> None:
    """Prompts that part anywhere, in so little room that they go."""
    chance = random.Random(rules)
    prefixes = Prefixes(executor, rules, size(executor, 2.5))
    hits = 0
    parents = [[3 + parent] * 16 for parent in range(2)]
    for now in range(24):
        tokens = list(chance.choice(parents))
        while len(tokens) < PROMPT + 9 and chance.random() < 0.9:
            tokens += [chance.randint(3, 5)] * 12
        hits += ask(prefixes, [*tokens, 7], float(now)) > 0
        check(prefixes)
    assert hits > 4 and prefixes.tree.evictions > 0
    forget(prefixes)


def test_what_was_decoded_is_not_kept_where_reading_it_gives_another_state() -> None:
    """Nemotron-H's own code bounds the time steps of its scan and not those of a decoded token."""
    totals = chats("nemotron_h", 3, 2.0)
    assert totals.differ == 0 and totals.off <= CLOSE
    assert totals.cached / totals.tokens == pytest.approx(0.56, abs=0.005)


@pytest.mark.conformance
@pytest.mark.parametrize("family", sorted(TINY))
def test_every_family_says_the_same_from_its_cache(family: str) -> None:
    totals = chats(family)
    assert totals.differ == 0 and totals.off <= CLOSE and totals.cached > 0
