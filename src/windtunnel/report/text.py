"""Figures and names as a reader wants to see them, the same on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from windtunnel.base import ranges, units

Summary = Mapping[str, Any]

_PATH_WORDS = {
    "compute": "compute", "pipeline_bubble": "pipeline bubble", "imbalance": "imbalance (late ranks)",
    "launch": "launch (host thread)", "idle": "idle",
}  # fmt: skip


_HELD = {
    "parameter": "parameters", "gradient": "gradients", "optimizer": "optimizer state",
    "activation": "activations", "communication": "communication buffers", "temporary": "temporaries",
}  # fmt: skip


def path_label(key: str) -> str:
    """A key of ``critical_path`` in words: ``communication:dp`` is ``exposed communication: dp``."""
    if key.startswith("communication"):
        _, _, label = key.partition(":")
        return f"exposed communication: {label}" if label else "exposed communication"
    return _PATH_WORDS.get(key, key.replace("_", " "))


def path_parts(summary: Summary) -> list[tuple[str, float, float]]:
    """The split of the critical path: (key, seconds, share), compute first, communication after it by size,
    idle last; what took no time is left out."""
    parts = {key: float(value) for key, value in (summary.get("critical_path") or {}).items() if value}
    total = sum(parts.values())
    order = {"compute": 0, "idle": 3}

    def place(key: str) -> tuple[int, float]:
        return (1 if key.startswith("communication") else order.get(key, 2), -parts[key])

    return [(key, parts[key], parts[key] / total) for key in sorted(parts, key=place)]


def critical(summary: Summary) -> str:
    """`` of rank 17``: whose critical path it is; nothing where that is not said."""
    rank = summary.get("critical_rank")
    return "" if rank is None else f" of rank {rank}"


def ranks(members: Iterable[int] | str, most: int = 4) -> str:
    """Rank numbers in few words: ``0-7, 16, 24-31``; beyond ``most`` ranges ``0-7, 16, … 120-127``.

    ``members``: the numbers, or text as a summary has it, ``0-7,16,24-31``.
    """
    words = members.split(",") if isinstance(members, str) else ranges.words(members)
    if len(words) > most:
        words = [*words[: most - 1], f"… {words[-1]}"]
    return ", ".join(words)


def verdict(rank_class: Mapping[str, Any]) -> str:
    """``fits``, ``tight`` (less than 5 % headroom) or ``does not fit``."""
    if not rank_class.get("fits", True):
        return "does not fit"
    memory, headroom = rank_class.get("memory_bytes"), rank_class.get("headroom_bytes")
    return "tight" if memory and headroom is not None and headroom < 0.05 * memory else "fits"


def out_of_memory(oom: Any) -> str:
    """In words what a summary says of the first allocation that was refused: a sentence, or its fields."""
    if not isinstance(oom, Mapping):
        return str(oom)
    who = oom.get("scope") or "it"
    return f"out of memory: {who} asks for {units.size(oom.get('requested_bytes'))}" + (
        f" with {units.size(oom['reserved_bytes'])} reserved" if oom.get("reserved_bytes") else ""
    )


def worst_out_of_memory(summary: Summary) -> str:
    """In one sentence: of the ranks that lack most memory, what runs out of it where, and what holds most of
    it; nothing where all ranks fit."""
    lacking = [group for group in summary.get("ranks") or () if group.get("oom")]
    if not lacking:
        return ""
    group = min(lacking, key=lambda row: row.get("headroom_bytes", 0))
    oom = group["oom"]
    who = f"rank{'s' * (group['count'] > 1)} {ranks(group.get('members', ''))}"
    words = f"{out_of_memory(oom)}, on {who} ({group['name']})"
    two_largest = sorted((oom.get("by_category") or {}).items(), key=lambda item: -item[1])[:2]
    most = [f"{_HELD.get(name, name)} {units.size(size)}" for name, size in two_largest if size]
    if most:
        words += f"; most is held by {', then '.join(most)}"
    largest = (oom.get("held") or ())[:1]
    if largest:
        words += f", the largest part for {largest[0]['scope']} ({units.size(largest[0]['bytes'])})"
    others = sum(row["count"] for row in lacking) - group["count"]
    return words + (f"; {others:,} more rank{'s' * (others > 1)} run out, too" if others else "")


def asked(summary: Summary) -> str:
    """What came of ``--fail-on``; nothing where that was not given."""
    verdict = summary.get("verdict")
    if not verdict:
        return ""
    baseline = verdict.get("baseline")
    reasons = "; ".join(verdict["reasons"]) or "passed"
    if verdict["passed"] and baseline:
        reasons += f", an iteration of {baseline['name']} takes {units.seconds(baseline['iteration_time_s'])}"
    return f"--fail-on {','.join(verdict['fail_on'])}: {reasons}"


def first_step(rank_class: Mapping[str, Any]) -> float | None:
    """Peak reserved bytes of the whole run, where set-up or the first step needs more than the steady one."""
    whole, steady = rank_class.get("first_step_peak_reserved_bytes"), rank_class.get("peak_reserved_bytes")
    return whole if whole and steady is not None and whole > steady else None


def provenance(summary: Summary, field: str) -> str:
    """How the figure came about: ``emulated`` (also where nothing is said), ``measured``, ``published`` or
    ``declared``."""
    word = (summary.get("provenance") or {}).get(field, "emulated")
    return str(word)


def headline(summary: Summary) -> list[tuple[str, str, str, str]]:
    """The figures that come first, as far as they are known: name, figure, how it came about, a remark."""

    def remark(field: str, form: Callable[[Any], str], words: str) -> str:
        return words.format(form(summary[field])) if summary.get(field) else ""

    rows: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
        ("iteration_time_s", "Iteration time", units.seconds,
         remark("period", lambda period: f"mean of {period['steps']} steps, ", "{}")
         + remark("first_iteration_time_s", units.seconds, "first one {}")),
        ("tokens_per_second_per_device", "Tokens/s per device", units.count,
         remark("tokens_per_iteration", units.count, "{} tokens an iteration")),
        ("mfu", "MFU", units.share,
         remark("model_flops_per_iteration", units.decimal, "{}FLOP of the model")),
        ("hfu", "HFU", units.share, remark("hardware_flops_per_iteration", units.decimal, "{}FLOP run")),
        ("joules_per_iteration", "Energy an iteration", lambda value: f"{value:.3g} J",
         "operators of all ranks"),
    )  # fmt: skip
    return [
        (name, form(summary[field]), provenance(summary, field), about)
        for field, name, form, about in rows
        if summary.get(field)
    ]


def period(summary: Summary) -> list[dict[str, str]]:
    """The kinds of steps that repeat, as a table's rows; nothing where every step is alike."""
    facts = summary.get("period") or {}
    return [
        {
            "steps": f"{kind['count']} of {facts['steps']}", "time": units.seconds(kind["iteration_time_s"]),
            "allocated": units.size(kind["peak_allocated_bytes"]),
            "reserved": units.size(kind["peak_reserved_bytes"]), "more than usual": ", ".join(kind["more"]),
        }
        for kind in facts.get("kinds") or ()
    ]  # fmt: skip


