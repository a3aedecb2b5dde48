"""Traces of requests to language models, read as they are distributed: when each arrived, and how many tokens
it brought and got.

| form | known by its columns | blocks |
|---|---|---|
| Azure LLM inference 2023, 2024 (csv) | TIMESTAMP, ContextTokens, GeneratedTokens | – |
| BurstGPT (csv) | Timestamp, Request tokens, Response tokens | – |
| Vidur (csv) | arrived_at, num_prefill_tokens, num_decode_tokens | – |
| Mooncake (jsonl) | timestamp (ms), input_length, output_length, hash_ids | 512 tokens |
| Qwen-Bailian (jsonl) | the same with chat_id; timestamp in seconds | 16 tokens |

Columns beside these are not read. Reading is strict: what is missing, no number, negative, or earlier than
the line before is refused in a sentence. A request that got no tokens failed where it was recorded
(BurstGPT): it is left out and counted.

What no trace says is which answers have parts that could be decoded side by side: `branched` lays such a
structure over any of them, from a seed, and says in the trace's source that it is synthetic.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.traces.header import Fields

Ids = NDArray[np.int64]
MOST_TOKENS = 1 << 31


@dataclass(frozen=True)
class Requests:
    """``arrival``: seconds since the first one, ascending. ``prompt`` and ``output``: tokens. ``ids``: of
    each prompt one number for every ``unit`` tokens, equal for equal prefixes; empty where the trace has
    none. ``branches``: of each request the tokens of branches that its answer has in its middle; empty: no
    request has any. ``left_out``: requests of the file without an answer."""

    arrival: NDArray[np.float64]
    prompt: Ids
    output: Ids
    source: str
    ids: tuple[Ids, ...] = ()
    unit: int = 1
    branches: tuple[tuple[int, ...], ...] = ()
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    def faster(self, times: float) -> Requests:
        """The same requests, arriving in so much less time."""
        return replace(self, arrival=self.arrival / times)

    def first(self, count: int) -> Requests:
        """At most ``count`` of them."""
        return replace(
            self, arrival=self.arrival[:count], prompt=self.prompt[:count], output=self.output[:count],
            ids=self.ids[:count], branches=self.branches[:count],
        )  # fmt: skip

    def repeated(self, count: int) -> Requests:
        """``count`` requests: the trace again and again, one mean gap between. Blocks keep their numbers."""
        rounds = -(-count // len(self))
        span = self.seconds + self.seconds / max(1, len(self) - 1)
        begins = np.repeat(np.arange(rounds) * span, len(self))
        several = replace(
            self, arrival=np.tile(self.arrival, rounds) + begins, prompt=np.tile(self.prompt, rounds),
            output=np.tile(self.output, rounds), ids=self.ids * rounds, branches=self.branches * rounds,
        )  # fmt: skip
        return several.first(count)


def load(path: Path, blocks: bool = False) -> Requests:
    """The trace in a file of one of the forms above; with ``blocks`` of one that tells what prompts share.

    Raises:
        UserError: the file cannot be read, is of another form, or a line of it is wrong.
    """
    try:
        # a line feed in a field would be no trace's, so lines are what editors show
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as fault:
        raise UserError(f"{path}: the trace cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise UserError(
            f"{path}: the trace is not UTF-8 text: {fault.reason} at byte {fault.start}"
        ) from fault
    numbered = [(number, line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"{path}: the file is empty; accepted are the forms {', '.join(FORMS)}")
    rows = (
        _json_rows(path, numbered) if numbered[0][1].lstrip().startswith("{") else _csv_rows(path, numbered)
    )
    form = next(rows)
    if blocks and not form.unit:
        raise UserError(
            f"{path}: a trace of {form.name} does not tell what prompts share; accepted are"
            f" {' and '.join(form_name for form_name in FORMS if FORMS[form_name].unit)}"
        )
    arrival, prompt, output, ids, left_out, last = [], [], [], [], 0, -1.0
    for where, when, prompt_tokens, answered, ids_of_prompt in rows:
        if when < last:
            raise UserError(
                f"{where}: field {form.time}: it is {last - when:.6g} s earlier than the line before;"
                " accepted are lines in the order of their times"
            )
        last = when
        if answered == 0 or prompt_tokens == 0:
            left_out += 1
            continue
        arrival.append(when)
        prompt.append(prompt_tokens)
        output.append(answered)
        if form.unit:
            ids.append(np.array(ids_of_prompt, np.int64))
    if not arrival:
        raise UserError(f"{path}: it holds no request with a prompt and an answer; one at least is needed")
    times = np.array(arrival)
    return Requests(
        times - times[0], np.array(prompt), np.array(output), f"{form.name} ({path.name})", tuple(ids),
        form.unit or 1, (), left_out,
    )  # fmt: skip


@dataclass(frozen=True)
class _Form:
    """A form by the names of its columns; ``unit``: tokens of a block, 0 where there are none; ``scale``:
    seconds of one in the column of times."""

    name: str
    time: str
    prompt: str
    output: str
    unit: int = 0
    scale: float = 1.0


FORMS = {
    form.name: form
    for form in (
        _Form("Azure LLM inference", "TIMESTAMP", "ContextTokens", "GeneratedTokens"),
        _Form("BurstGPT", "Timestamp", "Request tokens", "Response tokens"),
        _Form("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens"),
        _Form("Mooncake", "timestamp", "input_length", "output_length", 512, 1e-3),
        _Form("Qwen-Bailian", "timestamp", "input_length", "output_length", 16),
    )
}
DATE = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d):(\d\d):(\d\d(?:\.\d+)?)(?:\+00:00|Z)?")
NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
WHOLE = re.compile(r"\d{1,15}(?:\.0*)?")
Rows = Iterator[Any]
"""First the `_Form`, then (where, seconds, prompt, output, ids) of each line."""


def _csv_rows(path: Path, numbered: list[tuple[int, str]]) -> Rows:
    head = [cell.strip() for cell in _split(f"{path}, line {numbered[0][0]}", numbered[0][1])]
    form = _recognised(path, set(head), [form for form in FORMS.values() if not form.unit])
    yield form
    time, prompt, output = (head.index(name) for name in (form.time, form.prompt, form.output))
    dated = form.time == "TIMESTAMP"
    for number, line in numbered[1:]:
        where = f"{path}, line {number}"
        row = _split(where, line)
        if len(row) != len(head):
            raise UserError(
                f"{where}: it has {len(row)} fields; accepted are {len(head)}, as in the first line"
            )
        when = _instant(where, form.time, row[time]) if dated else _seconds(where, form.time, row[time])
        prompt_tokens = _tokens(where, form.prompt, row[prompt])
        yield where, when, prompt_tokens, _tokens(where, form.output, row[output]), ()


def _split(where: str, line: str) -> list[str]:
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as fault:
        raise UserError(f"{where}: it is not csv: {fault}") from None


def _json_rows(path: Path, numbered: list[tuple[int, str]]) -> Rows:
    form = None
    for number, line in numbered:
        where, fields = f"{path}, line {number}", Fields(path, number, line)
        if form is None:
            form = FORMS["Qwen-Bailian" if '"chat_id"' in line else "Mooncake"]
            yield form
        when = fields.number(form.time, None, least=0.0) * form.scale
        prompt_tokens, answered = (fields.take(name, int) for name in (form.prompt, form.output))
        for name, value in ((form.prompt, prompt_tokens), (form.output, answered)):
            if not 0 <= value < MOST_TOKENS:
                raise fields.wrong(name, value, "a number of tokens, not negative")
        blocks = fields.take("hash_ids", list)
        if not all(type(block) is int and abs(block) < 1 << 63 for block in blocks):
            raise fields.wrong("hash_ids", blocks, "a list of whole numbers")
        if len(blocks) != -(-prompt_tokens // form.unit):
            raise fields.wrong(
                "hash_ids", f"{len(blocks)} numbers",
                f"{-(-prompt_tokens // form.unit)}, one for every {form.unit} of {prompt_tokens} tokens",
            )  # fmt: skip
        yield where, when, prompt_tokens, answered, blocks


def _recognised(path: Path, head: set[str], forms: list[_Form]) -> _Form:
    """The form that has all its columns; else the nearest one says what is missing."""
    best = max(forms, key=lambda form: len(head & {form.time, form.prompt, form.output}))
    missing = [name for name in (best.time, best.prompt, best.output) if name not in head]
    if len(missing) == 3:
        names = "; ".join(f"{form.time}, {form.prompt}, {form.output} ({form.name})" for form in forms)
        words = ", ".join(sorted(head))
        raise UserError(
            f"{path}, line 1: columns {words if len(words) < 80 else words[:79] + '…'} are of no known trace;"
            f" accepted are {names}, or JSON lines of {' or '.join(key for key in FORMS if FORMS[key].unit)}"
        )
    if missing:
        raise UserError(
            f"{path}, line 1: {'column' if len(missing) == 1 else 'columns'} {' and '.join(missing)}"
            f" {'is' if len(missing) == 1 else 'are'} missing; a trace of {best.name} has {best.time},"
            f" {best.prompt} and {best.output}"
        )
    return best


def _wrong(where: str, field: str, value: str, accepted: str) -> UserError:
    words = repr(value) if len(value) < 60 else repr(value[:59] + "…")
    return UserError(f"{where}: field {field}: {words} is not accepted; use {accepted}")


def _tokens(where: str, field: str, value: str) -> int:
    text = value.strip()
    if not (text.isascii() and WHOLE.fullmatch(text)) or (count := int(float(text))) >= MOST_TOKENS:
        raise _wrong(where, field, value, "a number of tokens, not negative")
    return count


def _seconds(where: str, field: str, value: str) -> float:
    text = value.strip()
    if not (text.isascii() and NUMBER.fullmatch(text)) or (seconds := float(text)) > 1e12:
        raise _wrong(where, field, value, "a number of seconds, not negative")
    return seconds


def _instant(where: str, field: str, value: str) -> float:
    """Seconds; Azure's have seven places, more than `datetime` keeps."""
    match = DATE.fullmatch(value.strip())
    try:
        if match is None or not value.isascii():
            raise ValueError
        day, hours, minutes, rest = match.groups()
        begin = datetime.strptime(f"{day} {hours}:{minutes}", "%Y-%m-%d %H:%M").replace(tzinfo=UTC)
        if (more := float(rest)) >= 60:
            raise ValueError
    except ValueError:
        raise _wrong(where, field, value, "a time such as 2023-11-16 18:17:03.9799600") from None
    return begin.timestamp() + more


