"""The executor against the models' own code: one model of each family, tiny and random."""

from __future__ import annotations

import hashlib
import random
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from support.families import SMALL, TINY, Recorded, read, tiny  # noqa: E402
from windtunnel.base.errors import UserError  # noqa: E402
from windtunnel.serving.engine.live import attention, families  # noqa: E402
from windtunnel.serving.engine.live.executor import Executor, Snapshot  # noqa: E402
from windtunnel.serving.engine.live.segments import Sequence  # noqa: E402

TIE = 1e-4  # two best logits as near as this may change places: sums in another order
CLOSE = 1e-5  # of the largest logit


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _ids(count: int, seed: int) -> list[int]:
    return [random.Random(f"{seed} {at}").randrange(3, 199) for at in range(count)]


def _generated(plain: Any, prompt: list[int], count: int) -> list[int]:
    """What Transformers generates greedily."""
    with torch.no_grad():
        out = plain.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


class _Row:
    """A sequence that decodes greedily, held against what was generated; a tie ends it."""

    def __init__(self, sequence: Sequence, logits: Any, wanted: list[int]) -> None:
        self.sequence, self.logits, self.left, self.ties = sequence, logits, list(wanted), 0

    def token(self) -> int:
        wanted, best = self.left.pop(0), int(self.logits.argmax())
        if best != wanted:
            assert self.logits[best] - self.logits[wanted] < TIE
            self.ties += 1
        return wanted


def _decode(served: Executor, rows: list[_Row], chance: random.Random) -> int:
    """Decodes all to their ends, in each step some of them in any order; tells how many ties there were."""
    while alive := [row for row in rows if row.left]:
        some = chance.sample(alive, chance.randint(1, len(alive)))
        step_logits = served.step([(row.sequence, [row.token()]) for row in some], 0)
        for row, logits in zip(some, step_logits, strict=True):
            row.logits = logits
    return sum(row.ties for row in rows)


def _same(logits: Any, wanted: Any) -> None:
    assert (logits - wanted).abs().max() <= CLOSE * wanted.abs().max()


def _sum(served: Executor, snapshot: Snapshot) -> str:
    parts = [
        held[piece.index, :, :length]
        for piece, length in snapshot.path
        for _, held in sorted(piece.slots.tensors.items())
    ] + [state for _, state in sorted(snapshot.states.items())]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in parts)).hexdigest()


@pytest.mark.parametrize("family", sorted(TINY))
def test_a_family_is_served_as_it_generates(family: str) -> None:
    """Batched with any others, chunked, forked, joined, kept and restored: the same tokens as alone."""
    plain, chance = families.build(tiny(family)), random.Random(family)
    served = Recorded(families.build(tiny(family)))
    prompts = [_ids(length, length) for length in (1, 7, 26)]
    rows = []
    for prompt in prompts:
        sequence, at = served.new(), 0
        while at < len(prompt):
            size = chance.randint(1, len(prompt) - at)
            logits = served.prefill(sequence, prompt[at : at + size])
            at += size
        rows.append(_Row(sequence, logits, _generated(plain, prompt, 4)))
    heads = [_ids(length, 50 + length) for length in (1, 5)]
    parent = served.new()
    served.prefill(parent, prompts[1])
    forked = list(zip(served.fork(parent, len(heads)), heads, strict=True))
    whole = served.new()
    step_logits = served.step([*forked, (whole, prompts[0]), (rows[0].sequence, [rows[0].token()])], 3)
    branches = [
        _Row(branch, logits, _generated(plain, prompts[1] + head, 4))
        for (branch, head), logits in zip(forked, step_logits[:-2], strict=True)
    ]
    rows[0].logits = step_logits[-1]
    rows.append(_Row(whole, step_logits[-2], _generated(plain, prompts[0], 4)))
    assert _decode(served, rows + branches, chance) <= 1
    assert served.known[branches[1].sequence][: len(prompts[1])] == prompts[1]

    joined = [token for row in branches for token in served.known[row.sequence][parent.depth :]]
    logits = served.prefill(parent, joined)
    with torch.no_grad():
        _same(logits, plain(input_ids=torch.tensor([served.known[parent]])).logits[0, -1])


