"""The policy: what a turn needs, which job is next, what may be forgotten."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.agents.sandbox.model import (
    Effects,
    FileChange,
    FilesPart,
    ImagePart,
    Manifest,
    ProcessEffect,
    References,
    Spec,
    TurnClass,
)
from windtunnel.agents.sandbox.policy import (
    Queues,
    Retention,
    Rules,
    decide,
    forgettable,
    process_changed,
    promote,
    save_order,
)

paths = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
changes = st.builds(
    FileChange, paths, st.sampled_from(["created", "modified", "deleted", "renamed", "metadata"])
)
processes = st.builds(
    ProcessEffect,
    st.integers(2, 99),
    st.just("python3"),
    started=st.booleans(),
    ended=st.booleans(),
    shell=st.booleans(),
    dirty_pages=st.none() | st.integers(0, 3),
    new_mappings=st.integers(0, 2),
    inputs=st.none() | st.integers(0, 3),
    writes=st.none() | st.integers(0, 3),
    cpu=st.floats(0, 10),
    descriptors_changed=st.booleans(),
)
all_effects = st.builds(
    Effects,
    files=st.lists(changes, max_size=4).map(tuple),
    processes=st.lists(processes, max_size=4).map(tuple),
    shells=st.sampled_from([(), ("main",)]),
    doubts=st.lists(st.sampled_from(["files: lost events", "ring lost"]), max_size=2).map(tuple),
).map(lambda effects: replace(effects, files_total=len(effects.files)))
all_references = st.builds(
    lambda every, mapped: References(frozenset(every) | frozenset(mapped), frozenset(mapped)),
    st.sets(paths, max_size=3),
    st.sets(paths, max_size=2),
)


@given(all_effects, all_references)
def test_nothing_is_the_class_of_no_effect_alone(effects: Effects, references: References) -> None:
    decided = decide(effects, references).turn_class
    quiet = not (effects.files or effects.doubts or any(process_changed(one) for one in effects.processes))
    assert (decided is TurnClass.NONE) == (quiet and not effects.shells)
    assert (decided is TurnClass.SHELL) == (quiet and bool(effects.shells))


@given(all_effects, all_references, changes, processes)
def test_more_effects_never_weaken_a_class(
    effects: Effects, references: References, change: FileChange, process: ProcessEffect
) -> None:
    before = decide(effects, references).turn_class
    more_files = replace(effects, files=(*effects.files, change), files_total=effects.files_total + 1)
    assert decide(more_files, references).turn_class >= max(before, TurnClass.FILES)
    assert decide(replace(effects, processes=(*effects.processes, process)), references).turn_class >= before
    for doubt, least in (("files: x", TurnClass.FILES), ("x", TurnClass.FULL)):
        doubted = replace(effects, doubts=(*effects.doubts, doubt))
        assert decide(doubted, references).turn_class >= max(before, least)


@given(all_effects, all_references)
def test_every_class_but_none_has_a_reason(effects: Effects, references: References) -> None:
    decision = decide(effects, references)
    assert bool(decision.reasons) == (decision.turn_class is not TurnClass.NONE)


@given(processes)
def test_strict_rules_and_unknown_memory_are_never_weaker(process: ProcessEffect) -> None:
    if process_changed(process):
        assert process_changed(process, Rules(strict_dirty=True))
        assert process_changed(replace(process, dirty_pages=None, inputs=None, writes=None))


def test_an_idle_timer_is_no_change_and_a_served_request_is() -> None:
    idle = ProcessEffect(7, "python3", dirty_pages=3)
    assert not process_changed(idle)
    assert process_changed(replace(idle, inputs=1))
    assert process_changed(replace(idle, writes=1))
    assert process_changed(replace(idle, cpu=9.0))
    assert not process_changed(replace(idle, dirty_pages=0, inputs=5, writes=5))


@given(st.lists(changes, max_size=5), all_references)
def test_promotion_is_for_what_the_image_refers_to(files: list[FileChange], references: References) -> None:
    apart = [
        change
        for change in files
        if not any(path == change.path or path.startswith(change.path + "/") for path in references.paths)
    ]
    assert promote(apart, references) == []
    for path in references.paths:
        assert promote([FileChange(path, "deleted")], references)
    for path in references.mapped:
        assert promote([FileChange(path, "modified")], references)


def test_the_channel_never_counts() -> None:
    effects = Effects(files=(FileChange("/.windtunnel/t/1.out", "created"),), files_total=1)
    assert decide(effects, References()).turn_class is TurnClass.NONE


operations = st.lists(
    st.tuples(st.sampled_from(["add", "urgent", "promote", "take", "remove"]), st.integers(0, 9)), max_size=60
)


@given(operations, st.integers(1, 4), st.booleans())
def test_queues_lose_and_repeat_nothing(todo: list[tuple[str, int]], most: int, fifo: bool) -> None:
    queues = Queues(most_urgent=most, fifo=fifo)
    inside: list[str] = []
    urgent: set[str] = set()
    in_a_row = 0
    for kind, number in todo:
        job = str(number)
        if kind in ("add", "urgent") and job not in inside:
            queues.add(job, urgent=kind == "urgent")
            inside.append(job)
            if kind == "urgent" and not fifo:
                urgent.add(job)
        elif kind == "promote" and queues.promote(job):
            urgent.add(job)
        elif kind == "remove":
            assert queues.remove(job) == (job in inside)
            inside = [one for one in inside if one != job]
            urgent.discard(job)
        elif kind == "take":
            taken = queues.take()
            assert (taken is None) == (not inside)
            if taken is None:
                continue
            if fifo:
                assert taken == inside[0]
            normal_waits = len(inside) > len(urgent)
            if taken in urgent:
                assert in_a_row < most or not normal_waits
                in_a_row += 1
            else:
                assert not urgent or in_a_row >= most
                in_a_row = 0
            inside.remove(taken)
            urgent.discard(taken)
        assert len(queues) == len(inside)


def manifest(box: str, number: int, files: str, image: str, *, label: str = "") -> Manifest:
    return Manifest(
        id=f"{box}{number}",
        box=box,
        turn=number,
        parent=f"{box}{number - 1}" if number else None,
        turn_class=TurnClass.FILES,
        reasons=(),
        created=float(number),
        files=FilesPart(files, "btrfs"),
        image=ImagePart(image, 1, (), (), (), 0, 0),
        shells=(),
        spec=Spec(box),
        covered=(),
        not_covered=(),
        label=label,
    )


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.lists(st.integers(0, 11), min_size=12, max_size=12),
    st.sets(st.integers(0, 11)),
    st.integers(0, 11),
)
def test_retention_keeps_whatever_something_alive_needs(
    count: int, keep: int, parts: list[int], labelled: set[int], base: int
) -> None:
    """Sandbox a has ``count`` checkpoints, sandbox b was forked from one of them, sandbox c is gone."""
    own = [
        manifest(
            "a",
            n,
            f"a{min(parts[n], n)}",
            f"a{min(parts[n], parts[n - 1], n)}",
            label="kept" if n in labelled else "",
        )
        for n in range(count)
    ]
    gone = [manifest("c", n, f"c{n}", f"c{n}") for n in range(3)]
    base = min(base, count - 1)
    dropped, needed = forgettable([*own, *gone], {"a": f"a{count - 1}", "b": f"a{base}"}, Retention(keep))
    kept = [one for one in own if one.id not in dropped]
    assert {f"a{count - 1}", f"a{base}"} <= {one.id for one in kept}
    assert {f"a{n}" for n in range(max(0, count - keep), count)} <= {one.id for one in kept}
    assert {one.id for one in own if one.label} <= {one.id for one in kept}
    for one in kept:
        assert one.files is not None and one.files.id in needed
        assert one.image is not None and one.image.id in needed
    assert {one.id for one in gone} <= set(dropped)


@given(
    st.dictionaries(
        st.text("abcdef", min_size=1, max_size=3), st.tuples(st.floats(0.01, 5), st.floats(0.01, 50))
    ),
    st.floats(0, 60),
    st.integers(1, 4),
)
def test_a_notice_saves_every_sandbox_in_some_way_before_it_saves_one_whole(
    costs: dict[str, tuple[float, float]], seconds: float, workers: int
) -> None:
    """``costs``: seconds of a files-only and of a full checkpoint."""
    costs = {box: (files, max(files, full)) for box, (files, full) in costs.items()}
    plan = save_order(costs, seconds, workers)
    assert sorted(box for box, _ in plan) == sorted(costs)
    free = [0.0] * workers
    for box, turn_class in plan:
        free.sort()
        free[0] += costs[box][1 if turn_class is TurnClass.FULL else 0]
    if sum(files for files, _ in costs.values()) + max((f for f, _ in costs.values()), default=0) <= seconds:
        assert max(free) <= seconds + 1e-6
    if sum(full for _, full in costs.values()) <= seconds:
        assert all(turn_class is TurnClass.FULL for _, turn_class in plan)