def branched(
    trace: Requests, share: float, count: tuple[int, int], tokens: float, random: np.random.Generator
) -> Requests:
    """The trace with branches in the middle of the answers of a ``share`` of its requests: between
    ``count[0]`` and ``count[1]`` of them, each value as likely, of ``tokens`` tokens on average (their
    logarithm is normal with deviation 0.5).

    Raises:
        UserError: a value that cannot be.
    """
    if not 0 <= share <= 1 or not 1 <= count[0] <= count[1] <= 1024 or not 1 <= tokens <= 1e6:
        raise UserError(
            f"branches: share {share:g}, {count[0]}-{count[1]} branches of {tokens:g} tokens are not"
            " accepted; use a share from 0 to 1, from 1 to 1024 branches, and from 1 to 1e6 tokens"
        )
    deviation = 0.5
    middle = np.log(tokens) - deviation**2 / 2
    counts = []
    for _ in range(len(trace)):
        if random.random() >= share:
            counts.append(())
            continue
        drawn = random.lognormal(middle, deviation, int(random.integers(count[0], count[1] + 1)))
        counts.append(tuple(np.maximum(1, np.round(drawn)).astype(int).tolist()))
    return replace(
        trace, branches=tuple(counts),
        source=f"{trace.source}, with synthetic branches ({share:.0%}, {count[0]}-{count[1]} of {tokens:g})",
    )  # fmt: skip