@pytest.mark.parametrize("family", sorted(TINY))
def test_what_is_kept_is_gone_on_from_at_its_depth_alone(family: str) -> None:
    """Cut points around the convolution (4) and the scan's chunk (8); two restored at once; never changed."""
    plain, tokens = families.build(tiny(family)), _ids(27, 3)
    served = Executor(families.build(tiny(family)))
    with torch.no_grad():
        wanted = plain(input_ids=torch.tensor([tokens])).logits[0]
    cuts = [1, 3, 7, 8, 9, 13, 26]
    logits, kept = read(served, whole := served.new(), tokens, cuts)
    _same(logits, wanted[-1])
    sums = {cut: _sum(served, kept[cut]) for cut in cuts}
    served.free(whole)
    for cut in cuts:
        again = [served.restore(kept[cut]) for _ in range(2)]
        for sequence in again:
            _same(served.prefill(sequence, tokens[cut:]), wanted[-1])
        step = served.decode(again, [5, 6])
        served.free(again.pop())
        assert (step[0] - step[1]).abs().max() > 0.01
    assert {cut: _sum(served, kept[cut]) for cut in cuts} == sums

    if not kept[9].states:
        _same(served.prefill(served.restore(kept[13], depth=11), tokens[11:]), wanted[-1])


def _check_bytes(served: Executor) -> None:
    """What is accounted is what is there: counted anew from what is alive."""
    holders = [*served.sequences, *served.snapshots]
    pieces = {piece for holder in holders for piece, _ in holder.path}
    assert sum(sum(piece.ends.values()) for piece in pieces) == sum(len(holder.path) for holder in holders)
    pieces |= {sequence.tail for sequence in served.sequences if sequence.tail is not None}
    tensors = [
        each for slots in (*served.store.slots.values(), served.pool) for each in slots.tensors.values()
    ]
    tensors += [each for snapshot in served.snapshots for each in snapshot.states.values()]
    assert served.allocated == sum(each.nbytes for each in tensors)
    used = sum(each.slot_bytes * len(each.owners) for each in served.store.slots.values())
    assert used == sum(piece.capacity * served.token_bytes for piece in pieces)
    assert len(served.pool.owners) == sum(sequence.index >= 0 for sequence in served.sequences)
    for slots in (*served.store.slots.values(), served.pool):
        assert [owner.index for owner in slots.owners] == list(range(len(slots.owners)))


@pytest.mark.parametrize("family", ["qwen3", "falcon_h1", "lfm2"])
def test_nothing_is_lost_by_any_order_of_events(family: str) -> None:
    """Random forks, pauses, aborts, keeps and restores: bytes are accounted, nobody reads another's state."""
    served, chance = Recorded(families.build(tiny(family))), random.Random(family)
    plain = families.build(tiny(family))
    snapshots: list[Snapshot] = []
    for event in range(160):
        alive = sorted(served.sequences, key=lambda sequence: (sequence.depth, served.known[sequence]))
        what = chance.choice(
            ["new", "decode", "decode", "fork", "keep", "restore", "abort", "forget", "more"]
        )
        if what == "new" or not alive:
            served.prefill(served.new(), _ids(chance.randint(1, 40), event))
        elif what == "decode":
            some = chance.sample(alive, chance.randint(1, len(alive)))
            served.decode(some, _ids(len(some), event))
        elif what == "fork" and len(alive) < 12:
            served.fork(chance.choice(alive), chance.randint(1, 3))
        elif what == "more":
            served.prefill(chance.choice(alive), _ids(chance.randint(1, 9), event))
        elif what == "keep":
            snapshots.append(served.snapshot(chance.choice(alive)))
        elif what == "restore" and snapshots:
            served.restore(chance.choice(snapshots))
        elif what == "abort":
            served.free(chance.choice(alive))
        elif what == "forget" and snapshots:
            served.free(snapshots.pop(chance.randrange(len(snapshots))))
        _check_bytes(served)
    for sequence in list(served.sequences)[:6]:
        logits = served.decode([sequence], [7])[0]
        with torch.no_grad():
            _same(logits, plain(input_ids=torch.tensor([served.known[sequence]])).logits[0, -1])
    for holder in [*served.sequences, *snapshots]:
        served.free(holder)
        _check_bytes(served)
    assert served.allocated == 0