def counted(summary: Summary) -> str:
    """What calls are counted in, and what their times are of."""
    steps = (summary.get("period") or {}).get("steps")
    return f"counted in {steps} iterations, times in the mean one" if steps else "in one iteration"


def provenance_sentence(summary: Summary) -> str:
    """One sentence for all figures: those that are not emulated are named."""
    others: dict[str, list[str]] = {}
    for field, word in (summary.get("provenance") or {}).items():
        if word != "emulated":
            others.setdefault(str(word), []).append(_words(str(field)))
    exceptions = "; ".join(f"{word}: {', '.join(fields)}" for word, fields in sorted(others.items()))
    return "All times and memory are emulated" + (f" ({exceptions})." if exceptions else ".")


def _words(field: str) -> str:
    """A field's name without its unit."""
    return field.removesuffix("_s").removesuffix("_bytes").replace("_", " ").replace("rss", "RSS")


def command_line(summary: Summary) -> str:
    """The script and its arguments as they were typed (without the emulator's options)."""
    command = summary.get("command") or {}
    return " ".join(str(word) for word in (command.get("script", ""), *(command.get("args") or ()))).strip()


def ranks_line(summary: Summary) -> str:
    """``3 of 16 ranks ran, 13 assumed alike``: how much of the world the figures rest on; nothing where it is
    not said."""
    captured = _count(summary.get("captured_ranks"))
    if not captured:
        return ""
    words = [f"{captured:,} of {summary.get('world_size', units.NONE):,} ranks ran"]
    checked, assumed = _count(summary.get("checked_ranks")), summary.get("assumed_ranks")
    if checked:
        words.append(f"{checked:,} more only for what they call of others")
    if assumed is not None:
        words.append(f"{_count(assumed):,} assumed alike" if _count(assumed) else "none assumed alike")
    return ", ".join(words)


def _count(members: Iterable[int] | str | None) -> int:
    numbers = ranges.read(members) if isinstance(members, str) else members or ()
    return len(tuple(numbers))


def cluster_line(summary: Summary) -> str:
    """``128 x h100-96 in 16 hosts of 8, rail-optimised, ib-400``; the world that is emulated comes first."""
    cluster = summary.get("cluster") or {}
    hosts, each = cluster.get("hosts"), cluster.get("devices_per_host")
    words = f"{summary.get('world_size', units.NONE)} ranks on {cluster.get('device', 'devices')}"
    if hosts and each:
        words += f", {hosts:,} host{'s' if hosts > 1 else ''} of {each}"
    return ", ".join([words, *(str(cluster[key]) for key in ("topology", "nic") if cluster.get(key))])
