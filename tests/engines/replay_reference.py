"""The truth that the engine is held against: a plain simulator, and random jobs.

It sweeps over all nodes of all ranks again and again, filling in every time whose causes are known, until
nothing changes: no cursors, no wake-ups, no order of its own.
"""

from __future__ import annotations

import numpy as np

from windtunnel.engines.replay import Program, ReplayJob


def reference(
    job: ReplayJob,
) -> tuple[list[list[float | None]], list[list[float | None]], list[list[float | None]]]:
    """Start, ready and end of every node of every rank; None where it never happens."""
    programs = [job.programs[p] for p in job.rank_program]
    start = [[None] * len(p) for p in programs]
    ready = [[None] * len(p) for p in programs]
    end = [[None] * len(p) for p in programs]
    clock = [[None] * len(p) for p in programs]  # of the host after each node
    members: dict[int, list[tuple[int, int]]] = {}
    for r, program in enumerate(programs):
        for i in range(len(program)):
            if program.join[i] >= 0:
                join = int(job.rank_join[job.rank_join_ptr[r] + program.join[i]])
                members.setdefault(join, []).append((r, i))
    changed = True
    while changed:
        changed = False
        for r, program in enumerate(programs):
            for i in range(len(program)):
                q = program.queue[i]
                cost = program.issue[i] * job.issue_scale[r]
                host = 0.0 if i == 0 else clock[r][i - 1]
                if host is None:
                    break
                if q > 0 and clock[r][i] is None:
                    clock[r][i] = host + cost
                    changed = True
                if ready[r][i] is None:
                    causes = [host if q == 0 else clock[r][i]]
                    causes += [end[r][d] for d in program.dep[program.dep_ptr[i] : program.dep_ptr[i + 1]]]
                    if q > 0:
                        causes += [end[r][x] for x in range(i) if program.queue[x] == q]
                    if None in causes:
                        continue
                    ready[r][i] = max(causes)
                    if program.join[i] >= 0:
                        ready[r][i] += cost if q == 0 else 0.0
                    else:
                        start[r][i] = ready[r][i]
                        if q == 0:
                            end[r][i] = (start[r][i] + cost) + program.duration[i] * job.issue_scale[r]
                            clock[r][i] = end[r][i]
                        else:
                            end[r][i] = start[r][i] + program.duration[i] * job.compute_scale[r]
                    changed = True
        for join, who in members.items():
            times = [ready[r][i] for r, i in who]
            if len(who) == job.join_size[join] and None not in times and end[who[0][0]][who[0][1]] is None:
                changed = True
                for r, i in who:
                    start[r][i] = max(times)
                    end[r][i] = max(times) + job.join_duration[join]
                    if programs[r].queue[i] == 0:
                        clock[r][i] = end[r][i]
    return start, ready, end


def make_program(
    rng: np.random.Generator, kinds: list[tuple[bool, int]], *, deps: bool = True, coarse: bool = False
) -> Program:
    """A program whose node i is a join if ``kinds[i][0]`` and runs on queue ``kinds[i][1]``. ``coarse``
    times are small integers, so that ties are common and sums exact."""
    n = len(kinds)
    ptr, dep = [0], []
    for i in range(n):
        if deps and i and rng.random() < 0.4:
            dep += list(rng.integers(0, i, int(rng.integers(1, 4))))
        ptr.append(len(dep))
    is_join = np.array([kind[0] for kind in kinds], bool)

    def times() -> np.ndarray:
        return rng.integers(0, 4, n).astype(float) if coarse else rng.random(n) * (rng.random(n) < 0.8)

    return Program(
        queue=np.array([kind[1] for kind in kinds], np.int32),
        duration=times(),
        issue=times() if coarse else times() * 0.2,
        dep_ptr=np.array(ptr, np.int32),
        dep=np.array(dep, np.int32),
        join=np.where(is_join, np.cumsum(is_join) - 1, -1).astype(np.int32),
    )


def random_job(
    seed: int, ranks: int, joins: int, *, shuffle: bool = False, drop: bool = False, coarse: bool = False
) -> ReplayJob:
    """Every rank has its own program. All meet their joins in one order, unless ``shuffle`` swaps
    neighbours in some ranks; ``drop`` leaves one member out of some join."""
    rng = np.random.default_rng(seed)
    order: list[list[int]] = [[] for _ in range(ranks)]
    sizes = []
    for join in range(joins):
        group = rng.permutation(ranks)[: int(rng.integers(1, ranks + 1))]
        sizes.append(len(group))
        for r in group:
            order[r].append(join)
    if shuffle:
        for sequence in order:
            for x in range(len(sequence) - 1):
                if rng.random() < 0.3:
                    sequence[x], sequence[x + 1] = sequence[x + 1], sequence[x]
    if drop:
        victims = [r for r in range(ranks) if order[r]]
        if victims:
            sequence = order[victims[int(rng.integers(len(victims)))]]
            sequence.pop(int(rng.integers(len(sequence))))
    programs = []
    for sequence in order:
        kinds: list[tuple[bool, int]] = []
        for _ in sequence:
            kinds += [(False, int(rng.integers(0, 4))) for _ in range(int(rng.integers(0, 4)))]
            kinds.append((True, int(rng.choice([0, 1, 2, 3], p=[0.1, 0.3, 0.3, 0.3]))))
        kinds += [(False, int(rng.integers(0, 4))) for _ in range(int(rng.integers(0, 4)))]
        programs.append(make_program(rng, kinds, coarse=coarse))
    return ReplayJob(
        programs=programs,
        rank_program=np.arange(ranks, dtype=np.int32),
        compute_scale=rng.choice([1.0, 1.5, 2.0], ranks),
        issue_scale=rng.choice([1.0, 2.0], ranks),
        rank_join_ptr=np.concatenate([[0], np.cumsum([len(s) for s in order])]).astype(np.int64),
        rank_join=np.array([join for sequence in order for join in sequence], np.int64),
        join_size=np.array(sizes, np.int32),
        join_duration=rng.integers(0, 4, joins).astype(float) if coarse else rng.random(joins),
    )
