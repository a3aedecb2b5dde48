"""What must hold of paths, pieces, and every schedule on any jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from least_mean import least_mean

from benchmarks.network.dag import uneven
from windtunnel.base.errors import UserError
from windtunnel.engines.flows import World
from windtunnel.network.dag.generate import hosts, random_graph, training
from windtunnel.network.dag.policy import (
    SCHEDULES,
    Decision,
    GraphJob,
    GraphTask,
    Observation,
    TaskShare,
    decide,
    split,
)
from windtunnel.network.dag.policy.forecast import filled
from windtunnel.network.dag.policy.paths import MOST_PIECES, alone, checked, paths
from windtunnel.network.dag.twin import emulate

RESOURCES = hosts(3)


def drawn(seed: int, jobs: int = 2, tasks: int = 6, *, pipelined: bool = False) -> list[GraphJob]:
    rng = np.random.default_rng(seed)
    graphs = [
        random_graph(f"j{k}", rng, hosts=3, tasks=tasks, begins=float(rng.uniform(0, 2))) for k in range(jobs)
    ]
    if not pipelined:
        return graphs

    def piped(task: GraphTask) -> GraphTask:
        feeds = tuple(name for name in task.after if rng.random() < 0.7)
        after = tuple(name for name in task.after if name not in feeds)
        return replace(task, after=after, pipelined=feeds, unit=task.size / int(rng.integers(1, 5)))

    return [replace(job, tasks=tuple(map(piped, job.tasks))) for job in graphs]


@given(st.integers(0, 10**6), st.sampled_from(SCHEDULES))
@settings(max_examples=25, deadline=None)
def test_order_and_capacity_hold_and_nothing_is_idle_that_could_work(seed: int, schedule: str) -> None:
    jobs = drawn(seed, pipelined=seed % 2 == 0)

    def look(observation: Observation, decision: Decision) -> None:
        world, links = World(observation.resources.values()), list(observation.resources)
        ready = [entry for entry in observation.pending if entry.ready and entry.task.kind == "network"]
        tasks = {(entry.job, entry.task.name): entry.task for entry in ready}
        assert set(tasks) == {(share.job, share.task) for share in decision.shares}
        for share in decision.shares:
            loads = {links.index(name): times for name, times in tasks[share.job, share.task].loads}
            world.start(1e9, loads, weight=share.weight, cap=share.cap, priority=share.priority)
        left = np.array(list(observation.resources.values())) - world.loads()
        for entry in ready:  # work conserving: each has a full link
            assert any(
                left[links.index(name)] <= 1e-6 * observation.resources[name] for name, _ in entry.task.loads
            ), (schedule, entry)  # fmt: skip
        for host in ("h0", "h1", "h2"):
            on = [entry for entry in observation.pending if entry.task.loads[0][0] == host and entry.ready]
            taken = sum(entry.begun for entry in on) + sum(
                (entry.job, entry.task.name) in decision.begin for entry in on
            )  # fmt: skip
            assert taken == min(len(on), observation.resources[host])

    done = emulate(jobs, RESOURCES, schedule, decided=look)
    for job in jobs:
        for task in job.tasks:
            begin, end = done.tasks[job.name, task.name]
            assert begin >= job.begins and end - begin >= alone(task, RESOURCES) * (1 - 1e-9)
            for before in task.after:
                assert done.tasks[job.name, before][1] <= begin + 1e-9
            for before in task.pipelined:
                assert done.tasks[job.name, before][0] < begin and done.tasks[job.name, before][1] < end
        assert done.jobs[job.name] >= paths(job, RESOURCES).length * (1 - 1e-9)


@given(st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_critical_path_is_the_longest_of_all_and_slack_is_what_it_spares(seed: int) -> None:
    (job,) = drawn(seed, 1, 7)
    analysis, tasks = paths(job, RESOURCES), {task.name: task for task in job.tasks}

    def ways(name: str) -> list[list[str]]:
        return [[*way, name] for before in tasks[name].after for way in ways(before)] or [[name]]

    def seconds(way: list[str]) -> float:
        return sum(alone(tasks[name], RESOURCES) for name in way)

    every = [way for name in tasks for way in ways(name)]
    assert analysis.length == pytest.approx(max(map(seconds, every)))
    assert seconds(list(analysis.critical)) == pytest.approx(analysis.length)
    for name in tasks:
        longest = max(seconds(way) for way in every if name in way)
        assert analysis.slack[name] == pytest.approx(analysis.length - longest, abs=1e-9)
    beside = [name for copath in analysis.copaths for name in copath.tasks]
    assert sorted([*beside, *analysis.critical]) == sorted(tasks)
    for copath in analysis.copaths:
        assert copath.spare == pytest.approx(min(map(analysis.slack.__getitem__, copath.tasks)))
        assert {copath.behind, copath.before} <= {"", *tasks}


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_a_pipelined_chain_takes_its_units_and_its_slowest_rest(units: list[float], pieces: int) -> None:
    chain = [
        GraphTask(f"t{k}", "compute", unit * pieces, ((f"h{k}", 1.0),), (), (f"t{k - 1}",) if k else (), unit)
        for k, unit in enumerate(units)
    ]
    job, resources = GraphJob("chain", tuple(chain)), hosts(4)
    expected = sum(units) + max(unit * (pieces - 1) for unit in units)
    assert emulate([job], resources, "mxdag").mean == pytest.approx(expected)
    assert paths(job, resources).length == pytest.approx(expected)
    assert expected <= sum(task.size for task in chain) * (1 + 1e-9)


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_pieces_sum_to_their_tasks_and_never_lengthen_a_path(seed: int) -> None:
    for job in drawn(seed, 1, pipelined=True):
        plain = split(job)
        for task in job.tasks:
            sizes = [piece.size for piece in plain.tasks if piece.name.partition("#")[0] == task.name]
            assert sum(sizes) == pytest.approx(task.size) and min(sizes) > 0
        whole = replace(
            job,
            tasks=tuple(replace(task, after=task.after + task.pipelined, pipelined=()) for task in job.tasks),
        )
        assert paths(job, RESOURCES).length <= paths(whole, RESOURCES).length * (1 + 1e-9)


@given(st.integers(0, 10**6))
@settings(max_examples=15, deadline=None)
def test_tasks_without_slack_go_before_those_of_their_job_that_have_some(seed: int) -> None:
    def look(observation: Observation, decision: Decision) -> None:
        if decision == decide(replace(observation, schedule="fair")):
            return  # what-if took it
        priority = {(share.job, share.task): share.priority for share in decision.shares}
        for job in {entry.job for entry in observation.pending}:
            mine = [entry for entry in observation.pending if entry.job == job]
            here = {entry.task.name for entry in mine}
            rest = GraphJob(job, tuple(
                replace(
                    entry.task, size=entry.left,
                    after=tuple(name for name in entry.task.after if name in here),
                )
                for entry in mine
            ))  # fmt: skip
            analysis = paths(rest, observation.resources)
            ready = [entry.task.name for entry in mine if (job, entry.task.name) in priority]
            urgent = [name for name in ready if analysis.slack[name] <= 1e-9]
            easy = [name for name in ready if analysis.slack[name] > 0.051 * analysis.length]
            assert all(priority[job, name] < priority[job, other] for name in urgent for other in easy)
        assert decision.until > observation.now

    emulate(drawn(seed), RESOURCES, "mxdag", decided=look)


@given(st.integers(0, 10**6), st.sampled_from(SCHEDULES))
@settings(max_examples=10, deadline=None)
def test_names_make_no_difference_and_the_same_is_the_same_again(seed: int, schedule: str) -> None:
    jobs, rng = drawn(seed), np.random.default_rng(seed)
    every = {name for job in jobs for name in (job.name, *(task.name for task in job.tasks))}
    names = {name: f"{rng.integers(10**9)}" for name in sorted(every)}

    def other(task: GraphTask) -> GraphTask:
        return replace(task, name=names[task.name], after=tuple(names[name] for name in task.after))

    renamed = [replace(job, name=names[job.name], tasks=tuple(map(other, job.tasks))) for job in jobs]
    once, again, there = (emulate(given, RESOURCES, schedule) for given in (jobs, jobs, renamed))
    assert once == again and list(once.jobs.values()) == list(there.jobs.values())


def test_schedules_are_no_better_than_the_optimum_and_mxdag_is_near_it() -> None:
    over = []
    for seed in (0, 1, 4):
        rng = np.random.default_rng(seed)
        jobs = [random_graph(f"j{k}", rng, hosts=3, tasks=3, seconds=1.0, whole=True) for k in range(2)]
        done = {name: emulate(jobs, RESOURCES, name) for name in SCHEDULES}
        least = least_mean(jobs, RESOURCES, 1.0, round(sum(done["fair"].jobs.values())) + 1)
        assert least is not None and all(outcome.mean >= least * (1 - 1e-9) for outcome in done.values())
        over.append(done["mxdag"].mean / least - 1)
    assert np.mean(over) <= 0.05


@given(st.integers(0, 10**6))
@example(114)  # the large flow of two first leaves a processor idle: 1.22 times fair
@example(160)
@example(283)  # a task with nothing behind it before one whose flow waits: 1.14
@settings(max_examples=25, deadline=None)
def test_jobs_that_are_all_there_end_on_average_no_later_than_by_fair(seed: int) -> None:
    jobs, resources = uneven(np.random.default_rng(seed))
    jobs = [replace(job, begins=0.0) for job in jobs]
    assert emulate(jobs, resources, "mxdag").mean <= emulate(jobs, resources, "fair").mean * (1 + 1e-6)


def test_a_wrong_size_is_put_right_as_it_is_seen() -> None:
    job = drawn(3, 1)[0]
    observations: list[Observation] = []
    wrong = {(job.name, task.name): 0.5 for task in job.tasks}
    done = emulate(
        [job],
        RESOURCES,
        "mxdag",
        believed=wrong,
        decided=lambda observation, _: observations.append(observation),
    )
    assert set(done.tasks) == {(job.name, task.name) for task in job.tasks}
    assert observations[0].pending[0].task.size == pytest.approx(0.5 * job.tasks[0].size)
    assert all(entry.left > 0 for look in observations for entry in look.pending)


def test_madd_ends_a_coflow_together_and_gives_the_rest_again() -> None:
    small = GraphTask("s", "network", 1.0, (("x", 1.0), ("y", 1.0)), coflow="c")
    flows = (small, replace(small, name="b", size=3.0, loads=(("x", 1.0), ("z", 1.0)), coflow="c"))
    other = GraphTask("o", "network", 9.0, (("y", 1.0),))
    ends = emulate(
        [GraphJob("j", flows), GraphJob("k", (other,))], {"x": 1.0, "y": 1.0, "z": 1.0}, "sebf"
    ).tasks
    assert ends["j", "s"][1] == pytest.approx(4.0) and ends["j", "b"][1] == pytest.approx(4.0)
    assert ends["k", "o"][1] == pytest.approx(10.0)  # it has had 3/4 of its link until then


def test_a_training_job_waits_at_each_layer_for_that_layer() -> None:
    job = training("t", (0, 1), 2, 1, forward=1.0, nbytes=1.25e9)
    done = emulate([job], hosts(2), "mxdag").tasks
    assert done["t", "reduce0.1"][0] < done["t", "backward0.0@0"][1]  # while backward goes on
    assert done["t", "forward1.0@1"][0] == done["t", "reduce0.0"][1]


GOOD = GraphTask("a", "compute", 1.0, (("h0", 1.0),))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((replace(GOOD, after=("b",)), replace(GOOD, name="b", pipelined=("a",))), "a -> b -> a|b -> a -> b"),
        ((replace(GOOD, after=("z",)),), "comes after 'z', accepted are tasks of its job: a"),
        ((GOOD, GOOD), "two tasks have one name"),
        ((replace(GOOD, loads=(("h9", 1.0),)),), "is on 'h9', accepted are resources"),
        ((replace(GOOD, loads=(("h0", 2.0),)),), "accepted is one processor"),
        ((replace(GOOD, loads=(("h0", float("nan")),)),), "nan times"),
        ((replace(GOOD, size=float("nan")),), "has size nan"),
        ((replace(GOOD, size=0.0),), "has size 0.0, accepted is a positive number"),
        ((replace(GOOD, unit=-1.0),), "has unit -1.0"),
        ((replace(GOOD, kind="network", loads=()),), "loads nothing"),
        ((replace(GOOD, size=1e300),), "takes 1e.300 s alone"),
        ((), "has no tasks"),
    ],
)
def test_jobs_that_are_none_are_refused(tasks: tuple[GraphTask, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked([GraphJob("j", tasks)], RESOURCES)


def test_more_pieces_than_can_be_had_are_refused_and_order_is_put_right() -> None:
    fine = replace(GOOD, unit=0.9 / MOST_PIECES)
    with pytest.raises(UserError, match=f"more than {MOST_PIECES} pieces"):
        split(GraphJob("j", (fine, replace(GOOD, name="b", pipelined=("a",)))))
    assert len(split(GraphJob("j", (fine,))).tasks) == 1  # nobody takes its units
    (job,) = checked([GraphJob("j", (replace(GOOD, name="b", after=("a",)), GOOD))], RESOURCES)
    assert [task.name for task in job.tasks] == ["a", "b"]
    with pytest.raises(KeyError):
        decide(Observation(0.0, RESOURCES, (), "best"))


def test_slots_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"1\.0 s are not of whole slots"):
        least_mean([GraphJob("j", (GOOD,))], RESOURCES, 0.3, 10)
    assert least_mean([GraphJob("j", (GOOD,))], RESOURCES, 0.5, 4) == pytest.approx(1.0)
    assert least_mean([GraphJob("j", (GOOD,))], RESOURCES, 0.5, 1) is None


def test_a_job_that_nobody_serves_is_not_looked_at_all_the_time() -> None:
    """Its slack is not used up while what it waits for makes no way, and sizes may be wrong by a lot."""
    flow = GraphTask("f", "network", 1e6 * RESOURCES["h0.out"], (("h0.out", 1.0),))
    long = GraphJob("long", (replace(GOOD, size=1e6), flow))
    short = GraphJob("short", (replace(GOOD, size=1e-3), replace(flow, size=flow.size * 1e-10)), begins=1.0)
    done = emulate([long, short], RESOURCES, "mxdag", believed={("long", "a"): 1e-3, ("long", "f"): 1e-2})
    assert done.decisions < 300 and done.jobs["short"] >= 999_999


def test_a_policy_that_leaves_tasks_standing_is_told_of() -> None:
    with pytest.raises(ValueError, match="1 tasks have not ended, and none of them is under way"):
        emulate([GraphJob("j", (GOOD,))], RESOURCES, "fair", decide=lambda observation: Decision((), ()))


@pytest.mark.parametrize(("size", "first"), [(30.0, "short"), (0.4, "long")])
def test_slack_yields_a_processor_only_for_less_than_there_is_of_it(size: float, first: str) -> None:
    short = GraphJob("short", (replace(GOOD, size=0.5), replace(GOOD, name="b", loads=(("h1", 1.0),))))
    long, decisions = GraphJob("long", (replace(GOOD, size=size),)), list[Decision]()
    emulate([long, short], RESOURCES, "mxdag", decided=lambda _, decision: decisions.append(decision))
    assert (first, "a") in decisions[0].begin


share = st.builds(
    TaskShare, st.just("j"), st.text("abcdef", min_size=1, max_size=2), st.integers(0, 2),
    st.floats(0.1, 10), st.floats(0.05, 2) | st.just(float("inf")),
)  # fmt: skip
loads = st.dictionaries(st.sampled_from(["p", "q", "r"]), st.floats(0.5, 2), min_size=1)


@settings(max_examples=40)
@given(st.lists(st.tuples(share, loads), max_size=8, unique_by=lambda pair: pair[0].task))
def test_lines_are_filled_in_order_of_priority(given_: list[tuple[TaskShare, dict[str, float]]]) -> None:
    """No line is over its bytes/s, no flow over its cap; one that is below has a full line on which none of
    its priority has more for its weight, and none of a later one has anything."""
    lines = {"p": 1.0, "q": 1.5, "r": 0.5}
    on = {("j", share.task): tuple(load.items()) for share, load in given_}
    rates = filled([share for share, _ in given_], on, lines)
    used = {name: sum(rate * dict(on[key]).get(name, 0.0) for key, rate in rates.items()) for name in lines}
    assert all(used[name] <= lines[name] * (1 + 1e-6) for name in lines)
    shares = {("j", share.task): share for share, _ in given_}
    for key, share in shares.items():
        assert rates[key] <= share.cap * (1 + 1e-6)
        if rates[key] < share.cap * (1 - 1e-6):
            assert any(
                used[name] >= lines[name] * (1 - 1e-6)
                and all(
                    rates[other] / more.weight <= rates[key] / share.weight * (1 + 1e-6) + 1e-9
                    if more.priority == share.priority
                    else rates[other] <= 1e-6
                    for other, more in shares.items()
                    if more.priority >= share.priority and name in dict(on[other])
                )
                for name, _ in on[key]
            )