_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT |= {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("family", "fields", "sentence"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
        ("gemma3n_text", {}, "reads keys that another layer keeps"),
        ("llama4_text", {}, "chunked_attention"),
        ("bloom", {}, "AttentionInterface"),
        ("deepseek_v2", {"head_dim": None, **_LATENT}, "keeps other keys and values than it reads"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(family: str, fields: dict[str, Any], sentence: str) -> None:
    small = {**SMALL, "head_dim": 16, "num_local_experts": 2, "layer_types": None, **fields}
    if family == "gemma3n_text":
        small |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4}
        small |= {"vocab_size_per_layer_input": 199, "activation_sparsity_pattern": None, "sliding_window": 8}
        small |= {"hidden_size_per_layer_input": 8, "laurel_rank": 4}
    model = families.build(families.AutoConfig.for_model(family, **small))
    with pytest.raises(UserError, match=sentence):
        Executor(model)


def test_a_family_whose_kept_states_are_not_gone_on_from_is_refused() -> None:
    """Jamba's own scan begins every time from zero."""
    jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2}
    small = {**SMALL, **jamba, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}
    model = families.build(families.AutoConfig.for_model("jamba", **small))
    with pytest.raises(UserError, match="jamba cannot be served: tokens behind a kept state"):
        families.check(model)


def test_a_model_is_checked_plainly_whatever_its_generation_config_asks_for() -> None:
    model = families.build(tiny("qwen3"))
    own = families.GenerationConfig(num_beams=3, num_return_sequences=2, use_cache=False, eos_token_id=[5, 6])
    model.generation_config = own
    assert families.check(model).ready.model.generation_config is own


SHORT = [
    family if family in ("qwen3_next", "qwen3_moe") else pytest.param(family, marks=pytest.mark.conformance)
    for family in sorted(TINY)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", SHORT)
def test_short_numbers_are_served_as_well_as_the_model_does(family: str, dtype: Any) -> None:
    tokens = _ids(20, 6)
    plain, short = (families.build(tiny(family), dtype=kind) for kind in (torch.float32, dtype))
    served = Executor(families.build(tiny(family), dtype=dtype))
    row = served.new()
    served.prefill(row, tokens[:12])
    served.prefill(row, tokens[12:19])
    logits = served.decode([row], [tokens[19]])[0].float()
    with torch.no_grad():
        wanted = plain(input_ids=torch.tensor([tokens])).logits[0, -1]
        off = short(input_ids=torch.tensor([tokens])).logits[0, -1].float() - wanted
    assert (logits - wanted).abs().max() < 2 * off.abs().max()


def test_a_row_without_numbers_harms_no_other() -> None:
    """Keys that are no numbers stay where they are: no later owner of the slot, and no other row, does."""
    served, tokens = Executor(families.build(tiny("qwen3"))), _ids(20, 9)
    wanted = served.prefill(served.new(), tokens)
    well, ill = served.new(), served.new()
    served.prefill(well, tokens[:19])
    served.prefill(ill, tokens)
    with torch.inference_mode():
        for each in ill.tail.slots.tensors.values():
            each[ill.tail.index] = torch.nan
    logits = served.decode([ill, well], [tokens[19]] * 2)
    assert torch.isnan(logits[0]).all()
    _same(logits[1], wanted)
    place = ill.tail.index
    served.free(ill)
    served.prefill(later := served.new(), tokens[:17])
    assert later.tail.index == place
    _same(served.prefill(served.new(), [*tokens[:17], 5]), served.decode([well, later], [5, 5])[1])


def test_models_come_from_directories_and_configurations(tmp_path: Path) -> None:
    """A directory's weights are served, all of them; a configuration gets random ones by the seed."""
    model, tokens = families.build(tiny("lfm2"), seed=3), _ids(9, 2)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([tokens])).logits[0, -1]
    model.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        served = families.load(source, seed=3)
        _same(served.prefill(served.new(), tokens), wanted)
    weights = safetensors.load_file(file := tmp_path / "model.safetensors")
    del weights[lacking := next(name for name in sorted(weights) if "layers" in name)]
    safetensors.save_file(weights, file, {"format": "pt"})
    with pytest.raises(UserError, match=f"lacks 1 .*{re.escape(lacking)}"):
        families.load(tmp_path)
    file.write_bytes(b"torn")
    with pytest.raises(UserError, match="cannot be loaded"):
        families.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no such"}')
    for source in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(UserError, match="cannot be loaded"):
            families.load(source)


def test_what_is_too_long_or_nowhere_is_refused() -> None:
    served = families.load("tiny-attention")
    with pytest.raises(UserError, match="more than the model's 4096"):
        served.prefill(served.new(), [5] * 4097)
    for name in ("no/such/place", "tiny-bert"):
        with pytest.raises(UserError, match=name):
            families.load(name)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_blocks_of_queries_leave_out_no_key(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of prompts that are longer than a block: read at once, and behind what was read before."""
    monkeypatch.setattr(attention, "BLOCK", 5)
    families.check(families.build(tiny(family)))
