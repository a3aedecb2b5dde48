"""The policy: what a turn needs, which job is next, what may be forgotten."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.agents.sandbox.model import (
    CheckpointManifest,
    EffectDoubt,
    FileChange,
    FilesPart,
    ImagePart,
    ProcessEffect,
    References,
    SandboxPart,
    SandboxSpec,
    ShellEffect,
    TurnClass,
    TurnEffects,
)
from windtunnel.agents.sandbox.policy import (
    POLICIES,
    CheckpointPlan,
    CheckpointRequest,
    Endangered,
    Notice,
    Occasion,
    SaveOrder,
    Settle,
    Shortfall,
    decide,
)
from windtunnel.agents.sandbox.policy.effects import process_changed, promote
from windtunnel.agents.sandbox.policy.queues import Pick, Queues, forgettable

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
    TurnEffects,
    files=st.lists(changes, max_size=4).map(tuple),
    processes=st.lists(processes, max_size=4).map(tuple),
    shells=st.sampled_from([(), (ShellEffect("main"),)]),
    doubts=st.lists(
        st.sampled_from(
            [EffectDoubt(SandboxPart.FILES, "lost events"), EffectDoubt(SandboxPart.PROCESSES, "ring lost")]
        ),
        max_size=2,
    ).map(tuple),
).map(lambda effects: replace(effects, files_total=len(effects.files)))
all_references = st.builds(
    lambda every, mapped: References(frozenset(every) | frozenset(mapped), frozenset(mapped)),
    st.sets(paths, max_size=3),
    st.sets(paths, max_size=2),
)


def kept(effects: TurnEffects, references: References) -> CheckpointPlan:
    """What is decided at the end of a turn with those effects."""
    decision = decide(CheckpointRequest(Occasion.TURN, effects, references))
    assert isinstance(decision, CheckpointPlan)
    return decision


@given(all_effects, all_references)
def test_nothing_is_the_class_of_no_effect_alone(effects: TurnEffects, references: References) -> None:
    decided = kept(effects, references).turn_class
    quiet = not (
        effects.files or effects.doubts or any(process_changed(process) for process in effects.processes)
    )
    assert (decided is TurnClass.NONE) == (quiet and not effects.shells)
    assert (decided is TurnClass.SHELL) == (quiet and bool(effects.shells))


@given(all_effects, all_references, changes, processes)
def test_more_effects_never_weaken_a_class(
    effects: TurnEffects, references: References, change: FileChange, process: ProcessEffect
) -> None:
    before = kept(effects, references).turn_class
    more_files = replace(effects, files=(*effects.files, change), files_total=effects.files_total + 1)
    assert kept(more_files, references).turn_class >= max(before, TurnClass.FILES)
    assert kept(replace(effects, processes=(*effects.processes, process)), references).turn_class >= before
    for part, least in ((SandboxPart.FILES, TurnClass.FILES), (SandboxPart.PROCESSES, TurnClass.FULL)):
        doubted = replace(effects, doubts=(*effects.doubts, EffectDoubt(part, "x")))
        assert kept(doubted, references).turn_class >= max(before, least)


@given(processes)
def test_unknown_memory_is_never_weaker(process: ProcessEffect) -> None:
    if process_changed(process):
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
    effects = TurnEffects(files=(FileChange("/.windtunnel/t/1.out", "created"),), files_total=1)
    assert kept(effects, References()).turn_class is TurnClass.NONE


operations = st.lists(
    st.tuples(st.sampled_from(["add", "urgent", "promote", "take", "remove"]), st.integers(0, 9)), max_size=60
)


@given(operations, st.integers(1, 4))
def test_queues_lose_and_repeat_nothing(todo: list[tuple[str, int]], most: int) -> None:
    queues = Queues(most_urgent=most)
    inside: list[str] = []
    urgent: set[str] = set()
    in_a_row = 0
    for kind, number in todo:
        job = str(number)
        if kind in ("add", "urgent") and job not in inside:
            queues.add(job, urgent=kind == "urgent")
            inside.append(job)
            if kind == "urgent":
                urgent.add(job)
        elif kind == "promote" and queues.promote(job):
            urgent.add(job)
        elif kind == "remove":
            assert queues.remove(job) == (job in inside)
            inside = [name for name in inside if name != job]
            urgent.discard(job)
        elif kind == "take":
            queued = queues.queued()
            assert (queued is None) == (not inside)
            if queued is None:
                continue
            pick = decide(queued)
            assert isinstance(pick, Pick)
            taken = queues.take(pick)
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


def manifest(box: str, number: int, files: str, image: str, *, label: str = "") -> CheckpointManifest:
    return CheckpointManifest(
        id=f"{box}{number}",
        box=box,
        turn=number,
        parent=f"{box}{number - 1}" if number else None,
        turn_class=TurnClass.FILES,
        required=TurnClass.FILES,
        reasons=(),
        created=float(number),
        files=FilesPart(files, "btrfs"),
        image=ImagePart(image, 1, (), (), (), 0, 0),
        shells=(),
        spec=SandboxSpec(box),
        restorable=(),
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
    dropped, needed = forgettable([*own, *gone], {"a": f"a{count - 1}", "b": f"a{base}"}, keep)
    kept = [checkpoint for checkpoint in own if checkpoint.id not in dropped]
    assert {f"a{count - 1}", f"a{base}"} <= {checkpoint.id for checkpoint in kept}
    assert {f"a{n}" for n in range(max(0, count - keep), count)} <= {checkpoint.id for checkpoint in kept}
    assert {checkpoint.id for checkpoint in own if checkpoint.label} <= {checkpoint.id for checkpoint in kept}
    for checkpoint in kept:
        assert checkpoint.files is not None and checkpoint.files.id in needed
        assert checkpoint.image is not None and checkpoint.image.id in needed
    assert {checkpoint.id for checkpoint in gone} <= set(dropped)


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
    order = decide(
        Notice(seconds, workers, tuple(Endangered(box, TurnClass.FULL, *both) for box, both in costs.items()))
    )
    assert isinstance(order, SaveOrder)
    plan = [(save.name, save.most) for save in order.saves]
    if not seconds:
        assert plan == []  # no time is left
        return
    assert sorted(box for box, _ in plan) == sorted(costs)
    assert [most for _, most in plan] == sorted(most for _, most in plan)
    free = [0.0] * workers
    for box, turn_class in plan:
        free.sort()
        free[0] += costs[box][1 if turn_class is TurnClass.FULL else 0]
    if sum(files for files, _ in costs.values()) + max((f for f, _ in costs.values()), default=0) <= seconds:
        assert max(free) <= seconds + 1e-6
    if sum(full for _, full in costs.values()) <= seconds:
        assert all(turn_class is TurnClass.FULL for _, turn_class in plan)


looks = st.builds(
    CheckpointRequest,
    st.sampled_from(Occasion),
    st.none() | all_effects,
    all_references,
    has_parent=st.booleans(),
    has_files=st.booleans(),
    has_image=st.booleans(),
    images_possible=st.booleans(),
    no_images=st.just("no CRIU"),
    full=st.booleans(),
    named=st.booleans(),
    most=st.sampled_from([TurnClass.FILES, TurnClass.FULL]),
)
lesser = st.builds(
    Shortfall,
    st.sampled_from(TurnClass),
    st.sampled_from(TurnClass),
    st.lists(st.sampled_from(("files", "processes")), unique=True).map(tuple),
    st.integers(1, 3),
    again=st.booleans(),
    allow_less=st.booleans(),
)


@given(looks, st.sampled_from(sorted(POLICIES)))
def test_a_checkpoint_is_made_of_what_can_be_made(look: CheckpointRequest, policy: str) -> None:
    keep = POLICIES[policy](look)
    assert isinstance(keep, CheckpointPlan)
    assert keep.content < TurnClass.FULL or (look.images_possible and look.most is TurnClass.FULL)
    assert bool(keep.lost) == (not keep.image)
    assert keep.image or keep.content <= TurnClass.FILES
    assert not keep.again or (keep.image and keep.content is TurnClass.FILES and look.has_image)
    if look.named:
        assert keep.content > TurnClass.NONE
    if policy == "semantic":
        assert keep.content >= keep.turn_class or not keep.image


@given(looks)
def test_what_cannot_be_known_is_kept_whole(look: CheckpointRequest) -> None:
    decision = decide(look)
    assert isinstance(decision, CheckpointPlan)
    if look.effects is None or look.full or not look.has_parent or not look.has_files:
        assert decision.turn_class is TurnClass.FULL
    if look.images_possible and not look.has_image:
        assert decision.turn_class is TurnClass.FULL


def test_where_there_is_no_time_for_processes_the_files_are_kept() -> None:
    server = TurnEffects(processes=(ProcessEffect(7, "server", started=True),))
    look = CheckpointRequest(Occasion.NOTICE, server, most=TurnClass.FILES)
    keep = kept(server, References())
    assert (keep.content, keep.image) == (TurnClass.FULL, True)
    late = decide(look)
    assert late == replace(keep, content=TurnClass.FILES, image=False, lost="there was no time for them")
    assert decide(replace(look, effects=TurnEffects())) == CheckpointPlan(TurnClass.NONE, TurnClass.NONE)


def test_what_a_shell_holds_is_in_the_image_or_makes_one() -> None:
    busy = TurnEffects(shells=(ShellEffect("main", resources=("it has background jobs",)),))
    assert kept(busy, References()).turn_class is TurnClass.SHELL
    without = decide(CheckpointRequest(Occasion.TURN, busy, has_image=False, images_possible=False))
    assert isinstance(without, CheckpointPlan)
    assert (without.turn_class, without.content) == (TurnClass.FULL, TurnClass.FILES)
    for shell in (ShellEffect("main", busy=True), ShellEffect("main", gone=True)):
        assert kept(TurnEffects(shells=(shell,)), References()).turn_class is TurnClass.FULL


@given(lesser, st.sampled_from(sorted(POLICIES)))
def test_what_lacks_is_an_error_unless_it_is_allowed(less: Shortfall, policy: str) -> None:
    settle = POLICIES[policy](less)
    assert isinstance(settle, Settle)
    if not less.lacks or less.allow_less or policy in ("files", "conversation"):
        assert settle == Settle("deliver")
    else:
        assert settle.answer == ("retry" if less.again and less.tries < 2 else "hold")
